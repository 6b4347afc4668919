"""Which tensors a rank holds while it runs forward and backward of a network, operation by operation.

A walk over the layers in the order of forward, then of backward, as torch's autograd runs them. Forward makes the
output of an operation, unless it is a view or works in place, and what autograd keeps beside it (``LayerKind.saves``);
an output lives until its last reader has run, or until backward of whoever saved it. Backward of an operation makes a
gradient for each input that needs one, unless it hands its own on, and for its parameters; then it lets go of the
output's gradient and of what was saved. Where branches meet their gradients are added: in place where nobody else holds
the first, else into a third tensor.

Sharded layers hold what their communication does as well (:mod:`~paradl_bench.strategies.memory.sharded_operations`).

An output also lives as long as the model's own variables hold it (``Layer.held_until``).

Not seen: workspaces inside of kernels, the allocator's rounding and fragments.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paradl_bench.network.graph import NEXT_FORWARD, ModelGraph
from paradl_bench.network.kinds.kind import Saved
from paradl_bench.strategies.memory.ledger import Gradient, Ledger, Storage, hold
from paradl_bench.strategies.memory.rank_operations import RECEIVED, RankRun, of_operation, shares_input
from paradl_bench.strategies.memory.sharded_operations import Readers, ShardedOperations


@dataclass(slots=True)
class Pass:
    """What one forward left for its backward.

    Attributes:
        saved: per layer. outputs: that the caller keeps until backward is done.
        given: per segment that is computed again, what it read of other layers, by layer, and of what is gathered.
        handed: per segment that is computed again, what else is held until its backward is done.
        waiting: per layer, gradients that the input's part of backward keeps for the parameters' part.
    """

    saved: list[list[Storage]]
    outputs: list[Storage] = field(default_factory=list)
    given: list[tuple[dict[int, Storage], dict[int, Storage]]] = field(default_factory=list)
    handed: dict[int, list[Storage]] = field(default_factory=dict)
    waiting: dict[int, list[Gradient]] = field(default_factory=dict)


class Liveness(ShardedOperations):
    """Walks a rank's network, or one stage of it, as often as micro-batches pass."""

    def __init__(self, ledger: Ledger, network: ModelGraph, run: RankRun) -> None:
        super().__init__(ledger, network, run)
        self._kept_outputs = frozenset(run.kept_outputs)
        self._parameter_bytes = {parameter.name: parameter.bytes for parameter in network.parameters}
        self._finished: set[str] = set()
        self._recomputed = tuple(run.recomputed)
        # By segment, layers whose backward runs it again: those that read what is kept, in a reentrant one all.
        self._keeping = [
            [i for i in self._order if i in layers and (self._is_reentrant(i) or self._keeps(i) != Saved())]
            for layers in self._recomputed
        ]

    def forward(self, received: Storage) -> Pass:
        """Run forward on what the network reads."""
        ledger = self._ledger
        made: dict[int, Storage] = {}
        wholes: dict[int, Storage] = {}
        left = Pass([[] for _ in self._layers])
        again = {i for layers in self._recomputed for i in layers}
        begins = {layers.start: which for which, layers in enumerate(self._recomputed)}
        for i in range(len(self._layers)):
            if i in begins:
                left.given.append(self._hold_given(begins[i], {RECEIVED: received} | made, wholes))
            made[i] = self._run_on(i, made, wholes, received, left.saved[i])
            if i in again:
                # What autograd would keep is not kept.
                self._release_all(left.saved[i])
            if i in self._kept_outputs:
                left.outputs.append(hold(made[i]))
            if self._layers[i].held_until == NEXT_FORWARD and self._order:
                # To the end of backward: its last operation lets go of it.
                left.saved[self._order[-1]].append(hold(made[i]))
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
        self._gather_inputs(i, made, wholes)
        sources = [self._index.get(name, RECEIVED) for name in self._layers[i].inputs]
        gathered = {source: wholes[source] for source in sources if source in wholes and self._reads_whole(i, source)}
        storages = (gathered.get(source) or made.get(source, received) for source in sources)
        output = self._run(i, [storage for storage in storages if storage is not None], saved)
        if self._gathered_again_bytes(i):
            self._keep_parts({id(wholes[source]): made[source] for source in gathered if source in made}, saved)
        return output

    def _keep_parts(self, parts: Mapping[int, Storage], saved: list[Storage]) -> None:
        """Keep parts in the place of what was gathered of them."""
        for place, storage in enumerate(saved):
            if id(storage) in parts:
                saved[place] = hold(parts[id(storage)])
                self._ledger.release(storage)

    def _release_all(self, storages: list[Storage]) -> None:
        for storage in storages:
            self._ledger.release(storage)
        storages.clear()

    def _hold_given(
        self, which: int, made: Mapping[int, Storage], wholes: Mapping[int, Storage]
    ) -> tuple[dict[int, Storage], dict[int, Storage]]:
        """Hold what a segment reads of earlier layers, and what was gathered of it before, if it runs again."""
        if not self._keeping[which]:
            return {}, {}
        layers = self._recomputed[which]
        read = {self._index.get(name, RECEIVED) for i in layers for name in self._layers[i].inputs}
        given = {source: hold(made[source]) for source in read if source < layers.start and source in made}
        return given, {source: hold(wholes[source]) for source in read if source in wholes}

    def _is_reentrant(self, i: int) -> bool:
        """Whether a function of Python's runs a layer's backward, and holds the gradient and the output meanwhile."""
        return self._layers[i].repeats == "reentrant"

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
        if self._is_reentrant(layers[-1]) and layers[-1] in made:
            left.handed[which].append(hold(made[layers[-1]]))
        # Autocast is entered anew, and converts parameters anew.
        self._casts.end_forward()
        made_again = [storage for i, storage in made.items() if i not in given]
        self._release_all(made_again + [storage for i, storage in wholes.items() if i not in gathered])

    def _run(self, i: int, read: Sequence[Storage], saved: list[Storage]) -> Storage:
        """Run one operation on storages; ``saved`` takes what autograd keeps."""
        ledger, layer, shard, kind = self._ledger, self._layers[i], self._shards[i], self._kinds[i]
        copied = self._copy_of_input(i, read)
        read = [copied] if copied is not None else read
        keeps = self._keeps(i)
        read, converted = self._convert_inputs(i, read)
        parameters = self._casts.parameters(i)
        kept = self._watched(i, "kept")
        with_output = 0 if self._differentiated[i] else kept
        beside = ledger.allocate(self._beside(keeps, self._inner_width(i)) + kept - with_output)
        if shares_input(layer, kind):
            # A view of a parameter, a buffer or the targets takes nothing: these are held throughout.
            output = hold(read[0]) if read else ledger.allocate(0)
        elif i in self._in_registers:
            output = ledger.allocate(0)
        else:
            output = ledger.allocate(self._output_bytes(shard.layer) + with_output)
        ledger.mark(self._watched(i, "forward") + self._held_in_rounds(i))
        if self._differentiated[i]:
            saved += [hold(beside), *map(hold, self._kept_inputs(i, keeps, read))]
            saved += [hold(output)] if keeps.output else []
            saved += map(hold, parameters)
        self._release_all([beside, *parameters, *converted])
        if copied is not None:
            ledger.release(copied)
        return self._combine(i, output)

    def backward(self, left: Pass, given: Sequence[Gradient] = ()) -> list[Storage]:
        """Run backward of a pass from gradients of its outputs; returns those of what it read, held by the caller."""
        # What was gathered gets gradients of the whole, and takes its block.
        pending: dict[int, list[Gradient]] = dict(zip(self._outputs, ([gradient] for gradient in given), strict=False))
        of_wholes: dict[int, list[Gradient]] = {}
        due = {layers[0]: which for which, layers in enumerate(self._keeping) if layers}
        done = {layers[-1]: which for which, layers in enumerate(self._keeping) if layers}
        for i in self._order:
            if i in due:
                handed = [hold(gradient.storage) for gradient in pending.get(i, ()) if self._is_reentrant(i)]
                left.handed[due[i]] = handed
                self._compute_again(self._recomputed[due[i]], left, due[i])
            for whole in of_wholes.pop(i, ()):
                self._push(pending, i, self._cut_gradient(i, whole))
            for arrived in self._run_apart(i, pending.pop(i, [])):
                for source, gradient in self._differentiate(i, arrived, left.saved[i]):
                    gathered = self._is_cut(source) and not self._is_cut(i)
                    self._push(of_wholes if gathered else pending, source, gradient)
            if i in done:
                for held in left.given[done[i]]:
                    self._release_all(list(held.values()))
                self._release_all(left.handed.pop(done[i]))
        for output in left.outputs:
            self._ledger.release(output)
        return [gradient.storage for gradient in pending.pop(RECEIVED, [])]

    def _push(self, pending: dict[int, list[Gradient]], source: int, gradient: Gradient) -> None:
        """Hand a gradient to a layer, which adds it to what other readers have sent."""
        ledger, queue = self._ledger, pending.setdefault(source, [])
        alike = (other for other in queue if (other.size, other.output) == (gradient.size, gradient.output))
        first = next(alike, None)
        if first is None:
            queue.append(gradient)
            return
        if first.storage.holders > 1 or first.size != first.storage.size:
            total = ledger.allocate(first.size)
            ledger.mark()
            ledger.release(first.storage)
            first.storage = total
        ledger.release(gradient.storage)

    def _run_apart(self, i: int, arrived: Sequence[Gradient]) -> list[list[Gradient]]:
        """Gradients of a layer's outputs by what runs backward of them: each its own, the last first, or all one."""
        memory = self._layers[i].memory
        if memory is None or not memory.apart or not arrived:
            return [list(arrived)]
        outputs = sorted({gradient.output for gradient in arrived}, reverse=True)
        return [[gradient for gradient in arrived if gradient.output == output] for output in outputs]

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
            if self._hands_to_parameters(i):
                self._release_all([gradient.storage for gradient in upstream])
                upstream = []
            shared = any(gradient.storage.holders > 1 for gradient in upstream)
            inside = self._watched(i, "backward_if_held" if shared else "backward") + self._gathered_again_bytes(i)
            # Gradients of parameters that ranks along an axis sum, in the buffer of their message.
            inside += self._made_with_it(i)
            inside += sum(work.message_bytes for work in of_operation(self._shards[i].sums, "all_reduce"))
            ledger.mark(self._inside_norm(i) + self._held_in_rounds_back(i) + inside, made_of_parameters)
            ledger.gradients += kept
        for gradient in upstream:
            ledger.release(gradient.storage)
        self._release_all(saved)
        if lowered:
            self._gradients_of_lowered(lowered, kept)
        return [handed for source, gradient in made for handed in self._hand_on(i, source, gradient)]

    def _gradients_of_lowered(self, lowered: Sequence[tuple[int, int]], kept: int) -> None:
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
        size = self._casts.in_run_width(i, position, self._read_bytes(i, position))
        output = self._read_outputs[i][position]
        if self._passes_gradient(i) and upstream:
            return Gradient(hold(upstream[0].storage), size, output)
        if i in self._in_registers.get(self._reads[i][position], ()):
            return Gradient(self._ledger.allocate(0), size, output)
        return Gradient(self._ledger.allocate(size), size, output)

    def _passes_gradient(self, i: int) -> bool:
        layer, kind = self._layers[i], self._kinds[i]
        if layer.memory is not None:
            return layer.memory.passes_gradient
        return kind is not None and kind.passes_gradient(layer)

    def _hands_to_parameters(self, i: int) -> bool:
        """Whether a layer is a view of a parameter, whose gradient then is the memory of its own."""
        views = shares_input(self._layers[i], self._kinds[i]) and not self._layers[i].inputs
        return views and bool(self._layers[i].parameters) and self._passes_gradient(i)

    def _parameter_gradients(self, i: int) -> tuple[int, int]:
        """Bytes of the gradients of a layer's parameters, and of those that stay: others are added to earlier ones.

        Gradients of one pass are added up first. Where earlier passes left some, those of a parameter that several
        layers read stay apart from these until the last of the layers has made its own.
        """
        made = {name: self._parameter_bytes.get(name, 0) for name in self._layers[i].parameters}
        if self._framework.gradient_dtype:
            # The buffer is there at all times.
            return 0 if self._framework.placeholders and self._is_linear(i) else sum(made.values()), 0
        kept = 0
        for name, size in made.items():
            readers, earlier = self._readers[name], name in self._finished
            several = readers.first != readers.last
            if i == readers.first and (several or not earlier):
                kept += size
            if i == readers.last:
                kept -= size if several and earlier else 0
                self._finished.add(name)
        return sum(made.values()), kept

    @functools.cached_property
    def _readers(self) -> dict[str, Readers]:
        """Per parameter, the first and the last of the layers that read it to which backward comes."""
        found: dict[str, Readers] = {}
        for i in self._order:
            for name in self._layers[i].parameters:
                found[name] = Readers(found[name].first if name in found else i, i)
        return found
