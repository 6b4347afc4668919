"""The plan of any nesting of axes: who shards layers, and who exchanges gradients with whom.

The rules of the axes are in their folders, and here they are put together by their traits, so that no combination is
written by hand and no axis is known by name. One axis shards layers, or several in turn: one that cuts features, one
that cuts tokens of what comes of that, one that cuts experts of what is left. Stages take their ranges of the result.
Ranks that hold the same parameters exchange gradients as torch's DistributedDataParallel does, or in messages that the
settings give. Axes nest in every order, which decides who is whose neighbour and nothing else.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import msgspec

from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.kinds.autocast import as_held
from paradl_bench.plan.axes.kind import IN_TURN, Trait
from paradl_bench.plan.axes.registry import kinds_with
from paradl_bench.plan.axis_planner import (
    AxisPlace,
    Latest,
    ReplicaShards,
    ShardedLayers,
    axis_planner,
    samples_at_once,
    shard_in_turn,
    sharded_layers,
    staging_axis,
    staging_planner,
    updating_planners,
)
from paradl_bench.plan.mesh import (
    axes_apart,
    axes_that_shard,
    degree_of,
    group_axes,
    place_of,
    positions,
    ranks_along,
    zero_stage,
)
from paradl_bench.plan.settings import Limit, PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.plan.tasks import Plan, Role, RoleBuilder, Setup, Work
from paradl_bench.strategies.exchange.gradients import (
    GradientBuckets,
    GradientExchange,
    add_buffer_broadcasts,
    exchanged_along,
    exchanged_over_nodes,
    issued_before_steady_state,
)
from paradl_bench.strategies.exchange.messages import check_messages
from paradl_bench.strategies.exchange.node_groups import NodeGroups, node_groups, place_roles
from paradl_bench.strategies.exchange.options import ExchangeOptions
from paradl_bench.strategies.frameworks.presets import scatters_gradients
from paradl_bench.strategies.passes.accumulation import MicroSteps, check_accumulation
from paradl_bench.strategies.passes.clipping import add_clipping, sums_before
from paradl_bench.strategies.passes.gradient_buffer import add_checks, add_zeros
from paradl_bench.strategies.passes.norm_statistics import synchronise_norms
from paradl_bench.strategies.passes.recomputation import check_recomputation
from paradl_bench.strategies.passes.weight_update import add_update

_LATEST: Latest[ReplicaShards] = Latest()
"""The plan, the memory model and a rank's run ask for the same shards."""


def check_nesting(strategy: Strategy) -> None:
    """The rule of which axes nest, over their traits: of those that shard layers one, or one each of those that do so
    in turn, and all others.

    Raises:
        UserError: other axes both shard layers.
    """
    sharding = [axis for axis in strategy.axes if axis.has(Trait.SHARDS_LAYERS)]
    turns = [trait for axis in sharding for trait in IN_TURN if axis.has(trait)]
    if len(sharding) > 1 and not len(sharding) == len(turns) == len(set(turns)):
        together = "".join(f"{kinds_with(trait)[0].letter}2" for trait in IN_TURN)
        raise UserError(
            f"strategy {strategy}: {' and '.join(axis.kind for axis in sharding)} both share layers out, and one of"
            " them can; nest one with data or a pipeline, as d2f2 or d2p2f2, or cut features, tokens and experts of the"
            f" same layers, as {together}"
        )


class NestedPlanner:
    """Plans the strategies of one name.

    Raises:
        UserError: axes that do not nest.
    """

    def __init__(self, strategy: Strategy) -> None:
        check_nesting(strategy)
        self.name = strategy.name
        self._planners = [axis_planner(axis.declared) for axis in strategy.axes]
        self._sharding = axes_that_shard(strategy)

    def plan(self, network: ModelGraph, strategy: Strategy, settings: PlanSettings) -> Plan:
        """The tasks of one iteration in the steady state; what is issued before it stands in ``Role.setup``.

        Raises:
            UserError: a limit is exceeded; the message names it.
        """
        network = as_held(network, settings.dtype)
        shards = self.shards(network, strategy, settings)
        staging = staging_axis(strategy)
        if staging is not None:
            return staging_planner(strategy.axes[staging].declared).plan_stages(network, strategy, settings, shards)
        replicas = degree_of(strategy, Trait.DIVIDES_BATCH)
        exchange_axes = group_axes(strategy, Trait.REPLICATES)
        works: dict[Work, int] = {}
        roles: list[Role] = []
        notes: dict[str, None] = {}
        nodes = node_groups(strategy, settings)
        once = _Once(settings, nodes)
        placed = place_roles(strategy, shards.positions, nodes)
        for (index, leader_index), multiplicity in placed.roles.items():
            sharded = shards.distinct[index]
            buckets = exchange_axes and zero_stage(strategy) < 2
            exchanged = once.exchanged(sharded).buckets.notes if buckets else ()
            notes |= dict.fromkeys((*sharded.notes, *exchanged))
            number = f" {index}" if len(shards.distinct) > 1 else ""
            if nodes is not None and nodes.leaders:
                number += f", leader {leader_index}" if leader_index < nodes.leaders else ", led"
            roles.append(self._build_role(sharded, strategy, once, works, number, multiplicity, leader_index))
        return Plan(
            strategy=strategy,
            network=network.name,
            local_batch=settings.batch // replicas,
            roles=tuple(roles),
            works=tuple(works),
            notes=tuple(notes),
            positions=placed.positions,
            per_node=placed.per_node,
            exchange_axes=exchange_axes,
            sharded=sharded_layers(shards),
            micro_batches=settings.accumulate,
            recomputes=bool(settings.recompute),
        )

    def shards(self, network: ModelGraph, strategy: Strategy, settings: PlanSettings) -> ReplicaShards:
        """What the ranks of a replica each run of the layers, on a micro-batch where there is a pipeline.

        Raises:
            UserError: a limit is exceeded; the message names it.
        """
        network = as_held(network, settings.dtype)
        self._check_axes(network, strategy, settings)
        # Whether what one axis leaves parts over the ranks of the next shows here.
        return self._found_shards(network, strategy, settings)

    def _found_shards(self, network: ModelGraph, strategy: Strategy, settings: PlanSettings) -> ReplicaShards:
        key = strategy, samples_at_once(strategy, settings), self._decisive(strategy, settings)
        return _LATEST.get(network, key, lambda: self._find_shards(network, strategy, settings))

    def _decisive(self, strategy: Strategy, settings: PlanSettings) -> PlanSettings:
        """Settings with what decides what ranks run of layers, beside the samples that they have at once.

        Strategies of a search differ in turns and buckets, which do not: planners of axes know theirs again by these.
        """
        options = {kind for index in self._sharding for kind in strategy.axes[index].declared.options}
        axes = tuple(given for given in settings.axes if type(given) in options - {ExchangeOptions})
        return msgspec.structs.replace(settings, axes=axes, batch=1, accumulate=1)

    def _find_shards(self, network: ModelGraph, strategy: Strategy, settings: PlanSettings) -> ReplicaShards:
        local_batch, decisive = samples_at_once(strategy, settings), self._decisive(strategy, settings)
        distinct: list[ShardedLayers] = []
        of_coordinate: dict[tuple[int, ...], int] = {}
        known: dict[AxisPlace, ShardedLayers] = {}
        of_positions = []
        for position in positions(strategy):
            coordinate = tuple(position[index] for index in self._sharding)
            if coordinate not in of_coordinate:
                sharded = self._shard(network, strategy, position, local_batch, decisive, known)
                if settings.batch_norm == "sync":
                    sharded = synchronise_norms(sharded, network, strategy, settings)
                number = next((i for i, other in enumerate(distinct) if other == sharded), len(distinct))
                distinct += [sharded] * (number == len(distinct))
                of_coordinate[coordinate] = number
            of_positions.append(of_coordinate[coordinate])
        return ReplicaShards(tuple(distinct), tuple(of_positions))

    def shards_of(self, rank: int, network: ModelGraph, strategy: Strategy, settings: PlanSettings) -> ShardedLayers:
        """What one rank runs of the layers; see :meth:`shards`."""
        shards = self.shards(network, strategy, settings)
        return shards.distinct[shards.positions[place_of(strategy, rank)]]

    def check(self, network: ModelGraph, strategy: Strategy, settings: PlanSettings) -> None:
        """Refuse what cannot run; of an empty network, what no network could make right.

        Raises:
            UserError: says what would be right.
        """
        self._check_axes(network, strategy, settings)
        if network.layers and len(self._sharding) > 1:
            self._check_parts(as_held(network, settings.dtype), strategy, settings)

    def _check_axes(self, network: ModelGraph, strategy: Strategy, settings: PlanSettings) -> None:
        """All of that but what takes shards of layers to tell."""
        for index, planner in enumerate(self._planners):
            planner.check(network, strategy, index, settings)
        node_groups(strategy, settings)
        # One device sends nothing: it is what predictions hold others against, under the same settings.
        if settings.of(ExchangeOptions).fused_bytes and strategy.axes:
            check_messages(strategy, settings)
        check_accumulation(strategy, settings)
        check_recomputation(network, strategy, settings)

    def _check_parts(self, network: ModelGraph, strategy: Strategy, settings: PlanSettings) -> None:
        """What one axis leaves has to part over the ranks of the next: its largest parts, which come first, and its
        smallest.
        """
        known: dict[AxisPlace, ShardedLayers] = {}
        local_batch, decisive = samples_at_once(strategy, settings), self._decisive(strategy, settings)
        ends = [{0, axis.degree - 1} if index in self._sharding else {0} for index, axis in enumerate(strategy.axes)]
        for position in itertools.product(*map(sorted, ends)):
            self._shard(network, strategy, position, local_batch, decisive, known)

    def _shard(
        self,
        network: ModelGraph,
        strategy: Strategy,
        position: tuple[int, ...],
        local_batch: int,
        settings: PlanSettings,
        known: dict[AxisPlace, ShardedLayers],
    ) -> ShardedLayers:
        places = [AxisPlace(strategy.axes[i], i, position[i], local_batch) for i in self._sharding]
        try:
            return shard_in_turn(network, places, settings, known)
        except UserError as error:
            text = str(error)
            for place in places:
                text = text.replace(f"strategy {place.axis}:", f"strategy {strategy}:")
            raise UserError(text) from error

    def _build_role(
        self,
        sharded: ShardedLayers,
        strategy: Strategy,
        once: _Once,
        works: dict[Work, int],
        number: str,
        multiplicity: int,
        leader_index: int,
    ) -> Role:
        """What ``multiplicity`` ranks of one leader index on their nodes each do."""
        network, axes = sharded.network, group_axes(strategy, Trait.REPLICATES)
        builder, settings = RoleBuilder(works), once.settings
        for planner in updating_planners(strategy):
            before = planner.add_role(builder, sharded, strategy, settings, once.operations)
            if before is not None:
                return builder.build(f"replica{number}", multiplicity, exchanged_before=before)
        add_zeros(builder, [network], settings)
        steps = MicroSteps(builder, sharded, settings, once.operations)
        if not axes:
            steps.add_but_last()
            last = tuple(task for _, task in steps.add_last())[-1:]
            last = add_checks(builder, network, strategy, settings, sharded.apart, last)
            last = add_clipping(builder, network, strategy, settings, last)
            before = add_update(builder, network, strategy, settings, last, sharded.apart)
            before += sums_before(network, strategy, settings)
            return builder.build(f"device{number}", multiplicity, exchanged_before=before)
        ranks = ranks_along(strategy, axes)
        buckets, setup = once.exchanged(sharded)
        received = add_buffer_broadcasts(builder, network, ranks, axes)
        steps.add_but_last(received)
        nodes = None if once.nodes is None else (once.nodes, leader_index)
        scatters = scatters_gradients(strategy, settings)
        in_backward = builder, network, buckets, steps.backward_layers, ranks, axes, nodes
        exchanges = [GradientExchange(*in_backward, scatters=scatters)]
        before = sums_before(network, strategy, settings) + (exchanged_over_nodes(buckets, *nodes) if nodes else ())
        of_apart = axes_apart(strategy) if sharded.apart else ()
        if of_apart:
            apart = once.exchanged(sharded, of_apart=True)
            alike = ranks_along(strategy, of_apart)
            exchanges.append(GradientExchange(builder, network, apart.buckets, steps.backward_layers, alike, of_apart))
            before += exchanged_along(apart.setup, alike, of_apart)
        last_task = -1
        for layer, last_task in steps.add_last(received):
            for exchange in exchanges:
                exchange.add_ready(layer, last_task)
        done = tuple(task for exchange in exchanges for task in exchange.add_finish(last_task))
        done = add_checks(builder, network, strategy, settings, sharded.apart, done)
        done = add_clipping(builder, network, strategy, settings, done)
        before = add_update(builder, network, strategy, settings, done, sharded.apart) + before
        return builder.build(f"replica{number}", multiplicity, setup, exchanged_before=before)

    def limits(self, network: ModelGraph, settings: PlanSettings) -> tuple[Limit, ...]:
        """The limit of each axis; of a strategy without axes, that it is one device."""
        if not self._planners:
            return (Limit(axis="serial", ranks=1, reason="serial runs on one device"),)
        return tuple(planner.limit(network, settings) for planner in self._planners)


class _Exchanged(NamedTuple):
    """The buckets of a network, and what is issued for them before the steady state."""

    buckets: GradientBuckets
    setup: Setup


class _Once:
    """What the roles of a plan have in common, each found once: ranks along a spatial axis hold the same parameters."""

    def __init__(self, settings: PlanSettings, nodes: NodeGroups | None) -> None:
        self.settings, self.nodes = settings, nodes
        self.operations: dict[int, str] = {}
        self._latest: Latest[_Exchanged] = Latest()

    def exchanged(self, sharded: ShardedLayers, *, of_apart: bool = False) -> _Exchanged:
        def find() -> _Exchanged:
            buckets = GradientBuckets(sharded.network, self.settings, sharded.apart, of_apart=of_apart)
            return _Exchanged(buckets, issued_before_steady_state(buckets, flat=self.nodes is None))

        return self._latest.get(sharded.network, of_apart, find)
