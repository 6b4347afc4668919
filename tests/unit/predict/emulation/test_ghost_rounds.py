"""Ghosts of what runs in rounds are refused."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[bench,test]'")

from search_cases import profile_of

from paradl_bench.core.errors import UserError
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.network.models.catalog import load_model
from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.strategies.nesting.catalog import planner_for
from predict.costs.cost_model import CostModel
from predict.emulation.ghost import table_of


def test_a_layer_that_runs_in_rounds_has_no_ghost() -> None:
    network, strategy = trace_network(load_model("transformer_networks:llama_tokens")), parse_strategy("x2")
    model = CostModel(profile=profile_of(network), network=network)
    for exchange in ("gather", "ring"):
        settings = plan_settings(batch=8, context_exchange=exchange, accumulate=2, recompute=("all",))
        plan = planner_for(strategy).plan(network, strategy, settings)
        if exchange == "gather":
            assert table_of(model, plan, settings, profile="p", sha256="s").roles
            continue
        with pytest.raises(UserError, match=r"layer .*attention of x2 computes in rounds.*context_exchange=ring"):
            table_of(model, plan, settings, profile="p", sha256="s")
