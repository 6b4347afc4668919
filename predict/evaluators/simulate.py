"""``simulate``: the plan's tasks on their streams, with interference and the lag of the slowest rank.

The exchange starts when the last rank arrives, so what a rank computes between two exchanges counts as the slowest of
p ranks computes it (:meth:`predict.model_costs.ModelCosts.straggler`). Lag is applied to all compute of an iteration,
weight update included, because the next exchange waits for that as well.

Roles that differ (blocks at an edge, uneven shards) are simulated each by itself, as if the others kept its pace; the
slowest one is the answer. Between them a rank that waits for another in one layer and makes up for it in the next is
taken as slower than it is.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paradl_bench.spec.plan import Phase, Role, Stream
from paradl_bench.strategies.catalog import planner_for
from predict.cost_model import CostModel, PricedPlan
from predict.costs import Floats
from predict.memory import per_phase_memory
from predict.simulator import Timeline, condense, simulate
from predict.workload import Evaluator, Point, Timing, Workload


def prepare(model: CostModel, point: Point) -> Workload:
    """Plan, price, and condense the plan for repeated simulation."""
    planner = planner_for(point.strategy)
    plan = planner.plan(model.network, point.strategy, point.settings)
    priced = model.price(plan)
    by_phase, coarse = (
        [_simulation(role, priced, across_phases=across_phases) for role in plan.roles]
        for across_phases in (False, True)
    )
    return Workload(
        costs=priced.costs,
        spread=priced.spread,
        remarks=priced.remarks,
        memory=per_phase_memory(
            model.network, point.local_batch, model.optimizer, ranks=point.strategy.ranks, dtype=model.dtype
        ),
        limits=tuple(map(str, planner.limits(model.network, point.settings))),
        time=lambda *costs: max((each.timing(*costs) for each in by_phase), key=lambda timing: timing.iteration_s),
        iteration_s=lambda *costs: max(each.run(*costs).iteration_s for each in coarse),
        lag=priced.straggler.factor,
    )


def _simulation(role: Role, priced: PricedPlan, *, across_phases: bool) -> _Simulation:
    lag = np.where(priced.costs.is_communication[role.work], 1.0, priced.straggler.factor)
    return _Simulation(role, lag, across_phases=across_phases)


class _Simulation:
    """A role condensed once, to be run under many costs of its works.

    Args:
        lag: per task, how much longer the slowest rank takes.
    """

    def __init__(self, role: Role, lag: Floats, *, across_phases: bool) -> None:
        self._condensed = condense(role, across_phases=across_phases)
        first_task = np.unique(self._condensed.segment, return_index=True)[1]
        self._work, self._lag = role.work, lag
        self._segment_work = role.work[first_task]
        on_compute = role.stream[first_task] == Stream.COMPUTE
        self._forward = on_compute & (self._condensed.phase == Phase.FW)
        self._backward = on_compute & (self._condensed.phase == Phase.BW)
        self._exchange = self._condensed.phase == Phase.GE

    def run(self, seconds: Floats, compute_slowdown: Floats, communication_slowdown: Floats) -> Timeline:
        """The timeline of the segments under costs per work."""
        return simulate(
            self._condensed.graph,
            self._condensed.sum_seconds(seconds[self._work] * self._lag),
            compute_slowdown[self._segment_work],
            communication_slowdown[self._segment_work],
        )

    def timing(self, seconds: Floats, compute_slowdown: Floats, communication_slowdown: Floats) -> Timing:
        """Where each phase ends, one after the other."""
        line = self.run(seconds, compute_slowdown, communication_slowdown)
        forward = _last(line, self._forward, 0.0)
        backward = _last(line, self._backward, forward)
        exchange = _last(line, self._exchange, backward)
        return Timing(
            fw_s=forward,
            bw_s=backward - forward,
            ge_s=exchange - backward,
            wu_s=max(line.iteration_s - exchange, 0.0),
            exposed_communication_s=line.exposed_communication_s,
            overlap_s=line.overlap_s,
        )


def _last(line: Timeline, chosen: NDArray[np.bool_], earliest: float) -> float:
    return max(earliest, float(line.end_s[chosen].max(initial=0.0)))


EVALUATOR = Evaluator(
    name="simulate",
    summary="the plan's tasks with overlap, interference and the slowest rank",
    prepare=prepare,
)
