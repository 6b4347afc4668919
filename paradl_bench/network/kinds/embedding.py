"""Table look-up."""

from __future__ import annotations

import math
from collections.abc import Mapping

from paradl_bench.network.graph import Layer
from paradl_bench.network.kinds.attributes import COUNT, or_default
from paradl_bench.network.kinds.kind import Call, Facts, LayerKind, Operands, TensorArgument, inputs_saved


def facts(call: Call) -> Facts:
    """Moves data forward; backward adds each row's gradient (1 an element)."""
    return Facts({"rows": call.bind("input weight")["weight"].shape[0]}, bw_weight_flops=call.output_elements)


def operands(layer: Layer, batch: int) -> Operands | None:
    """``batch`` is the look-ups made at once (samples times tokens); of the table no more rows are read than those."""
    rows = layer.attributes.get("rows")
    if not isinstance(rows, int) or len(layer.input_shapes) != 1 or not layer.output_shape:
        return None
    width, lookups = layer.output_shape[-1], batch * math.prod(layer.input_shapes[0])
    sizes = {"batch": lookups, "rows": rows, "width": width}
    return Operands(sizes, {"function": "embedding"}, min(rows, lookups) * width)


def _call(sizes: Mapping[str, int], settings: Mapping[str, str]) -> Call:
    batch, rows, width = (sizes[name] for name in ("batch", "rows", "width"))
    given = TensorArgument((batch,)), TensorArgument((rows, width), "weight")
    return Call("embedding", given, {}, ((batch, width),), batch)


KIND = LayerKind(
    name="embedding",
    functions=("embedding",),
    facts=facts,
    attributes={"rows": or_default(COUNT)},
    saves=inputs_saved,
    operands=operands,
    autocast=lambda attributes, device: "parameters",
    call=_call,
)
