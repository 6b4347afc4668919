"""What a rank's operations read, return and keep, in bytes: from formulas of their kinds, and as tracing watched it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from paradl_bench.core.cache_keys import Answers
from paradl_bench.network.graph import DTYPE_BYTES, NEXT_FORWARD, Layer, ModelGraph, Value
from paradl_bench.network.kinds.autocast import Width, widths_of
from paradl_bench.network.kinds.kind import LayerKind, Saved, layer_kinds
from paradl_bench.plan.compute import INPUT, LayerShard, backward_layers, layers_with_gradient
from paradl_bench.plan.tasks import Collective, Communication, HaloExchange
from paradl_bench.strategies.frameworks.framework_memory import ADDED_IN_KERNEL, TORCH, FrameworkMemory
from paradl_bench.strategies.memory.casts import Casts
from paradl_bench.strategies.memory.gpu_kernels import fused_layers, in_registers, layers_on_gpu, with_memory_of
from paradl_bench.strategies.memory.ledger import Ledger, Storage

_INDEX_BYTES = 8
_GPU_MASK_BYTES = 1
_WATCHED_WIDTH = 4
"""Bytes of an element where memory was watched."""
_STATISTIC_BYTES = 4
"""Statistics are of fp32 whatever activations are."""
RECEIVED = -1
"""In the place of a layer's index: what the network reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRun:
    """How a rank runs a network, or one stage of it.

    Attributes:
        samples: that pass at a time.
        device: kind of the device: ``cpu`` or ``cuda``.
        shards: what the rank runs of layers, by index; all of those that are missing.
        outputs: indices of the layers whose gradients are given; empty for the last one, the loss.
        kept_outputs: indices of the layers whose outputs the caller keeps until backward is done.
        input_has_gradient: whether backward makes a gradient of what the network reads.
        widths: per layer, how wide the elements are that it works on; empty for those of the network by itself.
        reads: by index, the tensors that a layer reads, where several of them are what the network reads.
        recomputed: ranges of layers that keep what they read of others and nothing else, and run forward again in
            backward.
        framework: what the framework holds in the place of what torch does.
    """

    samples: int
    dtype: str = "fp32"
    device: str = "cpu"
    shards: Mapping[int, LayerShard] = field(default_factory=dict)
    outputs: Sequence[int] = ()
    kept_outputs: Sequence[int] = ()
    input_has_gradient: bool = False
    widths: Sequence[Width] = ()
    reads: Mapping[int, Sequence[Value]] = field(default_factory=dict)
    recomputed: Sequence[range] = ()
    framework: FrameworkMemory = TORCH


class RankOperations:
    """The operations of a rank's network, or of one stage of it.

    Args:
        network: with the shapes that parameters have on the rank.
    """

    def __init__(self, ledger: Ledger, network: ModelGraph, run: RankRun) -> None:
        self._ledger, self._network, self._samples = ledger, network, run.samples
        self._framework, fuses = run.framework, run.framework.fuses
        widths = run.widths or widths_of(network, run.dtype, run.device, fuses)
        self._casts, self._is_cpu = Casts(ledger, network, run.dtype, run.device, widths), run.device == "cpu"
        known = layer_kinds()
        self._kinds = [known.get(layer.kind) for layer in network.layers]
        on_device = network.layers if self._is_cpu else layers_on_gpu(network.layers, self._kinds)
        self._layers = fused_layers(on_device, run.framework)
        self._in_registers = in_registers(self._layers, fuses, {*run.kept_outputs, *run.outputs})
        self._outputs = tuple(run.outputs)
        self._shards = [
            with_memory_of(run.shards.get(i) or LayerShard(layer), layer, network.layers[i])
            for i, layer in enumerate(self._layers)
        ]
        self._cut = [self._has_part(i) for i in range(len(self._layers))]
        self._index = {layer.name: i for i, layer in enumerate(self._layers)}
        self._differentiated = layers_with_gradient(network, input_has_gradient=run.input_has_gradient)
        self._input_has_gradient = run.input_has_gradient
        self._order = backward_layers(network, self._differentiated, run.outputs)
        self._reached = frozenset(self._order)
        read = [self._tensors_read(layer, run.reads.get(i)) for i, layer in enumerate(self._layers)]
        self._reads = [[source for source, _ in tensors] for tensors in read]
        self._read_outputs = [[output for _, output in tensors] for tensors in read]
        self._saved = Answers()
        self._last_reader = self._find_last_readers()
        self._forgotten = self._find_forgotten()

    def _keeps(self, i: int) -> Saved:
        return self._saved.once(i, lambda: self._find_kept(i))

    def _find_kept(self, i: int) -> Saved:
        memory, kind = self._shards[i].layer.memory, self._kinds[i]
        if memory is not None:
            return Saved(inputs=bool(memory.inputs), output=memory.output)
        if self._in_registers.get(i) and not shares_input(self._layers[i], kind):
            # Its derivative is taken from what it reads, since nobody writes the output.
            return Saved(inputs=True)
        return kind.saves(self._shards[i].layer) if kind else Saved(inputs=True, output=True)

    def _find_last_readers(self) -> list[list[int]]:
        """Per layer, the layers whose outputs nobody reads or holds after it."""
        last = {i: i for i in range(len(self._layers))}
        for i, layer in enumerate(self._layers):
            last |= {self._index[name]: i for name in layer.inputs if name in self._index}
        for i, layer in enumerate(self._layers):
            if layer.held_until and layer.held_until != NEXT_FORWARD:
                # A layer that is not there is one of a later stage.
                last[i] = max(last[i], self._index.get(layer.held_until, len(self._layers) - 1))
        read_last: list[list[int]] = [[] for _ in self._layers]
        for source, reader in last.items():
            read_last[reader].append(source)
        return read_last

    def _find_forgotten(self) -> list[list[int]]:
        """Per layer, the layers that autograd forgets then: backward reaches none, nobody holds what they lead to."""
        ends = list(range(len(self._layers)))
        for reader, sources in enumerate(self._last_reader):
            for source in sources:
                ends[source] = reader
        for i in range(len(self._layers) - 1, -1, -1):
            if self._differentiated[i] and i not in self._reached:
                for source in set(self._reads[i]) - {RECEIVED}:
                    ends[source] = max(ends[source], ends[i])
        forgotten: list[list[int]] = [[] for _ in self._layers]
        for i, end in enumerate(ends):
            if i not in self._reached:
                forgotten[end].append(i)
        return forgotten

    def _tensors_read(self, layer: Layer, told: Sequence[Value] | None) -> list[tuple[int, int]]:
        """(index of the layer that made it, which of its outputs) for what a layer reads and gets a gradient.

        Args:
            told: what it reads, where the layer does not tell one received tensor from another.
        """

        def is_without(source: int, output: int) -> bool:
            return source >= 0 and output in self._layers[source].without_gradient

        if told is not None:
            values = [(self._index.get(name, RECEIVED), output) for name, output in told]
            return [value for value in values if not is_without(*value)]
        read = []
        for name in layer.inputs:
            source = self._index.get(name, RECEIVED)
            outputs = [output for of, output in layer.values_read if of == name and not is_without(source, output)]
            read += [(source, output) for output in outputs or (0,)]
        return read

    def _input_bytes(self, layer: Layer) -> int:
        return layer.input_elements_of(self._samples) * self._casts.runs[layer.name]

    def _output_bytes(self, layer: Layer) -> int:
        width = self._own_width(self._index[layer.name]) or self._casts.runs[layer.name]
        return layer.output_elements_of(self._samples) * width

    def _holding(self, i: int) -> Layer:
        """A layer with the block of its output that the rank holds."""
        return self._shards[i].held or self._shards[i].layer

    def _held_bytes(self, i: int) -> int:
        """Bytes of that block."""
        return self._output_bytes(self._holding(i))

    def _own_width(self, source: int) -> int:
        """Bytes of an element of a layer's output that is of no dtype of the network's; 0 for others.

        A mask, positions, complex or double numbers.
        """
        memory = self._layers[source].memory if source >= 0 else None
        return memory.width if memory is not None and memory.width != _WATCHED_WIDTH else 0

    def _read_bytes(self, i: int, position: int) -> int:
        """Bytes of a tensor that the rank's operation reads."""
        run, source = self._shards[i].layer, self._reads[i][position]
        if len(self._reads[i]) in (len(run.input_shapes), len(self._layers[i].input_shapes)) or source < 0:
            # Of what crosses a pipeline's cut, the last tensors have no position of their own.
            place = min(position, len(run.input_shapes) - 1)
            samples = 1 if place in run.batchless_inputs else self._samples
            width = self._own_width(source) or self._casts.read_width(i, position)
            return math.prod(run.input_shapes[place]) * samples * width
        cut = self._is_cut(source) and self._is_cut(i)
        return self._held_bytes(source) if cut else self._output_bytes(self._layers[source])

    def _made_with_it(self, i: int) -> int:
        """Bytes of the gradient that a gated activation's kernel makes while it reads its output's."""
        gated = {source for source in self._reads[i] if i in self._in_registers.get(source, ())}
        parts = {source for source in gated if shares_input(self._layers[source], self._kinds[source])}
        return sum(self._input_bytes(self._shards[source].layer) for source in parts or gated)

    def _is_linear(self, i: int) -> bool:
        return self._layers[i].kind in ADDED_IN_KERNEL and bool(self._layers[i].parameters)

    def _is_cut(self, i: int) -> bool:
        """Whether the rank holds a block of a layer's output, or makes one number of one; of the input it has all."""
        return i >= 0 and self._cut[i]

    def _has_part(self, i: int) -> bool:
        shard, layer = self._shards[i], self._layers[i]
        if shard.held is not None:
            return True
        if not shard.shard or shard.after_fw:
            return False
        part = shard.layer.output_elements < layer.output_elements
        return part or (not layer.output_shape and shard.layer.input_elements < layer.input_elements)

    def _reads_whole(self, i: int, source: int) -> bool:
        """Whether the rank's part of a layer reads all of what another makes: what is outside of blocks reads all."""
        shard = self._shards[i]
        if not self._is_cut(i):
            return True
        leading = shard if shard.leader is None else self._shards[shard.leader]
        if of_operation(leading.before_fw, "all_to_all"):
            # What it reads came from other ranks, and goes back to them.
            return True
        if not of_operation(leading.before_fw, "all_gather"):
            return False
        held = math.prod(self._network.input_shape) if source < 0 else self._holding(source).output_elements
        return any(part == whole or part > held for part, whole in self._elements_read(i, source))

    def _elements_read(self, i: int, source: int) -> list[tuple[int, int]]:
        """Of a tensor that another layer makes, the elements of a sample where the rank's part of this layer reads it,
        and where all of it does."""
        read = INPUT if source < 0 else self._layers[source].name
        layer, run = self._layers[i], self._shards[i].layer
        shapes = zip(layer.inputs, run.input_shapes, layer.input_shapes, strict=False)
        return [(math.prod(part), math.prod(whole)) for name, part, whole in shapes if name == read]

    def _copies_input(self, i: int) -> bool:
        shard, layer = self._shards[i], self._layers[i]
        if any(isinstance(work, HaloExchange) for work in shard.before_fw):
            return True
        if self._is_cut(i):
            # Without neighbours to ask the padding is made nevertheless.
            kind = self._kinds[i]
            return kind is not None and kind.windows is not None and shard.layer.attributes != layer.attributes
        # What earlier layers left cut is read as it is.
        sliced = shard.layer.input_elements < layer.input_elements and not any(map(self._is_cut, self._reads[i]))
        return sliced and bool(of_operation(shard.after_fw, "all_reduce")) and self._samples > 1

    def _watched(self, i: int, when: Literal["kept", "forward", "backward", "backward_if_held"]) -> int:
        """Bytes that were watched of an operation, for the rank's part of it; none of what was not."""
        layer, run = self._layers[i], self._shards[i].layer
        if run.memory is None or not layer.output_elements:
            return 0
        per_sample, fixed = getattr(run.memory, when)
        kind = self._kinds[i]
        part, whole = (kind.held_elements(of) if kind else of.output_elements for of in (run, layer))
        if not layer.output_shape and layer.input_elements and run.memory is layer.memory:
            # One number, of a part of what it is made of: a loss.
            part, whole = run.input_elements, layer.input_elements
        held = per_sample * self._samples * part // whole + fixed
        return int(held * self._inner_width(i) // DTYPE_BYTES[layer.dtype])

    def _inner_width(self, i: int) -> int:
        """Bytes of an element of what an operation holds beside what it reads and returns."""
        kind, runs = self._kinds[i], self._casts.run_width(i)
        return max(runs, DTYPE_BYTES["fp32"]) if kind is not None and kind.keeps_fp32(self._shards[i].layer) else runs

    def _kept_inputs(self, i: int, keeps: Saved, read: Sequence[Storage]) -> Sequence[Storage]:
        layer, memory = self._layers[i], self._shards[i].layer.memory
        if memory is None:
            return read if keeps.inputs else ()
        if len(read) == len(layer.input_shapes):
            return [storage for index, storage in enumerate(read) if index in memory.inputs]
        if len(read) != len(layer.inputs):
            return read if keeps.inputs else ()
        if len(layer.values_read) != len(layer.input_shapes):
            # Targets and constants have no name: only a tensor of another shape is surely not kept.
            shapes = {layer.input_shapes[index] for index in memory.inputs}
            return [s for name, s in zip(layer.inputs, read, strict=True) if shapes & self._shapes_of(name)]
        kept = {layer.values_read[index] for index in memory.inputs}
        # What an operation returns after the first is other memory, which it keeps itself or which nobody does, unless
        # these are parts of one tensor.
        firsts = {name for name, number in kept if not number or self._returns_parts(self._index.get(name, RECEIVED))}
        return [storage for name, storage in zip(layer.inputs, read, strict=True) if name in firsts]

    def _shapes_of(self, name: str) -> set[tuple[int, ...]]:
        source = self._index.get(name)
        return {self._network.input_shape} if source is None else set(self._layers[source].output_shapes)

    def _returns_parts(self, i: int) -> bool:
        return i >= 0 and bool(self._layers[i].further_outputs) and shares_input(self._layers[i], self._kinds[i])

    def _beside(self, keeps: Saved, element_bytes: int) -> int:
        """Bytes of what is kept beside inputs and output, whose elements are of so many bytes."""
        mask_bytes = element_bytes if self._is_cpu else _GPU_MASK_BYTES
        return (
            keeps.elements * self._samples * element_bytes
            + keeps.mask * self._samples * mask_bytes
            + keeps.indices * self._samples * _INDEX_BYTES
            + keeps.sums * self._samples * max(element_bytes, _STATISTIC_BYTES)
            + keeps.statistics * _STATISTIC_BYTES
        )

    def _inside_norm(self, i: int) -> int:
        """Beside the gradient of a synchronised normalisation, tensors of its size that are held while it is made."""
        synchronised = self._layers[i].kind == "batch_norm" and of_operation(self._shards[i].before_fw, "all_reduce")
        return 3 * self._output_bytes(self._shards[i].layer) if synchronised else 0


def shares_input(layer: Layer, kind: LayerKind | None) -> bool:
    """Whether the output is the input's memory."""
    is_view = layer.memory.aliases if layer.memory is not None else kind is not None and kind.view
    return is_view or bool(layer.attributes.get("in_place", False))


def of_operation(works: Sequence[Communication], operation: str) -> list[Collective]:
    """The collectives of one operation."""
    return [work for work in works if isinstance(work, Collective) and work.operation == operation]
