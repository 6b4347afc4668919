"""Networks are traced with a CPU's kernels: what those of a GPU hold in the place of them.

Fused attention returns heads behind positions in memory. A model that puts them side by side again (``transpose`` and
``contiguous``) copies nothing then.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from paradl_bench.network.graph import Layer, LayerMemory
from paradl_bench.network.kinds.kind import LayerKind
from paradl_bench.plan.compute import LayerShard

_AS_IT_LIES = LayerMemory(passes_gradient=True, aliases=True)
_HEADS_BEHIND_POSITIONS = (-3, -2)


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


def with_memory_of(shard: LayerShard, layer: Layer, traced: Layer) -> LayerShard:
    """What a rank runs of a layer, where the GPU's kernel holds something else: a part is told by the whole."""
    if layer is traced:
        return shard
    return shard._replace(layer=msgspec.structs.replace(shard.layer, memory=layer.memory))
