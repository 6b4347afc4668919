"""What holds for the plan of every kind of axis that is discovered, and of nestings, without naming a kind."""

from __future__ import annotations

import contextlib
import math
from collections import Counter

import numpy as np
import pytest
from network_factory import NetworkFactory

from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import Layer, ModelGraph
from paradl_bench.network.kinds.kind import TensorArgument
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.axes.registry import axis_kinds
from paradl_bench.plan.axis_planner import AxisPlanner, axis_planner, staging_axis
from paradl_bench.plan.mesh import group_of
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Axis, Strategy, parse_strategy
from paradl_bench.plan.tasks import Collective, Compute, HaloExchange, Phase, Plan, Role, Transfer, WeightUpdate, Work
from paradl_bench.strategies.nesting.catalog import planner_for

PLANNERS = {name: axis_planner(kind) for name, kind in axis_kinds().items()}
SETTINGS = PlanSettings(batch=8)
NESTED = (
    "d2f2",
    "d2c2",
    "d2s2",
    "s2d2",
    "d2s2x2",
    "f3",
    "c3",
    "s3",
    "d2f3",
    "f2d2",
    "c2d2",
    "d2p2",
    "p2d2",
    "p2f2",
    "p2c2",
    "p2s2",
    "p2s3",
    "f2p2",
    "d2p2f3",
    "d2p2s2",
    "t3",
    "d2t2",
    "t2d2",
    "p2t2",
    "d2p2t3",
    "d2x2",
    "x4d2",
    "x2t2",
    "d2t2x2",
    "p2x2",
    "x2p2",
    "d2p2x2",
    "p2x2t2",
    "d2x2p2t2",
    "p2e2",
    "e2p2",
    "d2p2e2",
    "d2e2",
    "e4d2",
)
SHARDED = ("z1d2", "z2d2", "z3d4")
"""Replicas that update a part of the parameters each."""

every_kind = pytest.mark.parametrize("kind", list(PLANNERS))


def branching_network() -> ModelGraph:
    """A skip connection, a shared parameter, batch norm's buffers and an operation that no gradient reaches."""
    factory = NetworkFactory(8, 12, 12)
    factory.scale("scale")
    factory.conv("conv1", 8)
    factory.batch_norm("bn1")
    factory.conv("conv2", 8, 5, padding=2)
    factory.conv("conv3", 8, 5, padding=2, weight="conv2")
    factory.add("add", "conv3", "bn1")
    factory.pool("pool", 2)
    factory.conv("conv4", 12, stride=2, groups=4, bias=False)
    factory.flatten("flatten")
    factory.linear("fc1", 16)
    factory.relu("relu")
    factory.linear("fc2", 10)
    factory.loss()
    return factory.network(
        "branching",
        (
            *("fc2.bias", "fc2.weight", "fc1.bias", "fc1.weight", "conv4.weight", "conv2.weight", "conv2.bias"),
            *("bn1.weight", "bn1.bias", "conv1.weight", "conv1.bias"),
        ),
    )


NETWORK = branching_network()


def token_network() -> ModelGraph:
    """Token ids, an attention, a skip connection and a mean over tokens; the sequence has 8."""
    factory = NetworkFactory(8)

    def linear(name: str, features: int, source: str) -> str:
        read = factory._read(source)
        weight = factory._parameter(f"{name}.weight", features, read.shape[-1])
        return factory.call(name, "linear", (read, weight), (8, features), (source,))

    table = factory._parameter("words.weight", 20, 12)
    words = factory.call("words", "embedding", (factory._read("input"), table), (8, 12), ("input",))
    attending = tuple(linear(name, 12, words) for name in ("query", "key", "value"))
    read = tuple(factory._read(name) for name in attending)
    attention = factory.call("attention", "scaled_dot_product_attention", read, (8, 12), attending, is_causal=True)
    head = linear("head", 20, factory.add("add", attention, words))
    logits = factory._read(head)
    targets = TensorArgument(logits.shape[:-1])
    factory.call("loss.cross_entropy", "cross_entropy", (logits, targets), (), (head,))
    return factory.network("tokens")


TOKENS = token_network()


def expert_network() -> ModelGraph:
    """Token ids, eight experts of two products and what works row by row between them, and a head."""
    factory = NetworkFactory(8)
    table = factory._parameter("words.weight", 20, 12)
    words = factory.call("words", "embedding", (factory._read("input"), table), (8, 12), ("input",))
    factory.linear("router", 8)
    ends = factory.call("ends", "sum", (factory._read("router"), 1), (8,), ("router",))

    def product(name: str, source: str, width: int, features: int) -> str:
        matrices = factory._parameter(f"{name}.weight", 8, width, features)
        read = (factory._read(source), matrices, factory._read(ends))
        return factory.call(name, "grouped_mm", read, (8, features), (source, ends))

    up = factory.relu("relu", product("up", words, 12, 16))
    head = factory.add("add", product("down", up, 16, 12), words)
    # As much as all else: stages are cut in front of it, and not where rows are.
    weight = factory._parameter("head.weight", 80, 12)
    logits = factory.call("head", "linear", (factory._read(head), weight), (8, 80), (head,))
    given = factory._read(logits), TensorArgument((8,))
    factory.call("loss.cross_entropy", "cross_entropy", given, (), (logits,))
    return factory.network("experts")


EXPERTS = expert_network()


def network_of(strategy: Strategy) -> ModelGraph:
    """The first that the strategy can run."""
    for network in (NETWORK, TOKENS, EXPERTS):
        with contextlib.suppress(UserError):
            planner_for(strategy).check(network, strategy, SETTINGS)
            return network
    raise AssertionError(f"no network here runs {strategy}")


def line_network() -> ModelGraph:
    """A chain over one spatial dim; 8 is the fewest of filters, channels and positions, and the batch; 8 train."""
    factory = NetworkFactory(4, 16)
    factory.relu("relu0")
    factory.conv("conv1", 8, stride=2)
    factory.relu("relu1")
    factory.conv("conv2", 12)
    for number in range(3, 7):
        factory.conv(f"conv{number}", 12)
    factory.flatten("flatten")
    factory.linear("fc1", 8)
    factory.linear("fc2", 9)
    factory.loss()
    return factory.network("line")


def strategy_of(kind: str, ranks: int) -> Strategy:
    return Strategy(axes=(Axis(kind=kind, extents=(ranks,)),))  # type: ignore[arg-type]


STRATEGIES = [
    Strategy(),
    *(strategy_of(kind, ranks) for kind in PLANNERS for ranks in (1, 2, 4)),
    *map(parse_strategy, (*NESTED, *SHARDED)),
]

every_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=str)


def plan(strategy: Strategy, network: ModelGraph | None = None) -> Plan:
    return planner_for(strategy).plan(network or network_of(strategy), strategy, SETTINGS)


def works_of(found: Plan, role: Role) -> list[Work]:
    return [found.works[index] for index in role.work]


def counted(found: Plan, of: type[Work]) -> Counter[Work]:
    return Counter(work for work in works_of(found, found.roles[0]) if isinstance(work, of))


@every_kind
def test_it_is_found_by_its_kind(kind: str) -> None:
    assert isinstance(PLANNERS[kind], AxisPlanner)
    assert PLANNERS[kind].name == kind
    assert planner_for(strategy_of(kind, 2)).name == kind


@every_kind
def test_one_pe_does_the_work_of_serial(kind: str) -> None:
    alone = plan(strategy_of(kind, 1))
    serial = plan(Strategy(), network_of(alone.strategy))
    assert counted(alone, Compute) == counted(serial, Compute)
    assert counted(alone, WeightUpdate) == counted(serial, WeightUpdate)
    assert alone.local_batch == SETTINGS.batch
    assert {work.ranks for work in alone.works if isinstance(work, Collective)} <= {1}
    assert not [work for work in alone.works if isinstance(work, HaloExchange)]


@every_strategy
def test_roles_are_all_ranks_and_every_work_is_done(strategy: Strategy) -> None:
    found = plan(strategy)
    played = Counter(found.role_of(rank) for rank in range(strategy.ranks))
    assert played == {index: role.multiplicity for index, role in enumerate(found.roles)}
    done = np.unique(np.concatenate([role.work for role in found.roles]))
    assert done.tolist() == list(range(len(found.works)))


@every_strategy
def test_the_mini_batch_is_computed_once(strategy: Strategy) -> None:
    data = math.prod(axis.degree for axis in strategy.axes if axis.has(Trait.DIVIDES_BATCH))
    assert plan(strategy).local_batch * data == SETTINGS.batch


@every_strategy
def test_a_layer_waits_for_what_it_reads(strategy: Strategy) -> None:
    found = plan(strategy)
    for role in found.roles:
        tasks = {
            (work.layer, work.phase): task
            for task, work in enumerate(works_of(found, role))
            if isinstance(work, Compute)
        }
        rows = np.split(role.dependencies, role.dependency_start[1:-1])
        before: list[set[int]] = []
        for row in rows:
            before.append(set(row.tolist()).union(*(before[task] for task in row.tolist())))
        for reader in network_of(strategy).layers:
            for source in set(reader.inputs) - {"input"}:
                if (source, "FW") not in tasks or (reader.name, "FW") not in tasks:
                    # On different stages: what is sent from one to the other orders them.
                    assert staging_axis(strategy) is not None
                    continue
                assert tasks[source, "FW"] in before[tasks[reader.name, "FW"]]
                if (source, "BW") in tasks:
                    assert tasks[reader.name, "BW"] in before[tasks[source, "BW"]]


@every_strategy
def test_phases_follow_each_other(strategy: Strategy) -> None:
    for role in plan(strategy).roles:
        compute = [phase for phase in role.phase.tolist() if phase != Phase.GE]
        assert compute == sorted(compute)
        assert compute[-1] == Phase.WU


@every_strategy
def test_planning_twice_gives_the_same(strategy: Strategy) -> None:
    first, second = plan(strategy), plan(strategy)
    assert (first.works, first.notes, first.positions) == (second.works, second.notes, second.positions)
    assert [role.setup for role in first.roles] == [role.setup for role in second.roles]
    for one, other in zip(first.roles, second.roles, strict=True):
        for name in ("phase", "stream", "work", "dependency_start", "dependencies"):
            assert np.array_equal(getattr(one, name), getattr(other, name))


@every_kind
def test_limits_hold_and_are_explained(kind: str) -> None:
    own = network_of(strategy_of(kind, 2))
    network = line_network() if own is NETWORK else own
    (limit,) = planner_for(strategy_of(kind, 1)).limits(network, SETTINGS)
    assert limit.axis == kind
    assert limit.reason
    assert str(limit).startswith(f"p <= {limit.ranks}: ")
    assert limit.ranks == SETTINGS.batch == 8
    assert plan(strategy_of(kind, limit.ranks), network).strategy.ranks == limit.ranks
    with pytest.raises(UserError, match=r"8") as refused:
        plan(strategy_of(kind, limit.ranks + 1), network)
    named = [layer.name for layer in network.layers if layer.name in limit.reason]
    assert all(name in str(refused.value) for name in named)
    assert "\n" not in str(refused.value)


@every_kind
def test_a_network_without_layers_passes_each_strategys_check(kind: str) -> None:
    nothing = ModelGraph(name="nothing", input_shape=(), layers=(), parameters=())
    strategy = strategy_of(kind, 2)
    planner_for(strategy).check(nothing, strategy, SETTINGS)


def flops_of(found: Plan, role: Role, network: ModelGraph) -> Counter[tuple[str, str]]:
    """FLOPs a sample that a rank computes, by layer and phase, from the shapes that it runs."""
    of_operation: dict[str, Layer] = {layer.operation: layer for layer in network.layers}
    of_operation |= {layer.operation: layer for layer, _ in found.sharded}
    flops: Counter[tuple[str, str]] = Counter()
    for work in works_of(found, role):
        if isinstance(work, Compute):
            layer = of_operation[work.operation]
            forward = work.phase == "FW"
            flops[work.layer, work.phase] += layer.fw_flops if forward else layer.bw_input_flops + layer.bw_weight_flops
    return flops


@every_strategy
def test_work_is_conserved_where_it_is_split(strategy: Strategy) -> None:
    """Over the ranks of a replica a layer's FLOPs are the serial ones where it is split, else so many times these."""
    network = network_of(strategy)
    serial = plan(Strategy(), network)
    alone = flops_of(serial, serial.roles[0], network)
    found = plan(strategy)
    sharded = [axis for axis in strategy.axes if axis.has(Trait.SHARDS_LAYERS) and axis.degree > 1]
    # Who sees samples of their own computes as many as serial of a sample.
    sharing = [axis for axis in sharded if not axis.has(Trait.DIVIDES_BATCH)]
    of_ranks = [flops_of(found, found.roles[index], network) for index in found.positions]
    split = {work.layer: work.shard for work in found.works if isinstance(work, Compute) and work.shard}
    tables = {layer.name for layer in network.layers if layer.kind == "embedding"}
    assert bool(split) == bool(sharded)
    for (layer, phase), flops in alone.items():
        # On one stage of a pipeline, once a micro-batch.
        total = sum(of_rank[layer, phase] for of_rank in of_ranks) / found.micro_batches
        # Along an axis that leaves a layer whole, every rank computes it; in parts of a table, as many look-ups.
        alike = [axis for axis in sharing if layer in tables and axis.has(Trait.CUTS_FEATURES)]
        alike += [axis for axis in sharing if axis not in alike and str(axis) not in split.get(layer, "")]
        expected = flops * math.prod(axis.degree for axis in alike)
        # A share of FLOPs is rounded to a whole number on each rank.
        assert abs(total - expected) <= 2 * (math.prod(axis.degree for axis in sharing) - 1), (layer, phase)


@every_strategy
def test_parameters_are_updated_as_often_as_ranks_hold_them(strategy: Strategy) -> None:
    found = plan(strategy)
    held = sum(
        work.elements * role.multiplicity
        for role in found.roles
        for work in works_of(found, role)
        if isinstance(work, WeightUpdate)
    )
    alike = [axis for axis in strategy.axes if axis.has(Trait.REPLICATES) and not axis.prefix]
    # Along an axis that cuts experts, some parameters are held by one rank of each group.
    replicas = [a.degree for a in alike if not a.has(Trait.CUTS_EXPERTS)]
    elements = network_of(strategy).parameter_elements
    assert held >= elements * math.prod(replicas)
    assert held <= elements * strategy.ranks


def communication_by_group(found: Plan) -> dict[tuple[int, ...], dict[int, list[Collective | HaloExchange]]]:
    """Per group, what each of its ranks issues in it, in order."""
    issued: dict[tuple[int, ...], dict[int, list[Collective | HaloExchange]]] = {}
    for rank in range(found.strategy.ranks):
        for work in found.communication(found.role_of(rank)):
            group = group_of(found.strategy, work.axes, rank)
            issued.setdefault(group, {}).setdefault(rank, []).append(work)
    return issued


@every_strategy
def test_group_members_issue_the_same_collectives_in_the_same_order(strategy: Strategy) -> None:
    for group, of_ranks in communication_by_group(plan(strategy)).items():
        collectives = [[work for work in of_ranks.get(rank, []) if isinstance(work, Collective)] for rank in group]
        assert all(issued == collectives[0] for issued in collectives)
        assert {work.ranks for work in collectives[0]} <= {len(group)}


@every_strategy
def test_every_message_that_a_rank_sends_some_rank_receives(strategy: Strategy) -> None:
    for of_ranks in communication_by_group(plan(strategy)).values():
        sent: Counter[int] = Counter()
        received: Counter[int] = Counter()
        for works in of_ranks.values():
            for work in works:
                if isinstance(work, HaloExchange):
                    sent.update(work.sends_bytes)
                    received.update(work.receives_bytes)
                elif isinstance(work, Transfer):
                    (sent if work.direction == "send" else received).update(work.message_bytes)
        assert sent == received
