"""Parts of the sequence beside tensor parallelism, on threads: equal to serial, and not where it is broken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[bench,test]'")

from paradl_bench.core.errors import UserError
from paradl_bench.measure.layers import shards_proof
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.models.catalog import load_model
from paradl_bench.plan.compute import LayerShard
from paradl_bench.plan.settings import PlanSettings, plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Collective, Phase, Plan, Transfer
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.running import summed_gradients
from paradl_bench.strategies.running.group_functions import gather
from paradl_bench.strategies.tensor.sequence import module as running
from paradl_bench.strategies.tensor.sequence import sorted_rows


class _Request:
    def settings(self, batch: int) -> PlanSettings:
        return plan_settings(batch=batch, sequence_parallel="on")


def proved(name: str, strategy: str) -> Any:
    model = load_model(f"transformer_networks:{name}")
    network = trace_network(model)
    return shards_proof._prove(model, network, parse_strategy(strategy), _Request(), 3)  # type: ignore[arg-type]


NAMES = ["gpt2_tokens", "llama_tokens", "bert_tokens", "Reading", "masked", "Tied"]
WITH_EXPERTS = ["mixtral_tokens", "Sorted", "Skewed", "Added"]


@pytest.mark.parametrize("name", NAMES + WITH_EXPERTS)
def test_parts_of_the_sequence_train_as_all_of_it(name: str) -> None:
    proof = proved(name, "t2").verification
    assert not proof.why_not
    assert proof.largest_difference < 1e-12


def own_part_alone(parameters: Any, group: Any) -> Any:
    return tuple(parameters)


def own_bias_alone(self: running.SequenceRun, bias: torch.Tensor) -> torch.Tensor:
    return bias


def own_gradient_alone(self: running.SequenceRun, part: torch.Tensor) -> torch.Tensor:
    by_sample = running._by_sample(part, self.own.length // self._group.size)
    shape = (*by_sample.shape[:-2], self.own.length, part.shape[-1])
    return gather(by_sample, self.own.slices(by_sample.dim(), -2), shape, self._group).flatten(-3, -2)


@pytest.mark.parametrize(
    ("owner", "name", "broken", "differing"),
    [
        (summed_gradients, "sum_gradients", own_part_alone, "the gradient of transformer.ln_f.bias"),
        (running.SequenceRun, "bias", own_bias_alone, "the gradient of transformer.h.1.mlp.c_proj.bias"),
        (running.SequenceRun, "gathered", own_gradient_alone, "the gradient of transformer.wte.weight"),
    ],
    ids=["norms' gradients of own tokens", "biases' gradients of own tokens", "own columns' gradient"],
)
def test_what_is_broken_differs_from_serial(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, broken: Callable[..., Any], differing: str
) -> None:
    monkeypatch.setattr(owner, name, broken)
    first = proved("gpt2_tokens", "t2").first
    assert first is not None
    # What layers give on parts of the sequence is held against those parts.
    assert first.what == differing
    assert 1e-6 < first.relative < 1


def in_order_of_ranks(rows: torch.Tensor, sizes: Any) -> torch.Tensor:
    return rows


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [(sorted_rows, "in_columns", in_order_of_ranks), (summed_gradients, "sum_gradients", own_part_alone)],
    ids=["rows in the order of ranks", "routers' gradients of own tokens"],
)
def test_what_is_broken_of_experts_differs(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, broken: Callable[..., Any]
) -> None:
    monkeypatch.setattr(owner, name, broken)
    first = proved("mixtral_tokens", "t2").first
    assert first is not None
    assert first.relative > 1e-6


def shards(name: str, strategy: str, **options: Any) -> list[LayerShard]:
    network = trace_network(load_model(f"transformer_networks:{name}"))
    given = parse_strategy(strategy)
    settings = plan_settings(**{"batch": 4, "sequence_parallel": "on"} | options)
    found = planner_for(given).shards(network, given, settings).distinct[0]
    return list(found.shards.values())


def messages(found: list[LayerShard]) -> Counter[tuple[str, int]]:
    works = (work for each in found for work in (*each.before_fw, *each.after_fw, *each.before_bw, *each.after_bw))
    return Counter((work.operation, work.message_bytes) for work in works if isinstance(work, Collective))


def test_messages_are_parts_of_what_was_all_reduced() -> None:
    whole = messages(shards("gpt2_tokens", "t2", sequence_parallel="off"))
    parts = messages(shards("gpt2_tokens", "t2"))
    operation, largest = max(whole, key=lambda key: key[1])
    assert operation == "all_reduce"
    assert parts["all_reduce", largest] == 0
    assert parts["reduce_scatter", largest // 2] == whole["all_reduce", largest]
    assert parts["all_gather", largest // 2] == whole["all_reduce", largest]


@pytest.mark.parametrize(
    ("name", "strategy", "options", "reason"),
    [
        ("gpt2_tokens", "t3p2", {"batch": 4, "micro_batches": 2}, "does not split evenly over 3 ranks"),
        ("gpt2_tokens", "t3", {}, "does not split evenly over 3 ranks"),
        ("gpt2", "t2", {}, "no token ids"),
        ("gpt2_tokens", "t2", {"split": ("*attn*", "*mlp*")}, "have the head cut"),
        # These differed from serial training in silence (drawn modules 41000184, 41000327 and 41000397).
        ("frozen_attention", "t2", {}, "reads all keys and values"),
        ("one_key_head", "t2", {}, "reads all keys and values"),
        ("gpt2_tokens", "t2", {"split": ("*mlp*", "*head*")}, "reads all keys and values"),
    ],
)
def test_what_cannot_run_is_refused(name: str, strategy: str, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        shards(name, strategy, **options)


def test_options_are_checked_before_there_is_a_network() -> None:
    strategy, settings = parse_strategy("t2"), plan_settings(batch=2, sequence_parallel="on")
    planner_for(strategy).check(ModelGraph(name="", input_shape=(), layers=(), parameters=()), strategy, settings)


def plan_of(name: str, text: str = "p2t2", **options: Any) -> Plan:
    network, strategy = trace_network(load_model(f"transformer_networks:{name}")), parse_strategy(text)
    return planner_for(strategy).plan(
        network, strategy, plan_settings(batch=4, **({"micro_batches": 2} if "p" in text else {}), **options)
    )


def issued(plan: Plan, operation: str, phase: Phase = Phase.FW) -> list[int]:
    """Bytes of all collectives of an operation in a phase, on one rank of each role."""
    works = [plan.works[at] for role in plan.roles for at in role.work[role.phase == phase]]
    return sorted(work.message_bytes for work in works if isinstance(work, Collective) and work.operation == operation)


def test_stages_send_parts_of_the_sequence() -> None:
    plans = [plan_of("gpt2_tokens", sequence_parallel=on) for on in ("off", "on")]
    sent = [{work for work in plan.works if isinstance(work, Transfer) and work.phase == "FW"} for plan in plans]
    whole, parts = ({work.message_bytes for work in works} for works in sent)
    assert {tuple(size // 2 for size in sizes) for sizes in whole} == parts


def test_each_stage_gathers_what_a_cut_parts() -> None:
    cuts = ("model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj")
    before, between = (plan_of("llama_tokens", sequence_parallel="on", stages=(cut,)) for cut in cuts)
    gathered = issued(before, "all_gather")
    # One more for each of two micro-batches, on every role of one of two stages.
    assert issued(between, "all_gather") == sorted([*gathered, *gathered[:1] * len(between.roles)])
    assert issued(between, "reduce_scatter") == issued(before, "reduce_scatter")


@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter"])
def test_blocks_that_run_again_gather_and_scatter_again(operation: str) -> None:
    kept, again = (plan_of("gpt2_tokens", "t2", sequence_parallel="on", recompute=of) for of in ((), ("all",)))
    # On each role the head gathers and the embedding scatters once: they are in no block.
    once = issued(kept, operation)[len(kept.roles) :]
    assert once
    assert issued(again, operation, Phase.BW) == sorted([*issued(kept, operation, Phase.BW), *once])
    assert issued(again, operation) == issued(kept, operation)


def test_a_layer_that_runs_again_without_its_leader_gathers() -> None:
    alone = ("model.layers.1.mlp.up_proj",)
    kept, again = (plan_of("llama_tokens", "t2", sequence_parallel="on", recompute=of) for of in ((), alone))
    gathered = issued(kept, "all_gather", Phase.BW)
    assert issued(again, "all_gather", Phase.BW) == sorted([*gathered, *gathered[: len(kept.roles)]])
