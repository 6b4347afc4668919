"""Products of groups of rows with a matrix each, as of tokens with the weights of the expert that they are sent to."""

from __future__ import annotations

import math

from paradl_bench.network.graph import Attribute
from paradl_bench.network.kinds.attributes import TEXT
from paradl_bench.network.kinds.kind import Call, Facts, LayerKind, inputs_saved, per_sample


def facts(call: Call) -> Facts:
    """FLOPs: 2 multiply-adds an output element over the inner dim, whichever matrix a row meets; twice that backward.

    Bytes are those of the rows, read and written. The matrices are read as often for any batch: they count where their
    parameter is read.
    """
    rows = call.tensors[0].shape
    flops = 2 * rows[-1] * call.output_elements
    moved = math.prod(per_sample(rows, call.batch)) + call.output_elements
    attributes: dict[str, Attribute] = {"function": "grouped_mm", "groups": call.tensors[1].shape[0]}
    return Facts(attributes, fw_flops=flops, bw_input_flops=2 * flops, moved_elements=moved)


KIND = LayerKind(
    name="grouped_matmul",
    functions=("grouped_mm", "_grouped_mm", "grouped_mm_fallback"),
    facts=facts,
    attributes={"function": TEXT},
    saves=inputs_saved,
    autocast=lambda attributes, device: "input",
)
