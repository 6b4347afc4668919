"""Stages of one node send each other what crosses no link between nodes, and are priced so."""

from __future__ import annotations

import pytest
from profile_factory import make_network
from search_cases import LEVELS, profile_of

from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import Strategy, parse_strategy
from paradl_bench.plan.tasks import Transfer
from paradl_bench.records.cluster import Level
from paradl_bench.strategies.nesting.catalog import planner_for
from predict.costs.communication.hops import span_of_hop
from predict.costs.cost_model import CostModel

NETWORK = make_network((64, 512, 256, 512, 32))


def spans(strategy: str, *units: int) -> list[int]:
    """From each stage to the next, and from the last to the first, in nodes, racks, ... of so many ranks."""
    parsed = parse_strategy(strategy)
    (along,) = [index for index, axis in enumerate(parsed.axes) if axis.has(Trait.STAGES)]
    stages, stride = parsed.axes[along].degree, 1
    for axis in parsed.axes[along + 1 :]:
        stride *= axis.degree
    levels = [Level(name=str(ranks), ranks=ranks) for ranks in units]
    places = [(place, (place + 1) % stages) for place in range(stages)]
    found = [span_of_hop(levels, parsed.ranks, (stages, stride), hop) for hop in places]
    assert found == [by_ranks(parsed, along, stages * stride, units, hop) for hop in places]
    return found


def by_ranks(strategy: Strategy, along: int, whole: int, units: tuple[int, ...], hop: tuple[int, int]) -> int:
    """Likewise, from where each rank stands."""
    place = {rank: strategy.coordinates(rank) for rank in range(strategy.ranks)}
    pairs = [
        (sender, receiver)
        for sender, of_sender in place.items()
        for receiver, of_receiver in place.items()
        if of_sender[along] == hop[0] and of_receiver == (*of_sender[:along], hop[1], *of_sender[along + 1 :])
    ]
    together = [unit for unit in units if all(one // unit == other // unit for one, other in pairs)]
    return min([unit for unit in together if unit < whole], default=whole)


def test_two_stages_a_node_cross_links_at_every_second_cut() -> None:
    assert spans("p4t2", 4, 64) == [4, 8, 4, 8]


def test_stages_as_large_as_nodes_cross_links_at_every_cut() -> None:
    assert spans("d2p4t4", 4, 64) == [16, 16, 16, 16]


def test_a_pipeline_inside_of_a_node_crosses_none() -> None:
    assert spans("d4p4", 8, 64) == [4, 4, 4, 4]


def test_one_replica_that_crosses_nodes_decides() -> None:
    # The fourth of the replicas of five ranks has its first two in different nodes of four.
    assert spans("d3p5", 4, 64)[0] == 4
    assert spans("d4p5", 4, 64)[0] == 5


def test_every_level_holds_the_hops_inside_of_it() -> None:
    assert spans("p16", 2, 8, 64)[:8] == [2, 8, 2, 8, 2, 8, 2, 16]


def test_every_cut_takes_what_its_link_does() -> None:
    # Nodes of two ranks and racks of four: p4 crosses two nodes in the middle, p4d2 two nodes at each cut.
    node, rack, system = LEVELS
    assert links_of("p4", node, rack, node)
    assert links_of("d2p4", node, rack, node)
    assert links_of("p4d2", rack, system, rack)


def links_of(strategy: str, *links: Level) -> bool:
    """Whether what crosses each cut takes what these links do."""
    parsed = parse_strategy(strategy)
    plan = planner_for(parsed).plan(NETWORK, parsed, plan_settings(batch=8, micro_batches=4))
    seconds = CostModel(profile=profile_of(NETWORK), network=NETWORK).price(plan).costs.seconds
    sends = {
        work.cut: (sum(size for _, size in work.messages), float(seconds[index]))
        for index, work in plan.of_kind(Transfer).items()
        if work.phase == "FW" and work.direction == "send"
    }
    assert sorted(sends) == list(range(len(links)))
    for cut, link in enumerate(links):
        size, found_s = sends[cut]
        assert link.alpha_s is not None
        assert link.beta_s_per_byte is not None
        assert found_s == pytest.approx(link.alpha_s + size * link.beta_s_per_byte * (link.contention or 1.0))
    return True
