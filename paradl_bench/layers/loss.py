"""The loss: cross-entropy over classes."""

from __future__ import annotations

from paradl_bench.layers.kind import Call, Facts, LayerKind


def facts(call: Call) -> Facts:
    """FLOPs an input element: 5 forward (log-softmax and pick), 4 backward."""
    return Facts({"function": call.function}, fw_flops=5 * call.input_elements, bw_input_flops=4 * call.input_elements)


KIND = LayerKind(name="loss", functions=("cross_entropy", "nll_loss", "mse_loss"), facts=facts)
