"""Memory of ZeRO's stages: parts of the optimizer's state, shards, gathered units, and gradients on their way.

Stages 2 and 3 as torch's ``fully_shard`` holds them (torch/distributed/fsdp/_fully_shard, torch 2.13): each rank its
shard of parameters, gradients and state; forward the unit at work, whole, and the buffer that it was received in, which
is freed when the next has been copied out; backward the unit at work, the buffer of the one in front of it (stage 3),
its gradients, and the gradients of the last unit as they were sent. While a unit's gradients are reduced they are there
twice. Stage 2 keeps units whole from forward to backward. The rank with the largest shards is taken. A unit that is
shared out in two parts is gathered and reduced part by part, and keeps the buffers of both until the next is reduced.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from paradl_bench.network.graph import ModelGraph, Tensor
from paradl_bench.network.kinds.autocast import as_sharded
from paradl_bench.plan.compute import gradient_order, layers_with_gradient, operations_of_forward
from paradl_bench.strategies.data.zero.sharing import Part, Shares, parts_of, state_parts
from paradl_bench.strategies.data.zero.units import Unit, as_reduced, units_of
from paradl_bench.strategies.exchange.buckets import total_bytes
from paradl_bench.strategies.memory.ledger import UNMARKED, Gradient, Ledger, Moment, Moments, Storage
from paradl_bench.strategies.memory.liveness import Liveness, Pass
from paradl_bench.strategies.memory.peak import updated_parameters
from paradl_bench.strategies.memory.rank_operations import RankRun


class ZeroState(NamedTuple):
    """What ranks hold under a stage; see :class:`~paradl_bench.strategies.memory.peak.PartedState`."""

    stage: int
    shares: Shares
    replicas: int = 1
    dtype: str = "fp32"
    reduce_dtype: str = "own"

    def held(self, network: ModelGraph) -> ModelGraph | None:
        """Shards, from stage 2 on, as large as the largest."""
        if self.stage < 2:
            return None
        whole = (as_sharded(parameter, self.dtype) for parameter in network.parameters)
        parameters = tuple(
            msgspec.structs.replace(p, shape=(self.shares.elements(p),)) if p.shape else p for p in whole
        )
        return msgspec.structs.replace(network, parameters=parameters)

    def walk(self, moments: Moments, network: ModelGraph, run: RankRun) -> Liveness:
        """Which tells when units are gathered, and gradients reduced."""
        return ShardedLiveness(moments, network, run)

    def count_held(self, ledger: Ledger, network: ModelGraph, device: str, passes: Sequence[Sequence[Moment]]) -> None:
        """Units and gradients at the moments of the walks of micro-batches; they count with the gradients."""
        units = _ShardedUnits(network, self, device)
        in_forward, entering = units.in_forward()
        backward, held = units.in_backward(), 0
        made = [total_bytes(parameters) for parameters in _made_with(network)]
        for place, layer, activations, peak in itertools.chain.from_iterable(passes):
            ledger.activations = activations
            if place == "FW":
                ledger.gradients = held + entering.get(layer, 0)
                ledger.mark()
                ledger.gradients = held + in_forward[layer]
            elif place == "again":
                # Backward has gathered the unit, and holds gradients.
                ledger.gradients = backward.working[layer]
            elif place == "BW":
                ledger.gradients = backward.entering.get(layer, 0)
                ledger.mark()
                # A gradient that is added to that of a later layer is there beside it.
                ledger.gradients = max(0, backward.working[layer] - made[layer])
            elif place == "behind":
                ledger.gradients = backward.reducing[layer]
                ledger.mark()
            elif place == "end":
                # What is left are the reduced gradients, which further micro-batches add theirs to.
                held = ledger.gradients = units.scattered_bytes
                backward = units.in_backward(held=held)
            if peak != UNMARKED:
                ledger.mark(peak[0] - activations, peak[1])

    def updated(self, network: ModelGraph, *, evenly: bool = False) -> tuple[Tensor, ...] | None:
        """Of stage 1, which parts the update alone."""
        if self.stage != 1:
            return None
        if evenly:
            # The parts of a buffer of all of them.
            return tuple(
                msgspec.structs.replace(p, shape=(-(-p.elements // self.shares.of(p)),))
                for p in updated_parameters(network)
            )
        return tuple(parameter for parts in state_parts(network, self.shares) for parameter in parts.own)

    def gather(self, ledger: Ledger, network: ModelGraph) -> None:
        """All units of the rank's stages, from its first forward on."""
        if self.stage > 1:
            parts = (part for unit in units_of(network) for part in parts_of(unit, self.shares))
            ledger.gradients += sum(part.whole_bytes for part in parts)

    def reduce(self, ledger: Ledger, network: ModelGraph) -> None:
        """Unit by unit, the whole model's first: each is freed; its gradients are there twice while they are sent."""
        updated = set(gradient_order(network))
        *units, root = units_of(network)
        in_turn = (root, *units) if self.stage > 1 else ()
        for part in (part for unit in in_turn for part in parts_of(unit, self.shares)):
            parameters = tuple(parameter for parameter in part.parameters if parameter.name in updated)
            ledger.gradients -= part.whole_bytes
            ledger.mark(gradients=(part.ranks + 1) * part.bytes_of(parameters))
            ledger.gradients += _kept_bytes(part, parameters, self.dtype) - total_bytes(parameters)


class ShardedLiveness(Liveness):
    """The walk of a rank under stages 2 and 3, which tells where it is; what it holds but for units and gradients."""

    def __init__(self, moments: Moments, network: ModelGraph, run: RankRun) -> None:
        super().__init__(moments, network, run)
        self._moments = moments
        self._again: int | None = None

    def _compute_again(self, layers: range, left: Pass, which: int) -> None:
        self._again = layers[-1]
        super()._compute_again(layers, left, which)
        self._again = None

    def _run(self, i: int, read: Sequence[Storage], saved: list[Storage]) -> Storage:
        if self._again is None:
            self._moments.come_to("FW", i)
        else:
            self._moments.come_to("again", self._again)
        return super()._run(i, read, saved)

    def _differentiate(self, i: int, arrived: Sequence[Gradient], saved: list[Storage]) -> list[tuple[int, Gradient]]:
        self._moments.come_to("BW", i)
        gradients = super()._differentiate(i, arrived, saved)
        self._moments.come_to("behind", i)
        return gradients


def _kept_bytes(part: Part, parameters: tuple[Tensor, ...], dtype: str) -> int:
    """Bytes of the gradients that a rank keeps of parameters: of its shards, as these are."""
    return part.bytes_of(as_sharded(parameter, dtype) for parameter in parameters)


def _made_with(network: ModelGraph) -> list[list[Tensor]]:
    """Per layer, the parameters whose gradient its backward makes; of one that several layers read, the last does."""
    parameters = {parameter.name: parameter for parameter in network.parameters}
    last = {name: layer for layer in network.layers for name in layer.parameters}
    return [
        [parameters[name] for name in dict.fromkeys(layer.parameters) if name in parameters and last[name] is layer]
        for layer in network.layers
    ]


class _Backward(NamedTuple):
    """Bytes of gathered parameters and gradients.

    Attributes:
        working: per layer, in its backward. reducing: in what it lets be reduced.
        entering: by layer that backward comes to a unit with, while that is copied from the buffer it was received in.
    """

    working: list[int]
    reducing: list[int]
    entering: dict[int, int]


class _Part(NamedTuple):
    """Bytes of a part of a unit.

    Attributes:
        whole: of its gathered parameters, padding included. buffer: that they are received in; none of one rank.
        copied: of those that are copied twice from there.
        last: of the last gradient, which a variable of ``foreach_reduce`` holds until all are sent; rejoined: where it
            was copied before. sending: of the copy that gloo makes of what it reduces.
        made: of gradients, as backward makes them; joined: once more, where they are joined before they are converted.
        sent: of these as they are sent. scattered: of the rank's own. kept: from then on. also: what replicas
            all-reduced, which torch holds to the end of backward beside the gradients made of it.
    """

    whole: int
    buffer: int
    copied: int
    last: int
    rejoined: int
    sending: int
    made: int
    joined: int
    sent: int
    scattered: int
    kept: int
    also: int


def _bytes_of_part(part: Part, updated: set[str], state: ZeroState, device: str) -> _Part:
    parameters = tuple(parameter for parameter in part.parameters if parameter.name in updated)
    scattered = part.bytes_of(as_reduced(parameters, state.reduce_dtype))
    kept = _kept_bytes(part, parameters, state.dtype)
    # On a CPU chunk_cat joins gradients in their own dtype first, where it is to convert them.
    joins = device == "cpu" and state.reduce_dtype != "own"
    sends = part.ranks > 1
    return _Part(
        whole=part.whole_bytes,
        buffer=part.whole_bytes if sends else 0,
        copied=part.cut_inside(part.parameters),
        last=total_bytes(parameters[-1:]) if sends else 0,
        rejoined=part.cut_inside(parameters[-1:]),
        sending=part.ranks * scattered if sends and device == "cpu" else 0,
        made=total_bytes(parameters),
        joined=part.ranks * part.bytes_of(parameters) if joins else 0,
        sent=part.ranks * scattered,
        scattered=scattered,
        kept=kept,
        also=scattered if state.replicas > 1 and scattered != kept else 0,
    )


class _ShardedUnits:
    def __init__(self, network: ModelGraph, state: ZeroState, device: str) -> None:
        # Stage 3 frees units after forward.
        self._network, self._reshard = network, state.stage == 3
        self._units = units_of(network)
        self._unit_of = {layer: unit for unit in self._units[:-1] for layer in unit.layers}
        self._called = sorted((unit for unit in self._units[:-1] if unit.layers), key=lambda unit: unit.layers[0])
        self._ends = [unit.layers[-1] for unit in self._called]
        # Backward leaves a unit with its first layer that has a gradient.
        has_gradient = layers_with_gradient(network)
        self._first = {
            unit.name: next((layer for layer in unit.layers if has_gradient[layer]), unit.layers[0])
            for unit in self._called
        }
        updated = set(gradient_order(network))
        self._parts = {
            unit.name: [_bytes_of_part(part, updated, state, device) for part in parts_of(unit, state.shares)]
            for unit in self._units
        }
        self._wholes = {name: sum(part.whole for part in parts) for name, parts in self._parts.items()}
        # Of the first units that are called, as many as there are before an entry.
        self._sums = [0, *itertools.accumulate(self._wholes[unit.name] for unit in self._called)]

    @property
    def scattered_bytes(self) -> int:
        return sum(part.kept for parts in self._parts.values() for part in parts)

    def _whole(self, unit: Unit) -> int:
        """Bytes of a unit's gathered parameters, padding included."""
        return self._wholes[unit.name]

    def _entry(self, unit: Unit, buffer: int) -> tuple[int, int]:
        """Bytes while forward gathers a unit behind a buffer that is still there, and of the last buffer."""
        # A variable of ``FSDPParamGroup.wait_for_unshard`` holds the one before, until the next is copied out.
        held = peak = 0
        for part in self._parts[unit.name]:
            held += part.whole
            peak = max(peak, held + part.buffer + buffer + part.copied)
            buffer = part.buffer
        return peak, buffer

    def in_forward(self) -> tuple[list[int], dict[int, int]]:
        """Per layer, bytes of gathered parameters and their buffer; and those while its unit is copied out."""
        root = gathered = self._whole(self._units[-1])
        first, buffer = self._entry(self._units[-1], 0)
        entered = set[str]()
        gathered_bytes, entering = [], {0: first}
        for layer in range(len(self._network.layers)):
            unit = self._unit_of.get(layer)
            if unit is not None and unit.name not in entered:
                entered.add(unit.name)
                peak, buffer = self._entry(unit, buffer)
                entering[layer] = max(entering.get(layer, 0), peak + (root if self._reshard else gathered))
                gathered += self._whole(unit)
            kept = root + (self._whole(unit) if unit else 0) if self._reshard else gathered
            gathered_bytes.append(kept + buffer)
        return gathered_bytes, entering

    def in_backward(self, held: int = 0) -> _Backward:
        """What ranks hold beside ``held`` bytes of gradients of earlier micro-batches."""
        layers = len(self._network.layers)
        backward, reduction, entering = [0] * layers, [0] * layers, dict[int, int]()
        root = self._units[-1]
        made = _made_with(self._network)
        of_root = {parameter.name for parameter in root.parameters}
        scattered, sent, unreduced, unreduced_of_root = held, 0, 0, 0
        for layer in reversed(range(layers)):
            unit = self._unit_of.get(layer)
            if unit is not None and layer == unit.layers[-1] and self._reshard:
                copied = self._copied_for_backward(unit)
                entering[layer] = self._whole(root) + copied + scattered + sent + unreduced_of_root
            unreduced_of_root += total_bytes(p for p in made[layer] if p.name in of_root)
            unreduced += total_bytes(p for p in made[layer] if p.name not in of_root)
            gradients = scattered + sent + unreduced + unreduced_of_root
            backward[layer] = self._gathered_in_backward(layer, unit) + gradients
            if unit is not None and layer == self._first[unit.name]:
                others = backward[layer] - self._whole(unit) - (gradients - scattered - unreduced_of_root)
                peak, sent, kept = self._reduce(unit, unreduced, again=bool(held))
                reduction[layer] = others + peak
                scattered += kept
                unreduced = 0
        if layers and root.parameters:
            reduction[0] = max(reduction[0], scattered + self._reduce(root, unreduced_of_root, again=bool(held))[0])
        return _Backward(backward, reduction, entering)

    def _reduce(self, unit: Unit, unreduced: int, *, again: bool) -> tuple[int, int, int]:
        """Bytes while a unit's gradients are reduced, those of the buffers that stay, and of the gradients that do.

        Args:
            unreduced: of gradients. again: whether they are added to those of an earlier micro-batch.
        """
        whole, peak, sent, kept = self._whole(unit), 0, 0, 0
        for part in reversed(self._parts[unit.name]):
            whole -= part.whole
            filling = unreduced + part.joined + part.rejoined
            unreduced -= part.made
            sending = unreduced + part.last + part.sending
            peak = max(peak, whole + sent + kept + part.sent + part.scattered + max(filling, sending))
            sent += part.sent
            kept += part.also + (0 if again else part.kept)
        return peak, sent, kept

    def _copied_for_backward(self, unit: Unit) -> int:
        """Bytes of a unit's parameters and their buffers, at most, while backward copies one out into the other."""
        early = self._early(self._behind(unit), unit)
        peak, held = 0, sum(part.buffer for part in early)
        for part in self._parts[unit.name]:
            held += part.whole + (0 if part in early else part.buffer)
            peak = max(peak, held + part.copied)
            held -= part.buffer
        return peak

    def _early(self, unit: Unit, in_front: Unit) -> list[_Part]:
        """Parts that are gathered when backward comes to the unit behind theirs; a unit in one part gathers one."""
        parts = self._parts[in_front.name]
        return parts if len(self._parts[unit.name]) > 1 else parts[-1:]

    def _behind(self, unit: Unit) -> Unit:
        """The unit that forward calls next; of the last the whole model."""
        return [*self._called, self._units[-1]][self._called.index(unit) + 1]

    def _gathered_in_backward(self, layer: int, unit: Unit | None) -> int:
        root = self._whole(self._units[-1])
        if not self._reshard:
            return root + self._sums[bisect.bisect_right(self._called, layer, key=lambda called: called.layers[0])]
        if layer >= operations_of_forward(self._network):
            # Backward has not come to the model.
            return root
        # A unit is one piece, so that their ends stand in the order of their starts.
        in_front = bisect.bisect_left(self._ends, unit.layers[0] if unit else layer)
        if not in_front:
            return root + (self._whole(unit) if unit else 0)
        before = self._called[in_front - 1]
        early = sum(part.buffer for part in self._early(unit or self._behind(before), before))
        return root + (self._whole(unit) if unit else 0) + early
