"""Plan of data parallelism with ZeRO stages, as torch runs them.

Stage 1 is DistributedDataParallel (:mod:`~paradl_bench.strategies.exchange.gradients`) with torch's
ZeroRedundancyOptimizer: each rank updates the parameters that are its own and then broadcasts them, all in one message.

Stages 2 and 3 are torch's ``fully_shard`` (FSDP2) on the units of :mod:`~paradl_bench.strategies.data.zero.units`. Each
rank holds rows of every parameter, padded to equal numbers. A unit's parameters are gathered before its forward, and
copied out of what was received; its gradients are copied in, and reduced and scattered, when backward has left the
unit, or at the end of backward where its input needs no gradient. Stage 3 frees a unit after forward and gathers it
again for backward, each unit while the one behind it computes; stage 2, and the whole model's own parameters in both,
are kept.

Where collectives have streams of their own (``PlanSettings.blocking`` is false) a gather of forward waits for the
copy-out of the unit before the last, one of backward for the last copy-out, and the next copy-in of gradients for the
last reduce-scatter: two gathered buffers are there at most, and one of gradients. Gathers and reduce-scatters share a
communicator, which runs them in the order of their calls. Else the process waits for each where it calls it, as FSDP2
does on a CPU.

One role stands for all ranks that run the same layers: that with the largest shard, which the others wait for.
Shards are of what another axis has left of a layer. Where replicas hold the same shards, each is all-reduced among them
once it has been scattered, and the next copy-in waits for the scatter alone.

In stages of a pipeline both are one: a rank gathers the units of its stages in its first forward, keeps them, and
reduces the gradients of all micro-batches when its last backward is over.

Micro-batches whose gradients are accumulated each gather and reduce as if they were alone, which is torch's default;
the sum of shards is not priced.

Not modelled: mixed precision, offloading, accumulation without reduction, explicit prefetching, and that all-reduces
among replicas have a stream and a communicator of their own.

Source: torch/distributed/fsdp/_fully_shard (_fsdp_param_group.py, _fsdp_collectives.py), torch/distributed/optim/
zero_redundancy_optimizer.py (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from paradl_bench.network.graph import Layer, ModelGraph
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.axis_planner import ShardedLayers
from paradl_bench.plan.compute import (
    LayerShard,
    NetworkCompute,
    add_weight_update,
    gradient_order,
    layers_with_gradient,
    operations_of_forward,
)
from paradl_bench.plan.mesh import group_axes, ranks_along, sharing_axes, zero_stage
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.plan.tasks import Before, BucketCopy, Collective, Phase, RoleBuilder, Stream, WeightUpdate
from paradl_bench.strategies.data.zero.units import (
    Unit,
    as_reduced,
    optimizer_parts,
    shard_bytes,
    shard_elements,
    units_of,
)
from paradl_bench.strategies.exchange.buckets import total_bytes
from paradl_bench.strategies.exchange.options import ExchangeOptions
from paradl_bench.strategies.passes.clipping import add_clipping, sums_before
from paradl_bench.strategies.passes.lower_precision import settings_of_update
from paradl_bench.strategies.passes.recomputation import segments_of

_EMPTY_BUCKET_BYTES = 4
"""What torch broadcasts for a rank that has no parameter to update: one number."""


def add_optimizer_broadcasts(
    builder: RoleBuilder, network: ModelGraph, strategy: Strategy, settings: PlanSettings, after: tuple[int, ...]
) -> Before:
    """Stage 1's weight update and the broadcasts of what it changed; returns those of the first two iterations."""
    axes = sharing_axes(strategy)
    ranks = ranks_along(strategy, axes)
    parts = optimizer_parts(network, ranks)
    updated = set(gradient_order(network))
    updated_parts = [[parameter for parameter in part if parameter.name in updated] for part in parts]
    largest = max(updated_parts, key=lambda part: sum(parameter.elements for parameter in part))
    elements = sum(parameter.elements for parameter in largest)
    work = WeightUpdate(optimizer=settings.optimizer, elements=elements, tensors=len(largest))
    update = add_weight_update(builder, work, settings, after)
    sent = []
    for part in parts:
        size = total_bytes(part) or _EMPTY_BUCKET_BYTES
        sent.append(Collective(operation="broadcast", message_bytes=size, ranks=ranks, axes=axes))
        builder.add(sent[-1], Phase.WU, Stream.COMMUNICATION, (update,))
    return _in_first_iterations(sent)


def add_sharded_role(
    builder: RoleBuilder,
    sharded: ShardedLayers,
    strategy: Strategy,
    settings: PlanSettings,
    operations: dict[int, str],
) -> Before:
    """An iteration of a rank under stages 2 and 3; returns what it reduces in the first two."""
    network = sharded.network
    shards = _led_by_unit(network, network.layers, sharded.shards)
    again = [segment.layers for segment in segments_of(network, settings)]
    compute = NetworkCompute(builder, network, shards, operations=operations, recomputed=again)
    done: tuple[int, ...] = ()
    reduced: list[Collective] = []
    groups = _Groups.of(strategy)
    for _ in range(settings.accumulate):
        units = _ShardedUnits(
            builder, network, settings, groups, compute.backward_layers, reshard=zero_stage(strategy) == 3
        )
        compute.add_forward(done, before_layer=units.before_forward)
        units.end_forward()
        left: list[int] = []

        def before_backward(layer: int, units: _ShardedUnits = units, left: list[int] = left) -> tuple[int, ...]:
            # Backward has left a unit when what is communicated for the gradient of its input is over.
            while left:
                units.after_backward(left.pop(), compute.backward_task)
            return units.before_backward(layer)

        for layer, task in compute.add_backward(before_layer=before_backward):
            if layer in shards and shards[layer].after_bw:
                left.append(layer)
            else:
                units.after_backward(layer, task)
        if left:
            units.after_backward(left.pop(), compute.backward_task)
        done = units.end_backward((len(builder.phase) - 1,))
        reduced += units.reductions
    _add_update(builder, network, strategy, settings, done)
    return _in_first_iterations(reduced) + sums_before(network, strategy, settings)


def _add_update(
    builder: RoleBuilder, network: ModelGraph, strategy: Strategy, settings: PlanSettings, done: tuple[int, ...]
) -> None:
    """Limit the gradients of a rank's shards and update them."""
    updated, ranks = set(gradient_order(network)), ranks_along(strategy, sharing_axes(strategy))
    parameters = [parameter for parameter in network.parameters if parameter.name in updated]
    elements = sum(shard_elements(parameter, ranks) for parameter in parameters)
    work = WeightUpdate(optimizer=settings.optimizer, elements=elements, tensors=len(parameters))
    done = add_clipping(builder, network, strategy, settings, done, work)
    add_weight_update(builder, work, settings_of_update(strategy, settings), done)


class ShardedStages:
    """Stages 2 and 3 in a pipeline: see :class:`~paradl_bench.plan.axis_planner.StageParts`.

    Args:
        network: the stages of a rank, one behind the other.
    """

    def __init__(self, network: ModelGraph, strategy: Strategy, settings: PlanSettings) -> None:
        self._network, self._strategy, self._settings = network, strategy, settings

    def led(self, layers: Sequence[Layer], shards: Mapping[int, LayerShard]) -> dict[int, LayerShard]:
        """What layers of a stage communicate, each unit of them for itself."""
        return _led_by_unit(self._network, layers, shards)

    def gathering(self, builder: RoleBuilder, after: tuple[int, ...] = ()) -> _ShardedUnits:
        """Those of the first forward."""
        groups = _Groups.of(self._strategy)
        return _ShardedUnits(builder, self._network, self._settings, groups, (), after, reshard=False)

    def add_update(self, builder: RoleBuilder) -> Before:
        """One reduce-scatter a unit, the whole model's first, since torch goes through its modules in their order."""
        units = self.gathering(builder)
        done = units.end_backward()
        _add_update(builder, self._network, self._strategy, self._settings, done)
        return _in_first_iterations(units.reductions) + sums_before(self._network, self._strategy, self._settings)


def _led_by_unit(
    network: ModelGraph, layers: Sequence[Layer], shards: Mapping[int, LayerShard]
) -> dict[int, LayerShard]:
    """Layers whose leader is in another unit communicate by themselves, the first of each run of them for all.

    A unit is given tensors of its own, so that what layers of several units read is another tensor in each.

    Args:
        network: whose units they are. layers: that ``shards`` are of, by index; some of the network's.
    """
    unit_of = {network.layers[index].name: unit.name for unit in units_of(network) for index in unit.layers}
    led, last = dict(shards), dict[int, str]()
    for index, shard in sorted(shards.items()):
        leader = index if shard.leader is None else shard.leader
        unit = unit_of[layers[index].name]
        if unit != last.setdefault(leader, unit):
            last[leader] = unit
            leading = shards[leader]
            led[index] = shard._replace(before_fw=leading.before_fw, after_bw=leading.after_bw)
    return led


def _in_first_iterations(issued: Sequence[Collective]) -> Before:
    """What the first two iterations issue as every later one does."""
    return tuple((when, work) for when in ("first", "rebuild") for work in issued)


class _Groups(NamedTuple):
    """Axes along which parameters are shared out, and along which their shards are held several times; with ranks."""

    axes: tuple[int, ...]
    ranks: int
    outer_axes: tuple[int, ...]
    replicas: int

    @classmethod
    def of(cls, strategy: Strategy) -> _Groups:
        axes = sharing_axes(strategy)
        outer = tuple(index for index in group_axes(strategy, Trait.REPLICATES) if index not in axes)
        return cls(axes, ranks_along(strategy, axes), outer, ranks_along(strategy, outer))


class _ShardedUnits:
    """Adds what the units communicate to a role, as ``fully_shard``'s hooks do round modules.

    Args:
        after: what the first task waits for.

    Attributes:
        reductions: of gradients, in order: reduce-scatters, and all-reduces among replicas.
    """

    def __init__(
        self,
        builder: RoleBuilder,
        network: ModelGraph,
        settings: PlanSettings,
        groups: _Groups,
        backward_layers: Sequence[int],
        after: tuple[int, ...] = (),
        *,
        reshard: bool,
    ) -> None:
        self._builder, self._groups, self._ranks, self._reshard = builder, groups, groups.ranks, reshard
        self._blocking, self._reduce_dtype = settings.blocking, settings.of(ExchangeOptions).reduce_dtype
        self._units = units_of(network)
        self._root = self._units[-1]
        self._unit_of = {layer: unit for unit in self._units[:-1] for layer in unit.layers}
        self._model_layers = operations_of_forward(network)
        self._updated = set(gradient_order(network))
        late = _units_that_reduce_late(network, self._units)
        self._reduced_with = {
            min(in_backward): unit
            for unit in self._units[:-1]
            if unit.name not in late and (in_backward := set(unit.layers) & set(backward_layers))
        }
        # The order in which forward leaves units; the whole model is left last, where it has parameters.
        called = sorted((unit for unit in self._units[:-1] if unit.layers), key=lambda unit: unit.layers[0])
        self._order = [*called, *([self._root] if self._root.parameters else [])]
        self._entered: set[str] = set()
        self._gathers: dict[str, int] = {}
        self._whole: set[str] = set()
        self._copied_out: list[int] = []
        self._reduced: dict[str, int] = {}
        self._scattered: tuple[int, ...] = ()
        self._waited_for = list(after)
        self.reductions: list[Collective] = []

    def before_forward(self, layer: int) -> tuple[int, ...]:
        """Gather what a layer's unit needs; returns what the layer waits for."""
        for unit in (self._root, self._unit_of.get(layer)):
            if unit is not None and unit.name not in self._entered:
                self._entered.add(unit.name)
                # The streams of a gather of forward wait for the copy-out of the unit before the last.
                self._gather(unit, Phase.FW, tuple(self._copied_out[-2:-1]))
                self._copy_out(unit, Phase.FW)
        return self._take_waited_for()

    def gather_rest(self) -> None:
        """Gather the units that no layer has asked for, in the order in which forward comes to them."""
        for unit in self._order:
            self._gather(unit, Phase.FW, tuple(self._copied_out[-2:-1]))
            self._copy_out(unit, Phase.FW)

    def end_forward(self) -> None:
        """Free what stage 3 frees: all but the whole model's own parameters."""
        self._entered.clear()
        if self._reshard:
            self._whole &= {self._root.name}

    def before_backward(self, layer: int) -> tuple[int, ...]:
        """Gather what backward of a layer's unit needs, and the unit in front of it; returns what the layer awaits."""
        for unit in (self._root, self._unit_of.get(layer)) if layer < self._model_layers else ():
            if unit is None or unit.name in self._entered or not unit.parameters:
                continue
            self._entered.add(unit.name)
            # The streams of gathers wait for the last copy-out from the end of forward on.
            self._gather(unit, Phase.BW, tuple(self._copied_out[-1:]))
            self._copy_out(unit, Phase.BW)
            position = self._order.index(unit)
            if position:
                self._gather(self._order[position - 1], Phase.BW, tuple(self._copied_out[-1:]))
        return self._take_waited_for()

    def after_backward(self, layer: int, task: int) -> None:
        """Reduce a unit's gradients once backward has left it."""
        if layer in self._reduced_with:
            self._reduce(self._reduced_with[layer], (task,))

    def end_backward(self, last: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Reduce what is left behind the last task of backward; returns what the weight update waits for."""
        for unit in (self._root, *self._units[:-1]):
            if unit.name not in self._reduced:
                self._reduce(unit, last)
        return (*list(self._reduced.values())[-1:], *self._take_waited_for())

    def _take_waited_for(self) -> tuple[int, ...]:
        """What the next task of the compute stream waits for."""
        waited_for = tuple(self._waited_for)
        self._waited_for.clear()
        return waited_for

    def _call(self, work: Collective, phase: Phase, after: tuple[int, ...]) -> int:
        """A collective; where calls block, all that the process computes next waits for it."""
        task = self._builder.add(work, phase, Stream.COMMUNICATION, after)
        if self._blocking:
            self._waited_for.append(task)
        return task

    def _gather(self, unit: Unit, phase: Phase, after: tuple[int, ...]) -> None:
        if not unit.parameters or unit.name in self._gathers or unit.name in self._whole:
            return
        size = shard_bytes(unit.parameters, self._ranks)
        copy = BucketCopy(direction="into", bytes=size, tensors=len(unit.parameters))
        stream = Stream.COMPUTE if self._blocking else Stream.COPY
        copied = self._builder.add(copy, phase, stream, (*after, *self._take_waited_for()))
        work = Collective(operation="all_gather", message_bytes=size, ranks=self._ranks, axes=self._groups.axes)
        self._gathers[unit.name] = self._call(work, phase, (copied,))

    def _copy_out(self, unit: Unit, phase: Phase) -> None:
        if unit.name not in self._gathers:
            return
        size = self._ranks * shard_bytes(unit.parameters, self._ranks)
        work = BucketCopy(direction="out", bytes=size, tensors=len(unit.parameters))
        waits = (self._gathers.pop(unit.name), *self._take_waited_for())
        self._copied_out.append(self._builder.add(work, phase, Stream.COMPUTE, waits))
        self._waited_for.append(self._copied_out[-1])
        self._whole.add(unit.name)

    def _reduce(self, unit: Unit, after: tuple[int, ...]) -> None:
        parameters = tuple(parameter for parameter in unit.parameters if parameter.name in self._updated)
        if not parameters:
            return
        size = shard_bytes(as_reduced(parameters, self._reduce_dtype), self._ranks)
        copy = BucketCopy(direction="into", bytes=self._ranks * size, tensors=len(parameters))
        # torch keeps one buffer of gradients at a time: the next is filled when the last has been sent.
        waits = (*after, *self._scattered, *self._take_waited_for())
        copied = self._builder.add(copy, Phase.GE, Stream.COMPUTE, waits)
        done = self._send("reduce_scatter", size, self._ranks, self._groups.axes, copied)
        self._scattered = (done,)
        if self._groups.replicas > 1:
            done = self._send("all_reduce", size, self._groups.replicas, self._groups.outer_axes, done)
        self._reduced[unit.name] = done

    def _send(self, operation: str, size: int, ranks: int, axes: tuple[int, ...], after: int) -> int:
        self.reductions.append(Collective(operation=operation, message_bytes=size, ranks=ranks, axes=axes))
        return self._call(self.reductions[-1], Phase.GE, (after,))


def _units_that_reduce_late(network: ModelGraph, units: tuple[Unit, ...]) -> set[str]:
    """Units whose backward nothing leaves: no operation before them that they read has a gradient."""
    has_gradient = layers_with_gradient(network)
    index = {layer.name: i for i, layer in enumerate(network.layers)}
    late = {""}
    for unit in units[:-1]:
        read = {index[name] for i in unit.layers for name in network.layers[i].inputs if name in index}
        if not any(has_gradient[i] for i in read - set(unit.layers)):
            late.add(unit.name)
    return late
