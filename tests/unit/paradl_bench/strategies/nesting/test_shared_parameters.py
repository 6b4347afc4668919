"""Parameters that several stages of a pipeline use: who holds them, what is sent for them, what is refused."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from network_factory import NetworkFactory

from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import BucketCopy, Phase, Transfer
from paradl_bench.strategies.memory.of_plan import memory_of_plan
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.pipeline.stages import cut_into_stages, places_of_shared

SIZE = 16 * 16 * 4


def chain(shared: tuple[int, ...]) -> ModelGraph:
    """Six layers, of which some have one weight in common."""
    factory = NetworkFactory(16)
    for number in range(6):
        factory.linear(f"fc{number}", 16)
    factory.loss()
    network = factory.network("chain")
    first, *others = (f"fc{number}.weight" for number in shared)
    layers = tuple(
        msgspec.structs.replace(layer, parameters=tuple(first if name in others else name for name in layer.parameters))
        for layer in network.layers
    )
    return msgspec.structs.replace(
        network,
        layers=layers,
        parameters=tuple(each for each in network.parameters if each.name not in others),
        gradient_order=tuple(name for name in network.gradient_order if name not in others),
    )


@pytest.mark.parametrize(("text", "shared", "partners"), [("p2", (0, 5), 1), ("p3", (0, 5), 1), ("p3", (0, 2, 5), 2)])
def test_gradients_go_to_all_that_hold_the_parameter(text: str, shared: tuple[int, ...], partners: int) -> None:
    network, strategy, settings = chain(shared), parse_strategy(text), plan_settings(batch=12)
    places = places_of_shared(network, cut_into_stages(network, strategy.ranks, settings))
    (holders,) = places.values()
    plan = planner_for(strategy).plan(network, strategy, settings)
    ends: Counter[tuple[str, int, int]] = Counter()
    for rank in range(strategy.ranks):
        works = plan.communication(rank, phases=(Phase.BW,))
        sent = [work for work in works if isinstance(work, Transfer) and work.to >= 0]
        assert len(sent) == 2 * partners * (rank in holders)
        assert {work.message_bytes for work in sent} <= {(SIZE,)}
        assert {work.cut if work.direction == "send" else work.to for work in sent} <= {rank}
        ends.update((work.direction, work.cut, work.to) for work in sent)
    assert {key[1:] for key in ends if key[0] == "send"} == {key[1:] for key in ends if key[0] == "receive"}


def test_replicas_hold_no_rows_of_a_shared_parameter() -> None:
    network, settings = chain((0, 5)), plan_settings(batch=12)
    with pytest.raises(UserError, match=r"share fc0\.weight, .* under stage 3 of ZeRO; take z1, or untie it"):
        planner_for(parse_strategy("z3d2p2")).plan(network, parse_strategy("z3d2p2"), settings)
    # Both stages update it alike.
    assert planner_for(parse_strategy("z1d2p2")).plan(network, parse_strategy("z1d2p2"), settings).roles


def test_weights_are_updated_once_the_sum_is_there() -> None:
    strategy = parse_strategy("p2")
    plan = planner_for(strategy).plan(chain((0, 5)), strategy, plan_settings(batch=8))
    for role in plan.roles:
        update = role.tasks - 1
        waits = role.dependencies[role.dependency_start[update] : role.dependency_start[update + 1]].tolist()
        added = [plan.works[role.work[task]] for task in waits]
        assert any(isinstance(work, BucketCopy) and work.direction == "add" and work.bytes == SIZE for work in added)


def test_each_holder_keeps_the_parameter_and_its_state() -> None:
    strategy, settings = parse_strategy("p2"), plan_settings(batch=8)
    tied, apart = (memory_of_plan(chain(own), strategy, settings).parts_bytes for own in ((0, 5), (0,)))
    assert {part: tied[part] for part in ("parameters", "optimizer")} == {
        part: apart[part] for part in ("parameters", "optimizer")
    }


def test_two_stages_of_one_rank_exchange_what_they_share_once() -> None:
    settings = plan_settings(batch=16, schedule="interleaved", micro_batches=2, stages=("fc1", "fc3", "fc5"))
    network = chain((0, 3))
    assert places_of_shared(network, cut_into_stages(network, 2, settings)) == {}
    plan = planner_for(parse_strategy("d2p2")).plan(network, parse_strategy("d2p2"), settings)
    # The first rank has three layers, two of which share a weight; the second has three without.
    sent = [sum(size * count for (_, size, _), count in plan.collectives(role).items()) for role in (0, 1)]
    biases = 3 * 16 * 4
    assert sent == [2 * SIZE + biases, 3 * SIZE + biases]
