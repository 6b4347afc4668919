"""Elements picked by index."""

from __future__ import annotations

from paradl_bench.network.kinds.kind import Call, Facts, LayerKind, inputs_saved


def facts(call: Call) -> Facts:
    """Moves data; backward adds each element's gradient where it came from (1 an element)."""
    given = call.bind("input dim index")
    dim = given.get("dim")
    return Facts(
        {"function": call.function, "dim": dim if isinstance(dim, int) else None}, bw_input_flops=call.output_elements
    )


KIND = LayerKind(
    name="gather",
    functions=("gather", "index_select", "take_along_dim"),
    facts=facts,
    saves=inputs_saved,
    # Whatever the dtype of indices is.
    autocast=lambda attributes, device: "input",
)
