"""Entries of a role add up to the iteration where axes cut tokens, heads or experts."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[bench,test]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[bench,test]'")

from profile_factory import (
    affine_seconds,
    free_copies,
    in_context,
    layer_times,
    make_profile,
    model_times,
    ring_fit,
    with_compute,
    with_doctor,
)

from calibrate.profile.profile import Profile
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.models.catalog import load_model
from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import parse_strategy
from predict.costs.cost_model import CostModel
from predict.workload import Configuration, evaluator_named

CLOSE = 1e-9
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
CASES = (
    ("gpt2_tokens", "t2", {"sequence_parallel": "on"}),
    ("gpt2_tokens", "d2t2", {"sequence_parallel": "on"}),
    ("gpt2_tokens", "p2t2", {"sequence_parallel": "on", "schedule": "zb", "micro_batches": 4}),
    ("gpt2_tokens", "x2", {}),
    ("gpt2_tokens", "d2x2", {}),
    ("gpt2_tokens", "x2t2", {}),
    ("gpt2_tokens", "d2t2x2", {"context_exchange": "ring"}),
    ("Sorted", "e2", {}),
    ("Sorted", "d2e2", {}),
)


@pytest.fixture(scope="module")
def networks() -> dict[str, ModelGraph]:
    return {name: trace_network(load_model(f"transformer_networks:{name}")) for name in {name for name, *_ in CASES}}


def profile_of(network: ModelGraph) -> Profile:
    """With late ranks, all that surrounds a call, copies, and seconds that grow less than the batch."""
    quantiles = tuple(0.75 + 0.05 * step for step in range(11))
    profile = make_profile(
        network,
        layer_times=layer_times(network, seconds=affine_seconds, block_sd=0.05),
        model_times=model_times(network, seconds=affine_seconds, between_s=1e-3, quantiles=quantiles, samples=1000),
        communication=tuple(ring_fit(operation, beta_s_per_byte=1e-8) for operation in OPERATIONS),
        contexts=(with_compute(1.3, 1.6), *(in_context("after-compute", name, added_s=1e-4) for name in OPERATIONS)),
        copies=free_copies(beta_s_per_byte=1e-9),
    )
    return with_doctor(profile)


@pytest.mark.parametrize(("name", "strategy", "settings"), CASES)
def test_entries_add_up(networks: dict[str, ModelGraph], name: str, strategy: str, settings: dict[str, Any]) -> None:
    ranks, network = parse_strategy(strategy), networks[name]
    point = Configuration(strategy=ranks, settings=plan_settings(batch=16, **settings))
    evaluation = evaluator_named("simulate").prepare(CostModel(profile=profile_of(network), network=network), point)
    iteration_s, roles = evaluation.timing().iteration_s, evaluation.ledger()
    assert sum(role.ranks for role in roles) == ranks.ranks
    for role in roles:
        assert sum(entry.exposed_s for entry in role.entries) == pytest.approx(iteration_s, rel=CLOSE)
        assert any(entry.base_s > 0 for entry in role.entries if "group" in entry.details)
