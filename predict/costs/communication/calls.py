"""In which contexts a plan calls its communication: after compute, with an all-reduce in flight, by how many ranks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paradl_bench.plan.mesh import zero_stage
from paradl_bench.plan.tasks import Collective, Ints, Phase, Plan, Stream, TaskArrays, Transfer, Work
from predict.costs.communication.communication_costs import Call


def calls_of(plan: Plan) -> list[Call]:
    """Per work of a plan, how it is called; of what does not communicate this says nothing."""
    return plan.found.once("calls", lambda: _find_calls(plan))


def _find_calls(plan: Plan) -> list[Call]:
    shares = [_taking_part(plan, work) for work in plan.works]
    exchange = max(_all_reduces_of_gradients(plan), key=lambda work: work.ranks, default=None)
    rows = zip(works_after_compute(plan), shares, works_with_all_reduce(plan), strict=True)
    return [Call(bool(behind), share, exchange if beside else None) for behind, share, beside in rows]


def _all_reduces_of_gradients(plan: Plan) -> list[Collective]:
    tasks = (role.arrays.brief.tasks for role in plan.roles)
    issued = {work for of_role in tasks for work in _numbers_in(of_role.work[of_role.phase == Phase.GE])}
    works = plan.of_kind(Collective).items()
    return [work for index, work in works if index in issued and work.operation == "all_reduce"]


def _numbers_in(values: Ints) -> list[int]:
    """The distinct ones among small numbers. (``np.unique`` loads masked arrays, which every command waits for.)"""
    return list(np.flatnonzero(np.bincount(values)).tolist())


def works_with_all_reduce(plan: Plan) -> NDArray[np.bool_]:
    """Per work, whether it is communication for layers of a plan whose gradients are all-reduced beside backward.

    Such a one is waited for where it stands, on the thread that computes, in a group of its own. So is what a stage
    sends, for which another one waits. Not of ZeRO, whose exchange is no all-reduce.
    """
    sharded = zero_stage(plan.strategy) > 0
    if not _all_reduces_of_gradients(plan) or sharded:
        return np.zeros(len(plan.works), bool)
    behind_compute = _works_behind_compute(plan)
    return np.array([_is_blocking(*of) for of in zip(plan.works, behind_compute.tolist(), strict=True)], bool)


def _works_behind_compute(plan: Plan) -> NDArray[np.bool_]:
    """Per work, whether any of its tasks is outside of forward and backward."""
    found = np.zeros(len(plan.works), bool)
    for role in plan.roles:
        tasks = role.arrays.brief.tasks
        found[tasks.work[(tasks.phase != Phase.FW) & (tasks.phase != Phase.BW)]] = True
    return found


def _is_blocking(work: Work, behind_compute: bool) -> bool:
    if isinstance(work, Transfer):
        return work.direction == "send" and work.to < 0
    return bool(work.is_of_layer and work.meets) and not behind_compute


def _taking_part(plan: Plan, work: Work) -> float:
    """Share of the ranks that take part in all-reduces between nodes: of some leaders of a node, they alone do."""
    if not isinstance(work, Collective) or work.scope != "between nodes":
        return 1.0
    alike = [
        index
        for index, other in plan.of_kind(Collective).items()
        if (other.operation, other.axes, other.scope) == (work.operation, work.axes, work.scope)
    ]
    taking_part = (role for role in plan.roles if np.isin(role.arrays.brief.tasks.work, alike).any())
    ranks = sum(role.multiplicity for role in taking_part)
    return ranks / plan.strategy.ranks


def works_after_compute(plan: Plan) -> NDArray[np.bool_]:
    """Per work, whether a rank comes to it from compute and computes on only when it is done, as a rule.

    Halos and the collectives of shared layers do, a gather that a process waits for, and the first of a run of
    collectives (buffers that are broadcast). A pipeline's message is waited for by the stage that receives it. An
    all-reduce of gradients does not: it is issued beside backward, and waits for the others.
    """
    return plan.found.once("works after compute", lambda: _find_after_compute(plan))


def _find_after_compute(plan: Plan) -> NDArray[np.bool_]:
    behind = np.zeros((2, len(plan.works)), int)
    is_sent = np.zeros(len(plan.works), bool)
    is_sent[[index for index, work in plan.of_kind(Transfer).items() if work.direction == "send"]] = True
    for role in plan.roles:
        tasks, times = role.arrays.brief.tasks, role.arrays.brief.times
        chosen = _tasks_after_compute(plan.works, tasks) | is_sent[tasks.work]
        for row, of_row in zip(behind, (~chosen, chosen), strict=True):
            row += np.bincount(tasks.work[of_row], weights=times[of_row], minlength=len(plan.works)).astype(int)
    return np.asarray(behind[1] > behind[0])


def _tasks_after_compute(works: tuple[Work, ...], role: TaskArrays) -> NDArray[np.bool_]:
    """Per task of a role, likewise, but for what is sent."""
    after_compute = np.zeros(role.tasks, bool)
    computes, issued = role.stream == Stream.COMPUTE, np.flatnonzero(role.stream == Stream.COMMUNICATION)
    if not len(issued):
        return after_compute
    # A run are calls of one phase, one right behind the other.
    begins = (np.diff(issued, prepend=-2) > 1) | (np.diff(role.phase[issued], prepend=-1) != 0)
    first, last = issued[begins], issued[np.append(begins[1:], True)]
    run_of = np.full(role.tasks, -1)
    run_of[issued] = np.cumsum(begins) - 1
    task, waits_for = np.repeat(np.arange(role.tasks), np.diff(role.dependency_start)), role.dependencies
    from_compute, waited_for = np.zeros((2, len(first)), bool)
    # What an iteration begins with stands behind the weight update of the one before.
    from_compute[0] = first[0] == 0
    is_first = np.zeros(role.tasks, bool)
    is_first[first] = True
    from_compute[run_of[task[computes[waits_for] & is_first[task]]]] = True
    # Compute that waits for a run does so before the next one begins.
    met = computes[task] & (run_of[waits_for] >= 0)
    runs, in_front = run_of[waits_for[met]], np.searchsorted(first, task[met]) - 1
    waited_for[runs[runs == in_front]] = True
    last_computed = int(np.flatnonzero(computes)[-1]) if computes.any() else -1
    chosen = first[from_compute & (waited_for | (last_computed < last))]
    phases, of_tasks = role.phase[chosen].tolist(), role.work[chosen].tolist()
    after_compute[chosen] = [not _is_exchange(works[work], phase) for work, phase in zip(of_tasks, phases, strict=True)]
    return after_compute


def _is_exchange(work: Work, phase: int) -> bool:
    return phase == Phase.GE and isinstance(work, Collective) and work.operation == "all_reduce"
