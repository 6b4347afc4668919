"""Experts shared out over threads: equal to serial, not where broken; what is refused, planned and recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[bench,test]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[bench,test]'")

import transformer_networks
from torch import nn

from paradl_bench.core.errors import UserError
from paradl_bench.measure.layers import shards_proof
from paradl_bench.measure.tracing import tracing
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.measure.training.calls.recorder import differences, planned_collectives
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.kinds.kernel_shape import kernel_shape
from paradl_bench.network.models.catalog import load_model
from paradl_bench.plan.settings import PlanSettings, plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Collective, Plan
from paradl_bench.records.training.issued import as_planned, unevenness
from paradl_bench.records.training.training_record import IssuedCollective
from paradl_bench.strategies.expert import module as running
from paradl_bench.strategies.expert.routes import find_routes
from paradl_bench.strategies.nesting.catalog import planner_for

NAMES = ("mixtral_tokens", "qwen_tokens", "Sorted", "Added", "Skewed")
ROWS, WIDTH = transformer_networks.READ, transformer_networks.WIDTH


class _Request:
    def settings(self, batch: int) -> PlanSettings:
        return plan_settings(batch=batch)


def traced(name: str) -> ModelGraph:
    return trace_network(load_model(f"transformer_networks:{name}"))


def proved(name: str, strategy: str) -> Any:
    model, ranks = load_model(f"transformer_networks:{name}"), parse_strategy(strategy)
    request: Any = _Request()
    return shards_proof._prove(model, trace_network(model), ranks, request, 2 * ranks.ranks)


def planned(name: str | ModelGraph, strategy: str, batch: int = 8, **settings: Any) -> Plan:
    network = traced(name) if isinstance(name, str) else name
    return planner_for(parse_strategy(strategy)).plan(
        network, parse_strategy(strategy), plan_settings(batch=batch, **settings)
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("strategy", ["e2", "e4"])
def test_experts_on_several_ranks_train_as_on_one(name: str, strategy: str) -> None:
    proof = proved(name, strategy).verification
    assert not proof.why_not
    # Qwen's router runs in single precision.
    assert proof.largest_difference < (1e-6 if name == "qwen_tokens" else 1e-12)


@pytest.mark.parametrize("name", ["Sorted", "Added"])
def test_experts_are_traced_without_memory(name: str) -> None:
    model = load_model(f"transformer_networks:{name}")
    on_meta = tracing._trace_on_meta(model)
    on_cpu = tracing._trace(model.fresh("cpu"), tracing._CPU_BATCH, "cpu")
    assert [layer.operation for layer in on_meta.layers] == [layer.operation for layer in on_cpu.layers]
    # Each product has a kernel, on the rows of all tokens.
    products = [layer for layer in on_meta.layers if layer.kind == "grouped_matmul"]
    kernels = [kernel_shape(layer, "FW", 2, "fp32") for layer in products]
    assert products
    assert [kernel.sizes["batch"] for kernel in kernels if kernel] == [2 * layer.output_shape[0] for layer in products]


def in_order_of_arrival(rows: torch.Tensor, sizes: Any) -> torch.Tensor:
    return rows.clone()


def unscaled(there: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda rows, sizes, group, scale=1.0: there(rows, sizes, group)


@pytest.mark.parametrize(
    ("function", "broken"),
    [("in_columns", in_order_of_arrival), ("_there", unscaled(running._there)), ("_back", unscaled(running._back))],
    ids=["rows in the order of ranks", "gradients of all ranks", "gradients divided"],
)
def test_what_breaks_a_rule_is_seen(function: str, broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, function, broken)
    first = proved("Sorted", "e2").first
    assert first is not None
    assert first.relative > 1e-6


def all_to_alls(plan: Plan) -> list[Collective]:
    return [work for work in plan.communication() if isinstance(work, Collective) and work.operation == "all_to_all"]


def test_rows_of_two_products_are_sent_once() -> None:
    sent = all_to_alls(planned("Sorted", "d2e2"))
    # Of two samples on a rank, in fp32; a half for each rank.
    of_rows = 2 * ROWS * WIDTH * 4 // 2
    assert [work.message_bytes for work in sent] == [4 * 8 // 2, *(of_rows,) * 4]
    assert {(work.ranks, work.axes) for work in sent} == {(2, (1,))}


def test_gradients_go_back_where_a_reader_has_none() -> None:
    bytes_sent = [
        sorted(sent.message_bytes for sent in all_to_alls(planned(name, "e2"))) for name in ("Added", "Sorted")
    ]
    assert bytes_sent[0] == bytes_sent[1]


def test_an_imbalance_is_paid_for_not_checked() -> None:
    even, uneven = (all_to_alls(planned("Sorted", "e2", expert_imbalance=share)) for share in (1.0, 1.5))
    assert [work.messages for work in even] == [work.messages for work in uneven]
    assert [work.message_bytes for work in uneven[1:]] == [work.message_bytes * 3 // 2 for work in even[1:]]
    network = traced("Sorted")
    # Gate and up are one operation.
    serial = {layer.name: layer.fw_flops for layer in network.layers if layer.kind == "grouped_matmul"}
    for share in (1.0, 1.5):
        sharded = planned(network, "e2", expert_imbalance=share).sharded
        found = [layer for layer, _ in sharded if layer.kind == "grouped_matmul"]
        assert len(found) == 2
        assert [layer.fw_flops for layer in found] == [round(serial[layer.name] * share) for layer in found]
        assert {layer.attributes["groups"] for layer in found} == {2}


def test_gradients_of_experts_go_to_those_that_hold_them() -> None:
    network = traced("Sorted")
    whole = {parameter.name: parameter.bytes for parameter in network.parameters}
    of_experts = sum(whole[name] for name in ("gate", "up", "down"))

    def reduced(strategy: str) -> dict[tuple[int, ...], int]:
        found: dict[tuple[int, ...], int] = {}
        for work in planned(network, strategy).communication():
            if isinstance(work, Collective) and work.operation == "all_reduce":
                found[work.axes] = found.get(work.axes, 0) + work.message_bytes
        return found

    others = sum(whole.values()) - of_experts
    assert reduced("e4") == {(0,): others}
    assert reduced("d2e2") == {(0, 1): others, (0,): of_experts // 2}
    assert reduced("e2d2") == {(0, 1): others, (1,): of_experts // 2}


def issued(plan: Plan, received: int) -> list[IssuedCollective]:
    """What a plan holds, with so many bytes on the other side of each all-to-all but that of numbers."""
    own = planned_collectives(plan)
    return [
        IssuedCollective(
            when=item.when,
            operation=item.operation,
            message_bytes=received if item.message_bytes > 100 else item.message_bytes,
            received_bytes=item.message_bytes,
            group=item.group,
            count=item.count,
        )
        if item.operation == "all_to_all"
        else item
        for item in own
    ]


def test_the_side_that_routing_decides_is_recorded_not_compared() -> None:
    plan = planned("Sorted", "e2")
    (rows,) = {work.message_bytes for work in all_to_alls(plan) if work.message_bytes > 100}
    skewed = issued(plan, rows * 5 // 4)
    assert not differences(skewed, planned_collectives(plan))
    assert unevenness(skewed, planned_collectives(plan)) == (1.0, 1.25)
    lost = [item for item in skewed if item.message_bytes != rows * 5 // 4]
    assert differences(lost, planned_collectives(plan))


def test_few_rows_are_not_taken_for_numbers_of_rows() -> None:
    """A rank whose experts got one row, which is as many bytes as the numbers (drawn module 41000329)."""
    plan = planned("Sorted", "e2")
    own = planned_collectives(plan)
    (numbers,) = {work.message_bytes for work in all_to_alls(plan) if work.message_bytes < 100}
    few = issued(plan, numbers)
    assert not differences(few, own)
    assert len({item.message_bytes for item in as_planned(few, own) if item.operation == "all_to_all"}) == 2
    assert differences([*few, next(item for item in few if item.received_bytes != item.message_bytes)], own)


class Biased(transformer_networks.Sorted):
    """Adds to rows, between products, what is not sent with them."""

    def product(self, rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return super().product(rows, matrices, ends) + torch.arange(rows.size(0), device=rows.device).unsqueeze(-1)


class Watching(transformer_networks.Sorted):
    """Reads experts' matrices beside the products."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) + self.gate.mean()


class Uneven(transformer_networks.Sorted):
    experts = 6


def network_of(module: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> ModelGraph:
    monkeypatch.setattr(transformer_networks, "tried", module, raising=False)
    return traced("tried")


def test_rows_come_back_before_what_reads_others(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = find_routes(network_of(Biased, monkeypatch))
    assert not routes.refused
    # Gate and up read one tensor; down reads what was put together at home.
    assert len(routes.sent) == 2
    assert len(routes.counted) == 1
    assert sum(map(len, routes.returned.values())) == 3
    assert proved("tried", "e2").verification.largest_difference < 1e-12


class Unordered(transformer_networks.Sorted):
    """Rows stay as experts made them, and are read as such."""

    def put_back(self, made: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        return made.neg()


@pytest.mark.parametrize(
    ("module", "strategy", "settings", "message"),
    [
        (transformer_networks.Sorted, "e8", {}, "8 ranks along e8, but p <= 4: 4 experts, layer _grouped_mm"),
        (transformer_networks.Sorted, "e2", {"batch": 3}, "batch 3 does not split evenly over 2 ranks"),
        (transformer_networks.Sorted, "d2e2", {"batch": 6}, "batch 6 does not split evenly over 4 ranks"),
        (Unordered, "p2e2", {"stages": ("neg",)}, "at neg: between _grouped_mm#3 and neg a rank has as many rows"),
        (transformer_networks.Sorted, "e2f2", {}, "expert and filter both share layers"),
        (transformer_networks.Sorted, "e2", {"expert_imbalance": 2.5}, "--expert-imbalance 2.5 is more than the 2"),
        (transformer_networks.Sorted, "d2e2", {"exchange": "leader", "ranks_per_node": 2}, "exchange flat"),
        (Uneven, "e4", {}, "6 experts of layer _grouped_mm do not split evenly over 4 ranks"),
        (Watching, "e2", {}, "which reads the experts' matrices otherwise"),
        (transformer_networks.llama_tokens, "e2", {}, "has no expert layers"),
    ],
)
def test_what_does_not_run_is_refused_by_name(
    module: Callable[[], nn.Module],
    strategy: str,
    settings: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = network_of(module, monkeypatch)
    with pytest.raises(UserError, match=message.replace("(", "\\(")) as refused:
        planned(network, strategy, **settings)
    assert "\n" not in str(refused.value)
