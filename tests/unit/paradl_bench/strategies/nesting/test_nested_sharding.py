"""An axis that cuts tokens inside of one that cuts features: what is planned of both, and what is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[bench,test]'")

from paradl_bench.core.errors import UserError
from paradl_bench.measure.layers.rehearsal import sharing_axis
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.models.catalog import load_model
from paradl_bench.network.models.traced_networks import traced_network
from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Collective, Compute, HaloExchange, Plan, Transfer
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.running.nested_sharding import nest
from paradl_bench.strategies.running.sharded_module import Rule, Sharding

ORDERS = ("x2t2", "t2x2")


@pytest.fixture(scope="module")
def llama() -> ModelGraph:
    """Two layers of four heads of queries and two of keys, of four features each; eight tokens of 16 features."""
    return trace_network(load_model("transformer_networks:llama_tokens"))


def planned(network: ModelGraph, text: str, **options: Any) -> Plan:
    strategy = parse_strategy(text)
    return planner_for(strategy).plan(network, strategy, plan_settings(**{"batch": 2, **options}))


@pytest.mark.parametrize("text", ORDERS)
def test_messages_of_either_axis_are_of_what_the_other_leaves(llama: ModelGraph, text: str) -> None:
    found = planned(llama, text)
    tensor, context = text.index("t") // 2, text.index("x") // 2
    sent = Counter((work.operation, work.axes, work.message_bytes) for work in found.of_layers() if sends(work))
    # Of two samples, in four bytes: four own tokens of 16 features, of one head of four features, and a number each.
    features, head, numbers = (2 * 4 * 4 * count for count in (16, 4, 1))
    assert sent == {
        ("all_reduce", (tensor,), features): 10,
        ("all_reduce", (tensor,), numbers): 3,
        ("all_gather", (context,), head): 4,
        ("reduce_scatter", (context,), head): 4,
    }


def sends(work: object) -> bool:
    return isinstance(work, Collective | HaloExchange)


@pytest.mark.parametrize("text", ORDERS)
def test_layers_are_cut_by_both_axes_or_by_one(llama: ModelGraph, text: str) -> None:
    found = planned(llama, text)
    labels = {work.layer.rpartition(".")[2]: work.shard for work in found.works if isinstance(work, Compute)}
    assert {labels[name] for name in ("q_proj", "scaled_dot_product_attention", "down_proj", "lm_head")} == {"t2x2"}
    assert {labels[name] for name in ("norm", "input_layernorm")} == {"x2"}
    (attention,) = (layer for layer, _ in found.sharded if layer.kind == "attention")
    assert attention.input_shapes == ((2, 4, 4), (1, 8, 4), (1, 8, 4), (4, 8))
    (whole,) = {layer.operation: layer for layer in llama.layers if layer.kind == "attention"}.values()
    assert attention.fw_flops * 4 == whole.fw_flops


def test_in_stages_each_unit_sums_what_it_read(llama: ModelGraph) -> None:
    found = planned(llama, "z3d2p2t2", micro_batches=1)
    works = [found.works[work] for role in found.roles for work in role.work]
    # Eight tokens of 16 features, in four bytes.
    sums = [work for work in works if isinstance(work, Collective) and work.message_bytes == 8 * 16 * 4]
    assert {work.operation for work in sums} == {"all_reduce"}
    # Queries, keys and values read one tensor, as gate and up do, and each is a unit: three sums backward and two, and
    # one forward of either. Two parts of the vocabulary have roles, with a sum at the embedding and one at the head.
    assert len(sums) == 2 * (2 * (3 + 1 + 2 + 1) + 2)


def test_a_ring_passes_on_the_heads_of_a_rank(llama: ModelGraph) -> None:
    halos = [work for work in planned(llama, "x2t2", context_exchange="ring").of_layers() if sends(work)]
    blocks = {work.sends_bytes for work in halos if isinstance(work, HaloExchange)}
    # Keys and values of a head, of four own tokens of two samples.
    assert blocks == {(2 * 2 * 4 * 4 * 4,)}


@pytest.mark.parametrize("text", ORDERS)
def test_parts_of_own_tokens_are_sent_and_whole_gradients_summed(llama: ModelGraph, text: str) -> None:
    found = planned(llama, text, sequence_parallel="on")
    tensor, context = text.index("t") // 2, text.index("x") // 2
    sent = Counter((work.operation, work.axes, work.message_bytes) for work in found.of_layers() if sends(work))
    # Of two samples, in four bytes: two own tokens of 16 features, and of four tokens a number, or a head's features.
    part, numbers, head = (2 * 4 * count for count in (2 * 16, 4, 4 * 4))
    assert sent == {
        # Round two pairs of each layer; behind the embedding, or in front of the head.
        ("all_gather", (tensor,), part): 10,
        ("reduce_scatter", (tensor,), part): 10,
        ("all_reduce", (tensor,), numbers): 3,
        # Of the weights of five norms.
        ("all_reduce", (tensor,), 4 * 16): 5,
        ("all_gather", (context,), head): 4,
        ("reduce_scatter", (context,), head): 4,
    }
    labels = {work.layer.rpartition(".")[2]: work.shard for work in found.works if isinstance(work, Compute)}
    assert {labels[name] for name in ("norm", "input_layernorm", "down_proj")} == {"t2[sequence_parallel=on]x2"}


@pytest.mark.parametrize("text", ["p2x2t2", "t2p2x2", "z1d2p2x2t2"])
def test_stages_part_what_both_axes_leave(llama: ModelGraph, text: str) -> None:
    cut = "model.layers.1.input_layernorm"
    found = planned(llama, text, batch=8, micro_batches=2, schedule="1f1b", stages=(cut,))
    alone = planned(llama, text.replace("p2", ""), batch=8, accumulate=2)
    assert of_both_axes(found) == of_both_axes(alone)
    # Of a micro-batch, in four bytes: four own tokens of 16 features, which ranks of features hold alike.
    (crossing,) = {work.message_bytes for work in found.works if isinstance(work, Transfer)}
    assert crossing == (found.local_batch // 2 * 4 * 16 * 4,)


def of_both_axes(plan: Plan) -> Counter[tuple[str, str, int]]:
    """Messages of all roles along the axes that share layers."""
    works = (work for role in range(len(plan.roles)) for work in plan.of_layers(role) if isinstance(work, Collective))
    kinds = [axis.kind for axis in plan.strategy.axes]
    return Counter((work.operation, kinds[work.axes[0]], work.message_bytes) for work in works)


@pytest.mark.parametrize(
    ("text", "options", "why"),
    [
        (
            "x2t2",
            {"context_exchange": "all-to-all"},
            "strategy x2t2: --context-exchange all-to-all: 1 heads of keys that another axis leaves on a rank, of layer"
            r" model.layers.0.*scaled_dot_product_attention do not split evenly over 2 ranks",
        ),
        ("t2x8", {"sequence_parallel": "on"}, "--sequence-parallel on: .* of 8 tokens is smaller than 16 ranks"),
        (
            "x2f2",
            {},
            "context and filter both share layers out, .* features, tokens and experts .* as t2x2e2",
        ),
        ("x2t2f2", {}, "context and tensor and filter both share layers out"),
    ],
)
def test_what_does_not_nest_says_what_does(llama: ModelGraph, text: str, options: dict[str, str], why: str) -> None:
    with pytest.raises(UserError, match=why):
        planned(llama, text, **options)


@pytest.mark.parametrize("text", ["t8x2", "x2t8"])
def test_the_smallest_part_has_to_part_over_ranks_too(text: str) -> None:
    # Of 12 heads eight ranks have two or one.
    network, strategy = traced_network("gpt2"), parse_strategy(text)
    assert network is not None
    settings = plan_settings(batch=4, context_exchange="all-to-all")
    with pytest.raises(UserError, match="1 heads of queries that another axis leaves on a rank"):
        planner_for(strategy).check(network, strategy, settings)
    planner_for(six := parse_strategy("t6x2")).check(network, six, settings)


def test_stages_cut_the_sequence_twice(llama: ModelGraph) -> None:
    found = planned(llama, "p2x2t2", sequence_parallel="on", micro_batches=1)
    works = [found.works[work] for role in found.roles for work in role.work]
    tensor = [work for work in works if isinstance(work, Collective) and work.axes == (2,)]
    sizes = {
        name: {work.message_bytes for work in tensor if work.operation == name}
        for name in ("all_gather", "reduce_scatter")
    }
    # Of two samples, two own tokens of 16 features.
    assert sizes == {"all_gather": {2 * 2 * 16 * 4}, "reduce_scatter": {2 * 2 * 16 * 4}}
    # Of five norms every gradient is summed whole, whatever tokens it is of, by ranks of either part of the context.
    assert sum(work.operation == "all_reduce" and work.message_bytes == 16 * 4 for work in tensor) == 2 * 5
    labels = {work.layer.rpartition(".")[2]: work.shard for work in found.works if isinstance(work, Compute)}
    assert labels["norm"] == labels["q_proj"] == "t2[sequence_parallel=on]x2"


def test_parts_of_two_axes_are_measured_by_themselves() -> None:
    with pytest.raises(UserError, match="parts are measured of one axis; give t2,x2"):
        sharing_axis(parse_strategy("d2x2t2"))


def test_the_outer_rule_calls_the_inner_one() -> None:
    called: list[str] = []

    def rule(name: str, mark: Any = None, *, around: bool = False) -> Rule:
        def run(function: Any, args: Any, kwargs: Any) -> Any:
            called.append(name)
            return function(*args, **kwargs) + 1

        return Rule(frozenset({"relu"}), run, mark, around)

    def marked(tensor: Any) -> Any:
        called.append("mark")
        return tensor

    network: Any = None
    last = rule("last")
    both = nest(
        Sharding(
            {0: rule("outer"), 1: rule("outer"), 2: rule("outer")}, network, inside=dict.fromkeys((1, 3, 4), last)
        ),
        Sharding({1: rule("inner", marked), 2: rule("inner", around=True), 3: rule("inner")}, network),
        network,
        2,
    )
    found = {}
    for index in range(5):
        called.clear()
        result = both.rules[index].run(torch.relu, (torch.zeros(1),), {})
        found[index] = (list(called), result.item())
    assert found == {
        0: (["outer"], 1),
        1: (["outer", "inner", "last", "mark"], 3),
        2: (["inner", "outer"], 2),
        3: (["inner", "last"], 2),
        4: (["last"], 1),
    }


def test_what_a_stage_receives_is_of_the_inner_axis_first() -> None:
    """As where it was made: the outer axis tells its part by the shape that the inner one says is whole."""
    received: list[tuple[str, int, int]] = []

    def of_axis(name: str) -> Any:
        def receive(index: int, output: int, tensor: Any) -> Any:
            received.append((name, index, output))
            return tensor + 1

        return receive

    network: Any = None
    outer, inner = (Sharding({}, network, receive=of_axis(name)) for name in ("outer", "inner"))
    both = nest(outer, inner, network).receive
    assert both is not None
    assert both(3, 1, torch.zeros(1)).item() == 2
    assert received == [("inner", 3, 1), ("outer", 3, 1)]
