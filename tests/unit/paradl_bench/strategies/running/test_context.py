"""Context parallelism on threads: equal to serial, and not where it is broken; what it refuses and what it plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[bench,test]'")

import torch.nn.functional as F
import transformer_networks
from torch import nn

from paradl_bench.core.errors import UserError
from paradl_bench.measure.layers import shards_proof
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.models.catalog import LoadedModel, load_model
from paradl_bench.network.models.token_tasks import NextToken
from paradl_bench.plan.settings import PlanSettings, plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Collective, Compute, HaloExchange, Transfer
from paradl_bench.strategies.context import by_heads
from paradl_bench.strategies.context import module as running
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.running.group_functions import gather
from paradl_bench.strategies.tensor.sequence.tokens import find_tokens


def loaded(name: str) -> tuple[LoadedModel, ModelGraph]:
    model = load_model(f"transformer_networks:{name}")
    return model, trace_network(model)


class _Request:
    def __init__(self, exchange: str) -> None:
        self.exchange = exchange

    def settings(self, batch: int) -> PlanSettings:
        return plan_settings(batch=batch, context_exchange=self.exchange)


def proved(name: str, strategy: str, exchange: str = "gather") -> Any:
    model, network = loaded(name)
    request: Any = _Request(exchange)
    return shards_proof._prove(model, network, parse_strategy(strategy), request, 3)


CASES = [("Reading", "x2", "gather"), ("masked", "x4", "gather"), ("gpt2_tokens", "x2", "gather")]
CASES += [(name, "x2", "all-to-all") for name in ("gpt2_tokens", "llama_tokens", "bert_tokens", "Biased")]


@pytest.mark.parametrize(("name", "strategy", "exchange"), CASES)
def test_parts_of_the_sequence_train_as_all_of_it(name: str, strategy: str, exchange: str) -> None:
    proof = proved(name, strategy, exchange).verification
    assert not proof.why_not
    assert proof.largest_difference < 1e-12


def first_positions(self: running.OnTokens, tensor: torch.Tensor) -> torch.Tensor:
    dim = self._along.dim
    whole = not hasattr(tensor, running.MARK) and tensor.dim() >= -dim and tensor.shape[dim] == self._own.length
    return tensor.narrow(dim, 0, self._own.length // self._own.group.size) if whole else tensor


def later_tokens_seen(self: running._Masks, queries: torch.Tensor) -> torch.Tensor:
    return queries.new_zeros(self._own.length // self._own.group.size, self._own.length)


def mean_of_own(self: running._CrossEntropy, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return function(*args, **kwargs)


def own_gradient_alone(self: running._Attention, part: torch.Tensor) -> torch.Tensor:
    shape = (*part.shape[:-2], self._own.length, part.shape[-1])
    return gather(part, self._own.slices(part.dim(), -2), shape, self._own.group)


@pytest.mark.parametrize(
    ("owner", "method", "broken", "name"),
    [
        (running.OnTokens, "_taken", first_positions, "Reading"),
        (running._Masks, "like", later_tokens_seen, "gpt2_tokens"),
        (running._CrossEntropy, "__call__", mean_of_own, "masked"),
        (running._Attention, "_gathered", own_gradient_alone, "gpt2_tokens"),
    ],
    ids=["the first rank's positions", "no causal mask", "means of own targets", "no sum of keys' gradients"],
)
def test_what_is_broken_differs_from_serial(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, broken: Callable[..., Any], name: str
) -> None:
    monkeypatch.setattr(owner, method, broken)
    first = proved(name, "x2").first
    assert first is not None
    assert first.relative > 1e-6


def heads_of_another(tensor: torch.Tensor, parted: int, joined: int, group: Any) -> torch.Tensor:
    return torch.cat([tensor.chunk(group.size, parted)[group.rank]] * group.size, joined)


def test_heads_that_stay_where_they_are_differ_from_serial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_heads, "_moved", heads_of_another)
    first = proved("llama_tokens", "x2", "all-to-all").first
    assert first is not None
    assert first.relative > 1e-6


def test_an_exchange_by_heads_sends_queries_keys_values_and_output() -> None:
    _, network = loaded("llama_tokens")
    strategy = parse_strategy("d2x2")
    plan = planner_for(strategy).plan(network, strategy, plan_settings(batch=6, context_exchange="all-to-all"))
    # Three samples: half of four own tokens' heads, of four of queries and of two of keys, with four features each.
    queries, keys = 3 * 4 * 2 * 4 * 4, 3 * 4 * 1 * 4 * 4
    works = [work for work in plan.of_layers() if isinstance(work, Collective)]
    assert {work.operation for work in works} == {"all_to_all"}
    one = [queries, keys, keys, queries]
    assert [work.message_bytes for work in works] == [*one, *one, *reversed(one), *reversed(one)]
    (attention,) = (layer for layer, _ in plan.sharded if layer.kind == "attention")
    assert attention.input_shapes == ((2, 8, 4), (1, 8, 4), (1, 8, 4))
    assert attention.attributes["causal"]


def test_heads_that_do_not_part_are_refused_by_name() -> None:
    for name, text, why in (
        ("llama_tokens", "x4", "2 heads of keys, layer .*scaled_dot_product_attention"),
        ("Reading", "x2", "3 heads of queries of layer scaled_dot_product_attention do not split evenly over 2"),
    ):
        _, network = loaded(name)
        strategy = parse_strategy(text)
        with pytest.raises(UserError, match=why):
            planner_for(strategy).plan(network, strategy, plan_settings(batch=2, context_exchange="all-to-all"))


class _Mixing(nn.Module):
    """Token ids to logits, with one operation that mixes tokens."""

    def __init__(self, mix: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.token_task = NextToken(vocabulary=17, sequence=8)
        self.embedding, self.head, self._mix = nn.Embedding(17, 12), nn.Linear(12, 17), mix

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self._mix(self.embedding(ids)))


MIXES = {
    "cumsum": lambda x: x.cumsum(1),
    "mean": lambda x: x - x.mean(1, keepdim=True),
    "softmax": lambda x: F.softmax(x, 1),
    "matmul": lambda x: (x @ x.transpose(1, 2)) @ x,
    "roll": lambda x: x.roll(1, 1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "getitem": lambda x: x[:, torch.tensor([7, 6, 5, 4, 3, 2, 1, 0])],
    "conv1d": lambda x: F.conv1d(x.transpose(1, 2), torch.ones(12, 12, 3), padding=1).transpose(1, 2),
}


@pytest.mark.parametrize("name", MIXES)
def test_what_mixes_tokens_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(transformer_networks, "mixing", lambda: _Mixing(MIXES[name]), raising=False)
    _, network = loaded("mixing")
    strategy = parse_strategy("x2")
    with pytest.raises(UserError, match=rf"x2: .*can't be cut at {name}"):
        planner_for(strategy).plan(network, strategy, plan_settings(batch=2))


def test_a_permutation_that_moves_the_batch_is_followed() -> None:
    # What follows it is what is refused, and names the layer.
    refused = find_tokens(trace_network(load_model("transformer_networks:Own"))).refused
    assert refused == "matmul (matmul), a product of activations over it"


def test_degrees_and_nestings_that_do_not_run_are_refused() -> None:
    _, network = loaded("gpt2_tokens")
    for text, why in (("x3", "8 tokens does not split evenly over 3"), ("x16", "p <= 8"), ("f2x2", "both share")):
        strategy = parse_strategy(text)
        with pytest.raises(UserError, match=why):
            planner_for(strategy).plan(network, strategy, plan_settings(batch=2))


def test_attention_gathers_keys_and_values_and_computes_its_queries() -> None:
    _, network = loaded("llama_tokens")
    strategy = parse_strategy("d2x4")
    plan = planner_for(strategy).plan(network, strategy, plan_settings(batch=6))
    # Two layers; two heads of four features, two own tokens of each of three samples.
    message = 2 * 4 * 2 * 3 * 4
    issued = plan.collectives()
    assert issued["all_gather", message, 4] == issued["reduce_scatter", message, 4] == 4
    (attention,) = (layer for layer, _ in plan.sharded if layer.kind == "attention")
    (whole,) = {layer.operation: layer for layer in network.layers if layer.kind == "attention"}.values()
    assert attention.fw_flops * 4 == whole.fw_flops
    assert attention.input_shapes == ((4, 2, 4), (2, 8, 4), (2, 8, 4), (2, 8))
    assert attention.attributes["masked"]
    assert sum(isinstance(work, Compute) and work.shard == "x4" for work in plan.works) > 10
    assert len(plan.roles) == 1


@pytest.mark.parametrize("exchange", ["gather", "all-to-all", "ring"])
def test_stages_send_their_tokens_alone(exchange: str) -> None:
    _, network = loaded("gpt2_tokens")

    def sent(text: str) -> tuple[set[tuple[int, ...]], int]:
        strategy = parse_strategy(text)
        settings = plan_settings(batch=4, micro_batches=2, context_exchange=exchange)
        plan = planner_for(strategy).plan(network, strategy, settings)
        works = [plan.works[at] for role in plan.roles for at in role.work.tolist()]
        attending = sum(isinstance(work, Collective | HaloExchange) and work.axes == (1,) for work in works)
        forward = (work for work in works if isinstance(work, Transfer) and work.phase == "FW")
        return {work.message_bytes for work in forward}, attending

    whole, none = sent("p2")
    parts, attending = sent("p2x2")
    assert {tuple(size // 2 for size in sizes) for sizes in whole} == parts
    assert none == 0 < attending


def test_every_layer_of_the_sequence_is_cut_and_no_other() -> None:
    _, network = loaded("bert_tokens")
    tokens = find_tokens(network)
    whole = {layer.name for at, layer in enumerate(network.layers) if at not in tokens.layers}
    assert whole
    assert all("embeddings" in name for name in whole)
    assert network.layers[-1].kind == "loss"
    assert len(network.layers) - 1 in tokens.layers
