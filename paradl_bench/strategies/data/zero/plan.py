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

Experts are shared out by the ranks that hold the same ones, and all else by all ranks. A unit with both has two groups
of parameters, as torchtitan has by a mesh for each parameter (``ShardPlacementResult``). Forward gathers one behind the
other, and backward reduces them in the other order. A unit of two groups has both of the unit in front of it gathered
early, and a unit of one group only the last. Experts that one rank holds alone are copied, and nothing is sent. Under
stage 1 they have an optimizer of their own, as in Megatron-LM.

In stages of a pipeline both are one: a rank gathers the units of its stages in its first forward, keeps them, and
reduces the gradients of all micro-batches when its last backward is over, of a unit's groups the first one first.

Micro-batches whose gradients are accumulated each gather and reduce as if they were alone, which is torch's default;
the sum of shards is not priced.

Not modelled: mixed precision, offloading, accumulation without reduction, explicit prefetching, and that all-reduces
among replicas have a stream and a communicator of their own.

Source: torch/distributed/fsdp/_fully_shard (_fsdp_param_group.py, _fsdp_collectives.py), torch/distributed/optim/
zero_redundancy_optimizer.py (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paradl_bench.network.graph import Layer, ModelGraph, Tensor
from paradl_bench.plan.axis_planner import ShardedLayers
from paradl_bench.plan.compute import LayerShard, NetworkCompute, gradient_order, operations_of_forward
from paradl_bench.plan.mesh import zero_stage
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.plan.tasks import Before, BucketCopy, Collective, Phase, RoleBuilder, Stream, WeightUpdate
from paradl_bench.strategies.data.zero.sharing import Part, Shares, Sharing, parts_of, state_parts
from paradl_bench.strategies.data.zero.units import Unit, as_reduced, units_of, units_that_reduce_late
from paradl_bench.strategies.exchange.buckets import total_bytes
from paradl_bench.strategies.exchange.options import ExchangeOptions
from paradl_bench.strategies.passes.accumulation import MICRO_BATCHES_APART
from paradl_bench.strategies.passes.clipping import add_clipping, sums_before
from paradl_bench.strategies.passes.lower_precision import settings_of_update
from paradl_bench.strategies.passes.recomputation import segments_of
from paradl_bench.strategies.passes.weight_update import add_weight_update

_EMPTY_BUCKET_BYTES = 4
"""What torch broadcasts for a rank that has no parameter to update: one number."""


def add_optimizer_broadcasts(
    builder: RoleBuilder,
    network: ModelGraph,
    strategy: Strategy,
    settings: PlanSettings,
    after: tuple[int, ...],
    apart: frozenset[str],
) -> Before:
    """Stage 1's weight update and the broadcasts of what it changed; returns those of the first two iterations.

    Args:
        apart: parameters that are held apart, whose optimizer steps behind that of the others.
    """
    sharing, sent = Sharing(strategy, apart), []
    for parts in state_parts(network, sharing.shares):
        elements = sum(parameter.elements for parameter in parts.own)
        work = WeightUpdate(optimizer=settings.optimizer, elements=elements, tensors=len(parts.own))
        update = add_weight_update(builder, work, settings, after)
        after, groups = (update,), sharing.groups[parts.apart]
        for part in parts.by_rank if groups.ranks > 1 else ():
            size = total_bytes(part) or _EMPTY_BUCKET_BYTES
            sent.append(Collective(operation="broadcast", message_bytes=size, ranks=groups.ranks, axes=groups.axes))
            after += (builder.add(sent[-1], Phase.WU, Stream.COMMUNICATION, (update,)),)
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
    sharing, reshard = Sharing(strategy, sharded.apart), zero_stage(strategy) == 3
    for _ in range(min(settings.accumulate, MICRO_BATCHES_APART)):
        start = builder.tasks
        units = _ShardedUnits(builder, network, settings, sharing, compute.backward_layers, reshard=reshard)
        done = _add_micro_batch(builder, compute, units, shards, done)
        reduced += units.reductions
    repeated = max(settings.accumulate - MICRO_BATCHES_APART, 0)
    behind = builder.repeat(start, repeated)
    reduced += units.reductions * repeated
    _add_update(builder, network, strategy, settings, sharing.shares, tuple(task + behind for task in done))
    return _in_first_iterations(reduced) + sums_before(network, strategy, settings)


def _add_micro_batch(
    builder: RoleBuilder,
    compute: NetworkCompute,
    units: _ShardedUnits,
    shards: Mapping[int, LayerShard],
    after: tuple[int, ...],
) -> tuple[int, ...]:
    """Forward and backward of a micro-batch; returns what comes after it waits for."""
    compute.add_forward(after, before_layer=units.before_forward)
    units.end_forward()
    left: list[int] = []

    def before_backward(layer: int) -> tuple[int, ...]:
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
    return units.end_backward((builder.tasks - 1,))


def _add_update(
    builder: RoleBuilder,
    network: ModelGraph,
    strategy: Strategy,
    settings: PlanSettings,
    shares: Shares,
    done: tuple[int, ...],
) -> None:
    """Limit the gradients of a rank's shards and update them."""
    updated = set(gradient_order(network))
    parameters = [parameter for parameter in network.parameters if parameter.name in updated]
    elements = sum(map(shares.elements, parameters))
    work = WeightUpdate(optimizer=settings.optimizer, elements=elements, tensors=len(parameters))
    done = add_clipping(builder, network, strategy, settings, done, work)
    add_weight_update(builder, work, settings_of_update(strategy, settings), done)


class ShardedStages:
    """Stages 2 and 3 in a pipeline: see :class:`~paradl_bench.plan.axis_planner.StageParts`.

    Args:
        network: the stages of a rank, one behind the other. apart: as of
            :class:`~paradl_bench.plan.axis_planner.ShardedLayers`.
    """

    def __init__(self, network: ModelGraph, strategy: Strategy, settings: PlanSettings, apart: frozenset[str]) -> None:
        self._network, self._strategy, self._settings = network, strategy, settings
        self._sharing = Sharing(strategy, apart)

    def led(self, layers: Sequence[Layer], shards: Mapping[int, LayerShard]) -> dict[int, LayerShard]:
        """What layers of a stage communicate, each unit of them for itself."""
        return _led_by_unit(self._network, layers, shards)

    def gathering(self, builder: RoleBuilder, after: tuple[int, ...] = ()) -> _ShardedUnits:
        """Those of the first forward."""
        return _ShardedUnits(builder, self._network, self._settings, self._sharing, (), after, reshard=False)

    def add_update(self, builder: RoleBuilder) -> Before:
        """One reduce-scatter a unit, the whole model's first, since torch goes through its modules in their order."""
        units = self.gathering(builder)
        done = units.reduce_stages()
        _add_update(builder, self._network, self._strategy, self._settings, self._sharing.shares, done)
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
        sharing: Sharing,
        backward_layers: Sequence[int],
        after: tuple[int, ...] = (),
        *,
        reshard: bool,
    ) -> None:
        self._builder, self._groups, self._reshard = builder, sharing.groups, reshard
        self._blocking, self._reduce_dtype = settings.blocking, settings.of(ExchangeOptions).reduce_dtype
        self._units = units_of(network)
        self._parts = {unit.name: parts_of(unit, sharing.shares) for unit in self._units}
        self._root = self._units[-1]
        self._unit_of = {layer: unit for unit in self._units[:-1] for layer in unit.layers}
        self._model_layers = operations_of_forward(network)
        self._updated = set(gradient_order(network))
        late = units_that_reduce_late(network, self._units)
        self._reduced_with = {
            min(in_backward): unit
            for unit in self._units[:-1]
            if unit.name not in late and (in_backward := set(unit.layers) & set(backward_layers))
        }
        # The order in which forward leaves units; the whole model is left last, where it has parameters.
        called = sorted((unit for unit in self._units[:-1] if unit.layers), key=lambda unit: unit.layers[0])
        self._order = [*called, *([self._root] if self._root.parameters else [])]
        self._entered: set[str] = set()
        self._gathers: dict[tuple[str, bool], int] = {}
        self._whole: set[tuple[str, bool]] = set()
        self._copied_out: list[int] = []
        self._reduced: set[str] = set()
        self._last_reduced: dict[bool, int] = {}
        self._scattered: tuple[int, ...] = ()
        self._waited_for = list(after)
        self.reductions: list[Collective] = []

    def before_forward(self, layer: int) -> tuple[int, ...]:
        """Gather what a layer's unit needs; returns what the layer waits for."""
        for unit in (self._root, self._unit_of.get(layer)):
            if unit is not None and unit.name not in self._entered:
                self._entered.add(unit.name)
                self._gather_for_forward(unit)
        return self._take_waited_for()

    def gather_rest(self) -> None:
        """Gather the units that no layer has asked for, in the order in which forward comes to them."""
        for unit in self._order:
            self._gather_for_forward(unit)

    def _gather_for_forward(self, unit: Unit) -> None:
        for part in self._parts[unit.name]:
            # The streams of a gather of forward wait for the copy-out of the one before the last.
            self._gather(part, Phase.FW, tuple(self._copied_out[-2:-1]))
            self._copy_out(part, Phase.FW)

    def end_forward(self) -> None:
        """Free what stage 3 frees: all but the whole model's own parameters."""
        self._entered.clear()
        if self._reshard:
            self._whole &= {part.key for part in self._parts[self._root.name]}

    def before_backward(self, layer: int) -> tuple[int, ...]:
        """Gather what backward of a layer's unit needs, and the unit in front of it; returns what the layer awaits."""
        for unit in (self._root, self._unit_of.get(layer)) if layer < self._model_layers else ():
            if unit is None or unit.name in self._entered or not unit.parameters:
                continue
            self._entered.add(unit.name)
            # The streams of gathers wait for the last copy-out from the end of forward on.
            for part in self._parts[unit.name]:
                self._gather(part, Phase.BW, tuple(self._copied_out[-1:]))
                self._copy_out(part, Phase.BW)
            position = self._order.index(unit)
            for part in self._early(unit, self._order[position - 1]) if position else ():
                self._gather(part, Phase.BW, tuple(self._copied_out[-1:]))
        return self._take_waited_for()

    def _early(self, unit: Unit, in_front: Unit) -> tuple[Part, ...]:
        """What backward of a unit gathers of the one in front of it."""
        parts = self._parts[in_front.name][::-1]
        return parts if len(self._parts[unit.name]) > 1 else parts[:1]

    def after_backward(self, layer: int, task: int) -> None:
        """Reduce a unit's gradients once backward has left it."""
        if layer in self._reduced_with:
            self._reduce(self._parts[self._reduced_with[layer].name][::-1], (task,))

    def end_backward(self, last: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Reduce what is left behind the last task of backward; returns what the weight update waits for."""
        for unit in (self._root, *self._units[:-1]):
            if unit.name not in self._reduced:
                self._reduce(self._parts[unit.name][::-1], last)
        return self._waited_for_by_update()

    def reduce_stages(self) -> tuple[int, ...]:
        """Reduce all units at once, each part of one in the order of forward; returns as :meth:`end_backward`."""
        for unit in (self._root, *self._units[:-1]):
            self._reduce(self._parts[unit.name], ())
        return self._waited_for_by_update()

    def _waited_for_by_update(self) -> tuple[int, ...]:
        return (*self._last_reduced.values(), *self._take_waited_for())

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

    def _gather(self, part: Part, phase: Phase, after: tuple[int, ...]) -> None:
        if part.key in self._gathers or part.key in self._whole or part.ranks == 1:
            return
        size = part.shard_bytes
        copy = BucketCopy(direction="into", bytes=size, tensors=len(part.parameters))
        stream = Stream.COMPUTE if self._blocking else Stream.COPY
        copied = self._builder.add(copy, phase, stream, (*after, *self._take_waited_for()))
        axes = self._groups[part.apart].axes
        work = Collective(operation="all_gather", message_bytes=size, ranks=part.ranks, axes=axes)
        self._gathers[part.key] = self._call(work, phase, (copied,))

    def _copy_out(self, part: Part, phase: Phase) -> None:
        if part.key in self._whole:
            return
        copied = part.whole_bytes + part.cut_inside(part.parameters)
        work = BucketCopy(direction="out", bytes=copied, tensors=len(part.parameters))
        gathered = (self._gathers.pop(part.key),) if part.ranks > 1 else ()
        waits = (*gathered, *self._take_waited_for())
        self._copied_out.append(self._builder.add(work, phase, Stream.COMPUTE, waits))
        self._waited_for.append(self._copied_out[-1])
        self._whole.add(part.key)

    def _reduce(self, parts: Sequence[Part], after: tuple[int, ...]) -> None:
        # torch keeps the buffers of one unit's gradients: the next are filled when the last have been sent.
        sent, self._scattered = self._scattered, ()
        for part in parts:
            parameters = tuple(parameter for parameter in part.parameters if parameter.name in self._updated)
            if parameters:
                self._reduce_part(part, parameters, (*after, *sent))
                self._reduced.add(part.unit)
        self._scattered = self._scattered or sent

    def _reduce_part(self, part: Part, parameters: tuple[Tensor, ...], after: tuple[int, ...]) -> None:
        groups = self._groups[part.apart]
        size = part.bytes_of(as_reduced(parameters, self._reduce_dtype))
        copied = part.ranks * size + part.cut_inside(parameters)
        copy = BucketCopy(direction="into", bytes=copied, tensors=len(parameters))
        done = self._builder.add(copy, Phase.GE, Stream.COMPUTE, (*after, *self._take_waited_for()))
        if part.ranks > 1:
            done = self._send("reduce_scatter", size, part.ranks, groups.axes, done)
            self._scattered += (done,)
        if groups.replicas > 1:
            done = self._send("all_reduce", size, groups.replicas, groups.outer_axes, done)
        self._last_reduced[part.apart] = done

    def _send(self, operation: str, size: int, ranks: int, axes: tuple[int, ...], after: int) -> int:
        self.reductions.append(Collective(operation=operation, message_bytes=size, ranks=ranks, axes=axes))
        return self._call(self.reductions[-1], Phase.GE, (after,))
