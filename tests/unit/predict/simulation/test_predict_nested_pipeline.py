"""Predictions of pipelines whose stages share their layers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from network_factory import NetworkFactory
from profile_factory import free_copies, make_profile, ring_fit

from calibrate.profile.profile import write_profile
from paradl_bench.core.terminal.command_line import run_command
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.settings import PlanSettings, plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Collective, HaloExchange, Transfer
from paradl_bench.strategies.memory.peak import planned_memory
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.pipeline.memory import pipelined_memory
from predict.cli import group
from predict.costs.cost_model import CostModel
from predict.prediction.prediction import Prediction, Predictor
from predict.simulation.pipelines.pipeline_simulation import PipelineSimulation, lines_of_stages
from predict.workload import Configuration, evaluator_named


def convolutional() -> ModelGraph:
    """4x16x16 -> conv 8 -> relu -> conv 8 -> conv 6 -> pool 2 -> flatten -> fc 6."""
    factory = NetworkFactory(4, 16, 16)
    factory.conv("conv1", 8)
    factory.relu("relu")
    factory.conv("conv2", 8)
    factory.conv("conv3", 6)
    factory.pool("pool", 2)
    factory.flatten("flatten")
    factory.linear("fc", 6)
    factory.loss()
    return factory.network("convolutional")


NETWORK = convolutional()
PROFILE = make_profile(
    NETWORK, communication=tuple(map(ring_fit, ("all_reduce", "all_gather", "send_recv"))), copies=free_copies()
)


def point(strategy: str, batch: int = 8, **changes: object) -> Configuration:
    settings = plan_settings(batch=batch, **{"stages": ("conv3",), **changes})  # type: ignore[arg-type]
    return Configuration(strategy=parse_strategy(strategy), settings=settings)


def predicted(strategy: str, batch: int = 8, **changes: object) -> Prediction:
    costs = CostModel(profile=PROFILE, network=NETWORK)
    return Predictor(costs, evaluator_named("simulate")).predict(point(strategy, batch, **changes))


@pytest.mark.parametrize(
    ("strategy", "names"),
    [
        ("p2f2", {"all_gather", "all_reduce"}),
        ("c2p2", {"all_gather", "all_reduce"}),
        ("p2s2", {"halo"}),
        ("d2p2f2", {"all_gather", "all_reduce"}),
        ("d2p2s3", {"halo"}),
    ],
)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_parts_add_up_and_communication_for_layers_is_named(strategy: str, names: set[str], schedule: str) -> None:
    found = predicted(strategy, 16, schedule=schedule)
    parts = found.time.breakdown_s
    assert names <= parts.keys()
    assert all(parts[name] > 0 for name in names)
    # The first stage may never have to wait.
    assert parts.get("pipeline_idle", 1.0) > 0
    whole = parts.keys() - {"exposed_communication"}
    assert sum(parts[name] for name in whole) == pytest.approx(found.iteration_s)
    assert bool(parts["GE"]) == any(letter in strategy for letter in "ds")
    low, high = found.time.interval_s
    assert low <= found.iteration_s <= high
    assert any("stages start at conv3, cut by --stages" in line for line in found.provenance.notes)


def test_communication_takes_what_the_fits_say() -> None:
    """Stages of one role each: each waits for its own layers, whose seconds are known by hand."""
    strategy = parse_strategy("p2f2")
    plan = planner_for(strategy).plan(NETWORK, strategy, point("p2f2").settings)
    expected = []
    for role in range(2):
        sums = {"all_gather": 0.0, "all_reduce": 0.0}
        for work in plan.of_layers(role):
            if isinstance(work, Collective):
                halves = work.message_bytes / 2 if work.operation == "all_reduce" else work.message_bytes
                sums[work.operation] += (2 if work.operation == "all_reduce" else 1) * (50e-6 + halves * 1e-9)
        expected.append(sums)
    parts = predicted("p2f2").time.breakdown_s
    assert {name: parts[name] for name in expected[0]} in [pytest.approx(sums) for sums in expected]


def test_cuts_send_blocks_inside_the_region_and_activations_behind() -> None:
    def sent(stage: str, strategy: str = "p2s2") -> list[tuple[int, ...]]:
        parsed = parse_strategy(strategy)
        plan = planner_for(parsed).plan(NETWORK, parsed, plan_settings(batch=8, stages=(stage,)))
        return [work.message_bytes for work in plan.works if isinstance(work, Transfer) and work.direction == "send"]

    micro_batch = 4
    assert set(sent("conv2")) == {(8 * 16 * 8 * 4 * micro_batch,)}
    assert set(sent("fc")) == {(6 * 8 * 8 * 4 * micro_batch,)}
    assert set(sent("conv2", "p2f2")) == set(sent("conv2", "p2c2")) == {(8 * 16 * 16 * 4 * micro_batch,)}


def test_different_positions_are_separate_lines_and_the_slowest_decides() -> None:
    strategy = parse_strategy("d2p2s3")
    plan = planner_for(strategy).plan(NETWORK, strategy, point("d2p2s3").settings)
    lines = lines_of_stages(plan)
    # Two edges and a middle, of two stages each; both replicas alike.
    assert lines == ((0, 3), (1, 4), (2, 5))
    assert [role.multiplicity for role in plan.roles] == [2] * 6
    ones = np.ones(len(plan.works))
    middle = [isinstance(work, HaloExchange) and len(work.sends_bytes) > 1 for work in plan.works]
    slow = np.where(middle, 20.0, ones)
    simulation = PipelineSimulation(plan, ones)
    alike, found = (simulation.timing(seconds, ones, ones) for seconds in (ones, slow))
    # Two micro-batches, and at least one halo a stage, which the slowest line's last rank waits for in full.
    assert found.fw_of_layers_s["halo"] >= 2 * 20.0
    assert found.iteration_s == simulation.iteration_s(slow, ones, ones) > alike.iteration_s + 2 * 2 * 19.0


# Memory


def test_a_rank_holds_its_shards_of_its_stages() -> None:
    def parts(strategy: str, batch: int = 8) -> dict[str, int]:
        return pipelined_memory(NETWORK, parse_strategy(strategy), point(strategy, batch).settings).parts_bytes

    whole = parts("p2")
    for strategy in ("p2f2", "f2p2", "d2p2f2"):
        assert parts(strategy, 16 if "d" in strategy else 8)["parameters"] == whole["parameters"] / 2
    assert parts("p2s2")["parameters"] == whole["parameters"]
    assert (parts("p2f2")["buckets"], parts("p2s2")["buckets"]) == (0, whole["parameters"])
    assert parts("d2p2f2", 16)["buckets"] == whole["parameters"] / 2
    assert parts("p2f2")["communication"] == whole["communication"] == 2 * parts("p2s2")["communication"]
    assert parts("p2s2")["activations"] < whole["activations"]


def test_one_micro_batch_holds_no_more_than_without_a_pipeline() -> None:
    alone = planned_memory(NETWORK, parse_strategy("f2"), PlanSettings(batch=8)).parts_bytes
    staged = pipelined_memory(NETWORK, parse_strategy("p2f2"), point("p2f2", micro_batches=1).settings).parts_bytes
    assert staged["activations"] <= alone["activations"]
    assert staged["parameters"] < alone["parameters"]


# As a user meets them


class Caller:
    """Calls ``predict`` in this process."""

    def __init__(self, profile: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self._profile, self._monkeypatch, self._capfd = profile, monkeypatch, capfd

    def __call__(self, *arguments: str) -> tuple[int | str | None, str, str]:
        call = ["predict", "--from-profile", str(self._profile), "--model", NETWORK.name, *arguments]
        self._monkeypatch.setattr(sys, "argv", call)
        with pytest.raises(SystemExit) as caught:
            run_command(group, "predict")
        return caught.value.code, *self._capfd.readouterr()


@pytest.fixture
def predict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Caller:
    write_profile(tmp_path / "profile.json", PROFILE)
    return Caller(tmp_path / "profile.json", monkeypatch, capfd)


def test_cuts_by_the_profile_and_three_deep_in_one_call(predict: Caller) -> None:
    code, out, err = predict("--strategy", "p2,d2p2f2,d2,p2s2", "--batch", "8", "--stages", "measured", "--json")
    assert (code, err) == (0, "")
    found = {each["strategy"]: each for each in json.loads(out)}
    for strategy, each in found.items():
        assert each["options"].get("cut_by") == (None if strategy == "d2" else "seconds of the profile")
        assert ("stages" in each["options"]) == (strategy != "d2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--strategy", "d2", "--stages", "measured"), "--stages is for pipelines, and none of the strategies has"),
        (("--strategy", "p2f7"), "7 ranks along f7, but p <= 6: fewest filters, layer conv3"),
        (("--strategy", "p2f2s2"), "filter and spatial both share layers out, and one of them can"),
        (
            ("--strategy", "p2s2", "--evaluator", "paradl"),
            "for pipelines alone, not for p2s2: give --evaluator simulate",
        ),
    ],
)
def test_what_cannot_be_is_one_line(predict: Caller, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = predict(*arguments, "--batch", "8")
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
