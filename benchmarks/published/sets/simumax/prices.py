"""Seconds of layers by SimuMax's system file: products and attention as measured, the rest by the memory's bandwidth.

What Megatron-LM and TransformerEngine run beside a network's layers is priced with the layer that it belongs to:

- gradients that meet where several layers read one tensor are added (autograd);
- the gradient of the embedding is set to zero as a whole before rows are added (autograd);
- what is exchanged for heads is put in order before it is sent and when it is there (``flash_attn_a2a_communicate``);
- rows are transposed by expert once they are there, and by rank before they go back (``MoEAlltoAllTokenDispatcher``,
  which copies equal rows by torch);
- queries and values are copied out of the product that made them beside keys, and gradients are written side by side
  (``SelfAttention.get_query_key_value_tensors``, ``get_qkv_layout``, ``SplitAlongDim``).

A share of the memory's bandwidth is of the bytes that the file's publisher divides by. These are those of
``test_ce_permute_efficiency.py``: of a loss all logits twice, forward and backward, and of one of the two kernels
that move tokens to rows and back the tokens once and the rows three times.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from sets.measured_layers import Timed

from paradl_bench.network.graph import DTYPE_BYTES, Layer, ModelGraph
from paradl_bench.network.kernel import KernelSamples, KernelStage
from paradl_bench.network.kinds.kernel_shape import kernel_shape
from paradl_bench.plan.compute import layers_with_gradient

GIB = 2**30
HALVES: tuple[KernelStage, ...] = ("FW", "BW_input", "BW_weight")
WIDTH_BYTES = DTYPE_BYTES["bf16"]
_QKV = ("query", "key", "value")
_PARTS = ("chunk", "split", "unbind")
Times = dict[tuple[str, str, tuple[int, ...]], float]
"""Seconds by kind, stage and sizes."""


class Beside(NamedTuple):
    """What runs is more than the network says.

    Attributes:
        qkv_features: of queries, keys and values together, as one product; 0 where they are not.
        tokens: of the padded vocabulary, as a rank has them. experts: of a layer, with as many rows each; 0 for none.
        width: features of a token.
        readers: per layer, how many kernels read what it made and have a gradient of it.
        by_heads: whether tokens are exchanged for heads around attention.
    """

    qkv_features: int
    tokens: int
    experts: int = 0
    width: int = 0
    readers: Mapping[str, int] = {}
    by_heads: bool = False


def kernel_times(folder: Path) -> Times:
    """What the system file's import holds."""
    lines = (folder / "kernels.jsonl").read_bytes().splitlines()
    rows = [msgspec.json.decode(line, type=KernelSamples) for line in lines]
    return {
        _key(row.shape.kind, row.shape.stage, row.shape.sizes, row.shape.settings): row.samples_s[0] for row in rows
    }


def _key(kind: str, stage: str, sizes: dict[str, int], settings: dict[str, str]) -> tuple[str, str, tuple[int, ...]]:
    groups = int(settings.get("queries_per_key", "1"))
    return kind, stage, (groups, *(sizes[name] for name in sorted(sizes)))


class Prices:
    """Seconds of layers on one sample, from the system file and the times that were imported of it."""

    def __init__(self, system: dict[str, Any], times: Times, beside: Beside) -> None:
        self._times, self._beside = times, beside
        shares = system["accelerator"]["bandwidth"].items()
        self._memory = {
            name: (each["efficient_factor"] * each["gbps"] * GIB, each["latency_us"] * 1e-6) for name, each in shares
        }

    def timed(self, layer: Layer, shard: str = "") -> Timed:
        """Forward and backward."""
        forward_s, backward_s = self._seconds(layer, "FW"), self._seconds(layer, "BW")
        sums = max(self._beside.readers.get(layer.name, 1) - 1, 0)
        backward_s += sums * self._moved_s(3 * layer.output_elements * WIDTH_BYTES, "default")
        return Timed(layer, forward_s, backward_s, shard)

    def _seconds(self, layer: Layer, stage: KernelStage) -> float:
        if layer.kind == "loss":
            return self._moved_s(2 * WIDTH_BYTES * layer.input_elements, "ce_fusion")
        if layer.kind == "embedding" and stage == "BW":
            return self._dense_gradient_s(layer)
        halves = layer.kind in ("linear", "grouped_matmul") and stage == "BW"
        stages = HALVES[1:] if halves else (stage,)
        return sum(self._kernel(layer, each) for each in stages) + self._put_in_order_s(layer, stage)

    def _dense_gradient_s(self, layer: Layer) -> float:
        whole = int(str(layer.attributes["rows"])) * layer.output_shape[-1] * WIDTH_BYTES
        rows = 2 * layer.output_elements * WIDTH_BYTES
        return self._moved_s(whole, "default") + self._moved_s(rows, "default")

    def _put_in_order_s(self, layer: Layer, stage: KernelStage) -> float:
        """Copies around what a layer reads or makes; of what is exchanged two a tensor, forward as backward."""
        if layer.kind == "grouped_matmul":
            return self._copied_s(self._rows(layer.input_shapes[0][0]) * self._beside.width)
        if layer.kind != "attention":
            return 0.0
        query, key, value = (math.prod(shape) for shape in layer.input_shapes[:3])
        copied_s = 0.0
        if self._beside.qkv_features and query > key:
            apart = (query, value) if stage == "FW" else (query + key + value,)
            copied_s += sum(map(self._copied_s, apart))
        if self._beside.by_heads:
            exchanged = (query, key, value, layer.output_elements)
            copied_s += sum(2 * self._copied_s(elements) for elements in exchanged)
        return copied_s

    def _copied_s(self, elements: int) -> float:
        return self._moved_s(2 * elements * WIDTH_BYTES, "default")

    def _rows(self, rows: int) -> int:
        """Each expert has as many of each rank."""
        return self._beside.experts * math.ceil(rows / self._beside.experts)

    def _rows_moved_s(self, layer: Layer, stage: KernelStage) -> float:
        """Tokens to the rows of their experts, or rows added up by token: half of what was timed with four launches."""
        tokens, *further = (math.prod(shape) for shape in layer.input_shapes)
        rows = layer.output_elements if layer.kind == "gather" else max(further)
        order = "permute_fwd" if stage == "FW" else "permute_bwd"
        return self._moved_s((tokens + 3 * rows) * WIDTH_BYTES, order, launches=2)

    def _kernel(self, layer: Layer, stage: KernelStage) -> float:
        if layer.kind == "gather" or layer.attributes.get("function") == "index_add":
            return self._rows_moved_s(layer, stage)
        shape = kernel_shape(layer, stage, 1, "bf16")
        if shape is None or layer.kind == "activation":
            # A view; or one kernel with the product that reads it.
            return 0.0
        if layer.kind not in ("linear", "grouped_matmul", "attention"):
            return self._moved_s(shape.bytes, "default") if shape.bytes else 0.0
        sizes, share, beside = dict(shape.sizes), 1.0, self._beside
        name = layer.name.split(".")[-1]
        if name in _QKV and beside.qkv_features:
            share = sizes["out_features"] / beside.qkv_features
            sizes["out_features"] = beside.qkv_features
        elif name == "head":
            sizes["out_features"] = beside.tokens
        elif layer.kind == "grouped_matmul":
            sizes["batch"] = self._rows(sizes["batch"])
        return share * self._times[_key(shape.kind, shape.stage, sizes, shape.settings)]

    def _moved_s(self, size_bytes: float, name: str, launches: int = 1) -> float:
        """Of kernels that memory bounds: the file has their share of the bandwidth, and the latency of each."""
        rate, latency_s = self._memory[name]
        return size_bytes / rate + launches * latency_s


def readers_of(network: ModelGraph) -> dict[str, int]:
    """Per layer with a gradient, how many kernels read what it made; queries, keys and values are of one.

    Parts of a tensor have gradients of their own, which one kernel writes side by side.
    """
    pairs = list(zip(network.layers, layers_with_gradient(network), strict=True))
    made = {layer.name: layer.name for layer, has in pairs if has}
    for layer, has in pairs:
        if has and layer.kind == "view":
            made[layer.name] = made.get(layer.inputs[0], "") if layer.attributes["function"] not in _PARTS else ""
    counts: Counter[str] = Counter()
    for layer, has in pairs:
        if has and layer.kind != "view" and layer.name.split(".")[-1] not in _QKV[1:]:
            counts.update({made[name] for name in layer.inputs if made.get(name)})
    return dict(counts)


def timed_layers(
    network: ModelGraph, parts: Sequence[tuple[Layer, str]], system: dict[str, Any], times: Times, tensor: int
) -> list[Timed]:
    """Layers as the ranks of a strategy run them: whole, or as ``parts``, of which each has its label.

    Args:
        tensor: ranks along the tensor axis, each of which has as many features.
    """
    features = sum(layer.output_shape[-1] for layer in network.layers if layer.name.split(".")[-1] in _QKV)
    blocks = sum(layer.name.endswith(".query") for layer in network.layers)
    tokens = next(layer.output_shape[-1] for layer in network.layers if layer.name == "head")
    width = next(layer.output_shape[-1] for layer in network.layers if layer.name == "embedding")
    experts = next((int(str(e.attributes["groups"])) for e in network.layers if e.kind == "grouped_matmul"), 0)
    # Megatron-LM pads the vocabulary so that each rank has a multiple of 128.
    padded = 128 * math.ceil(tokens / (128 * tensor))
    beside = Beside(
        qkv_features=features // max(blocks, 1) // tensor,
        tokens=padded,
        experts=experts,
        width=width,
        readers=readers_of(network),
        by_heads=any("all-to-all" in label for _, label in parts),
    )
    prices, cut = Prices(system, times, beside), {layer.name for layer, _ in parts}
    whole = [prices.timed(layer) for layer in network.layers if layer.name not in cut]
    return whole + [prices.timed(layer, label) for layer, label in parts]
