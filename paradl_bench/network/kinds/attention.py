"""Scaled dot-product attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from paradl_bench.network.graph import Attribute, Layer, LayerMemory
from paradl_bench.network.kinds.attributes import FLAG, SHARE, TEXT, or_default
from paradl_bench.network.kinds.kind import Call, Facts, LayerKind, Operands, Saved, TensorArgument, per_sample

_FUSED_WIDTHS = 8
"""Widths of heads are multiples of it, where a fused kernel is to run."""
_ROW_BYTES = 4


def facts(call: Call) -> Facts:
    """FLOPs of the two products over all query-key pairs, those that a causal mask leaves out included.

    Softmax is left out (below 1% of the products at usual head sizes).
    """
    given = call.bind("query key value attn_mask dropout_p is_causal")
    query, key = (per_sample(given[name].shape, call.batch) for name in ("query", "key"))
    products = 2 * math.prod(query[:-2]) * query[-2] * key[-2] * (query[-1] + call.output_shape[-1])
    attributes: dict[str, Attribute] = {
        "function": call.function,
        "causal": bool(given.get("is_causal", False)),
        "masked": given.get("attn_mask") is not None,
        "dropout": float(given.get("dropout_p", 0.0)),
    }
    if given.get("enable_gqa"):
        attributes["grouped"] = True
    return Facts(attributes, fw_flops=products, bw_input_flops=2 * products)


def _build(attributes: Mapping[str, Attribute]) -> Callable[[list[Any], list[Any]], Any]:
    """``torch.nn.functional.scaled_dot_product_attention``; a mask is the fourth input.

    ``grouped`` where several heads of queries share one of keys and values.
    """
    import torch.nn.functional as F

    settings: dict[str, Any] = {"dropout_p": attributes["dropout"], "is_causal": attributes["causal"]}
    settings["enable_gqa"] = bool(attributes.get("grouped"))
    return lambda inputs, parameters: F.scaled_dot_product_attention(*inputs, **settings)


def saves(layer: Layer) -> Saved:
    """A fused kernel keeps what it reads and writes, and a sum a row; with dropout a CPU runs the products apart.

    It keeps query and key scaled, the value, the probabilities, and those that dropout left with its mask.
    """
    if not layer.attributes["dropout"]:
        return Saved(inputs=True, output=True, sums=math.prod(layer.input_shapes[0][:-1]))
    pairs = _pairs(layer)
    return Saved(elements=_elements_read(layer) + 2 * pairs, mask=pairs)


def _pairs(layer: Layer) -> int:
    query, key = layer.input_shapes[:2]
    return math.prod(query[:-1]) * key[-2]


def _elements_read(layer: Layer) -> int:
    return sum(map(math.prod, layer.input_shapes[:3]))


def held_elements(layer: Layer) -> int:
    """Elements that a fused kernel returns. Of products apart, which keep copies alone, those of copies and of pairs.

    A rank's queries may meet the keys of all ranks: it has a part of the former and all of the latter.
    """
    return _elements_read(layer) + _pairs(layer) if runs_apart(layer) else layer.output_elements


def runs_apart(layer: Layer) -> bool:
    """Whether the products run apart, which no fused kernel is there for.

    They are of fp32: torch converts what they read, and keeps that (``_scaled_dot_product_attention_math``).
    """
    return not layer.memory.inputs if layer.memory is not None else bool(layer.attributes["dropout"])


def memory_on_gpu(layer: Layer) -> LayerMemory | None:
    """Of torch's fused kernels (flash, memory-efficient), which draw dropout's mask again in backward.

    They keep what they read and write, and a number a row in fp32; backward makes another a row. None of heads whose
    width they do not take: a GPU runs the products apart then, as a CPU does with dropout.
    """
    if any(shape[-1] % _FUSED_WIDTHS for shape in layer.input_shapes[:3]):
        return None
    rows_bytes = math.prod(layer.input_shapes[0][:-1]) * _ROW_BYTES
    return LayerMemory(
        inputs=tuple(range(len(layer.input_shapes))), output=True, kept=(rows_bytes, 0), backward=(rows_bytes, 0)
    )


def operands(layer: Layer, batch: int) -> Operands | None:
    """Batch, heads, lengths and widths; None with a mask.

    Where several heads of queries read one of keys (grouped-query attention), a setting says how many: another kernel.
    """
    attributes = layer.attributes
    if attributes["masked"] or len(layer.input_shapes) != 3 or any(len(shape) != 3 for shape in layer.input_shapes):
        return None
    query, key, value = layer.input_shapes
    if query[0] % key[0] or key[0] != value[0] or layer.batchless_inputs:
        return None
    sizes = {"batch": batch, "heads": query[0], "queries": query[1], "keys": key[1], "width": query[2]}
    flags = {"causal": int(bool(attributes["causal"])), "drops": int(bool(attributes["dropout"]))}
    shared = {"queries_per_key": str(query[0] // key[0])} if query[0] != key[0] else {}
    return Operands({**sizes, "value_width": value[2], **flags}, {"function": str(attributes["function"]), **shared})


def _call(sizes: Mapping[str, int], settings: Mapping[str, str]) -> Call:
    """Attention of heads that are alike; with dropout, of a tenth."""
    batch, heads, queries, keys = (sizes[name] for name in ("batch", "heads", "queries", "keys"))
    shared = int(settings.get("queries_per_key", "1"))
    key_heads = heads // shared
    parts = ((heads, queries, "width"), (key_heads, keys, "width"), (key_heads, keys, "value_width"))
    tensors = tuple(TensorArgument((batch, count, length, sizes[width])) for count, length, width in parts)
    given = {"dropout_p": 0.1 if sizes["drops"] else 0.0, "is_causal": bool(sizes["causal"])}
    given |= {"enable_gqa": True} if shared > 1 else {}
    return Call(settings["function"], tensors, given, ((batch, heads, queries, sizes["value_width"]),), batch)


KIND = LayerKind(
    name="attention",
    functions=("scaled_dot_product_attention",),
    facts=facts,
    attributes={"function": TEXT, "causal": FLAG, "masked": FLAG, "dropout": SHARE, "grouped": or_default(FLAG)},
    build=_build,
    saves=saves,
    keeps_fp32=runs_apart,
    held_elements=held_elements,
    memory_on_gpu=memory_on_gpu,
    operands=operands,
    autocast=lambda attributes, device: "lower",
    call=_call,
)
