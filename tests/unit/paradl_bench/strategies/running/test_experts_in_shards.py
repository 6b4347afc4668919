"""ZeRO beside experts: who shares out which parameters, in which order they are sent, and what ranks hold of them."""

from __future__ import annotations

from functools import cache

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[bench,test]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[bench,test]'")

from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.network.graph import Layer, ModelGraph, Tensor
from paradl_bench.network.models.catalog import load_model
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Collective, Plan, WeightUpdate
from paradl_bench.strategies.data.zero.sharing import Part, Shares, parts_of, state_parts
from paradl_bench.strategies.data.zero.units import units_of
from paradl_bench.strategies.memory.peak import planned_memory
from paradl_bench.strategies.nesting.catalog import planner_for

BLOCKS = 2
EVERYONE, ALIKE = (0, 1), (0,)
SETTINGS = PlanSettings(batch=8, blocking=True)


@cache
def network() -> ModelGraph:
    return trace_network(load_model("transformer_networks:mixtral_tokens"))


def of_experts() -> int:
    return sum(parameter.bytes for parameter in network().parameters if ".experts." in parameter.name)


def plan(text: str) -> Plan:
    return planner_for(parse_strategy(text)).plan(network(), parse_strategy(text), SETTINGS)


def sent(text: str, operation: str) -> list[tuple[tuple[int, ...], int]]:
    """Axes and bytes of the collectives of an iteration, in order."""
    found = plan(text)
    works = (found.works[index] for index in found.roles[0].work.tolist())
    return [
        (work.axes, work.message_bytes)
        for work in works
        if isinstance(work, Collective) and work.operation == operation
    ]


def test_ranks_with_the_same_experts_share_those_out() -> None:
    gathered = [size for axes, size in sent("z3d2e2", "all_gather") if axes == ALIKE]
    # Each block in forward and in backward; a rank has a half of a half.
    assert gathered == [of_experts() // BLOCKS // 4] * 2 * BLOCKS
    assert {axes for axes, _ in sent("e2z3d2", "all_gather")} == {(0, 1), (1,)}
    assert sum(size for axes, size in sent("z3d2e2", "reduce_scatter") if axes == ALIKE) == of_experts() // 4


def test_a_block_gathers_two_parts_and_reduces_them_backwards() -> None:
    gathers, reductions = ([axes for axes, _ in sent("z3d2e2", name)] for name in ("all_gather", "reduce_scatter"))
    # Embedding, two blocks, norm, head.
    forward = [EVERYONE, *[EVERYONE, ALIKE] * BLOCKS, EVERYONE, EVERYONE]
    assert gathers[: len(forward)] == forward
    # The head gathers the norm early, and that the last part of a block, which gathers both of the next early.
    assert gathers[len(forward) :] == [EVERYONE, EVERYONE, ALIKE, EVERYONE, ALIKE, EVERYONE, EVERYONE]
    assert reductions == [EVERYONE, EVERYONE, *[ALIKE, EVERYONE] * BLOCKS, EVERYONE]


def test_stage_2_keeps_both_parts_to_backward() -> None:
    three, two = (sent(text, "all_gather") for text in ("z3d2e2", "z2d2e2"))
    assert two == three[: len(two)]
    assert len(three) > len(two)
    assert sent("z2d2e2", "reduce_scatter") == sent("z3d2e2", "reduce_scatter")


@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter"])
def test_experts_that_one_rank_holds_are_not_sent(operation: str) -> None:
    assert {axes for axes, _ in sent("z3d1e4", operation)} == {EVERYONE}
    assert sent("z3d1e4", "all_reduce") == []
    # Replicas of shards still sum their gradients.
    summed = [size for axes, size in sent("d2z3d1e2", "all_reduce") if axes == (0,)]
    assert summed.count(of_experts() // BLOCKS // 2) == BLOCKS


def test_experts_have_an_optimizer_of_their_own() -> None:
    broadcasts = sent("z1d2e2", "broadcast")
    assert sum(size for axes, size in broadcasts if axes == ALIKE) == of_experts() // 2
    assert {axes for axes, _ in sent("z1d1e4", "broadcast")} == {EVERYONE}
    updates = [work for work in plan("z1d2e2").works if isinstance(work, WeightUpdate)]
    # A rank updates a half of its half of the experts, behind what it updates of all else.
    assert updates[-1].elements == of_experts() // 4 // 4
    assert len(updates) == 2


def test_the_fullest_rank_is_found_over_both_optimizers() -> None:
    tensors = [Tensor(name=name, shape=(size,)) for name, size in (("a", 9), ("b", 5), ("x", 4), ("y", 3))]
    layers = [Layer(name=f"l{t.name}", kind="linear", inputs=("input",), parameters=(t.name,)) for t in tensors]
    small = ModelGraph(name="n", input_shape=(1,), layers=tuple(layers), parameters=tuple(tensors))
    found = state_parts(small, Shares(2, frozenset({"x", "y"}), 2, ((2, True),)))
    assert [[tensor.name for tensor in parts.own] for parts in found] == [["a"], ["x"]]
    # Ranks with other experts hold all of these, and share out the rest.
    alone = state_parts(small, Shares(2, frozenset({"x", "y"}), 1, ((2, False),)))
    assert [[tensor.name for tensor in parts.own] for parts in alone] == [["a"], ["x", "y"]]


def test_parts_stand_in_the_order_of_torch() -> None:
    (block,) = (unit for unit in units_of(network()) if unit.name == "model.layers.0")
    # torch has the modules inside of a module first, of which attention is the first.
    apart = frozenset(parameter.name for parameter in block.parameters if ".experts." in parameter.name)
    assert [part.apart for part in parts_of(block, Shares(4, apart, 2))] == [False, True]
    of_attention = frozenset(p.name for p in block.parameters if "self_attn" in p.name)
    assert [part.apart for part in parts_of(block, Shares(4, of_attention, 2))] == [True, False]
    assert [part.apart for part in parts_of(block, Shares(4))] == [False]


@pytest.mark.parametrize(("text", "share"), [("z3d2e2", 4), ("z3d1e4", 4), ("d2z3d1e2", 2), ("d2e2", 2)])
def test_ranks_hold_shards_of_their_experts(text: str, share: int) -> None:
    held = planned_memory(network(), parse_strategy(text), SETTINGS).parts_bytes["parameters"]
    of_others = network().parameter_bytes - of_experts()
    replicas = 1 if text == "d2e2" else 2 if text.startswith("d2z") else 4
    # Rows are padded.
    assert of_experts() // share + of_others // replicas <= held < of_experts() // share + 1.1 * of_others / replicas


@pytest.mark.parametrize(
    ("shape", "apart", "sent", "copied_twice"),
    [((1, 8, 4), True, 8, 32), ((1, 6, 4), True, 24, 0), ((1, 8, 4), False, 32, 0), ((4, 8, 4), True, 32, 0)],
    ids=["fewer experts than ranks", "a second dim that does not part", "held by all", "enough experts"],
)
def test_fewer_experts_than_ranks_are_cut_inside(
    shape: tuple[int, ...], apart: bool, sent: int, copied_twice: int
) -> None:
    part = Part("", apart, 4, (Tensor(name="x", shape=shape),))
    assert part.shard_bytes == 4 * sent
    assert part.cut_inside(part.parameters) == 4 * copied_twice
