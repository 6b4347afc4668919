"""Experts cut by features, and then shared out: what is planned, in which order, and what is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[bench,test]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[bench,test]'")

import transformer_networks

from paradl_bench.core.errors import UserError
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.models.catalog import load_model
from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Collective, Compute, Plan
from paradl_bench.strategies.nesting.catalog import planner_for


def traced(name: str) -> ModelGraph:
    return trace_network(load_model(f"transformer_networks:{name}"))


@pytest.fixture(scope="module")
def mixtral() -> ModelGraph:
    """Two blocks of four experts, two a token; eight tokens of 16 features, 20 features inside of an expert."""
    return traced("mixtral_tokens")


def planned(network: ModelGraph, text: str, **options: Any) -> Plan:
    strategy = parse_strategy(text)
    return planner_for(strategy).plan(network, strategy, plan_settings(**{"batch": 2, **options}))


@pytest.mark.parametrize("text", ["e2t2", "t2e2"])
def test_rows_are_sent_whole_and_summed_at_home(mixtral: ModelGraph, text: str) -> None:
    found = planned(mixtral, text)
    tensor, expert = text.index("t") // 2, text.index("e") // 2
    works = (work for work in found.of_layers() if isinstance(work, Collective))
    # Of one sample in four bytes: tokens, rows of two experts a token, and a number a token.
    tokens, rows, numbers = (4 * 8 * count for count in (16, 2 * 16, 1))
    assert Counter((work.operation, work.axes, work.message_bytes) for work in works) == {
        # Round an attention's pair in each block; of the embedding and in front of the head.
        ("all_reduce", (tensor,), tokens): 6,
        ("all_reduce", (tensor,), numbers): 3,
        # Of each block's experts, forward and backward.
        ("all_reduce", (tensor,), rows): 4,
        ("all_to_all", (expert,), rows // 2): 8,
        ("all_to_all", (expert,), 8 * 4 // 2): 2,
    }


@pytest.mark.parametrize("text", ["x2e2", "e2x2"])
def test_each_part_of_the_tokens_is_sent_to_experts(mixtral: ModelGraph, text: str) -> None:
    found = planned(mixtral, text)
    context, expert = text.index("x") // 2, text.index("e") // 2
    works = [work for work in found.communication() if isinstance(work, Collective)]
    # Of one sample in four bytes: two rows of 16 features of each of four own tokens.
    rows = 4 * 4 * 2 * 16
    sent = Counter((work.axes, work.message_bytes) for work in works if work.operation == "all_to_all")
    assert sent == {((expert,), rows // 2): 8, ((expert,), 8 * 4 // 2): 2}
    # Gradients of experts go to who holds the same ones for other tokens, all others to every rank.
    sizes = {tensor.name: tensor.bytes for tensor in mixtral.parameters}
    apart = sum(size for name, size in sizes.items() if ".experts." in name)
    reduced: Counter[tuple[int, ...]] = Counter()
    for work in works:
        reduced[work.axes] += work.message_bytes * (work.operation == "all_reduce")
    assert reduced[0, 1] == sum(sizes.values()) - apart
    assert reduced[context,] == apart // 2


@pytest.mark.parametrize("text", ["e2t2", "t2e2"])
def test_rows_of_own_tokens_are_gathered_and_scattered_at_home(mixtral: ModelGraph, text: str) -> None:
    found = planned(mixtral, text, sequence_parallel="on")
    tensor, expert = text.index("t") // 2, text.index("e") // 2
    works = [found.works[task] for task in found.roles[0].work]
    messages = [(work.operation, work.axes, work.message_bytes) for work in works if isinstance(work, Collective)]
    # Of one sample in four bytes: rows of two experts a token, of which ranks have a half each; a number an expert.
    rows, numbers = 4 * 8 * 2 * 16, 4 * 8
    first = messages.index(("all_gather", (tensor,), numbers))
    around = messages[first : first + 6]
    there = [("all_to_all", (expert,), numbers // 2), ("all_to_all", (expert,), rows // 2)]
    back = [there[1], ("reduce_scatter", (tensor,), rows // 2)]
    assert around == [messages[first], ("all_gather", (tensor,), rows // 2), *there, *back]
    # The gradient goes the same way, without numbers.
    backward = [at for at, message in enumerate(messages) if message == ("all_gather", (tensor,), rows // 2)][-1]
    assert messages[backward : backward + 4] == [("all_gather", (tensor,), rows // 2), there[1], *back]


def test_routers_see_own_tokens_and_sum_their_gradients(mixtral: ModelGraph) -> None:
    strategy, settings = parse_strategy("t2"), plan_settings(batch=2, sequence_parallel="on")
    sharded = planner_for(strategy).shards_of(0, mixtral, strategy, settings)
    shards = {mixtral.layers[index].name: shard for index, shard in sharded.shards.items()}
    router = shards["model.layers.0.mlp.gate#2"]
    assert router.layer.input_shapes == ((4, 16),)
    assert [work.message_bytes for work in router.sums if isinstance(work, Collective)] == [4 * 4 * 16]
    # A rank has the features of experts that it multiplies all rows with: nothing is summed of these.
    assert not shards["model.layers.0.mlp.experts.transpose"].sums


def test_each_rank_has_features_of_its_own_experts(mixtral: ModelGraph) -> None:
    found = planned(mixtral, "e2t2")
    products = {layer.name: layer for layer, _ in found.sharded if layer.kind == "grouped_matmul"}
    whole = {layer.name: layer for layer in mixtral.layers if layer.kind == "grouped_matmul"}
    gate, down = (layer for name, layer in products.items())
    assert [layer.input_shapes[1] for layer in (gate, down)] == [(2, 16, 20), (2, 10, 16)]
    assert [layer.attributes["groups"] for layer in (gate, down)] == [2, 2]
    # As many rows come as go, of features that two ranks share.
    assert all(layer.fw_flops * 2 == whole[name].fw_flops for name, layer in products.items())
    labels = {work.layer: work.shard for work in found.works if isinstance(work, Compute)}
    assert {labels[name] for name in products} == {"t2e2"}
    sharded = planner_for(found.strategy).shards_of(3, mixtral, found.strategy, plan_settings(batch=2))
    shapes = {tensor.name.rpartition(".")[2]: tensor.shape for tensor in sharded.network.parameters}
    assert shapes["gate_up_proj"] == (2, 20, 16)
    assert shapes["down_proj"] == (2, 16, 10)


def test_rows_come_back_before_they_are_summed(mixtral: ModelGraph) -> None:
    found = planned(mixtral, "e2t2")
    role = found.roles[0]
    works = [found.works[task] for task in role.work]
    names = [work.operation if isinstance(work, Collective) else getattr(work, "layer", "") for work in works]
    down = max(at for at, name in enumerate(names) if "grouped_mm" in name and getattr(works[at], "phase", "") == "FW")
    sent = [work for work in works[down + 1 :] if isinstance(work, Collective)][:2]
    assert [(work.operation, work.axes) for work in sent] == [("all_to_all", (0,)), ("all_reduce", (1,))]


def test_experts_stay_whole_along_features_where_others_were_chosen(mixtral: ModelGraph) -> None:
    settings, strategy = plan_settings(batch=2, split=("*_proj",)), parse_strategy("e2t2")
    sharded = planner_for(strategy).shards_of(0, mixtral, strategy, settings)
    shapes = {tensor.name.rpartition("layers.0.")[2]: tensor.shape for tensor in sharded.network.parameters}
    assert shapes["mlp.experts.gate_up_proj"] == (2, 40, 16)
    assert shapes["self_attn.q_proj.weight"] == (8, 16)


class Bent(transformer_networks.Sorted):
    """Works on rows once more before they are put back."""

    def put_back(self, made: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        return torch.tanh(made)[order.argsort()]


@pytest.mark.parametrize(
    ("name", "text", "options", "why"),
    [
        ("Bent", "e2t2", {}, "strategy e2t2: another axis sums rows of layer _grouped_mm#3 behind it"),
        ("Bent", "e2t2", {"sequence_parallel": "on"}, "another axis sums rows of layer _grouped_mm#3"),
        ("Latent", "e2t2", {"sequence_parallel": "on"}, "--sequence-parallel on can't be: "),
        ("mixtral_tokens", "e2f2", {}, "expert and filter both share layers out"),
        ("mixtral_tokens", "e2t16", {}, "16 ranks along t16, but p <= 2: fewest heads"),
    ],
)
def test_what_does_not_go_together_is_refused(
    name: str, text: str, options: dict[str, str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformer_networks, "Bent", Bent, raising=False)
    with pytest.raises(UserError) as refused:
        planned(traced(name), text, **options)
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)
