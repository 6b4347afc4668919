"""A product and a sum in one: what GPT-2's fully connected layers call, with weights stored as inputs times outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paradl_bench.layers.kind import Call, Facts, LayerKind, inputs_saved
from paradl_bench.spec.network import Attribute


def facts(call: Call) -> Facts:
    """FLOPs: 2 multiply-adds an output element over the inner dim and 1 for the sum; a product for each gradient.

    ``parameters`` says which of the three operands (sum, first and second factor) are parameters.
    """
    added, _, factor = call.tensors[:3]
    inner, out_features = factor.shape
    product = 2 * inner * call.output_elements
    operands = zip(("sum", "first", "second"), call.tensors, strict=False)
    return Facts(
        {"out_features": out_features, "weights": "-".join(name for name, tensor in operands if tensor.parameter)},
        fw_flops=product + call.output_elements,
        bw_input_flops=product,
        bw_weight_flops=product + bool(added.parameter) * call.output_elements,
    )


def build(attributes: Mapping[str, Attribute]) -> Callable[[list[Any], list[Any]], Any]:
    """``torch.addmm`` over all samples' rows at once."""
    import torch

    weights = str(attributes["weights"]).split("-")

    def run(inputs: list[Any], parameters: list[Any]) -> Any:
        activations, trained = iter(inputs), iter(parameters)
        operands = [next(trained if name in weights else activations) for name in ("sum", "first", "second")]
        of_samples = operands[1].shape[:-1]
        operands[1] = operands[1].flatten(0, -2)
        return torch.addmm(*operands).view(*of_samples, -1)

    return run


KIND = LayerKind(name="addmm", functions=("addmm",), facts=facts, build=build, splits_backward=True, saves=inputs_saved)
