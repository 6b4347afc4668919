"""Networks are traced with a CPU's kernels: what those of a GPU, or of a framework, hold in the place of them.

Fused attention returns heads behind positions in memory. A model that puts them side by side again (``transpose`` and
``contiguous``) copies nothing then.

A framework's fused kernels read and write the tensors that they are given
(:class:`~paradl_bench.strategies.frameworks.framework_memory.FrameworkMemory`). A gated activation (SwiGLU, GeGLU) has
the activation's output and its gradient in registers. It makes the gradient of what it reads in one piece, while it
reads that of the gate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from paradl_bench.network.graph import Layer, LayerMemory
from paradl_bench.network.kinds.kind import LayerKind
from paradl_bench.plan.compute import LayerShard
from paradl_bench.strategies.frameworks.framework_memory import FrameworkMemory

_AS_IT_LIES = LayerMemory(passes_gradient=True, aliases=True)
_HEADS_BEHIND_POSITIONS = (-3, -2)
_ROW_BYTES = 4


def layers_on_gpu(layers: Sequence[Layer], kinds: Sequence[LayerKind | None]) -> tuple[Layer, ...]:
    """Layers with the memory of a GPU's kernels, where these are others than a CPU's."""
    on_gpu: list[Layer] = []
    # By name, what lies as attention left it, and what lies side by side behind a transpose of that.
    left, transposed = set[str](), set[str]()
    for layer, kind in zip(layers, kinds, strict=True):
        memory = kind.memory_on_gpu(layer) if kind is not None and kind.memory_on_gpu is not None else None
        if memory is not None:
            left.add(layer.name)
        elif layer.kind == "view" and layer.inputs[:1] and layer.inputs[0] in left:
            if layer.attributes.get("dims") == _HEADS_BEHIND_POSITIONS:
                transposed.add(layer.name)
        elif layer.attributes.get("function") == "contiguous" and transposed & set(layer.inputs):
            memory = _AS_IT_LIES
        on_gpu.append(layer if memory is None else msgspec.structs.replace(layer, memory=memory))
    return tuple(on_gpu)


def fused_layers(layers: Sequence[Layer], framework: FrameworkMemory) -> tuple[Layer, ...]:
    """Layers with the memory of a framework's kernels, where it fuses their kind."""

    def fused(layer: Layer) -> Layer:
        # A loss that does not say its function is that of its kind's default.
        function = str(layer.attributes.get("function", "cross_entropy"))
        memory_of = _FUSED.get(function) if layer.kind in framework.fuses else None
        if memory_of is None:
            return layer
        overwrites = layer.kind == "loss" and framework.overwrites_logits
        return msgspec.structs.replace(layer, memory=_OVERWRITTEN if overwrites else memory_of(layer))

    return tuple(map(fused, layers))


_OVERWRITTEN = LayerMemory()
"""Nothing: the gradient of what it reads lies where that did, which is let go of, and made again in backward."""


def _fused_loss(layer: Layer) -> LayerMemory:
    """What it reads, and the logarithm of each row's sum in fp32."""
    logits = layer.input_shapes[0]
    return LayerMemory(inputs=(0,), kept=(_ROW_BYTES * math.prod(logits[:-1]), 0))


def _fused_norm(layer: Layer) -> LayerMemory:
    """What it reads, and a number a row in fp32; torch's formula of layer normalisation says as much."""
    return LayerMemory(inputs=(0,), kept=(_ROW_BYTES * layer.output_elements // layer.output_shape[-1], 0))


_FUSED: Mapping[str, Callable[[Layer], LayerMemory]] = {"cross_entropy": _fused_loss, "rms_norm": _fused_norm}


def in_registers(layers: Sequence[Layer], fuses: frozenset[str], held: Collection[int]) -> dict[int, frozenset[int]]:
    """Per layer that a gated activation reads from registers, by index, the layers whose gradients of it are none.

    An activation's output is, where a product alone reads it. So are the parts of one tensor that only the two read:
    these are memory of that tensor, but have no gradients of their own.

    Args:
        held: indices of layers whose outputs somebody else holds.
    """
    if "activation" not in fuses:
        return {}
    index = {layer.name: i for i, layer in enumerate(layers)}
    readers: dict[int, list[int]] = {}
    for i, layer in enumerate(layers):
        for name in dict.fromkeys(layer.inputs):
            readers.setdefault(index.get(name, -1), []).append(i)
    found: dict[int, frozenset[int]] = {}
    for i, layer in enumerate(layers):
        behind = readers.get(i, [])
        gates = layer.kind == "activation" and not layer.attributes.get("in_place") and i not in held
        if not gates or len(behind) != 1 or layers[behind[0]].attributes.get("function") != "mul":
            continue
        found[i] = frozenset(behind)
        for source in {index.get(name, -1) for name in layer.inputs} - {-1}:
            parts = layers[source].kind == "view" and bool(layers[source].further_outputs)
            if parts and set(readers[source]) == {i, *behind}:
                found[source] = frozenset({i, *behind})
    return found


def with_memory_of(shard: LayerShard, layer: Layer, traced: Layer) -> LayerShard:
    """What a rank runs of a layer, where the GPU's kernel holds something else: a part is told by the whole."""
    if layer is traced:
        return shard
    return shard._replace(layer=msgspec.structs.replace(shard.layer, memory=layer.memory))
