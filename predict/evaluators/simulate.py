"""``simulate``: the plan's tasks on their streams, with interference and the lag of the slowest rank.

The exchange starts when the last rank arrives, so what a rank computes between two exchanges counts as the slowest of
p ranks computes it (:meth:`predict.model_costs.ModelCosts.straggler`). Lag is applied to all compute of an iteration,
weight update included, because the next exchange waits for that as well.
"""

from __future__ import annotations

import numpy as np

from paradl_bench.spec.plan import Phase, Stream
from paradl_bench.strategies.catalog import planner_for
from predict.cost_model import CostModel
from predict.costs import Floats
from predict.memory import per_phase_memory
from predict.simulator import condense, simulate
from predict.workload import Evaluator, Point, Timing, Workload


def prepare(model: CostModel, point: Point) -> Workload:
    """Plan, price, and condense the plan for repeated simulation."""
    planner = planner_for(point.strategy)
    plan = planner.plan(model.network, point.strategy, point.settings)
    priced = model.price(plan)
    role = plan.roles[0]
    condensed = condense(role)
    tasks_of_compute = ~priced.costs.is_communication[role.work]
    lag = np.where(tasks_of_compute, priced.straggler.factor, 1.0)
    first_task = np.unique(condensed.segment, return_index=True)[1]
    segment_work = role.work[first_task]
    on_compute = role.stream[first_task] == Stream.COMPUTE

    def time(seconds: Floats, compute_slowdown: Floats, communication_slowdown: Floats) -> Timing:
        line = simulate(
            condensed.graph,
            condensed.sum_seconds(seconds[role.work] * lag),
            compute_slowdown[segment_work],
            communication_slowdown[segment_work],
        )

        def last(chosen: np.ndarray[tuple[int], np.dtype[np.bool_]], earliest: float) -> float:
            return max(earliest, float(line.end_s[chosen].max(initial=0.0)))

        forward = last(on_compute & (condensed.phase == Phase.FW), 0.0)
        backward = last(on_compute & (condensed.phase == Phase.BW), forward)
        exchange = last(condensed.phase == Phase.GE, backward)
        return Timing(
            fw_s=forward,
            bw_s=backward - forward,
            ge_s=exchange - backward,
            wu_s=max(line.iteration_s - exchange, 0.0),
            exposed_communication_s=line.exposed_communication_s,
            overlap_s=line.overlap_s,
        )

    return Workload(
        costs=priced.costs,
        spread=priced.spread,
        remarks=priced.remarks,
        memory=per_phase_memory(
            model.network, point.local_batch, model.optimizer, ranks=point.strategy.ranks, dtype=model.dtype
        ),
        limits=tuple(map(str, planner.limits(model.network, point.settings))),
        time=time,
        lag=priced.straggler.factor,
    )


EVALUATOR = Evaluator(
    name="simulate",
    summary="the plan's tasks with overlap, interference and the slowest rank",
    prepare=prepare,
)
