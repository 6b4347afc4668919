"""Memory of ZeRO's stages: parts of the optimizer's state, shards, gathered units, and gradients on their way.

Stages 2 and 3 as torch's ``fully_shard`` holds them (torch/distributed/fsdp/_fully_shard, torch 2.13): each rank its
shard of parameters, gradients and state; forward the unit at work, whole, and the buffer that it was received in, which
is freed when the next has been copied out; backward the unit at work, the buffer of the one in front of it (stage 3),
its gradients, and the gradients of the last unit as they were sent. While a unit's gradients are reduced they are there
twice. Stage 2 keeps units whole from forward to backward. The rank with the largest shards is taken.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from paradl_bench.network.graph import ModelGraph, Tensor
from paradl_bench.network.kinds.autocast import as_sharded
from paradl_bench.plan.compute import gradient_order, operations_of_forward
from paradl_bench.strategies.data.zero.units import (
    Unit,
    as_reduced,
    optimizer_parts,
    shard_bytes,
    shard_elements,
    units_of,
)
from paradl_bench.strategies.exchange.buckets import total_bytes
from paradl_bench.strategies.memory.ledger import Gradient, Ledger, Storage
from paradl_bench.strategies.memory.liveness import Liveness, Pass
from paradl_bench.strategies.memory.peak import updated_parameters
from paradl_bench.strategies.memory.rank_operations import RankRun


class ZeroState(NamedTuple):
    """What ranks hold under a stage; see :class:`~paradl_bench.strategies.memory.peak.PartedState`."""

    stage: int
    ranks: int
    replicas: int = 1
    dtype: str = "fp32"
    reduce_dtype: str = "own"

    def held(self, network: ModelGraph) -> ModelGraph | None:
        """Shards, from stage 2 on, as large as the largest."""
        if self.stage < 2:
            return None
        whole = (as_sharded(parameter, self.dtype) for parameter in network.parameters)
        parameters = tuple(
            msgspec.structs.replace(p, shape=(shard_elements(p, self.ranks),)) if p.shape else p for p in whole
        )
        return msgspec.structs.replace(network, parameters=parameters)

    def walk(self, ledger: Ledger, network: ModelGraph, run: RankRun) -> Liveness:
        """With units that are gathered and gradients that are reduced."""
        return ShardedLiveness(ledger, network, run, self)

    def updated(self, network: ModelGraph, *, evenly: bool = False) -> tuple[Tensor, ...] | None:
        """Of stage 1, which parts the update alone."""
        if self.stage != 1:
            return None
        updated = set(updated_parameters(network))
        if evenly:
            # The parts of a buffer of all of them.
            return tuple(
                msgspec.structs.replace(p, shape=(-(-p.elements // self.ranks),))
                for p in network.parameters
                if p in updated
            )
        parts = (tuple(p for p in part if p in updated) for part in optimizer_parts(network, self.ranks))
        return max(parts, key=total_bytes)

    def gather(self, ledger: Ledger, network: ModelGraph) -> None:
        """All units of the rank's stages, from its first forward on."""
        if self.stage > 1:
            ledger.gradients += sum(self.ranks * shard_bytes(unit.parameters, self.ranks) for unit in units_of(network))

    def reduce(self, ledger: Ledger, network: ModelGraph) -> None:
        """Unit by unit, the whole model's first: each is freed; its gradients are there twice while they are sent."""
        updated = set(gradient_order(network))
        *units, root = units_of(network)
        for unit in (root, *units) if self.stage > 1 else ():
            parameters = tuple(parameter for parameter in unit.parameters if parameter.name in updated)
            part = shard_bytes(parameters, self.ranks)
            ledger.gradients -= self.ranks * shard_bytes(unit.parameters, self.ranks)
            ledger.mark(gradients=(self.ranks + 1) * part)
            ledger.gradients += _kept_bytes(parameters, self.ranks, self.dtype) - total_bytes(parameters)


class ShardedLiveness(Liveness):
    """The walk of a rank under stages 2 and 3; what it gathers and reduces counts with the gradients.

    Args:
        state: how parameters are held.
    """

    def __init__(self, ledger: Ledger, network: ModelGraph, run: RankRun, state: ZeroState) -> None:
        super().__init__(ledger, network, run)
        self._units = _ShardedUnits(network, state, run.device)
        self._in_forward, self._entering = self._units.in_forward()
        self._backward = self._units.in_backward()
        self._held = 0
        self._again: int | None = None

    def _compute_again(self, layers: range, left: Pass, which: int) -> None:
        # Backward has gathered the unit, and holds gradients.
        self._again = self._backward.working[layers[-1]]
        super()._compute_again(layers, left, which)
        self._again = None

    def _run(self, i: int, read: Sequence[Storage], saved: list[Storage]) -> Storage:
        if self._again is None:
            self._ledger.mark(gradients=self._held + self._entering.get(i, 0) - self._ledger.gradients)
        self._ledger.gradients = self._held + self._in_forward[i] if self._again is None else self._again
        return super()._run(i, read, saved)

    def _differentiate(self, i: int, arrived: Sequence[Gradient], saved: list[Storage]) -> list[tuple[int, Gradient]]:
        made = sum(self._parameter_bytes.get(name, 0) for name in self._layers[i].parameters)
        self._ledger.gradients = self._backward.entering.get(i, 0)
        self._ledger.mark()
        self._ledger.gradients = max(0, self._backward.working[i] - made)
        gradients = super()._differentiate(i, arrived, saved)
        self._ledger.gradients = self._backward.reducing[i]
        self._ledger.mark()
        return gradients

    def backward(self, left: Pass, given: Sequence[Gradient] = ()) -> list[Storage]:
        """As without shards; what is left are the reduced gradients, which further micro-batches add theirs to."""
        storages = super().backward(left, given)
        self._held = self._ledger.gradients = self._units.scattered_bytes
        self._backward = self._units.in_backward(held=self._held)
        return storages


def _kept_bytes(parameters: tuple[Tensor, ...], ranks: int, dtype: str) -> int:
    """Bytes of the gradients that a rank keeps of parameters: of its shards, as these are."""
    return shard_bytes(tuple(as_sharded(parameter, dtype) for parameter in parameters), ranks)


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


class _ShardedUnits:
    def __init__(self, network: ModelGraph, state: ZeroState, device: str) -> None:
        # Stage 3 frees units after forward.
        self._network, self._ranks, self._reshard = network, state.ranks, state.stage == 3
        ranks = self._ranks
        self._units = units_of(network)
        self._unit_of = {layer: unit for unit in self._units[:-1] for layer in unit.layers}
        self._called = sorted((unit for unit in self._units[:-1] if unit.layers), key=lambda unit: unit.layers[0])
        self._ends = [unit.layers[-1] for unit in self._called]
        self._wholes = {unit.name: ranks * shard_bytes(unit.parameters, ranks) for unit in self._units}
        # Of the first units that are called, as many as there are before an entry.
        self._sums = [0, *itertools.accumulate(self._wholes[unit.name] for unit in self._called)]
        updated = set(gradient_order(network))
        self._updated = {
            unit.name: tuple(parameter for parameter in unit.parameters if parameter.name in updated)
            for unit in self._units
        }
        updated_by_unit = self._updated.items()
        self._kept = {name: _kept_bytes(parameters, ranks, state.dtype) for name, parameters in updated_by_unit}
        self._parts = {
            name: shard_bytes(as_reduced(parameters, state.reduce_dtype), ranks) for name, parameters in updated_by_unit
        }
        # On a CPU chunk_cat joins gradients in their own dtype first, where it is to convert them.
        joins = device == "cpu" and state.reduce_dtype != "own"
        self._joined = {name: ranks * shard_bytes(parameters, ranks) * joins for name, parameters in updated_by_unit}
        # What replicas all-reduced, which torch holds to the end of backward beside the gradients made of it.
        self._all_reduced = {
            name: part * (state.replicas > 1 and part != self._kept[name]) for name, part in self._parts.items()
        }

    @property
    def scattered_bytes(self) -> int:
        return sum(self._kept.values())

    def _whole(self, unit: Unit) -> int:
        """Bytes of a unit's gathered parameters, padding included: also those of the buffer that receives them."""
        return self._wholes[unit.name]

    def in_forward(self) -> tuple[list[int], dict[int, int]]:
        """Per layer, bytes of gathered parameters and their buffer; and those while its unit is copied out."""
        # Then the last unit's buffer is still there: a variable of ``FSDPParamGroup.wait_for_unshard`` holds it.
        root = self._whole(self._units[-1])
        gathered, buffer, entered = root, root, set[str]()
        gathered_bytes, entering = [], {}
        for layer in range(len(self._network.layers)):
            unit, before = self._unit_of.get(layer), 0
            if unit is not None and unit.name not in entered:
                entered.add(unit.name)
                before, buffer = buffer, self._whole(unit)
                gathered += buffer
            kept = root + (self._whole(unit) if unit else 0) if self._reshard else gathered
            gathered_bytes.append(kept + buffer)
            if before:
                entering[layer] = gathered_bytes[-1] + before
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
                entering[layer] = self._whole(root) + 2 * self._whole(unit) + scattered + sent + unreduced_of_root
            unreduced_of_root += total_bytes(p for p in made[layer] if p.name in of_root)
            unreduced += total_bytes(p for p in made[layer] if p.name not in of_root)
            gradients = scattered + sent + unreduced + unreduced_of_root
            backward[layer] = self._gathered_in_backward(layer, unit) + gradients
            if unit is not None and layer == unit.layers[0]:
                sent = self._ranks * self._parts[unit.name]
                reduction[layer] = backward[layer] - self._whole(unit) - (gradients - scattered - unreduced_of_root)
                reduction[layer] += unreduced + self._joined[unit.name] + sent + sent // self._ranks
                scattered += self._all_reduced[unit.name] + (0 if held else self._kept[unit.name])
                unreduced = 0
        if layers and root.parameters:
            whole = self._ranks * self._parts[""]
            reduction[0] = max(
                int(reduction[0]), scattered + unreduced_of_root + self._joined[""] + whole + whole // self._ranks
            )
        return _Backward(backward, reduction, entering)

    def _gathered_in_backward(self, layer: int, unit: Unit | None) -> int:
        root = self._whole(self._units[-1])
        if not self._reshard:
            return root + self._sums[bisect.bisect_right(self._called, layer, key=lambda called: called.layers[0])]
        if layer >= operations_of_forward(self._network):
            # Backward has not come to the model.
            return root
        # A unit is one piece, so that their ends stand in the order of their starts.
        in_front = bisect.bisect_left(self._ends, unit.layers[0] if unit else layer)
        return root + (self._whole(unit) if unit else 0) + (self._whole(self._called[in_front - 1]) if in_front else 0)
