"""Plan of pipeline parallelism: micro-batches pass through stages in the order of a schedule.

ParaDL, section 3.4 and Table 3. What crosses a cut is sent when the stage in front of it has computed a micro-batch;
its gradient comes back likewise. A send occupies the communication stream; a receive stands where the compute stream
waits for it, and takes no time of its own.

With data parallelism outside, the replicas of a stage exchange its gradients during its last backward, as torch's
DistributedDataParallel does under ``no_sync`` until then. Its buffers are broadcast before the first forward alone,
since every forward runs under ``no_sync``.

Before the first iteration torch's stages agree, by one message of 4 bytes each way over every cut, that they know the
shapes they receive (PipelineStage's vote, torch 2.13).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from paradl_bench.schedules.catalog import schedule_of
from paradl_bench.schedules.schedule import Action, Schedule
from paradl_bench.spec.errors import UserError
from paradl_bench.spec.network import Network
from paradl_bench.spec.plan import (
    HaloExchange,
    Limit,
    Phase,
    Plan,
    PlanSettings,
    Role,
    RoleBuilder,
    Stream,
    Transfer,
    Work,
)
from paradl_bench.spec.strategy import Strategy
from paradl_bench.strategies.compute import NetworkCompute, weight_update
from paradl_bench.strategies.data.plan import GradientBuckets, GradientExchange, issued_before_steady_state
from paradl_bench.strategies.mesh import degree_of, group_axes
from paradl_bench.strategies.pipeline.stages import Stage, cut_into_stages, message_bytes, most_stages

_VOTE_BYTES = 4


class PipelinePlanner:
    """Ranks that hold the network's stages."""

    name = "pipeline"

    def check(self, network: Network, strategy: Strategy, axis: int, settings: PlanSettings) -> None:
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
        schedule_of(settings.schedule).check(ranks, count)
        local = settings.batch // degree_of(strategy, "data")
        if local % count:
            raise UserError(
                f"strategy {strategy}: {local} samples do not split evenly into {count} micro-batches;"
                f" give --micro-batches one of {', '.join(str(n) for n in range(1, local + 1) if not local % n)}"
            )
        if network.layers:
            cut_into_stages(network, ranks, settings)

    def limit(self, network: Network, settings: PlanSettings) -> Limit:
        """As many stages as the network can be cut into (ParaDL, Table 3: as many as it has layers)."""
        stages = most_stages(network) // schedule_of(settings.schedule).stages_per_rank
        reason = f"places where {network.name} can be cut into stages that each have a parameter"
        return Limit(axis="pipeline", ranks=max(stages, 1), reason=reason)


PLANNER = PipelinePlanner()


def micro_batches(settings: PlanSettings, ranks: int) -> int:
    """Into how many micro-batches a rank's samples are split: as many as the pipeline has ranks, unless given."""
    return settings.micro_batches or ranks


def plan_pipeline(network: Network, strategy: Strategy, settings: PlanSettings) -> Plan:
    """The tasks of one iteration on every rank of a pipeline, and the exchange of gradients between its replicas."""
    (axis,) = group_axes(strategy, "pipeline")
    ranks, replicas = strategy.axes[axis].degree, degree_of(strategy, "data")
    local_batch, count = settings.batch // replicas, micro_batches(settings, strategy.axes[axis].degree)
    stages = cut_into_stages(network, ranks, settings)
    works: dict[Work, int] = {}
    data_axes = group_axes(strategy, "data")
    roles = []
    for rank in range(ranks):
        planned = _RankPlan(network, stages, strategy, settings, axis, rank, works)
        roles.append(planned.role())
    exchanged = [note for stage in stages for note in GradientBuckets(stage.network, settings).notes]
    cuts = ", ".join(network.layers[stage.layers.start].name for stage in stages[1:])
    return Plan(
        strategy=strategy,
        network=network.name,
        local_batch=local_batch,
        roles=tuple(roles),
        works=tuple(works),
        notes=(
            f"stages start at {cuts}; {count} micro-batches, {settings.schedule}",
            *(exchanged if data_axes else ()),
        ),
        positions=tuple(range(ranks)),
        exchange_axes=data_axes,
        micro_batches=count,
    )


class _RankPlan:
    """Builds the role of one rank of the pipeline."""

    def __init__(
        self,
        network: Network,
        stages: Sequence[Stage],
        strategy: Strategy,
        settings: PlanSettings,
        axis: int,
        rank: int,
        works: dict[Work, int],
    ) -> None:
        self._network, self._stages, self._settings = network, stages, settings
        self._axis, self._rank, self._ranks = axis, rank, strategy.axes[axis].degree
        self._replicas, self._data_axes = degree_of(strategy, "data"), group_axes(strategy, "data")
        self._schedule: Schedule = schedule_of(settings.schedule)
        self._count = micro_batches(settings, self._ranks)
        self._micro_batch = settings.batch // self._replicas // self._count
        self._builder = RoleBuilder(works)
        self._running: dict[tuple[int, int], NetworkCompute] = {}
        self._done: list[int] = []

    def role(self) -> Role:
        """Actions in the schedule's order, then the weight update of all stages of the rank."""
        for action in self._schedule.order(self._rank, self._ranks, self._count):
            if action.direction == "FW":
                self._add_forward(action)
            else:
                self._add_backward(action)
        own = [stage for stage in self._stages if stage.index % self._ranks == self._rank]
        update = weight_update(_together(self._network, own), self._settings)
        self._builder.add(update, Phase.WU, Stream.COMPUTE, tuple(self._done))
        return self._builder.build(f"stage {self._rank}", self._replicas, self._setup(own), self._handshake(own))

    def _add_forward(self, action: Action) -> None:
        stage, near = self._stages[action.stage], self._schedule.neighbours(action, self._ranks)
        compute = NetworkCompute(
            self._builder, stage.network, outputs=stage.outputs, input_has_gradient=bool(stage.receives)
        )
        self._running[action.stage, action.micro_batch] = compute
        received = self._receive(action, near.source)
        compute.add_forward(received)
        if near.target is not None:
            made = tuple(compute.forward_tasks[i] for i in stage.outputs if i < len(stage.layers))
            self._send(action, (*received, *made))

    def _add_backward(self, action: Action) -> None:
        stage, near = self._stages[action.stage], self._schedule.neighbours(action, self._ranks)
        compute = self._running.pop((action.stage, action.micro_batch))
        received = self._receive(action, near.source)
        exchange = None
        if self._data_axes and action.micro_batch == self._count - 1:
            exchange = GradientExchange(
                self._builder,
                stage.network,
                GradientBuckets(stage.network, self._settings),
                compute.backward_layers,
                self._replicas,
                self._data_axes,
            )
        last = -1
        for layer, last in compute.add_backward(received):
            if exchange is not None:
                exchange.add_ready(layer, last)
        self._done += exchange.add_finish(last) if exchange is not None else (last,)
        if near.target is not None:
            self._send(action, (last,))

    def _receive(self, action: Action, source: int | None) -> tuple[int, ...]:
        if source is None:
            return ()
        cut = min(source, action.stage)
        return (self._builder.add(self._transfer("receive", action, cut), Phase[action.direction], Stream.COMPUTE),)

    def _send(self, action: Action, after: tuple[int, ...]) -> None:
        cut = action.stage if action.direction == "FW" else action.stage - 1
        self._builder.add(
            self._transfer("send", action, cut), Phase[action.direction], Stream.COMMUNICATION, tuple(sorted(after))
        )

    def _transfer(self, direction: str, action: Action, cut: int) -> Transfer:
        sizes = message_bytes(self._network, self._stages[cut].sends, self._micro_batch)
        return Transfer(
            direction=direction,  # type: ignore[arg-type]
            phase=action.direction,
            cut=cut,
            message_bytes=sizes,
            axes=(self._axis,),
        )

    def _setup(self, own: Sequence[Stage]) -> tuple[tuple[str, str, int, int], ...]:
        if not self._data_axes:
            return ()
        counts: Counter[tuple[str, str, int]] = Counter()
        for stage in own:
            buckets = GradientBuckets(stage.network, self._settings)
            for *key, times in issued_before_steady_state(stage.network, buckets, buffers_in_second=False):
                counts[tuple(key)] += times  # type: ignore[index]
        return tuple((*key, times) for key, times in counts.items())

    def _handshake(self, own: Sequence[Stage]) -> tuple[HaloExchange, ...]:
        cuts = sum((stage.index > 0) + (stage.index + 1 < len(self._stages)) for stage in own)
        votes = (_VOTE_BYTES,) * cuts
        return (HaloExchange(sends_bytes=votes, receives_bytes=votes, axes=(self._axis,)),)


def _together(network: Network, stages: Sequence[Stage]) -> Network:
    """The network with the parameters that these stages hold of it."""
    held = {parameter.name for stage in stages for parameter in stage.network.parameters}
    return msgspec.structs.replace(
        network,
        parameters=tuple(parameter for parameter in network.parameters if parameter.name in held),
        gradient_order=tuple(name for name in network.gradient_order if name in held),
    )
