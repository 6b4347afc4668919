"""Where roles of a plan meet: collectives that ranks of several roles are in start when the last of them has come.

The n-th of an operation along the same axes with the same reach is one collective on all ranks of its group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    before = [
        _before(role, graph, node_of_task, {task for tasks in of_kinds.values() for task in tasks})
        for role, graph, node_of_task, of_kinds in zip(plan.roles, graphs, nodes, issued, strict=True)
    ]
    for waited_for, waiting in permutations(range(len(plan.roles)), 2):
        for kind, tasks in issued[waiting].items():
            theirs = issued[waited_for].get(kind, [])
            if len(theirs) != len(tasks) or waited_for not in together[waiting][kind]:
                continue
            pairs = [
                (node, task) for other, task in zip(theirs, tasks, strict=True) for node in before[waited_for][other]
            ]
            source, target = np.array(pairs, np.int32).reshape(-1, 2).T
            yield waited_for, source, waiting, nodes[waiting][target]


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


def _before(role: Role, graph: TaskGraph, nodes: Ints, tasks: set[int]) -> dict[int, list[int]]:
    """Of some tasks, nodes that a rank is done with as it comes to each: waited for, or before it on its lane."""
    rows, blocking, lanes = role.dependency_start.tolist(), nodes[role.dependencies], graph.lane[nodes].tolist()
    done_before: dict[int, list[int]] = {}
    last: dict[int, int] = {}
    for task, (lane, node) in enumerate(zip(lanes, nodes.tolist(), strict=True)):
        if task in tasks:
            done_before[task] = sorted(set(blocking[rows[task] : rows[task + 1]].tolist()))
            if lane in last:
                done_before[task].append(last[lane])
        last[lane] = node
    return done_before


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
