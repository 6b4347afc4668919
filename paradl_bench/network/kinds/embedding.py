"""Table look-up."""

from __future__ import annotations

from paradl_bench.network.kinds.kind import Call, Facts, LayerKind, inputs_saved


def facts(call: Call) -> Facts:
    """Moves data forward; backward adds each row's gradient (1 an element)."""
    return Facts({"rows": call.bind("input weight")["weight"].shape[0]}, bw_weight_flops=call.output_elements)


KIND = LayerKind(name="embedding", functions=("embedding",), facts=facts, saves=inputs_saved)
