"""Ghosts of what runs in rounds: they sleep in each, as long as planned, and messages begin behind earlier work."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[bench,test]'")

import transformer_networks
from ghost_clock import Clock
from search_cases import profile_of

from paradl_bench.emulation.layers import GhostLayers
from paradl_bench.emulation.sleeper import Sleeper
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.network.models.catalog import load_model
from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Compute, FrameworkOverhead
from paradl_bench.records.training.ghost_record import GhostRole
from paradl_bench.strategies.context import ring_kernels
from paradl_bench.strategies.context.ring_kernels import Scoring
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.running.group_functions import Group
from paradl_bench.strategies.running.sharded_module import instead
from paradl_bench.strategies.running.spans import Spans
from predict.costs.cost_model import CostModel
from predict.emulation.ghost import table_of

RANKS = 2


def test_rounds_sleep_together_as_long_as_is_planned() -> None:
    network, strategy = trace_network(load_model("transformer_networks:llama_tokens")), parse_strategy(f"x{RANKS}")
    model = CostModel(profile=profile_of(network), network=network)
    settings = plan_settings(batch=8, context_exchange="ring", accumulate=2, recompute=("all",))
    plan = planner_for(strategy).plan(network, strategy, settings)
    (role,) = table_of(model, plan, settings, profile="p", sha256="s").roles
    works = [plan.works[index] for index in plan.roles[0].work.tolist()]
    attention = next(layer.name for layer in network.layers if layer.kind == "attention")
    rounds = [work for work in works if isinstance(work, Compute) and (work.layer, work.phase) == (attention, "BW")]
    assert len(rounds) == RANKS * settings.accumulate
    of_operation = [work for work in works if isinstance(work, FrameworkOverhead) and work.phase == "BW"]
    assert of_operation
    alone_s, between_s = role.layers[attention]["BW"], role.between["BW"]
    assert RANKS * role.seconds(attention, "BW", RANKS) == pytest.approx(RANKS * alone_s + between_s)


def test_ghosts_of_rounds_ask_for_their_phase_and_return_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch, late_s=0.0)
    network = trace_network(load_model("transformer_networks:llama_tokens"))
    index, layer = next((i, layer) for i, layer in enumerate(network.layers) if layer.kind == "attention")
    seconds = GhostRole(layers={layer.name: {"FW": 1.0, "BW": 2.0}}, between={"FW": 0.5, "BW": 0.5}, update_s=0.0)
    sleeper = Sleeper()
    ghost = GhostLayers(network, seconds, sleeper)(index, torch.nn.functional.scaled_dot_product_attention)
    query, key, value = (torch.randn(2, 4, transformer_networks.READ // RANKS, 4) for _ in range(3))
    scoring = Scoring(causal=True, scale=None, dropout=0.0)
    attend = instead(ghost, ring_kernels.attend, rounds=RANKS)
    out, lse, drawn = attend((query, key, value), None, scoring)
    assert (out.shape, lse.shape, drawn) == (query.shape, query.shape[:-1], ())
    assert not out.any()
    assert sleeper.asked_s == {"FW": 1.25}
    differentiate = instead(ghost, ring_kernels.differentiate, rounds=RANKS, backward=True)
    made = differentiate((query, query, key, value, out, lse), None, drawn, scoring)
    assert [tensor.shape for tensor in made] == [query.shape, key.shape, value.shape]
    assert sleeper.asked_s == {"FW": 1.25, "BW": 2.25}
    # Nothing is joined for real, which would write into zeros that layers share.
    assert not lse.any()


def test_messages_beside_a_round_begin_when_earlier_work_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, late_s=0.0)
    sleeper = Sleeper()
    sleeper.begin_anew()
    began: list[float] = []
    monkeypatch.setattr(Group, "_post", lambda *_: began.append(clock.now) or [])
    group = Group(process_group=None, rank=0, size=RANKS, spans=Spans(listener=sleeper))  # type: ignore[arg-type]
    sleeper.ask("FW", 1.0)
    wait = group.begin_exchange([], [])
    sleeper.ask("FW", 2.0)
    assert began == [pytest.approx(1.0, abs=1e-3)]
    assert clock.now < 1.1
    wait()
    assert clock.now == pytest.approx(3.0, abs=1e-3)
