"""Context parallelism of models with experts: each rank routes its own tokens, and nothing is sent for that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[bench,test]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[bench,test]'")

import torch.nn.functional as F
import transformer_networks

from paradl_bench.core.errors import UserError
from paradl_bench.measure.layers import shards_proof
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.models.catalog import load_model
from paradl_bench.plan.compute import INPUT
from paradl_bench.plan.settings import PlanSettings, plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Collective, Plan
from paradl_bench.strategies.context import module as running
from paradl_bench.strategies.context.plan import ContextPlanner
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.running.group_functions import gather
from paradl_bench.strategies.tensor.sequence.rows import Held, Order, Rows
from paradl_bench.strategies.tensor.sequence.tokens import find_tokens


class _Request:
    def __init__(self, exchange: str) -> None:
        self.exchange = exchange

    def settings(self, batch: int) -> PlanSettings:
        return plan_settings(batch=batch, context_exchange=self.exchange)


def traced(name: str) -> ModelGraph:
    return trace_network(load_model(f"transformer_networks:{name}"))


def proved(name: str, strategy: str, exchange: str = "gather") -> Any:
    model, request = load_model(f"transformer_networks:{name}"), _Request(exchange)
    made: Any = request
    return shards_proof._prove(model, trace_network(model), parse_strategy(strategy), made, 3)


def planned(network: ModelGraph, strategy: str, **settings: Any) -> Plan:
    return planner_for(parse_strategy(strategy)).plan(network, parse_strategy(strategy), plan_settings(**settings))


CASES = [(name, "x2", "gather") for name in ("mixtral_tokens", "Sorted", "Added", "Latent")]
CASES += [("Skewed", "x4", "gather"), ("mixtral_tokens", "x4", "ring"), ("Latent", "x4", "ring")]
CASES += [("mixtral_tokens", "x2", "all-to-all"), ("Latent", "x2", "all-to-all"), ("qwen_tokens", "x2", "ring")]


@pytest.mark.parametrize(("name", "strategy", "exchange"), CASES)
def test_tokens_are_routed_as_among_all(name: str, strategy: str, exchange: str) -> None:
    proof = proved(name, strategy, exchange).verification
    assert not proof.why_not
    assert proof.largest_difference < 1e-12


class Elsewhere(transformer_networks.Sorted):
    """Weighs rows while they are sorted, by weights that are not."""

    def put_back(self, made: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        return super().put_back(made * self.weight.unsqueeze(-1), order)

    def choose(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.weight, chosen = super().choose(rows)
        return self.weight, chosen


class Numbered(transformer_networks.Sorted):
    """Adds to each row its place among those that are sorted."""

    def put_back(self, made: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        return super().put_back(made + order.unsqueeze(-1), order)


class Ranked(transformer_networks.Sorted):
    """Sorts rows by how sure the router is, and has the products follow the experts."""

    def choose(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.weight, chosen = super().choose(rows)
        return self.weight, chosen

    def order(self, chosen: torch.Tensor) -> torch.Tensor:
        return self.weight.argsort()


class Balanced(transformer_networks.Sorted):
    """Weighs tokens by how many rows the experts have."""

    def ends(self, chosen: torch.Tensor) -> torch.Tensor:
        counted = F.one_hot(chosen, self.experts).sum(0)
        self.share = counted / counted.sum()
        return counted.cumsum(0).to(torch.int32)

    def put_back(self, made: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        return super().put_back(made, order) * self.share.max()


class Limited(transformer_networks.Sorted):
    """Leaves out what an expert has too much of: rows are numbered over all tokens."""

    def put_back(self, made: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        return super().put_back(made, order) * (F.one_hot(self.chosen, self.experts).cumsum(0).amax(-1, True) < 5)

    def choose(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weight, self.chosen = super().choose(rows)
        return weight, self.chosen


class Even(transformer_networks.Sorted):
    """Gives every expert as many rows, whatever the router says."""

    def ends(self, chosen: torch.Tensor) -> torch.Tensor:
        size = chosen.numel() // self.experts
        return torch.arange(size, chosen.numel() + 1, size, dtype=torch.int32, device=chosen.device)


class Shared(transformer_networks.Sorted):
    """Adds two neighbours among sorted rows."""

    def put_back(self, made: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        pairs = made.unflatten(0, (-1, 2)).sum(1, keepdim=True).expand(-1, 2, -1).flatten(0, 1)
        return super().put_back(pairs, order)


MIXES = {
    Elsewhere: r"mul\S* \(mul\), which reads rows in unlike orders",
    Numbered: r"add \(add\), which computes with places of rows",
    Ranked: r"\S*grouped_mm .*, whose groups are not what its rows were sorted by",
    Balanced: r"sum\S* \(sum\), which reads numbers of rows",
    Limited: r"cumsum\S* \(cumsum\), which works along it",
    Even: r"\S*grouped_mm .*, whose groups are none of sorted rows",
    Shared: r"unflatten \(view\), which doesn't run token by token",
}


@pytest.mark.parametrize("mixing", MIXES, ids=lambda mixing: str(mixing.__name__))
def test_what_mixes_rows_of_tokens_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, mixing: Any) -> None:
    monkeypatch.setattr(transformer_networks, mixing.__name__, mixing, raising=False)
    with pytest.raises(UserError, match=rf"x2: .*can't be cut at {MIXES[mixing]}"):
        planned(traced(mixing.__name__), "x2", batch=2)


def by_any_groups(self: Rows, layer: Any, given: Any) -> Held:
    return Held(given[0].along, given[0].order, (layer.name, 0))


ALIKE = {"__eq__": lambda order, other: True, "__ne__": lambda order, other: False, "__hash__": lambda order: 0}


@pytest.mark.parametrize(
    ("mixing", "owner", "broken"),
    [(Elsewhere, Order, ALIKE), (Ranked, Rows, {"_product": by_any_groups})],
    ids=["orders are alike", "groups are of any rows"],
)
def test_what_is_refused_would_differ_from_serial(
    monkeypatch: pytest.MonkeyPatch, mixing: Any, owner: type, broken: dict[str, Callable[..., Any]]
) -> None:
    monkeypatch.setattr(transformer_networks, mixing.__name__, mixing, raising=False)
    for name, rule in broken.items():
        monkeypatch.setattr(owner, name, rule)
    first = proved(mixing.__name__, "x2").first
    assert first is not None
    assert first.relative > 1e-6


def own_gradient_alone(self: running._Attention, part: torch.Tensor) -> torch.Tensor:
    shape = (*part.shape[:-2], self._own.length, part.shape[-1])
    return gather(part, self._own.slices(part.dim(), -2), shape, self._own.group)


def test_rows_of_another_order_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward is found equal in every layer that has something to be held against."""
    monkeypatch.setattr(running._Attention, "_gathered", own_gradient_alone)
    first = proved("mixtral_tokens", "x2").first
    assert first is not None
    assert first.what.startswith("the gradient of")


def test_a_rank_has_part_of_rows_and_all_experts() -> None:
    network = traced("mixtral_tokens")
    plan = planned(network, "d2x4", batch=4)
    whole = {layer.name: layer for layer in network.layers if layer.kind == "grouped_matmul"}
    parts = [layer for layer, _ in plan.sharded if layer.kind == "grouped_matmul"]
    assert len(parts) == 2
    for layer in parts:
        # Two rows of each of eight tokens, of which a rank has two.
        assert (whole[layer.name].input_shapes[0][0], layer.input_shapes[0][0]) == (16, 4)
        assert layer.input_shapes[1:] == whole[layer.name].input_shapes[1:]
        assert layer.fw_flops * 4 == whole[layer.name].fw_flops
        assert layer.attributes == whole[layer.name].attributes
    held = ContextPlanner().parts_held(network, parse_strategy("x4").axes[0], 0, plan_settings(batch=4))
    assert not held


@pytest.mark.parametrize("exchange", ["gather", "all-to-all", "ring"])
def test_nothing_is_sent_for_rows(exchange: str) -> None:
    def sent(name: str) -> set[tuple[str, int]]:
        plan = planned(traced(name), "x2", batch=4, context_exchange=exchange)
        works = (work for work in plan.of_layers() if isinstance(work, Collective))
        return {(work.operation, work.message_bytes) for work in works}

    assert sent("mixtral_tokens") == sent("llama_tokens")


def test_tokens_with_experts_are_cut_in_every_layer() -> None:
    for name in ("mixtral_tokens", "Latent"):
        network = traced(name)
        layers = find_tokens(network).layers
        whole = [layer for at, layer in enumerate(network.layers) if at not in layers]
        # Positions and what is made of them, numbers of experts, matrices as they are read.
        assert whole
        assert not [layer.name for layer in whole if INPUT in layer.inputs or layer.fw_flops > 100]


def test_a_named_dim_is_told_from_behind() -> None:
    network = traced("Latent")
    along = {
        (layer.attributes["function"], layer.along) for layer in network.layers if layer.along is not msgspec.UNSET
    }
    assert along >= {("topk", -1), ("gather", -1), ("scatter", -1), ("argsort", -1)}
