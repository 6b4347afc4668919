"""In which contexts a plan calls its communication: after compute, with an all-reduce in flight, by how many ranks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.mesh import degree_of, zero_stage
from paradl_bench.plan.tasks import Collective, Phase, Plan, Role, Stream, Transfer, Work
from predict.costs.communication.communication_costs import Call


def calls_of(plan: Plan) -> list[Call]:
    """Per work of a plan, how it is called; of what does not communicate this says nothing."""
    return plan.once("calls", lambda: _find_calls(plan))


def _find_calls(plan: Plan) -> list[Call]:
    shares = [_taking_part(plan, work) for work in plan.works]
    exchange = max(_all_reduces_of_gradients(plan), key=lambda work: work.ranks, default=None)
    rows = zip(works_after_compute(plan), shares, works_with_all_reduce(plan), strict=True)
    return [Call(bool(behind), share, exchange if beside else None) for behind, share, beside in rows]


def _all_reduces_of_gradients(plan: Plan) -> list[Collective]:
    issued = {int(work) for role in plan.roles for work in np.unique(role.work[role.phase == Phase.GE])}
    works = plan.of_kind(Collective).items()
    return [work for index, work in works if index in issued and work.operation == "all_reduce"]


def works_with_all_reduce(plan: Plan) -> NDArray[np.bool_]:
    """Per work, whether it is communication for layers of a plan whose gradients are all-reduced beside backward.

    Such a one is waited for where it stands, on the thread that computes. Not of pipelines, whose stages queue what
    they send, nor of ZeRO, whose exchange is no all-reduce.
    """
    sharded = zero_stage(plan.strategy) > 0
    if not _all_reduces_of_gradients(plan) or sharded or degree_of(plan.strategy, Trait.STAGES) > 1:
        return np.zeros(len(plan.works), bool)
    return np.array([_is_blocking(plan, index) for index in range(len(plan.works))], bool)


def _is_blocking(plan: Plan, work: int) -> bool:
    if not (plan.works[work].is_of_layer and plan.works[work].meets):
        return False
    phases = {int(phase) for role in plan.roles for phase in np.unique(role.phase[role.work == work])}
    return phases <= {int(Phase.FW), int(Phase.BW)}


def _taking_part(plan: Plan, work: Work) -> float:
    """Share of the ranks that take part in all-reduces between nodes: of some leaders of a node, they alone do."""
    if not isinstance(work, Collective) or work.scope != "between nodes":
        return 1.0
    alike = [
        index
        for index, other in plan.of_kind(Collective).items()
        if (other.operation, other.axes, other.scope) == (work.operation, work.axes, work.scope)
    ]
    ranks = sum(role.multiplicity for role in plan.roles if np.isin(role.work, alike).any())
    return ranks / plan.strategy.ranks


def works_after_compute(plan: Plan) -> NDArray[np.bool_]:
    """Per work, whether a rank comes to it from compute and computes on only when it is done, as a rule.

    Halos and the collectives of shared layers do, a gather that a process waits for, and the first of a run of
    collectives (buffers that are broadcast). A pipeline's message is waited for by the stage that receives it. An
    all-reduce of gradients does not: it is issued beside backward, and waits for the others.
    """
    return plan.once("works after compute", lambda: _find_after_compute(plan))


def _find_after_compute(plan: Plan) -> NDArray[np.bool_]:
    behind = np.zeros((2, len(plan.works)), int)
    is_sent = np.zeros(len(plan.works), bool)
    is_sent[[index for index, work in plan.of_kind(Transfer).items() if work.direction == "send"]] = True
    for role in plan.roles:
        chosen = _tasks_after_compute(plan.works, role) | is_sent[role.work]
        for row, tasks in zip(behind, (~chosen, chosen), strict=True):
            row += np.bincount(role.work[tasks], minlength=len(plan.works))
    return np.asarray(behind[1] > behind[0])


def _tasks_after_compute(works: tuple[Work, ...], role: Role) -> NDArray[np.bool_]:
    """Per task of a role, likewise, but for what is sent."""
    after_compute = np.zeros(role.tasks, bool)
    computes, chosen = role.stream == Stream.COMPUTE, _communicating_or_waiting_for_it(role)
    last_computed = int(np.flatnonzero(computes)[-1]) if computes.any() else -1
    run: list[int] = []
    phase_of_run = -1
    waited_for = False
    from_compute = False

    def end_run() -> None:
        if run and from_compute and (waited_for or last_computed < run[-1]):
            after_compute[run[0]] = not _is_exchange(works[role.work[run[0]]], phase_of_run)

    # Few of the tasks: lists of all of them would take longer than the rest.
    bounds = role.dependency_start[chosen], role.dependency_start[chosen + 1]
    columns = chosen, *bounds, computes[chosen], role.phase[chosen]
    for task, start, stop, is_compute, phase in zip(*(column.tolist() for column in columns), strict=True):
        waits_for = role.dependencies[start:stop]
        if is_compute:
            waited_for = waited_for or any(other in run for other in waits_for.tolist())
            continue
        computed = waits_for[computes[waits_for]].tolist()
        goes_on = run and run[-1] == task - 1 and phase_of_run == phase
        if goes_on and max(computed, default=-1) < run[0]:
            run.append(task)
            continue
        end_run()
        # What an iteration begins with stands behind the weight update of the one before.
        run, waited_for, from_compute, phase_of_run = [task], False, bool(computed) or task == 0, phase
    end_run()
    return after_compute


def _communicating_or_waiting_for_it(role: Role) -> NDArray[np.integer]:
    """Tasks of the communication stream, and those of the compute stream that wait for one, in order."""
    row = np.repeat(np.arange(role.tasks), np.diff(role.dependency_start))
    chosen = role.stream == Stream.COMMUNICATION
    chosen[row[chosen[role.dependencies] & (role.stream[row] == Stream.COMPUTE)]] = True
    return np.flatnonzero(chosen)


def _is_exchange(work: Work, phase: int) -> bool:
    return phase == Phase.GE and isinstance(work, Collective) and work.operation == "all_reduce"
