"""Plan of pipeline parallelism: micro-batches pass through stages in the order of a schedule.

ParaDL, section 3.4 and Table 3. What crosses a cut is sent when the stage in front of it has computed a micro-batch;
its gradient comes back likewise. A send occupies the communication stream; a receive stands where the compute stream
waits for it, and takes no time of its own.

A schedule may run backward in two parts (:func:`~paradl_bench.plan.compute.parts_of_backward`); the first stage,
whose input needs no gradient, then runs all of it where the weights' turn comes, as torch does. Forward and backward
of two micro-batches may be one step, which sends what both have made when both are done. Gradients of every micro-batch
after the first are added to those before, where a layer's weights have theirs.

Ranks that hold the same parameters of a stage (replicas; blocks of positions) exchange its gradients during its last
backward, as torch's DistributedDataParallel does under ``no_sync`` until then. What fewer ranks hold alike has an
exchange of its own (:mod:`~paradl_bench.strategies.exchange.stage_exchanges`). Its buffers are broadcast before the
first forward alone, since every forward runs under ``no_sync``.

An axis that shards layers nests with a pipeline in either order (:mod:`paradl_bench.strategies.pipeline.stage_shards`).

Under ZeRO's stages 2 and 3 replicas gather parts in the first forward instead, and reduce behind the last backward.

Gradients of parameters that several stages use are added up behind all of that, and before the weight update
(:mod:`~paradl_bench.strategies.pipeline.stages`).

Before the first iteration torch's stages agree, by one message of 4 bytes each way over every cut, that they know the
shapes they receive (PipelineStage's vote, torch 2.13).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.axis_planner import (
    ReplicaShards,
    ShardedLayers,
    samples_at_once,
    sharded_layers,
)
from paradl_bench.plan.compute import NetworkCompute
from paradl_bench.plan.mesh import degree_of, group_axes, positions, zero_stage
from paradl_bench.plan.schedules.catalog import schedule_of
from paradl_bench.plan.schedules.ordered import Occurrence, Order, OrderedActions, ordered
from paradl_bench.plan.schedules.schedule import Action, Extent, Schedule
from paradl_bench.plan.settings import Limit, PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.plan.tasks import Before, Phase, Plan, Role, RoleBuilder, Stream, Transfer, Work
from paradl_bench.strategies.exchange.gradients import GradientBuckets
from paradl_bench.strategies.exchange.stage_exchanges import StageExchanges
from paradl_bench.strategies.frameworks.presets import framework_of
from paradl_bench.strategies.passes.accumulation import added_with, adds_first
from paradl_bench.strategies.passes.clipping import add_clipping, sums_before
from paradl_bench.strategies.passes.gradient_buffer import add_checks, add_zeros
from paradl_bench.strategies.passes.weight_update import add_update
from paradl_bench.strategies.pipeline.axis import PipelineOptions, cut_by, micro_batches
from paradl_bench.strategies.pipeline.repetition import BEFORE, ActionTasks, RepeatedTasks, moved
from paradl_bench.strategies.pipeline.stage_shards import (
    StageShard,
    add_sums_of_shared,
    exchanged_by_stages,
    handshake,
    hold_parameters,
    layers_by_name,
    likeness,
    message_bytes,
    parts_of_rank,
    shard_stage,
)
from paradl_bench.strategies.pipeline.stages import (
    Stage,
    check_shared,
    cut_into_stages,
    first_layers,
    most_stages,
    places_of_shared,
    sent_to_places,
)


class PipelinePlanner:
    """Ranks that hold the network's stages."""

    name = "pipeline"

    def check(self, network: ModelGraph, strategy: Strategy, axis: int, settings: PlanSettings) -> None:
        """Raises:
        UserError: micro-batches that the schedule or the batch does not split into, or a network without so many cuts.
        """
        ranks = strategy.axes[axis].degree
        if ranks == 1:
            return
        if settings.batch_norm == "sync":
            raise UserError(
                f"strategy {strategy}: batch norm is local to a micro-batch in a pipeline, not synchronised"
            )
        count = micro_batches(settings, ranks)
        schedule_of(settings.of(PipelineOptions).schedule).check(ranks, count, recomputes=bool(settings.recompute))
        local = settings.batch // degree_of(strategy, Trait.DIVIDES_BATCH)
        # First: with more stages than there can be, no number of micro-batches is right.
        stages = cut_into_stages(network, ranks, settings) if network.layers else ()
        if local % count:
            raise UserError(
                f"strategy {strategy}: {local} samples do not split evenly into {count} micro-batches;"
                f" give --micro-batches one of {', '.join(str(n) for n in range(1, local + 1) if not local % n)}"
            )
        check_shared(network, stages, strategy)

    def limit(self, network: ModelGraph, settings: PlanSettings) -> Limit:
        """As many stages as the network can be cut into (ParaDL, Table 3: as many as it has layers)."""
        stages = most_stages(network) // schedule_of(settings.of(PipelineOptions).schedule).placement.stages_per_rank
        reason = f"places where {network.name} can be cut into stages that each have a parameter"
        return Limit(axis="pipeline", ranks=max(stages, 1), reason=reason)

    def micro_batches(self, settings: PlanSettings, ranks: int) -> int:
        """As many as the pipeline has ranks, unless given."""
        return micro_batches(settings, ranks)

    def plan_stages(
        self, network: ModelGraph, strategy: Strategy, settings: PlanSettings, shards: ReplicaShards
    ) -> Plan:
        """See :class:`~paradl_bench.plan.axis_planner.StagingPlanner`."""
        (axis,) = group_axes(strategy, Trait.STAGES)
        replicas, count = degree_of(strategy, Trait.DIVIDES_BATCH), micro_batches(settings, strategy.axes[axis].degree)
        stages = cut_into_stages(network, strategy.axes[axis].degree, settings)
        places = [
            (position[axis], shard) for position, shard in zip(positions(strategy), shards.positions, strict=True)
        ]
        shared = places_of_shared(network, stages)
        works: dict[Work, int] = {}
        roles: dict[tuple[int, int], Role] = {}
        known: list[tuple[object, Role]] = []
        models: dict[object, _RankPlan] = {}
        for (rank, shard), alike in Counter(places).items():
            planned = _RankPlan(
                network, stages, strategy, settings, rank, shards.distinct[shard], shared, works, models
            )
            name = f"stage {rank}, part {shard}" if len(shards.distinct) > 1 else f"stage {rank}"
            # Ranks hold unlike parts in few stages: those of a vocabulary that does not part evenly.
            role = next((role for own, role in known if own == planned.own), None) or planned.role(name, 1)
            known.append((planned.own, role))
            roles[rank, shard] = dataclasses.replace(role, name=name, multiplicity=alike * replicas)
        numbers = {place: number for number, place in enumerate(roles)}
        exchange_axes = group_axes(strategy, Trait.REPLICATES)
        exchanging = stages if exchange_axes and zero_stage(strategy) < 2 else ()
        exchanged = [note for stage in exchanging for note in GradientBuckets(stage.network, settings).notes]
        return Plan(
            strategy=strategy,
            network=network.name,
            local_batch=settings.batch // replicas,
            roles=tuple(roles.values()),
            works=tuple(works),
            notes=(
                f"stages start at {', '.join(first_layers(network, stages))}, cut by {cut_by(settings)};"
                f" {count} micro-batches, {settings.of(PipelineOptions).schedule}",
                *dict.fromkeys(note for sharded in shards.distinct for note in sharded.notes),
                *exchanged,
            ),
            positions=tuple(numbers[place] for place in places),
            exchange_axes=exchange_axes,
            sharded=sharded_layers(shards),
            micro_batches=count,
            stage_ranks=tuple(stage.rank for stage in stages),
            recomputes=bool(settings.recompute),
        )


PLANNER = PipelinePlanner()


class _Forward(NamedTuple):
    """Forward of a micro-batch through a stage, in a builder of its own.

    Attributes:
        made: what a message of its outputs waits for.
    """

    builder: RoleBuilder
    compute: NetworkCompute
    made: tuple[int, ...]


class _RankPlan:
    """Builds the role of the ranks at one place of the pipeline that run alike shards of its stages.

    Args:
        models: by all that decides tasks but names and numbers of layers and cuts, the first plan of a rank; added to.
    """

    def __init__(
        self,
        network: ModelGraph,
        stages: Sequence[Stage],
        strategy: Strategy,
        settings: PlanSettings,
        rank: int,
        sharded: ShardedLayers,
        shared: Mapping[str, tuple[int, ...]],
        works: dict[Work, int],
        models: dict[object, _RankPlan],
    ) -> None:
        (self._axis,) = group_axes(strategy, Trait.STAGES)
        self._network, self._settings, self._sharded, self._strategy = network, settings, sharded, strategy
        self._rank, self._ranks = rank, strategy.axes[self._axis].degree
        self._last_stage, self._works, self._shared = len(stages) - 1, works, shared
        rank_stages = [stage for stage in stages if stage.rank == rank]
        self.own = {stage.index: shard_stage(network, stage, sharded, settings) for stage in rank_stages}
        self._parts = parts_of_rank(network, rank_stages, sharded, strategy, settings)
        if parts := self._parts:
            led = {index: parts.led(shard.network.layers, shard.shards) for index, shard in self.own.items()}
            self.own = {index: shard._replace(shards=led[index]) for index, shard in self.own.items()}
        networks = {} if self._parts else exchanged_by_stages(self.own.values())
        self._exchanges = StageExchanges(networks, strategy, settings, sharded.apart)
        self._schedule: Schedule = schedule_of(settings.of(PipelineOptions).schedule)
        self._count, self._micro_batch = micro_batches(settings, self._ranks), samples_at_once(strategy, settings)
        self._operations: dict[int, str] = {}
        self._computes: dict[int, NetworkCompute] = {}
        self._forwards: dict[tuple[int, bool], _Forward] = {}
        self._known: dict[tuple[object, ...], ActionTasks] = {}
        decisive = tuple(self._decisive(index, shard) for index, shard in self.own.items())
        self._model = self if self._parts else models.setdefault(decisive, self)

    def _decisive(self, index: int, shard: StageShard) -> tuple[object, ...]:
        apart = tuple(parameter.name in self._sharded.apart for parameter in shard.network.parameters)
        sizes = (message_bytes(cut, self._micro_batch) for cut in (shard.receives, shard.sends))
        return likeness(shard), *sizes, index == 0, index == self._last_stage, index + 1 in self.own, apart

    def role(self, name: str, multiplicity: int) -> Role:
        """Actions in the schedule's order, then the weight update of all stages of the rank."""
        actions = self._ordered(Extent(self._rank, self._ranks, self._count))
        # Works are numbered in the order in which a rank comes to them.
        first = actions.first_of_kinds
        distinct = [self._tasks(actions.at(number)) for number in first]
        kinds = actions.kinds[first].tolist()
        order = actions.order(kinds)
        assert order is not None
        update = RoleBuilder(self._works)
        before = self._parts.add_update(update) if self._parts else self._add_update(update)

        def shorter() -> Iterator[Order]:
            for extent in self._schedule.shorter(self._rank, self._ranks, self._count):
                found = self._ordered(extent).order(kinds)
                if found is not None:
                    yield found

        return Role(
            name=name,
            multiplicity=multiplicity,
            arrays=RepeatedTasks(distinct, order, shorter, update.arrays()),
            setup=self._exchanges.setup,
            handshake=handshake(self.own, self._last_stage, self._axis),
            exchanged_before=before + self._exchanges.setup_apart,
        )

    def _ordered(self, extent: Extent) -> OrderedActions:
        """The actions of the rank, or of one of a shorter pipeline that holds the same stages."""
        return ordered(
            self._schedule.order(*extent),
            extent,
            is_first=self._rank == 0,
            exchanges=bool(self._exchanges),
            adds_first=adds_first(self._settings),
            # It gathers what replicas hold parts of, or sets a buffer to zero.
            opens=bool(self._parts) or bool(framework_of(self._settings).gradient_dtype),
        )

    def _add_update(self, builder: RoleBuilder) -> Before:
        """The weight update of the rank's stages, which replicas may share out; returns what is issued before."""
        rank_shards, strategy, settings = list(self.own.values()), self._strategy, self._settings
        held = hold_parameters(rank_shards[0].network, [shard.stage for shard in rank_shards], self._sharded)
        added = add_sums_of_shared(builder, held, sent_to_places(self._shared, self._rank), self._rank, self._axis)
        checked = add_checks(builder, held, strategy, settings, self._sharded.apart, added)
        after = add_clipping(builder, held, strategy, settings, checked)
        before = add_update(builder, held, strategy, settings, after, self._sharded.apart)
        return before + sums_before(self._network, strategy, settings)

    def _tasks(self, asked: Occurrence) -> ActionTasks:
        """Those of an action, or of any other that differs in its micro-batch alone."""
        action, exchanging, opening, other = asked
        step = None if other is None else other.stage
        kind = action.direction, action.stage, action.micro_batch > 0, exchanging, opening, step
        if kind not in self._known:
            build = self._build_tasks if self._model is self else self._tasks_of_model
            self._known[kind] = build(asked)
        return self._known[kind]

    def _tasks_of_model(self, asked: Occurrence) -> ActionTasks:
        """Those of a rank that does the same for other layers and cuts."""
        stages = dict(zip(self.own, self._model.own, strict=True))
        action, other = asked.action, asked.other and asked.other._replace(stage=stages[asked.other.stage])
        there = action._replace(stage=stages[action.stage])
        tasks = self._model._tasks(asked._replace(action=there, other=other))
        names = layers_by_name(self._model.own[there.stage], self.own[action.stage])
        cuts = {like - back: stage - back for stage, like in stages.items() for back in (0, 1)}
        return moved(tasks, self._works, names, cuts)

    def _build_tasks(self, asked: Occurrence) -> ActionTasks:
        action, forward = asked.action, self._forward_of(asked.action, first=asked.opening)
        builder = forward.builder.copy()
        if action.direction == "FW":
            # Of a step of two actions, the second one sends what both have made.
            self._send_all(builder, () if asked.other else (action,), forward.made)
            return ActionTasks.of_builder(builder, 0, forward.builder.tasks - 1)
        start = builder.tasks
        computed, done = self._add_backward(builder, forward.compute.onto(builder), asked)
        return ActionTasks.of_builder(builder, start, computed, done)

    def _forward_of(self, action: Action, *, first: bool) -> _Forward:
        """Forward of the micro-batch of an action, which every kind of its backward goes on from."""
        key = action.stage, first
        if key not in self._forwards:
            builder = RoleBuilder(self._works)
            if first:
                add_zeros(builder, [shard.network for shard in self.own.values()], self._settings)
            compute = self._compute_of(action.stage).onto(builder)
            forward = action._replace(direction="FW")
            made = self._add_forward(builder, compute, forward, () if first else (BEFORE,))
            self._forwards[key] = _Forward(builder, compute, made)
        return self._forwards[key]

    def _compute_of(self, stage: int) -> NetworkCompute:
        if stage not in self._computes:
            shard = self.own[stage]
            self._computes[stage] = NetworkCompute(
                RoleBuilder(self._works),
                shard.network,
                shard.shards,
                outputs=shard.stage.outputs,
                input_has_gradient=bool(shard.stage.receives),
                operations=self._operations,
                recomputed=shard.recomputed,
            )
        return self._computes[stage]

    def _add_forward(
        self, builder: RoleBuilder, compute: NetworkCompute, action: Action, before: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Returns what a message of the stage's outputs waits for."""
        stage, near = self.own[action.stage].stage, self._schedule.neighbours(action, self._ranks)
        received = self._receive(builder, action, near.source)
        # What a stage communicates for its first layers, it calls when it comes to them.
        gathering = self._parts.gathering(builder, received) if self._parts and not before else None
        compute.add_forward(received or before, gathering.before_forward if gathering else None)
        if gathering is not None:
            gathering.gather_rest()
        return *received, *(compute.forward_tasks[i] for i in stage.outputs if i < len(stage.layers))

    def _add_backward(
        self, builder: RoleBuilder, compute: NetworkCompute, asked: Occurrence
    ) -> tuple[int, tuple[int, ...]]:
        """Returns the last task that computes, and those that the weight update waits for."""
        action, exchanging = asked.action, asked.exchanging
        shard, near = self.own[action.stage], self._schedule.neighbours(action, self._ranks)
        received = self._receive(builder, action, near.source)
        # What the weights' part waits for, the input's part has waited for: it comes later on the same stream.
        last = received[-1] if received else builder.tasks - 1
        part = compute.part_of_backward(action.direction)
        adds = action.completes and (action.micro_batch or adds_first(self._settings))
        added = added_with(shard.network, part.layers, self._settings) if adds else {}
        sending = tuple(of_step for of_step in (asked.other, action) if of_step)
        first = exchanging and near.target is not None and self._exchanges.behind_sends
        exchanges = self._exchanges.begin(builder, action.stage, part.layers, behind=first) if exchanging else []
        for layer, computed in compute.add_backward(received, part=part):
            if layer in added:
                computed = builder.add(added[layer], Phase.BW, Stream.COMPUTE, (computed,))
            for exchange in exchanges:
                exchange.add_ready(layer, computed)
        if compute.backward_task >= 0:
            # The input's gradient is there when the last layer has communicated for it.
            last = compute.backward_task
        if first:
            self._send_all(builder, sending, (last,))
        done = tuple(task for exchange in exchanges for task in exchange.add_finish(last)) or (last,)
        computed = builder.tasks - 1
        if not first:
            self._send_all(builder, sending, (last,))
        return computed, done if action.completes else ()

    def _receive(self, builder: RoleBuilder, action: Action, source: int | None) -> tuple[int, ...]:
        if source is None:
            return ()
        cut = min(source, action.stage)
        return (builder.add(self._transfer("receive", action, cut), Phase[action.way], Stream.COMPUTE),)

    def _send_all(self, builder: RoleBuilder, actions: Sequence[Action], after: tuple[int, ...]) -> None:
        """What actions have made for stages of other ranks, a message each."""
        waits = tuple(sorted(after))
        for action in actions:
            if self._schedule.neighbours(action, self._ranks).target is not None:
                cut = action.stage if action.direction == "FW" else action.stage - 1
                work = self._transfer("send", action, cut)
                builder.add(work, Phase[action.way], Stream.COMMUNICATION, waits)

    def _transfer(self, direction: Literal["send", "receive"], action: Action, cut: int) -> Transfer:
        stage_shard = self.own[action.stage]
        sizes = message_bytes(stage_shard.sends if cut == action.stage else stage_shard.receives, self._micro_batch)
        return Transfer(direction=direction, phase=action.way, cut=cut, message_bytes=sizes, axes=(self._axis,))
