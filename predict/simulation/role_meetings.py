"""Where roles of a plan meet: collectives that ranks of several roles are in start when the last of them has come.

The n-th of an operation along the same axes with the same reach is one collective on all ranks of its group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import permutations

import numpy as np

from paradl_bench.plan.mesh import members_of
from paradl_bench.plan.tasks import Collective, Ints, Plan, Role, Scope
from predict.simulation.simulator import TaskGraph

_Kind = tuple[str, tuple[int, ...], Scope]
"""Operation, axes and scope of a collective."""


def meetings(plan: Plan, graphs: Sequence[TaskGraph], nodes: Sequence[Ints]) -> Iterator[tuple[int, Ints, int, Ints]]:
    """Edges that have a collective of one role wait for all that another role does before the same one.

    Of each pair of roles: (role, nodes) that are waited for, and (role, nodes) that wait, as
    :func:`predict.simulation.simulator.merge_graphs` takes them. What roles issue in unlike numbers gets none.

    Args:
        graphs: of the roles. nodes: per role and task of it, the node of its graph that holds the task.
    """
    if len(plan.roles) == 1:
        return
    issued, together = plan.found.once("meetings", lambda: _met(plan))
    done_before = [_before(*of_role) for of_role in zip(plan.roles, graphs, nodes, strict=True)]
    for waited_for, waiting in permutations(range(len(plan.roles)), 2):
        for kind, tasks in issued[waiting].items():
            theirs = issued[waited_for].get(kind, [])
            if len(theirs) != len(tasks) or waited_for not in together[waiting][kind]:
                continue
            of_each, source = done_before[waited_for](np.array(theirs))
            yield waited_for, source, waiting, nodes[waiting][np.array(tasks)[of_each]]


def _met(plan: Plan) -> tuple[list[dict[_Kind, list[int]]], list[dict[_Kind, set[int]]]]:
    """What each role issues, and the roles that are in it together."""
    issued = [_issued(plan, role) for role in range(len(plan.roles))]
    return issued, _roles_together(plan, issued)


def _issued(plan: Plan, role: int) -> dict[_Kind, list[int]]:
    """Tasks of a role that are collectives, in order, by what they are."""
    works = plan.roles[role].work
    kinds = {index: (work.operation, work.axes, work.scope) for index, work in plan.of_kind(Collective).items()}
    tasks = np.flatnonzero(np.isin(works, list(kinds)))
    collectives: dict[_Kind, list[int]] = {}
    for task, index in zip(tasks.tolist(), works[tasks].tolist(), strict=True):
        collectives.setdefault(kinds[index], []).append(task)
    return collectives


def _before(role: Role, graph: TaskGraph, nodes: Ints) -> Callable[[Ints], tuple[Ints, Ints]]:
    """From tasks to what a rank is done with as it comes to each: what the task waits for, and the last on its lane.

    Pairs of (index in the tasks, node), by task; each node once.
    """
    by_lane = np.argsort(graph.lane[nodes], kind="stable")
    lanes, last = graph.lane[nodes][by_lane], np.full(role.tasks, -1, np.int32)
    last[by_lane[1:]] = np.where(lanes[1:] == lanes[:-1], nodes[by_lane[:-1]], -1)

    def of(tasks: Ints) -> tuple[Ints, Ints]:
        counts = np.diff(role.dependency_start)[tasks]
        waiting = np.repeat(np.arange(len(tasks)), counts)
        # Of the dependencies of all these tasks, how many are before those of a task.
        skipped = np.repeat(role.dependency_start[tasks] - (np.cumsum(counts) - counts), counts)
        waited_for = nodes[role.dependencies[skipped + np.arange(len(waiting))]]
        behind = np.flatnonzero(last[tasks] >= 0)
        index, node = np.concatenate([waiting, behind]), np.concatenate([waited_for, last[tasks][behind]])
        order = np.lexsort((node, index))
        index, node = index[order], node[order]
        first = np.append(True, (np.diff(index) != 0) | (np.diff(node) != 0))[: len(index)]
        return index[first], node[first].astype(np.int32)

    return of


def _roles_together(plan: Plan, issued: Sequence[dict[_Kind, list[int]]]) -> list[dict[_Kind, set[int]]]:
    """Per role and collective of it, the roles that ranks of its group play."""
    played = [plan.role_of(rank) for rank in range(plan.strategy.ranks)]
    by_role: list[dict[_Kind, set[int]]] = []
    for role, of_role in enumerate(issued):
        # By symmetry any rank of the role tells.
        rank, works = played.index(role), plan.roles[role].work
        of_kinds = {}
        for kind, tasks in of_role.items():
            work = plan.works[int(works[tasks[0]])]
            assert isinstance(work, Collective)
            of_kinds[kind] = {played[member] for member in members_of(plan.strategy, work, rank)}
        by_role.append(of_kinds)
    return by_role
