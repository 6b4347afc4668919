"""ZeRO beside other axes and under replicas, and parts of the sequence: searched, bounded, and told by rows."""

from __future__ import annotations

import json
import math
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[bench,test]'")

from network_factory import NetworkFactory
from profile_factory import make_network, ring_fit
from search_cases import exactly, found, profile_of, profile_on

from calibrate.profile.profile import write_profile
from paradl_bench.cli import group as bench
from paradl_bench.commands import train
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.measure.training.request import TrainingRequest
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.kinds.autocast import as_held
from paradl_bench.network.models.catalog import load_model
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.strategies.tensor.sequence.options import SequenceOptions
from predict.cli import group
from predict.costs.cost_model import CostModel
from predict.costs.memory_estimate import EstimatedMemory
from predict.search.candidates.space import Space, find_space, hold_activations_of
from predict.search.pricing.estimate import Estimates
from predict.search.pricing.memory_bound import MemoryBounds
from predict.search.pricing.shared_work import SharedWorks

WIDTHS = (64, 512, 256, 512, 32)
TOKENS = "transformer_networks:llama_tokens"
EXPERTS = "transformer_networks:mixtral_tokens"


def two_units() -> ModelGraph:
    """4x16x16 -> conv 8 -> body of two convolutions -> fc 12 -> loss: units of ZeRO, and what the model keeps."""
    factory = NetworkFactory(4, 16, 16)
    factory.conv("stem", 8, 3, padding=1)
    factory.conv("body.0.one", 8, 3, padding=1)
    factory.conv("body.1.one", 8, 3, padding=1)
    factory.flatten("flatten")
    factory.linear("fc", 12)
    factory.loss()
    return factory.network("chain")


@cache
def network_of(name: str) -> ModelGraph:
    if name in (TOKENS, EXPERTS):
        return trace_network(load_model(name))
    return two_units() if name == "units" else make_network(WIDTHS)


@cache
def costs_of(name: str) -> CostModel:
    network = network_of(name)
    profile = profile_of(network)
    fits = (*profile.communication, ring_fit("all_to_all"))
    return CostModel(profile=profile_of(network, communication=fits), network=network)


def named(space: Space) -> list[str]:
    """The strategy of each candidate."""
    return [str(space.strategies[index]) for index in space.strategy]


@cache
def held_by_all(name: str, dtype: str, device: str) -> tuple[CostModel, Space, list[EstimatedMemory]]:
    """The candidates of 4 ranks, and what each holds: several tests ask for it, and to walk them all takes seconds."""
    costs = CostModel(profile=profile_on(network_of(name), device), network=network_of(name), dtype=dtype)
    settings = PlanSettings(batch=4, blocking=True, dtype=dtype, device=device)
    space = find_space(costs.network, settings, 4, (), computed_in=(dtype, ""))
    first, plan_of = space.plans
    of_plans = [memory_of(costs, space, candidate) for candidate in first.tolist()]
    return costs, space, [of_plans[plan] for plan in plan_of.tolist()]


def memory_of(costs: CostModel, space: Space, candidate: int) -> EstimatedMemory:
    return costs.memory(space.strategies[space.strategy[candidate]], space.settings_of(candidate))


@pytest.mark.parametrize(
    ("name", "ranks", "batch"),
    [
        *((TOKENS, 2, 2), (EXPERTS, 2, 2), ("units", 4, 4)),
        *(pytest.param(*larger, marks=pytest.mark.slow) for larger in ((TOKENS, 4, 2), ("chain", 8, 4))),
    ],
)
def test_the_best_found_is_that_of_predicting_all(tmp_path: Path, name: str, ranks: int, batch: int) -> None:
    costs = costs_of(name)
    write_profile(tmp_path / "p.json", costs.profile)
    space = find_space(costs.network, PlanSettings(batch=batch, blocking=True), ranks, ())
    every = [exactly(costs, space.settings_of(index), strategy) for index, strategy in enumerate(named(space))]
    wanted = ("--ranks", str(ranks), "--batch", str(batch), "--caps", "25", "--predictions", "900")
    answer = found(tmp_path / "p.json", *wanted, model=costs.network.name)
    assert answer["rows"][0]["prediction"]["iteration_s"] == pytest.approx(min(every), rel=1e-12)


def test_stages_of_zero_nest_wherever_their_planner_lets_them() -> None:
    tokens = network_of(TOKENS)
    space = find_space(tokens, PlanSettings(batch=8, blocking=True), 8, ())
    strategies = {str(strategy) for strategy in space.strategies}
    assert {"z1d4t2", "t2z2d4", "z3d2x4", "d2z3d4", "d4z2d2", "d2z3d2t2", "d2t2z3d2"} <= strategies
    # The copies of shards stand outside of them, and stage 1 has none.
    assert not {"z3d4d2", "z3d2d2t2", "d2z1d4"} & strategies
    assert any(text.startswith("replicas inside of shards, or of ZeRO stage 1") for text in space.not_searched)
    experts = find_space(network_of(EXPERTS), PlanSettings(batch=4, blocking=True), 4, ())
    of_experts = {str(strategy) for strategy in experts.strategies}
    assert {"d2e2", "z1d2e2", "e2z2d2", "z3d2e2", "z1d1e4", "z3d1e4"} <= of_experts
    # Where one rank of data parallelism stands changes nothing.
    assert "e4z3d1" not in of_experts


def test_parts_of_the_sequence_are_tried_where_they_run() -> None:
    space = find_space(network_of(TOKENS), PlanSettings(batch=8, blocking=True), 4, ())
    settings = [space.settings_of(candidate) for candidate in range(len(space))]
    of_parts = [c for c, each in enumerate(settings) if each.of(SequenceOptions).on]
    names = named(space)
    assert {"d2t2", "z3d2t2", "p2t2"} <= {names[c] for c in of_parts}
    assert {"d2t2", "z3d2t2"} <= {name for c, name in enumerate(names) if c not in of_parts}
    assert {space.schedules[space.schedule[c]] for c in of_parts if space.is_pipelined(c)} == set(space.schedules)
    assert {bool(settings[c].recompute) for c in of_parts} == {True, False}


@pytest.mark.parametrize("blocking", [True, False], ids=["waits for calls", "on streams"])
@pytest.mark.parametrize("name", ["units", "chain"])
def test_no_stage_of_zero_is_faster_than_its_estimate(name: str, *, blocking: bool) -> None:
    costs = costs_of(name)
    space = find_space(costs.network, PlanSettings(batch=8, blocking=blocking), 8, ())
    estimates = Estimates(costs, space, SharedWorks(costs.network, space.settings)).seconds()
    names = named(space)
    sharded = [c for c in range(len(space)) if space.mesh(c).zero and not space.mesh(c).shared]
    assert {"z1d8", "z2d8", "z3d8", "d2z3d4", "d4z2d2"} <= {names[c] for c in sharded}
    ratios = [exactly(costs, space.settings_of(c), names[c]) / estimates[c] for c in sharded]
    assert min(ratios) >= 1 - 1e-9
    # A bound of nothing would be one as well.
    assert max(ratios) < 4


@pytest.mark.parametrize(
    ("name", "nested", "dtype", "device"),
    [
        (TOKENS, {"x2t2", "t2x2", "p2x2", "z3d2x2"}, "fp32", "cpu"),
        (EXPERTS, {"p2e2", "d2e2", "e2t2", "x2e2"}, "fp32", "cpu"),
        (EXPERTS, {"p2e2", "d2e2", "e2t2", "x2e2"}, "bf16", "cuda"),
    ],
    ids=["tokens", "experts", "copies of experts"],
)
def test_no_nested_candidate_holds_less_than_its_bound(name: str, nested: set[str], dtype: str, device: str) -> None:
    costs, space, uses = held_by_all(name, dtype, device)
    names, points = named(space), [space.settings_of(c) for c in range(len(space))]
    assert nested <= set(names)
    in_parts = {names[c] for c, point in enumerate(points) if point.of(SequenceOptions).on and point.recompute}
    assert in_parts >= ({"d2t2", "p2t2"} if name == TOKENS else set())
    peaks = [use.peak_bytes for use in uses]
    memory_bounds = MemoryBounds(costs, space, SharedWorks(as_held(costs.network, dtype), space.settings))
    # Where nothing fits, the parameters alone are looked at.
    for within in (math.inf, 0.0):
        bounds = memory_bounds.of(space, within)
        larger = np.flatnonzero(bounds > np.array(peaks)).tolist()
        assert [(within, names[c], points[c]) for c in larger] == []


@pytest.mark.parametrize(
    ("name", "ranks", "nested"),
    [
        (TOKENS, 8, {"p2x2t2", "t2p2x2", "z2d2p2t2", "p2z3d2x2"}),
        (EXPERTS, 4, {"d2e2", "e2d2", "z1d2e2", "z2d2e2", "z3d2e2", "z3d1e4", "z1d1p2e2", "z3d1p2e2"}),
        (EXPERTS, 8, {"p2d2e2", "p2z1d2e2", "z3d2p2e2"}),
    ],
    ids=["two axes", "experts", "experts in stages"],
)
def test_shared_layers_are_bounded_from_below(name: str, ranks: int, nested: set[str]) -> None:
    costs = costs_of(name)
    space = find_space(costs.network, PlanSettings(batch=ranks if name == EXPERTS else 4, blocking=True), ranks, ())
    shared = SharedWorks(costs.network, space.settings)
    estimates = Estimates(costs, space, shared).seconds()
    bounds = MemoryBounds(costs, space, shared).of(space, math.inf)
    times: dict[str, list[float]] = {}
    for candidate, name in enumerate(named(space)):
        if name in nested:
            settings, strategy = space.settings_of(candidate), space.strategies[space.strategy[candidate]]
            times.setdefault(name, []).append(exactly(costs, settings, name) / estimates[candidate])
            assert bounds[candidate] <= costs.memory(strategy, settings).peak_bytes, (name, settings)
    assert times.keys() == nested
    assert min(map(min, times.values())) >= 1 - 1e-9
    # A bound of nothing would be one as well. Of many micro-batches it is farther from the time.
    assert all(min(of_name) < 4 for of_name in times.values())


def test_candidates_of_one_plan_hold_the_same() -> None:
    costs, space, uses = held_by_all("units", "fp32", "cpu")
    differing = [c for c, use in enumerate(uses) if memory_of(costs, space, c).peak_bytes != use.peak_bytes]
    assert [named(space)[candidate] for candidate in differing] == []
    assert len(space.plans[0]) < len(space)


@pytest.mark.parametrize("name", ["units", TOKENS])
def test_activations_of_one_rule_out_others_that_hold_them(name: str) -> None:
    _, space, uses = held_by_all(name, "fp32", "cpu")
    peaks = np.array([use.peak_bytes for use in uses])
    several = 0
    for candidate, use in enumerate(uses):
        others = hold_activations_of(space, candidate)
        assert others[candidate] == (not space.is_pipelined(candidate))
        assert (peaks[others] >= use.parts_bytes["activations"]).all(), named(space)[candidate]
        several += len({named(space)[other] for other in np.flatnonzero(others)}) > 3
    assert several > 20


def test_rows_commands_say_stages_copies_and_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = costs_of(TOKENS)
    write_profile(tmp_path / "p.json", costs.profile)
    options = "--ranks", "4", "--batch", "4", "--predictions", "900", "--top", "99", "--caps", "25"
    rows = found(tmp_path / "p.json", *options, model=costs.network.name)["rows"]
    seen: list[Any] = []

    def take(request: TrainingRequest, *_: object) -> bool:
        seen.append(request)
        return False

    monkeypatch.setattr(train, "_run", take)
    told = set()
    for row in rows:
        predicted = row["prediction"]
        _, *words = shlex.split(row["train_command"])
        result = CliRunner().invoke(bench, words)
        assert result.exit_code == 0, result.output
        request = seen[-1]
        assert isinstance(request, TrainingRequest)
        assert (str(request.strategy), request.settings.batch) == (predicted["strategy"], predicted["batch"])
        assert request.settings.options == predicted["options"]
        told |= {predicted["strategy"], *predicted["options"]}
        if "z" in predicted["strategy"] or "sequence_parallel" in predicted["options"]:
            again = CliRunner().invoke(group, [*shlex.split(row["predict_command"])[1:], "--json"])
            assert json.loads(again.output) == [predicted]
    assert {"d2z3d2", "z2d2t2", "sequence_parallel"} <= told
