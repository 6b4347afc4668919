"""Which tensors a rank holds while it runs forward and backward of a network, operation by operation.

A walk over the layers in the order of forward, then of backward, as torch's autograd runs them. Forward makes the
output of an operation, unless it is a view or works in place, and what autograd keeps beside it (``LayerKind.saves``);
an output lives until its last reader has run, or until backward of whoever saved it. Backward of an operation makes a
gradient for each input that needs one, unless it hands its own on, and for its parameters; then it lets go of the
output's gradient and of what was saved. Where branches meet their gradients are added: in place where nobody else holds
the first, else into a third tensor.

Layers that a rank shares with others hold what their communication does as well: the part and the buffer beside
gathered activations, the slice of the input that a channel shard reads, the block with its halo and the messages, the
copy of a gradient that is summed.

Not seen: workspaces inside of kernels, the allocator's rounding and fragments, and variables of the model's own code
that outlive their last use in forward.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from paradl_bench.layers.kind import LayerKind, Saved, layer_kinds
from paradl_bench.memory.casts import Casts
from paradl_bench.memory.ledger import Gradient, Ledger, Storage, hold
from paradl_bench.spec.network import Layer, Network
from paradl_bench.spec.plan import Collective, Communication, HaloExchange
from paradl_bench.strategies.compute import LayerShard, backward_layers, layers_with_gradient

_INDEX_BYTES = 8
_WATCHED_WIDTH = 4
"""Bytes of an element where memory was watched."""
_STATISTIC_BYTES = 4
"""Statistics are of fp32 whatever activations are."""
_SEVERAL_TENSORS = ("chunk", "split", "unbind")
RECEIVED = -1
"""In the place of a layer's index: what the network reads."""


@dataclass(slots=True)
class Pass:
    """What one forward left for its backward.

    Attributes:
        saved: per layer. outputs: that the caller keeps until backward is done.
        given: per segment that is computed again, what it read of other layers, by layer, and of what is gathered.
        waiting: per layer, gradients that the input's part of backward keeps for the parameters' part.
    """

    saved: list[list[Storage]]
    outputs: list[Storage] = field(default_factory=list)
    given: list[tuple[dict[int, Storage], dict[int, Storage]]] = field(default_factory=list)
    waiting: dict[int, list[Gradient]] = field(default_factory=dict)


class Liveness:
    """Walks a rank's network, or one stage of it, as often as micro-batches pass.

    Args:
        network: with the shapes that parameters have on the rank.
        samples: that pass at a time.
        shards: what the rank runs of layers, by index; all of those that are missing.
        outputs: indices of the layers whose gradients are given; empty for the last one, the loss.
        kept_outputs: indices of the layers whose outputs the caller keeps until backward is done.
        input_has_gradient: whether backward makes a gradient of what the network reads.
        device: kind of the device: ``cpu`` or ``cuda``.
        mask_bytes: of an element of a mask; None for as many as any other element has.
        recomputed: ranges of layers that keep what they read of others and nothing else, and run forward again in
            backward.
    """

    def __init__(
        self,
        ledger: Ledger,
        network: Network,
        samples: int,
        *,
        dtype: str = "fp32",
        device: str = "cpu",
        shards: Mapping[int, LayerShard] | None = None,
        outputs: Sequence[int] = (),
        kept_outputs: Sequence[int] = (),
        input_has_gradient: bool = False,
        mask_bytes: int | None = None,
        recomputed: Sequence[range] = (),
    ) -> None:
        self._ledger, self._network, self._samples = ledger, network, samples
        self._casts, self._mask_bytes = Casts(ledger, network, dtype, device), mask_bytes
        self._layers, self._outputs, self._kept_outputs = network.layers, tuple(outputs), frozenset(kept_outputs)
        self._shards = [(shards or {}).get(i) or LayerShard(layer) for i, layer in enumerate(self._layers)]
        known = layer_kinds()
        self._kinds = [known.get(layer.kind) for layer in self._layers]
        self._index = {layer.name: i for i, layer in enumerate(self._layers)}
        self._differentiated = layers_with_gradient(network, input_has_gradient=input_has_gradient)
        self._input_has_gradient = input_has_gradient
        self._order = backward_layers(network, self._differentiated, outputs)
        self._reached = frozenset(self._order)
        self._reads = [self._tensors_read(layer) for layer in self._layers]
        self._last_reader = self._find_last_readers()
        self._forgotten = self._find_forgotten()
        self._parameter_bytes = {parameter.name: parameter.bytes for parameter in network.parameters}
        self._finished: set[str] = set()
        self._recomputed = tuple(recomputed)
        self._keeping = [
            [i for i in self._order if i in layers and self._keeps(i) != Saved()] for layers in self._recomputed
        ]

    def _keeps(self, i: int) -> Saved:
        memory, kind = self._layers[i].memory, self._kinds[i]
        if memory is not None:
            return Saved(inputs=bool(memory.inputs), output=memory.output)
        return kind.saves(self._shards[i].layer) if kind else Saved(inputs=True, output=True)

    def _find_last_readers(self) -> list[list[int]]:
        """Per layer, the layers whose outputs nobody reads after it."""
        last = {i: i for i in range(len(self._layers))}
        for i, layer in enumerate(self._layers):
            last |= {self._index[name]: i for name in layer.inputs if name in self._index}
        found: list[list[int]] = [[] for _ in self._layers]
        for source, reader in last.items():
            found[reader].append(source)
        return found

    def _find_forgotten(self) -> list[list[int]]:
        """Per layer, the layers that backward does not reach and whose last reader it is, or that of what they lead to.

        Autograd forgets them as soon as nobody holds what they lead to.
        """
        ends = list(range(len(self._layers)))
        for reader, sources in enumerate(self._last_reader):
            for source in sources:
                ends[source] = reader
        for i in range(len(self._layers) - 1, -1, -1):
            if self._differentiated[i] and i not in self._reached:
                for source in set(self._reads[i]) - {RECEIVED}:
                    ends[source] = max(ends[source], ends[i])
        found: list[list[int]] = [[] for _ in self._layers]
        for i, end in enumerate(ends):
            if i not in self._reached:
                found[end].append(i)
        return found

    def _tensors_read(self, layer: Layer) -> list[int]:
        """Indices of the layers that made what a layer reads; once for each tensor that gets a gradient."""
        found = []
        for name in layer.inputs:
            source = self._index.get(name, RECEIVED)
            none = self._layers[source].without_gradient if source >= 0 else ()
            several = sum(of == name and number not in none for of, number in layer.values_read)
            found += [source] * max(several, 1)
        return found

    def _input_bytes(self, layer: Layer) -> int:
        return layer.input_elements_of(self._samples) * self._casts.runs[layer.name]

    def _output_bytes(self, layer: Layer) -> int:
        width = self._casts.runs[layer.name]
        if layer.memory is not None and layer.memory.width != _WATCHED_WIDTH:
            # A mask, or positions: no dtype of the network's.
            width = layer.memory.width
        return layer.output_elements_of(self._samples) * width

    # Forward

    def forward(self, received: Storage) -> Pass:
        """Run forward on what the network reads."""
        ledger = self._ledger
        made: dict[int, Storage] = {}
        wholes: dict[int, Storage] = {}
        left = Pass([[] for _ in self._layers])
        again = {i for layers in self._recomputed for i in layers}
        begins = {layers.start: layers for layers in self._recomputed}
        for i in range(len(self._layers)):
            if i in begins:
                left.given.append(self._hold_given(begins[i], {RECEIVED: received} | made, wholes))
            made[i] = self._run_on(i, made, wholes, received, left.saved[i])
            if i in again:
                # What autograd would keep is not kept.
                self._release_all(left.saved[i])
            if i in self._kept_outputs:
                left.outputs.append(hold(made[i]))
            for source in self._last_reader[i]:
                ledger.release(made[source])
                if source in wholes:
                    ledger.release(wholes[source])
            for forgotten in self._forgotten[i]:
                self._release_all(left.saved[forgotten])
        if RECEIVED in wholes:
            ledger.release(wholes[RECEIVED])
        self._casts.end_forward()
        return left

    def _run_on(
        self,
        i: int,
        made: Mapping[int, Storage],
        wholes: dict[int, Storage],
        received: Storage | None,
        saved: list[Storage],
    ) -> Storage:
        """Run one operation on what others made."""
        self._gather_inputs(i, made, wholes)
        sources = [self._index.get(name, RECEIVED) for name in self._layers[i].inputs]
        gathered = {} if self._is_cut(i) else wholes
        found = (gathered.get(source) or made.get(source, received) for source in sources)
        return self._run(i, [storage for storage in found if storage is not None], saved)

    def _release_all(self, storages: list[Storage]) -> None:
        for storage in storages:
            self._ledger.release(storage)
        storages.clear()

    def _hold_given(
        self, layers: range, made: Mapping[int, Storage], wholes: Mapping[int, Storage]
    ) -> tuple[dict[int, Storage], dict[int, Storage]]:
        """Hold what a segment reads of earlier layers, and what was gathered of it before."""
        read = {self._index.get(name, RECEIVED) for i in layers for name in self._layers[i].inputs}
        given = {source: hold(made[source]) for source in read if source < layers.start and source in made}
        return given, {source: hold(wholes[source]) for source in read if source in wholes}

    def _compute_again(self, layers: range, left: Pass, which: int) -> None:
        """Forward of a segment in backward; what autograd keeps of it is there from then on."""
        ledger = self._ledger
        given, gathered = left.given[which]
        made, wholes = dict(given), dict(gathered)
        for i in layers:
            made[i] = self._run_on(i, made, wholes, None, left.saved[i])
            for source in self._last_reader[i]:
                if source in layers:
                    ledger.release(made.pop(source))
                    if source in wholes:
                        ledger.release(wholes.pop(source))
        own = [storage for i, storage in made.items() if i not in given]
        self._release_all(own + [storage for i, storage in wholes.items() if i not in gathered])

    def _gather_inputs(self, i: int, made: Mapping[int, Storage], wholes: dict[int, Storage]) -> None:
        """Blocks become whole where the spatial region ends; each is gathered before its first reader outside."""
        gathers = _of_operation(self._shards[i].before_fw, "all_gather")
        sources = [self._index[name] for name in self._layers[i].inputs if name in self._index]
        blocks = [s for s in sources if self._is_cut(s) and s not in wholes]
        for source, gather in zip(blocks, gathers, strict=False):
            wholes[source] = self._ledger.allocate(self._output_bytes(self._layers[source]))
            self._ledger.mark(gather.ranks * gather.message_bytes + self._padding(made[source].size, gather))
        for gather in gathers[len(blocks) :]:
            # What a stage has received as a block.
            wholes[RECEIVED] = self._ledger.allocate(gather.ranks * gather.message_bytes)
            self._ledger.mark(gather.ranks * gather.message_bytes)

    def _padding(self, part_bytes: int, gather: Collective) -> int:
        """The copy of a part that is shorter than the longest one."""
        return gather.message_bytes if part_bytes < gather.message_bytes else 0

    def _is_cut(self, i: int) -> bool:
        """Whether the rank holds a block of a layer's output; of the network's input it holds all."""
        if i < 0:
            return False
        shard = self._shards[i]
        return (
            bool(shard.shard) and not shard.after_fw and shard.layer.output_elements < self._layers[i].output_elements
        )

    def _run(self, i: int, read: Sequence[Storage], saved: list[Storage]) -> Storage:
        """Run one operation on storages; ``saved`` takes what autograd keeps."""
        ledger, layer, shard, kind = self._ledger, self._layers[i], self._shards[i], self._kinds[i]
        copied = self._copy_of_input(i, read)
        read = [copied] if copied is not None else read
        keeps = self._keeps(i)
        read, converted = self._casts.inputs(i, read, functools.partial(self._read_bytes, i))
        parameters = self._casts.parameters(i)
        own = ledger.allocate(self._beside(keeps, self._casts.run_width(i)) + self._watched(i, "kept"))
        aliases = _aliases(layer, kind) and bool(read)
        output = hold(read[0]) if aliases else ledger.allocate(self._output_bytes(shard.layer))
        ledger.mark(self._watched(i, "forward"))
        if self._differentiated[i]:
            saved += [hold(own), *map(hold, self._kept_inputs(i, keeps, read))]
            saved += [hold(output)] if keeps.output else []
            saved += map(hold, parameters)
        self._release_all([own, *parameters, *converted])
        if copied is not None:
            ledger.release(copied)
        return self._combine(i, output)

    def _watched(self, i: int, when: Literal["kept", "forward", "backward", "backward_if_held"]) -> int:
        """Bytes that were watched of an operation, for the rank's part of it; none of what was not."""
        layer, run = self._layers[i], self._shards[i].layer
        if layer.memory is None or not layer.output_elements:
            return 0
        each, fixed = getattr(layer.memory, when)
        held = each * self._samples * run.output_elements // layer.output_elements + fixed
        return int(held * self._casts.run_width(i) // _WATCHED_WIDTH)

    def _kept_inputs(self, i: int, keeps: Saved, read: Sequence[Storage]) -> Sequence[Storage]:
        layer = self._layers[i]
        if layer.memory is None:
            return read if keeps.inputs else ()
        if len(read) == len(layer.input_shapes):
            return [storage for index, storage in enumerate(read) if index in layer.memory.inputs]
        if len(layer.values_read) != len(layer.input_shapes) or len(read) != len(layer.inputs):
            return read if keeps.inputs else ()
        kept = {layer.values_read[index] for index in layer.memory.inputs}
        # What an operation returns after the first is other memory, which it keeps itself or which nobody does.
        firsts = {name for name, number in kept if not number or self._returns_parts(self._index.get(name, RECEIVED))}
        return [storage for name, storage in zip(layer.inputs, read, strict=True) if name in firsts]

    def _returns_parts(self, i: int) -> bool:
        return i >= 0 and self._layers[i].attributes.get("function") in _SEVERAL_TENSORS

    def _beside(self, keeps: Saved, element_bytes: int) -> int:
        """Bytes of what is kept beside inputs and output, whose elements are of so many bytes."""
        return (
            keeps.elements * self._samples * element_bytes
            + keeps.mask * self._samples * (self._mask_bytes or element_bytes)
            + keeps.indices * self._samples * _INDEX_BYTES
            + keeps.statistics * _STATISTIC_BYTES
        )

    def _copy_of_input(self, i: int, read: Sequence[Storage]) -> Storage | None:
        """The block with its halo, or a channel shard's slice; None where the operation reads the tensor itself."""
        shard = self._shards[i]
        size = self._input_bytes(shard.layer)
        if not self._copies_input(i) or not read:
            return None
        copied = self._ledger.allocate(size)
        self._ledger.mark(_messages(shard.before_fw))
        return copied

    def _copies_input(self, i: int) -> bool:
        shard, layer = self._shards[i], self._layers[i]
        if any(isinstance(work, HaloExchange) for work in shard.before_fw):
            return True
        if self._is_cut(i):
            # Without neighbours to ask the padding is made nevertheless.
            kind = self._kinds[i]
            return kind is not None and kind.windows is not None and shard.layer.attributes != layer.attributes
        sliced = shard.layer.input_elements < layer.input_elements
        return sliced and bool(_of_operation(shard.after_fw, "all_reduce")) and self._samples > 1

    def _combine(self, i: int, part: Storage) -> Storage:
        """What ranks made of a shared layer, put together."""
        ledger, layer, shard = self._ledger, self._layers[i], self._shards[i]
        whole = self._output_bytes(layer)
        for gather in _of_operation(shard.after_fw, "all_gather"):
            gathered = ledger.allocate(whole)
            ledger.mark(gather.ranks * gather.message_bytes + self._padding(part.size, gather))
            ledger.release(part)
            part = gathered
        if _of_operation(shard.after_fw, "all_reduce"):
            # Ranks of other groups' filters add zeros; the bias comes last, out of place.
            for _ in range((part.size < whole) + bool(layer.attributes.get("bias"))):
                larger = ledger.allocate(whole)
                ledger.mark()
                ledger.release(part)
                part = larger
        return part

    # Backward

    def backward(self, left: Pass, given: Sequence[Gradient] = ()) -> list[Storage]:
        """Run backward of a pass; returns the gradients of what the network read, which the caller holds.

        Args:
            given: gradients of the outputs.
        """
        # What was gathered gets gradients of the whole, and takes its block.
        pending: dict[int, list[Gradient]] = dict(zip(self._outputs, ([gradient] for gradient in given), strict=False))
        of_wholes: dict[int, list[Gradient]] = {}
        due = {own[0]: which for which, own in enumerate(self._keeping) if own}
        done = {own[-1]: which for which, own in enumerate(self._keeping) if own}
        for i in self._order:
            if i in due:
                self._compute_again(self._recomputed[due[i]], left, due[i])
            for whole in of_wholes.pop(i, ()):
                self._push(pending, i, self._cut_gradient(i, whole))
            for source, gradient in self._differentiate(i, pending.pop(i, []), left.saved[i]):
                gathered = self._is_cut(source) and not self._is_cut(i)
                self._push(of_wholes if gathered else pending, source, gradient)
            if i in done:
                for held in left.given[done[i]]:
                    self._release_all(list(held.values()))
        for output in left.outputs:
            self._ledger.release(output)
        return [gradient.storage for gradient in pending.pop(RECEIVED, [])]

    def _push(self, pending: dict[int, list[Gradient]], source: int, gradient: Gradient) -> None:
        """Hand a gradient to a layer, which adds it to what other readers have sent."""
        ledger, queue = self._ledger, pending.setdefault(source, [])
        first = (
            None
            if self._returns_parts(source)
            else next((other for other in queue if other.size == gradient.size), None)
        )
        if first is None:
            queue.append(gradient)
            return
        if first.storage.holders > 1 or first.size != first.storage.size:
            total = ledger.allocate(first.size)
            ledger.mark()
            ledger.release(first.storage)
            first.storage = total
        ledger.release(gradient.storage)

    def _differentiate(self, i: int, arrived: Sequence[Gradient], saved: list[Storage]) -> list[tuple[int, Gradient]]:
        """Backward of one operation; returns (layer that it read, gradient)."""
        ledger = self._ledger
        upstream = self._part_of_gradient(i, arrived)
        made = self._input_gradients(i, upstream, self._reached)
        made_of_parameters, kept = self._parameter_gradients(i)
        lowered = self._casts.lowered_gradients(i)
        if lowered:
            ledger.mark(sum(size for size, _ in lowered))
        else:
            shared = any(gradient.storage.holders > 1 for gradient in upstream)
            inside = self._watched(i, "backward_if_held" if shared else "backward")
            ledger.mark(self._inside_norm(i) + inside, made_of_parameters)
            ledger.gradients += kept
        for gradient in upstream:
            ledger.release(gradient.storage)
        self._release_all(saved)
        if lowered:
            self._gradients_of_lowered(i, lowered, kept)
        made = [(source, self._casts.gradient(i, source, gradient)) for source, gradient in made]
        return [(source, self._after_backward(i, source, gradient)) for source, gradient in made]

    def _gradients_of_lowered(self, i: int, lowered: Sequence[tuple[int, int]], kept: int) -> None:
        """fp32 gradients of parameters, one after the other, of those in the lower dtype."""
        waiting, done = sum(size for size, _ in lowered), 0
        for low, size in lowered:
            done += size
            self._ledger.mark(waiting, done)
            waiting -= low
        self._ledger.gradients += kept

    def _input_gradients(
        self, i: int, upstream: Sequence[Gradient], wanted: frozenset[int]
    ) -> list[tuple[int, Gradient]]:
        """(layer that it read, gradient) for those of its inputs that are wanted, or received with a gradient."""
        sources = self._reads[i]
        positions = [p for p, s in enumerate(sources) if s in wanted or (s < 0 and self._input_has_gradient)]
        return [(sources[p], self._input_gradient(i, p, upstream)) for p in positions]

    def _input_gradient(self, i: int, position: int, upstream: Sequence[Gradient]) -> Gradient:
        layer, kind, size = self._layers[i], self._kinds[i], self._read_bytes(i, position)
        size = self._casts.in_run_width(i, position, size)
        passes = kind is not None and kind.passes_gradient(layer)
        if layer.memory is not None:
            passes = layer.memory.passes_gradient
        if passes and upstream:
            return Gradient(hold(upstream[0].storage), size)
        return Gradient(self._ledger.allocate(size), size)

    def _read_bytes(self, i: int, position: int) -> int:
        """Bytes of a tensor that the rank's operation reads."""
        run, source = self._shards[i].layer, self._reads[i][position]
        if len(self._reads[i]) == len(run.input_shapes) or source < 0:
            # What crosses a pipeline's cut has one name, however many values it is.
            which = min(position, len(run.input_shapes) - 1)
            samples = 1 if which in run.batchless_inputs else self._samples
            width = self._casts.read_width(i, position)
            return math.prod(run.input_shapes[which]) * samples * width
        cut = self._is_cut(source) and self._is_cut(i)
        return self._output_bytes(self._shards[source].layer if cut else self._layers[source])

    def _parameter_gradients(self, i: int) -> tuple[int, int]:
        """Bytes of the gradients of a layer's parameters, and of those that stay: others are added to earlier ones."""
        made = {name: self._parameter_bytes.get(name, 0) for name in self._layers[i].parameters}
        kept = sum(size for name, size in made.items() if name not in self._finished)
        self._finished |= made.keys()
        return sum(made.values()), kept

    def _inside_norm(self, i: int) -> int:
        """Beside the gradient of a synchronised normalisation, tensors of its size that are held while it is made."""
        synchronised = self._layers[i].kind == "batch_norm" and _of_operation(self._shards[i].before_fw, "all_reduce")
        return 3 * self._output_bytes(self._shards[i].layer) if synchronised else 0

    def _part_of_gradient(self, i: int, arrived: Sequence[Gradient]) -> list[Gradient]:
        """What the rank's part of a shared layer gets of the output's gradient."""
        part = self._output_bytes(self._shards[i].layer)
        is_slice = part < self._output_bytes(self._layers[i]) and bool(self._shards[i].after_fw)
        if not is_slice or not arrived or self._samples == 1:
            return list(arrived)
        return [self._replaced(arrived[0], part)]

    def _cut_gradient(self, i: int, whole: Gradient) -> Gradient:
        """The rank's block of the gradient of what was gathered."""
        return self._replaced(whole, self._output_bytes(self._shards[i].layer))

    def _replaced(self, gradient: Gradient, size: int, more: int = 0) -> Gradient:
        """Another tensor made from a gradient, with ``more`` bytes held meanwhile."""
        made = Gradient(self._ledger.allocate(size), size)
        self._ledger.mark(more)
        self._ledger.release(gradient.storage)
        return made

    def _after_backward(self, i: int, source: int, gradient: Gradient) -> Gradient:
        """The gradient of a layer's input after the rank's own was communicated."""
        layer, shard = self._layers[i], self._shards[i]
        if not shard.shard:
            return gradient
        if self._is_cut(i):
            if not self._copies_input(i):
                return gradient
            owned = self._shards[source].layer if source >= 0 else layer
            size = self._output_bytes(owned) if source >= 0 else self._input_bytes(owned)
            return self._replaced(gradient, size, _messages(shard.after_bw))
        whole = self._input_bytes(layer)
        for gather in _of_operation(shard.after_bw, "all_gather"):
            more = gather.ranks * gather.message_bytes + self._padding(gradient.size, gather)
            gradient = self._replaced(gradient, whole, more)
        if gradient.size < whole:
            gradient = self._replaced(gradient, whole)
        for _ in _of_operation(shard.after_bw, "all_reduce"):
            gradient = self._replaced(gradient, whole)
        for scatter in _of_operation(shard.after_bw, "reduce_scatter"):
            gradient = self._replaced(gradient, whole, (scatter.ranks + 1) * scatter.message_bytes)
        return gradient


def _aliases(layer: Layer, kind: LayerKind | None) -> bool:
    """Whether the output is the input's memory."""
    is_view = layer.memory.aliases if layer.memory is not None else kind is not None and kind.view
    return is_view or bool(layer.attributes.get("in_place", False))


def _of_operation(works: Sequence[Communication], operation: str) -> list[Collective]:
    return [work for work in works if isinstance(work, Collective) and work.operation == operation]


def _messages(works: Sequence[Communication]) -> int:
    """Bytes of the messages of halo exchanges: copies of what is sent, and buffers of what comes."""
    halos = (work for work in works if isinstance(work, HaloExchange))
    return sum(sum(halo.sends_bytes) + sum(halo.receives_bytes) for halo in halos)
