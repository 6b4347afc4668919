"""Exchange of gradients over nodes: what leaders and others issue, which roles they play, and what is refused."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
from network_factory import NetworkFactory

from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.axes.registry import read_options
from paradl_bench.plan.axis_planner import refuse_unused
from paradl_bench.plan.mesh import members_of
from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Collective, Phase, Plan, Stream
from paradl_bench.strategies.exchange.node_groups import NodeGroups, Step
from paradl_bench.strategies.exchange.options import ExchangeOptions
from paradl_bench.strategies.nesting.catalog import planner_for

ONE_BUCKET = {"first_bucket_bytes": 1 << 30, "bucket_cap_bytes": 1 << 30}


def network() -> ModelGraph:
    """Convolutions whose parameters are an odd number."""
    factory = NetworkFactory(11, 8, 8)
    factory.conv("conv1", 4, 3, padding=1)
    factory.conv("conv2", 11, 3, padding=1)
    factory.conv("conv3", 5, 3, padding=1)
    factory.flatten("flatten")
    factory.loss()
    return factory.network("small")


def plan(strategy: str, exchange: str, on_node: int | None, **options: Any) -> Plan:
    parsed = parse_strategy(strategy)
    chosen = {"batch": 16, "exchange": exchange, "ranks_per_node": on_node, **ONE_BUCKET, **options}
    settings = plan_settings(**chosen)
    return planner_for(parsed).plan(network(), parsed, settings)


def exchanged(found: Plan, role: int) -> list[tuple[str, str, int, int]]:
    """(operation, reach, bytes, ranks) of a role's exchange, in order."""
    works = [work for work in found.communication(role, phases=(Phase.GE,)) if isinstance(work, Collective)]
    return [(work.operation, work.scope, work.message_bytes, work.ranks) for work in works]


def test_parts_of_a_bucket_have_a_leader_each() -> None:
    groups = NodeGroups(axes=(0,), nodes=2, per_node=4, leaders=3)
    parts = [(0, 4), (4, 3), (7, 3)]
    for local in range(4):
        assert groups.steps(10, local) == (
            *(Step("reduce", "node", count, start, leader) for leader, (start, count) in enumerate(parts)),
            *(Step("all_reduce", "between nodes", count, start) for start, count in parts[local : local + 1]),
            *(Step("broadcast", "node", count, start, leader) for leader, (start, count) in enumerate(parts)),
        )
    assert [groups.leader_index(local) for local in range(4)] == [0, 1, 2, 3]
    # Of two elements the third leader gets none.
    assert [step.elements for step in groups.steps(2, 2)] == [1, 1, 1, 1]


def test_segments_are_padded() -> None:
    groups = NodeGroups(axes=(0,), nodes=2, per_node=4, leaders=0)
    assert [(step.operation, step.elements) for step in groups.steps(10, 3)] == [
        ("reduce_scatter", 3),
        ("all_reduce", 3),
        ("all_gather", 3),
    ]
    assert {groups.leader_index(local) for local in range(4)} == {0}


def test_a_bucket_goes_through_its_chain_on_the_communication_stream() -> None:
    size = network().parameter_bytes
    found = plan("d8", "leader", 4)
    assert [role.multiplicity for role in found.roles] == [2, 6]
    within = [("reduce", "node", size, 4), ("broadcast", "node", size, 4)]
    assert exchanged(found, 0) == [within[0], ("all_reduce", "between nodes", size, 2), within[1]]
    assert exchanged(found, 1) == within
    segments = plan("d8", "segmented", 4)
    part = -(-size // 4 // 4) * 4
    assert [role.multiplicity for role in segments.roles] == [8]
    assert exchanged(segments, 0) == [
        ("reduce_scatter", "node", part, 4),
        ("all_reduce", "between nodes", part, 2),
        ("all_gather", "node", part, 4),
    ]
    role = segments.roles[0]
    chain = [task for task in range(role.tasks) if role.stream[task] == Stream.COMMUNICATION]
    for before, task in itertools.pairwise(chain):
        waits = role.dependencies[role.dependency_start[task] : role.dependency_start[task + 1]]
        assert waits.tolist() == [before]


@pytest.mark.parametrize(
    ("strategy", "on_node", "leaders"),
    [("d4", 2, 1), ("d4", 2, 2), ("d8", 4, 3), ("d2s2", 2, 1), ("d4s2", 4, 3), ("s2d2", 2, 1), ("d4f2", 4, 1)],
)
def test_ranks_play_their_roles(strategy: str, on_node: int, leaders: int) -> None:
    """Each leads as often as a leader of its place does, and leaders of a part are as many as nodes."""
    found = plan(strategy, f"leaders:{leaders}", on_node)
    ranks = found.strategy.ranks
    played = Counter(found.role_of(rank) for rank in range(ranks))
    assert played == {index: role.multiplicity for index, role in enumerate(found.roles)}
    issued = [exchanged(found, found.role_of(rank)) for rank in range(ranks)]
    leading = [rank for rank in range(ranks) if any(name == "all_reduce" for name, *_ in issued[rank])]
    # Two groups share a node where filters are split.
    assert len(leading) == ranks // on_node * leaders * (2 if "f" in strategy else 1)
    for rank in leading:
        works = found.communication(found.role_of(rank), phases=(Phase.GE,))
        for work in works:
            assert isinstance(work, Collective)
            members = members_of(found.strategy, work, rank)
            assert rank in members
            assert len(members) == work.ranks
            nodes = {member // on_node for member in members}
            assert len(nodes) == (1 if work.scope == "node" else work.ranks)
            if work.scope == "between nodes":
                assert set(members) <= set(leading)


def test_groups_stride_over_what_lies_inside() -> None:
    found = plan("d4f2", "leader", 4)
    (first, *_) = [work for work in found.works if isinstance(work, Collective) and work.scope == "node"]
    (between, *_) = [work for work in found.works if isinstance(work, Collective) and work.scope == "between nodes"]
    assert members_of(found.strategy, first, 3) == (1, 3)
    assert members_of(found.strategy, first, 5) == (5, 7)
    assert members_of(found.strategy, between, 5) == (1, 5)


@pytest.mark.parametrize(
    ("strategy", "exchange", "on_node", "said"),
    [
        ("f2", "leader", 2, "strategy f2: --exchange leader is for data and spatial parallelism without a pipeline"),
        ("d2p2", "leader", 2, "without a pipeline, up to ZeRO stage 1"),
        ("z2d4", "segmented", 2, "without a pipeline, up to ZeRO stage 1"),
        ("d4", "leader", None, "--exchange leader needs to know the nodes: give --ranks-per-node"),
        ("d4", "leader", 3, "4 ranks do not fill nodes of 3; give another --ranks-per-node"),
        ("d4", "leader", 4, "share one of 4 ranks; give --ranks-per-node of less, or --exchange flat"),
        ("f2d2", "leader", 2, "share one of 2 ranks"),
        ("d4", "segmented", 1, "no two that exchange gradients share one of 1 ranks; give --exchange flat"),
        ("d2f2", "leader", 2, "no two that exchange gradients share one of 2 ranks"),
        ("d3f4", "leader", 6, "nodes of 6 ranks hold unlike numbers of ranks that exchange gradients"),
        ("d4", "leaders:3", 2, "more leaders than the 2 ranks .* on a node; give at most leaders:2"),
    ],
)
def test_what_no_nodes_can_do_is_refused(strategy: str, exchange: str, on_node: int | None, said: str) -> None:
    with pytest.raises(UserError, match=said):
        plan(strategy, exchange, on_node, batch=12)


def placed(exchange: str, given: int | None, known: int | None) -> int | None:
    axes, _ = read_options({"exchange": exchange, "ranks_per_node": given})
    (own,) = (options.placed(lambda: known) for options in axes if isinstance(options, ExchangeOptions))
    return own.ranks_per_node


def test_what_the_options_say() -> None:
    settings = plan_settings(batch=1, exchange="leader", ranks_per_node=2)
    with pytest.raises(UserError, match="context, expert parallelism, not for serial,f2"):
        refuse_unused(settings, [parse_strategy("serial"), parse_strategy("f2")])
    refuse_unused(settings, [parse_strategy("serial"), parse_strategy("s2")])
    assert placed("flat", None, 4) is None
    assert placed("leader", None, 4) == 4
    assert placed("leaders:2", 8, 4) == 8
    assert placed("segmented", None, None) is None
    for wrong in ("tree", "leaders", "leaders:0", "leaders:x", "leader:2"):
        with pytest.raises(UserError, match=f"--exchange {wrong}: give flat, leader, leaders:K"):
            placed(wrong, None, 2)
        with pytest.raises(ValueError, match="exchange has to be"):
            plan_settings(batch=1, exchange=wrong)
    with pytest.raises(UserError, match="--ranks-per-node is for --exchange leader"):
        placed("flat", 2, 4)
