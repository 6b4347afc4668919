"""What the ranks of a host take from each other, where they compute in turns.

A profile's seconds are of ranks that all compute at once, as they do under data parallelism; on a host whose memory or
caches they share, a rank is faster while another one waits. Stages of a pipeline wait for each other, the more so the
less they are balanced. Where the profile was measured with one rank on the host too, what a stage computes takes

    t = t_all (1 - (1 - r) (1 - b)),     r = t_one / t_all

with b the mean share of the other ranks of its host that compute meanwhile. b follows from when stages compute, and
that from t: a few rounds find both. More of one makes less of the other, so from the second round on each goes half the
way, which ends the swinging to and fro of hosts whose ranks slow each other much.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.mesh import degree_of
from paradl_bench.plan.tasks import Plan
from predict.costs.cost_model import CostModel
from predict.costs.priced import PricedPlan
from predict.costs.sourced import CorrelatedError, Costs, Floats, Remark
from predict.simulation.exposure import StreamTimes
from predict.simulation.pipelines.pipeline_simulation import Computing, PipelineSimulation, lines_of_stages

_MOST_ROUNDS = 12
_CLOSE = 1e-3
"""Of a work's seconds: what it moves by when the rounds end."""
_MODE = "compute beside idle ranks of the host"


def on_shared_host(costs: CostModel, priced: PricedPlan) -> PricedPlan:
    """A pipeline's plan priced for stages that do not all compute at once; any other plan as it is.

    When stages compute is taken of ranks none of which is late.
    """
    plan, place = priced.plan, priced.place
    if degree_of(plan.strategy, Trait.STAGES) <= 1:
        return priced
    alone = costs.alone_on_host(plan, place)
    if alone is None or np.all(alone[0] == 1):
        return priced
    beside = ranks_beside(plan, place.ranks_on_host)
    simulation = PipelineSimulation(plan, np.ones(len(plan.works)), blocking=priced.blocking)
    shared = priced.costs
    idle = np.zeros(len(plan.works))
    for number in range(_MOST_ROUNDS):
        of_works = shared.seconds, shared.compute_slowdown, shared.communication_slowdown
        computing = [line.computing(*of_works) for line in simulation.lines]
        moved = 1 - busy_beside(plan, computing, beside) - idle
        idle = idle + (moved / 2 if number else moved)
        shared = _scaled(priced.costs, 1 - (1 - alone[0]) * idle, alone[1] * idle)
        if np.max(np.abs((1 - alone[0]) * moved)) < _CLOSE:
            break
    text = (
        "stages that compute while others of their host wait take between the measured times of one rank and of all"
        " ranks"
    )
    priced.remarks.add(Remark(text, False))
    return dataclasses.replace(priced, costs=shared)


def ranks_beside(plan: Plan, ranks_on_host: int) -> Floats:
    """Of shape (roles, roles): how many ranks of each role share a host with a rank of the role, itself left out.

    Ranks fill hosts in order; a role's first rank stands for all of them.
    """
    beside = np.zeros((len(plan.roles), len(plan.roles)))
    for role, rank in _first_ranks(plan).items():
        host = rank // ranks_on_host
        for other in range(host * ranks_on_host, min((host + 1) * ranks_on_host, plan.strategy.ranks)):
            if other != rank:
                beside[role, plan.role_of(other)] += 1
    return beside


def busy_beside(plan: Plan, computing: list[Computing], beside: Floats) -> Floats:
    """Per work, the mean share of the other ranks of the host that compute while it runs; 1 for what never does."""
    lines = lines_of_stages(plan)
    clocks: dict[int, StreamTimes] = {}
    for line, of_line in zip(lines, computing, strict=True):
        for stage, role in enumerate(line):
            of_stage = of_line.stage == stage
            clocks.setdefault(role, StreamTimes(of_line.start_s[of_stage], of_line.end_s[of_stage]))
    weight, total = np.zeros(len(plan.works)), np.zeros(len(plan.works))
    for line, of_line in zip(lines, computing, strict=True):
        shares = np.ones(len(of_line.stage))
        for stage, role in enumerate(line):
            of_stage = np.flatnonzero(of_line.stage == stage)
            shares[of_stage] = _shares(role, of_line.start_s[of_stage], of_line.end_s[of_stage], clocks, beside[role])
        np.add.at(weight, of_line.task_work, 1.0)
        np.add.at(total, of_line.task_work, shares[of_line.task_segment])
    return np.where(weight > 0, total / np.maximum(weight, 1.0), 1.0)


def _shares(role: int, start_s: Floats, end_s: Floats, clocks: dict[int, StreamTimes], beside: Floats) -> Floats:
    lasting = np.maximum(end_s - start_s, np.finfo(float).tiny)
    busy = np.zeros(len(start_s))

    def computed_s(clock: StreamTimes) -> Floats:
        return clock.busy_until(end_s) - clock.busy_until(start_s)

    for other in np.flatnonzero(beside).tolist():
        # Replicas of the stage keep its time.
        share = 1.0 if other == role else computed_s(clocks[other]) / lasting
        busy += beside[other] * np.minimum(share, 1.0)
    others = beside.sum()
    return np.asarray(busy / others) if others else np.zeros(len(start_s))


def _first_ranks(plan: Plan) -> dict[int, int]:
    """Of each role, the first rank that plays it."""
    first_rank_of: dict[int, int] = {}
    for rank in range(plan.strategy.ranks):
        first_rank_of.setdefault(plan.role_of(rank), rank)
        if len(first_rank_of) == len(plan.roles):
            break
    return first_rank_of


def _scaled(costs: Costs, factor: Floats, factor_sd: Floats) -> Costs:
    """Costs with seconds times a factor, and the factor's spread as a source of error that all works share."""
    none = np.zeros(len(factor))
    return dataclasses.replace(
        costs,
        seconds=costs.seconds * factor,
        independent_sd_s=costs.independent_sd_s * factor,
        modes=(
            *(mode._replace(seconds=mode.seconds * factor) for mode in costs.modes),
            CorrelatedError(_MODE, costs.seconds * factor_sd, none, none),
        ),
    )
