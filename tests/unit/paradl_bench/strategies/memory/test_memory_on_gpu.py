"""What a GPU's fused attention holds, where a CPU's products run apart."""

from __future__ import annotations

import msgspec
from network_factory import NetworkFactory

from paradl_bench.network.graph import Layer, LayerMemory
from paradl_bench.network.kinds.kind import layer_kinds
from paradl_bench.plan.compute import LayerShard
from paradl_bench.strategies.memory.gpu_kernels import layers_on_gpu, with_memory_of

HEADS, POSITIONS, WIDTH = 4, 32, 16
APART = LayerMemory(kept=(3 * HEADS * POSITIONS**2 * 4, 0))


def layer(name: str, kind: str, inputs: tuple[str, ...], shape: tuple[int, ...], **attributes: object) -> Layer:
    factory = NetworkFactory(1, 1, 1)
    factory.relu("any")
    (made,) = factory.network("any").layers
    heads = (HEADS, POSITIONS, WIDTH)
    return msgspec.structs.replace(
        made, name=name, kind=kind, inputs=inputs, input_shapes=(heads,) * len(inputs), output_shape=shape,
        attributes=attributes, memory=APART if kind == "attention" else None,
    )  # fmt: skip


def attention_and_what_reads_it(width: int = WIDTH) -> list[Layer]:
    heads, rows = (HEADS, POSITIONS, width), (POSITIONS, HEADS, width)
    fused = layer("fused", "attention", ("q", "k", "v"), heads, dropout=0.1)
    fused = msgspec.structs.replace(fused, input_shapes=(heads,) * 3)
    behind = layer("behind", "view", ("fused",), rows, function="transpose", dims=(-3, -2))
    return [fused, behind, layer("beside", "copy", ("behind",), rows, function="contiguous", output=rows)]


def on_gpu(layers: list[Layer]) -> tuple[Layer, ...]:
    return layers_on_gpu(layers, [layer_kinds().get(each.kind) for each in layers])


def test_fused_attention_keeps_a_number_a_row() -> None:
    attention, behind, beside = on_gpu(attention_and_what_reads_it())
    assert attention.memory is not None
    assert attention.memory.kept == (HEADS * POSITIONS * 4, 0)
    assert (attention.memory.inputs, attention.memory.output) == ((0, 1, 2), True)
    # Heads lie behind positions already: nothing is copied.
    assert behind.memory is None
    assert beside.memory is not None
    assert beside.memory.aliases


def test_heads_of_an_odd_width_run_apart_on_gpus() -> None:
    layers = attention_and_what_reads_it(width=12)
    assert on_gpu(layers) == tuple(layers)


def test_a_copy_of_other_dims_stays_one() -> None:
    attention, behind, beside = attention_and_what_reads_it()
    turned = msgspec.structs.replace(behind, attributes={"function": "transpose", "dims": (-2, -1)})
    assert on_gpu([attention, turned, beside])[2].memory is None


def test_a_ranks_part_is_told_by_the_whole_layer() -> None:
    traced = attention_and_what_reads_it()[0]
    whole = on_gpu([traced])[0]
    part = LayerShard(msgspec.structs.replace(traced, output_shape=(2, POSITIONS, WIDTH)), "t2")
    assert with_memory_of(part, whole, traced).layer.memory == whole.memory
    assert with_memory_of(part, traced, traced) is part
