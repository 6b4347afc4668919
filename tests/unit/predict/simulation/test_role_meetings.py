"""Roles that wait for each other in collectives, against times known by hand."""

from __future__ import annotations

import numpy as np
import pytest

from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Collective, FrameworkOverhead, Phase, Plan, Role, RoleBuilder, Stream, Work
from predict.simulation.role_meetings import meetings
from predict.simulation.simulator import merge_graphs, simulate, task_graph

COLLECTIVE_S = 0.5


def role(builder: RoleBuilder, name: str, collectives: list[Collective], ranks: int) -> Role:
    """Compute before every collective and behind the last one."""
    before: tuple[int, ...] = ()
    for collective in collectives:
        computed = builder.add(FrameworkOverhead(phase="FW"), Phase.FW, Stream.COMPUTE, before)
        before = (builder.add(collective, Phase.FW, Stream.COMMUNICATION, (computed,)),)
    builder.add(FrameworkOverhead(phase="FW"), Phase.FW, Stream.COMPUTE, before)
    return builder.build(name, ranks)


def gather(operation: str = "all_gather", axes: tuple[int, ...] = (0,)) -> Collective:
    return Collective(operation=operation, message_bytes=8, ranks=2, axes=axes)


def plan_of(strategy: str, issued: list[list[Collective]], positions: tuple[int, ...]) -> Plan:
    works: dict[Work, int] = {}
    ranks = parse_strategy(strategy).ranks
    roles = [
        role(RoleBuilder(works), f"role {index}", collectives, positions.count(index) * ranks // len(positions))
        for index, collectives in enumerate(issued)
    ]
    return Plan(
        strategy=parse_strategy(strategy),
        network="x",
        local_batch=1,
        works=tuple(works),
        roles=tuple(roles),
        positions=positions,
    )


def ends(plan: Plan, compute_s: list[list[float]]) -> list[float]:
    """When each role ends, its compute taking so long."""
    graphs = [task_graph(role) for role in plan.roles]
    seconds = []
    for role, own in zip(plan.roles, compute_s, strict=True):
        computes = iter(own)
        seconds += [next(computes) if stream == Stream.COMPUTE else COLLECTIVE_S for stream in role.stream]
    ones = np.ones(len(seconds))
    edges = list(meetings(plan, graphs, [np.arange(role.tasks, dtype=np.int32) for role in plan.roles]))
    line = simulate(merge_graphs(graphs, edges), np.array(seconds), ones, ones)
    borders = np.cumsum([role.tasks for role in plan.roles])[:-1]
    return [float(own.max()) for own in np.split(line.end_s, borders)]


def test_roles_that_are_slow_in_turn_wait_for_each_other() -> None:
    plan = plan_of("f2", [[gather(), gather()], [gather(), gather()]], (0, 1))
    # By itself each one would end after 4.
    assert ends(plan, [[1.0, 2.0, 0.0], [2.0, 1.0, 0.0]]) == pytest.approx([5.0, 5.0])
    assert ends(plan, [[1.0, 2.0, 0.25], [2.0, 1.0, 0.0]]) == pytest.approx([5.25, 5.0])


def test_collectives_of_unlike_operations_are_matched_by_what_they_are() -> None:
    several = [gather(), gather("all_reduce"), gather()]
    plan = plan_of("f2", [several, several], (0, 1))
    assert ends(plan, [[1.0, 0.0, 3.0, 0.0], [0.0, 2.0, 0.0, 1.0]]) == pytest.approx([7.5, 8.5])


def test_roles_without_a_common_group_keep_their_own_pace() -> None:
    """Replicas exchange with those of their own place, along the outer axis."""
    plan = plan_of("d2f2", [[gather()], [gather()]], (0, 1))
    assert ends(plan, [[1.0, 0.0], [2.0, 0.0]]) == pytest.approx([1.5, 2.5])
    shared = plan_of("d2f2", [[gather(axes=(1,))], [gather(axes=(1,))]], (0, 1))
    assert ends(shared, [[1.0, 0.0], [2.0, 0.0]]) == pytest.approx([2.5, 2.5])


def test_what_one_role_issues_more_often_has_no_partner() -> None:
    plan = plan_of("f2", [[gather(), gather("reduce"), gather()], [gather(), gather()]], (0, 1))
    assert ends(plan, [[0.0, 0.0, 0.0, 0.0], [2.0, 0.0, 0.0]]) == pytest.approx([3.5, 3.5])


def test_communication_queued_before_a_collective_delays_the_other_ranks() -> None:
    works: dict[Work, int] = {}
    roles = []
    for index, queued in enumerate(([gather("reduce"), gather()], [gather()])):
        builder = RoleBuilder(works)
        computed = builder.add(FrameworkOverhead(phase="FW"), Phase.FW, Stream.COMPUTE)
        for collective in queued:
            builder.add(collective, Phase.GE, Stream.COMMUNICATION, (computed,))
        roles.append(builder.build(f"role {index}", 1))
    plan = Plan(
        strategy=parse_strategy("f2"),
        network="x",
        local_batch=1,
        works=tuple(works),
        roles=tuple(roles),
        positions=(0, 1),
    )
    assert ends(plan, [[0.0], [0.0]]) == pytest.approx([1.0, 1.0])
