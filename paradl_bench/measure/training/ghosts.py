"""Emulated runs: what ranks agree to sleep, and what their host takes beside it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from paradl_bench.emulation.draws import IterationDraws
from paradl_bench.emulation.table import TableMaker, TableRequest, table_of
from paradl_bench.emulation.twin import GhostTwin
from paradl_bench.measure.execution.micro_steps import MicroSteps, Row, by_turn
from paradl_bench.measure.execution.optimizers import make_optimizer
from paradl_bench.measure.training.request import TrainingRequest
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.models.catalog import LoadedModel
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.axis_planner import steps_of
from paradl_bench.plan.mesh import degree_of
from paradl_bench.ranks.groups.process_groups import RankContext
from paradl_bench.ranks.pulse import beat
from paradl_bench.records.emulation import EmulatedLayers
from paradl_bench.records.slow_rank import SlowRank
from paradl_bench.records.training.ghost_record import DrawnSleeps, GhostRun, GhostTable, read_table
from paradl_bench.strategies.nesting.parallel import ParallelModule
from paradl_bench.strategies.passes.recomputed_module import recompute_segments
from paradl_bench.strategies.running.spans import Spans

REPEATED = 3
"""Iterations without sleep that the host's own time is the median of."""
_ENOUGH_S = 1.0
"""Of an iteration of all ranks, which is not repeated where it takes longer: it is communication for the most part."""
_MOST_CALLS = 90
"""Per cent of calls whose time between sleeps is the host's; what takes longer is an interruption."""


class Ghost(NamedTuple):
    """An emulated run on one rank: what all sleep, and what stands for this rank's compute.

    Attributes:
        drawn: with what sleeps are drawn; None where they do not spread.
    """

    table: GhostTable
    twin: GhostTwin
    dilate: float
    slow_rank: SlowRank | None
    drawn: DrawnSleeps | None = None

    @property
    def emulated(self) -> EmulatedLayers:
        """What its measurements' environment says of it."""
        return EmulatedLayers(
            profile_sha256=self.table.profile_sha256,
            dilate=self.dilate,
            slow_rank="" if self.slow_rank is None else str(self.slow_rank),
            spread=self.drawn is not None,
        )


class HostTime(NamedTuple):
    """Seconds an iteration that the host takes, by phase: of ghosts that do not sleep, and beyond what is to be slept.

    Attributes:
        of_call_s: what passes from one ghost's call to the next that is no sleep, in nine of ten at most.
    """

    framework_s: dict[str, float]
    oversleep_s: dict[str, float]
    of_call_s: dict[str, float]


def emulate(
    request: TrainingRequest, network: ModelGraph, context: RankContext, make_table: TableMaker
) -> Ghost | None:
    """What the ranks of an emulated run sleep; None for a real one. A collective: rank 0 gets the table for all.

    Raises:
        UserError: as of :func:`~paradl_bench.emulation.table.table_of`.
    """
    if request.emulate is None:
        return None
    made = b""
    if context.rank == 0:
        asked = TableRequest(
            file=request.emulate,
            network=network,
            strategy=request.strategy,
            settings=request.settings,
            dtype=request.dtype,
            backend=context.backend if context.ranks > 1 else "gloo",
            spread=request.spread,
        )
        made = msgspec.json.encode(table_of(asked, make_table))
    table = read_table(context.share(made, bytes), f"rank 0's table of {request.emulate}")
    dilate = 1.0 if request.dilate is None else request.dilate
    longer = 1.0 if request.slow_rank is None else request.slow_rank.of_rank(context.rank)
    draws, drawn = None, None
    if table.spread is not None:
        drawn = DrawnSleeps(seed=request.seed or 0, samples=table.spread.samples)
        draws = partial(IterationDraws, table.spread, seed=drawn.seed, rank=context.rank)
    twin = GhostTwin(network, table.of_rank(context.rank), dilate * longer, draws)
    return Ghost(table, twin, dilate, request.slow_rank, drawn)


def measure_host_time(
    twin: GhostTwin,
    model: LoadedModel,
    network: ModelGraph,
    batch: tuple[torch.Tensor, torch.Tensor],
    request: TrainingRequest,
    context: RankContext,
) -> HostTime:
    """Iterations of the whole model on rank 0 alone, awake and asleep, while the other ranks wait; empty on those.

    From then on that much of what passes before a turn's first ghost counts as the host's own, on all ranks. A rank of
    a pipeline runs a part of the model: its share of dispatching all of it.
    """
    host = HostTime({}, {}, {})
    if context.rank == 0:
        recompute_segments(model.module, network, request.settings)
        stages = degree_of(request.strategy, Trait.STAGES)
        host = _host_time(twin, model, network, batch, steps_of(request.strategy, request.settings))
        host = host._replace(framework_s={phase: spent / stages for phase, spent in host.framework_s.items()})
    twin.sleeper.host_s = context.share(host.of_call_s, dict[str, float])
    return host


def _host_time(
    twin: GhostTwin, model: LoadedModel, network: ModelGraph, batch: tuple[torch.Tensor, torch.Tensor], count: int
) -> HostTime:
    whole = ParallelModule(twin.alone(model.module), network, Spans())
    steps = MicroSteps(whole, twin.loss(model.loss), *batch, count)
    optimizer = make_optimizer(twin.optimizer_class(), model.module.parameters())

    def phases() -> dict[str, float]:
        beat()
        rows: list[Row] = []
        begin = time.perf_counter()
        steps.run(begin, twin.then(time.perf_counter), rows, lambda _: twin.sleeper.begin_turn())
        update = time.perf_counter()
        twin.sleeper.begin_turn()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        spent = {"FW": 0.0, "BW": 0.0, "WU": time.perf_counter() - update}
        for what, start, end in by_turn(rows)[2]:
            spent[what] += end - start
        return spent

    with twin.sleeper.awake():
        # The first one looks up what every layer returns.
        phases()
        twin.sleeper.take_asked()
        framework = _medians([phases() for _ in range(REPEATED)])
        # Awake, so that it does not take as long as a whole model sleeps once more.
        with twin.sleeper.watched() as gaps:
            phases()
    of_call = {str(phase): float(np.percentile(seconds, _MOST_CALLS)) for phase, seconds in gaps.items()}
    twin.sleeper.take_asked()
    twin.sleeper.host_s = of_call
    asleep = phases()
    asked = twin.sleeper.take_asked()
    return HostTime(
        framework_s=framework,
        oversleep_s={phase: spent - asked.get(phase, 0.0) for phase, spent in asleep.items()},
        of_call_s=of_call,
    )


def awake_iterations(
    twin: GhostTwin, iterate: Callable[[], object], context: RankContext, count: int
) -> tuple[float, ...]:
    """Seconds of so many iterations of all ranks that sleep nothing, or of one long one, each on its slowest rank.

    Ranks begin each one together: those that share a core wait for each other, and none runs ahead. A collective.
    They have run some awake before.
    """
    spent: list[float] = []
    with twin.sleeper.awake():
        for _ in range(count):
            twin.sleeper.take_asked()
            context.barrier()
            begin = time.perf_counter()
            iterate()
            spent.append(time.perf_counter() - begin)
            if len(spent) == 1 and context.share(spent[0], float) > _ENOUGH_S:
                break
    return tuple(map(max, zip(*context.gather(spent, list[float]), strict=True)))


def describe_run(
    ghost: Ghost,
    iterate: Callable[[], object],
    context: RankContext,
    host: HostTime,
    host_iteration_s: tuple[float, ...],
) -> GhostRun:
    """What an emulated run says of itself; on every rank alike, but for ``host``. A collective.

    Args:
        host_iteration_s: what ranks take the host for besides communication, in each of some iterations; none where
            that is not known.
    """
    twin, table = ghost.twin, ghost.table
    without_compute_s = statistics.median(awake_iterations(twin, iterate, context, REPEATED))
    asked = twin.sleeper.take_asked()
    return GhostRun(
        profile=table.profile,
        profile_sha256=table.profile_sha256,
        dilate=ghost.dilate,
        slow_rank=ghost.slow_rank,
        drawn=ghost.drawn,
        slept_s=max(context.gather(asked, dict[str, float]), key=lambda phases: sum(phases.values())),
        framework_s=host.framework_s,
        oversleep_s=host.oversleep_s,
        without_compute_s=without_compute_s,
        host_s=statistics.median(host_iteration_s) if host_iteration_s else None,
        host_iteration_s=host_iteration_s,
    )


def _medians(iterations: Sequence[dict[str, float]]) -> dict[str, float]:
    return {phase: statistics.median(spent[phase] for spent in iterations) for phase in iterations[0]}
