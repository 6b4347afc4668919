"""Ghost seconds and dilated predictions: the cost model's compute, stretched and without spread, and nothing else."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from in_process import run_in_process
from profile_factory import (
    ENVIRONMENT,
    linear_seconds,
    make_network,
    make_profile,
    model_times,
    with_compute,
    write_training_run,
)

from calibrate.fitting.memory.memory_runs import read_memory_runs
from calibrate.profile.emulated_profile import emulated
from calibrate.profile.profile import write_profile
from paradl_bench.core.errors import UserError
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Collective, Compute, FrameworkOverhead, WeightUpdate
from paradl_bench.ranks.directories.directory import write_network
from paradl_bench.records.emulation import EmulatedLayers, Emulation
from paradl_bench.records.slow_rank import SlowRank
from paradl_bench.records.training.ghost_record import GhostRun, GhostTable, read_table
from paradl_bench.strategies.nesting.catalog import planner_for
from predict.cli import main as predict
from predict.costs.cost_model import CostModel
from predict.prediction.prediction import Prediction, Predictor
from predict.validation.shown.report import markdown
from predict.validation.validation import validate_runs
from predict.validation.validation_scores import with_compared_runs
from predict.workload import Configuration, evaluator_named
from tests.cases.predicted_runs import run_like

CHAIN = make_network()
QUANTILES = (0.9, 1.0, 1.4)
PROFILE = make_profile(model_times=model_times(CHAIN, between_s=7e-5, common_sd=0.05, quantiles=QUANTILES))


def predicted(strategy: str, dilate: float | None, evaluator: str = "simulate") -> Prediction:
    model = CostModel(profile=PROFILE if dilate is None else emulated(PROFILE, dilate), network=CHAIN)
    point = Configuration(strategy=parse_strategy(strategy), settings=PlanSettings(batch=8))
    return Predictor(model, evaluator_named(evaluator)).predict(point)


def table(tmp_path: Path, *arguments: str) -> GhostTable:
    write_profile(tmp_path / "p.json", PROFILE)
    words = ("ghost", "--from-profile", "p.json", "--model", "chain", *arguments, "-o", "table.json", "--force")
    result = run_in_process(tmp_path, *words, main=predict, program="predict")
    assert result.returncode == 0, result.stderr
    return read_table((tmp_path / "table.json").read_bytes(), "the table")


def test_layers_sleep_what_the_profile_says(tmp_path: Path) -> None:
    found = table(tmp_path, "--strategy", "serial", "--batch", "4")
    (role,) = found.roles
    per_operation = 7e-5 / len(CHAIN.layers)
    for layer in CHAIN.layers:
        assert role.seconds(layer.name, "FW") == pytest.approx(linear_seconds(layer, "FW", 4) + per_operation)
        assert role.seconds(layer.name, "BW") == pytest.approx(linear_seconds(layer, "BW", 4) + 2 * per_operation)
    assert role.update_s == pytest.approx(1e-4)
    assert role.seconds("no such layer", "FW") == 0
    assert (found.role_of_rank, found.network_digest) == ((0,), CHAIN.digest)
    assert found.sources["measured"] == pytest.approx(1)


def test_every_rank_has_a_role_holding_its_own_parts(tmp_path: Path) -> None:
    found = table(tmp_path, "--strategy", "p2", "--batch", "8", "--micro-batches", "2")
    assert found.role_of_rank == (0, 1)
    held = [set(role.layers) for role in found.roles]
    assert held[0] | held[1] == {layer.name for layer in CHAIN.layers}
    assert not held[0] & held[1]
    shared = table(tmp_path, "--strategy", "f2", "--batch", "4")
    whole = table(tmp_path, "--strategy", "serial", "--batch", "4")
    assert shared.roles[0].layers["fc1"]["FW"] < whole.roles[0].layers["fc1"]["FW"]
    assert shared.sources["scaled"] > 0


def test_a_state_in_host_memory_is_refused(tmp_path: Path) -> None:
    write_profile(tmp_path / "p.json", PROFILE)
    words = ("--from-profile", "p.json", "--model", "chain", "--strategy", "d2", "--batch", "4")
    result = run_in_process(
        tmp_path, "ghost", *words, "--offload", "optimizer", "-o", "t.json", main=predict, program="predict"
    )
    assert result.returncode == 2
    assert "no optimizer state to copy: leave out --offload optimizer" in result.stderr
    assert not (tmp_path / "t.json").exists()


def test_several_points_are_refused(tmp_path: Path) -> None:
    write_profile(tmp_path / "p.json", PROFILE)
    words = "ghost --from-profile p.json --model chain --strategy serial,d2 --batch 8 -o -"
    result = run_in_process(tmp_path, *words.split(), main=predict, program="predict")
    assert (result.returncode, result.stdout) == (2, "")
    assert "takes one strategy and batch, not 2: give --strategy" in result.stderr


@pytest.mark.parametrize("evaluator", ["simulate", "paradl", "csf"])
def test_a_dilated_serial_run_multiplies_its_compute_without_its_spread(evaluator: str) -> None:
    real, once, stretched = (predicted("serial", dilate, evaluator) for dilate in (None, 1.0, 20.0))
    assert once.iteration_s == pytest.approx(real.iteration_s)
    assert stretched.iteration_s == pytest.approx(20 * real.iteration_s)
    assert real.time.interval_s[1] > real.iteration_s
    assert stretched.time.interval_s == pytest.approx((stretched.iteration_s, stretched.iteration_s))
    assert any("every compute time of the profile is multiplied by 20" in note for note in stretched.provenance.notes)


def test_dilation_stretches_compute_and_leaves_collectives_as_they_are() -> None:
    # What compute costs a collective is no part of an emulated run, and what ghosts do none of a real one.
    both = with_compute(1.3, 1.2), with_compute(1.1, 1.7, neighbours=("ghosts",))
    profile = msgspec.structs.replace(PROFILE, contexts=both)
    model = CostModel(profile=profile, network=CHAIN)
    strategy = parse_strategy("d2")
    plan = planner_for(strategy).plan(CHAIN, strategy, PlanSettings(batch=8))
    real = model.price(plan)
    slept = CostModel(profile=emulated(profile, 20.0), network=CHAIN).price(plan)
    computes = np.array([isinstance(work, Compute | FrameworkOverhead | WeightUpdate) for work in plan.works])
    np.testing.assert_allclose(slept.costs.seconds[computes], 20 * real.costs.seconds[computes])
    np.testing.assert_allclose(slept.costs.seconds[~computes], real.costs.seconds[~computes])
    exchanged = [index for index, work in enumerate(plan.works) if isinstance(work, Collective)]
    for costs, slowdowns in ((real.costs, (1.3, 1.2)), (slept.costs, (1.1, 1.7))):
        assert {(costs.compute_slowdown[i], costs.communication_slowdown[i]) for i in exchanged} == {slowdowns}
    profile = msgspec.structs.replace(PROFILE, contexts=both[:1])
    unmeasured = CostModel(profile=emulated(profile, 20.0), network=CHAIN).price(plan).costs
    assert {unmeasured.compute_slowdown[i] for i in exchanged} == {1.0}
    assert real.rank_spread.wait(2) > 0
    assert slept.rank_spread.wait(2) == 0


@pytest.mark.parametrize("dilate", ["0", "-2", "nan"])
def test_no_dilation_that_is_none(dilate: str, tmp_path: Path) -> None:
    write_profile(tmp_path / "p.json", PROFILE)
    words = f"--from-profile p.json --model chain --strategy serial --batch 8 --dilate {dilate}"
    result = run_in_process(tmp_path, *words.split(), main=predict, program="predict")
    assert result.returncode == 2
    assert "--dilate" in result.stderr


SPREAD_S = (0.9, *(0.25 for _ in range(19)), 0.5)


def emulated_run(
    directory: Path,
    *,
    dilate: float,
    slept: float = 1.0,
    slow: SlowRank | None = None,
    host_s: float | None = None,
    host_iteration_s: tuple[float, ...] = (),
    **more: Any,
) -> Path:
    """A run of d2 that takes what is predicted of one, and says that it slept so many times what the profile says."""
    prediction = predicted("d2", dilate)
    phases = prediction.time.phases_s
    row = (phases["FW"], phases["BW"], phases["GE"], phases["WU"])
    serial = predicted("serial", None)
    # A rank of two has half of the mini-batch, which is proportional but for what is fixed.
    plan_s = _compute_s()
    assert plan_s < serial.iteration_s
    ghost = GhostRun(
        profile="p.json",
        profile_sha256="ab" * 32,
        dilate=dilate,
        slept_s={"FW": dilate * slept * plan_s},
        framework_s={"FW": 0.0},
        oversleep_s={"FW": 0.0},
        without_compute_s=1e-3,
        slow_rank=slow,
        host_s=host_s,
        host_iteration_s=host_iteration_s,
    )
    layers = EmulatedLayers(profile_sha256=ghost.profile_sha256, dilate=dilate)
    environment = msgspec.structs.replace(ENVIRONMENT, emulated=Emulation(layers=layers))
    return write_training_run(
        directory,
        CHAIN,
        strategy="d2",
        batch=8,
        phases_s=[[row] * 12] * 2,
        environment=environment,
        ghost=ghost,
        **more,
    )


def _compute_s() -> float:
    seconds = sum(linear_seconds(layer, phase, 4) for layer in CHAIN.layers for phase in ("FW", "BW"))
    return seconds + 3 * 7e-5 + 1e-4


def test_an_emulated_run_is_held_against_dilated_compute_and_named(tmp_path: Path) -> None:
    write_profile(tmp_path / "p.json", PROFILE)
    run = emulated_run(tmp_path / "run", dilate=20.0)
    report = validate_runs(tmp_path / "p.json", [run], cluster_path=None, force=False)
    pair = next(pair for pair in report.pairs if pair.evaluator == "simulate")
    assert pair.error == pytest.approx(0, abs=1e-9)
    assert pair.predicted_s > 19 * _compute_s()
    assert "sleep 20 times as long" in pair.emulated
    assert "d2 (emulated)" in markdown(report)
    assert any(note.startswith("emulated, ") for note in report.notes)


def test_a_profile_keeps_no_emulated_run_as_compared(tmp_path: Path) -> None:
    write_profile(tmp_path / "p.json", PROFILE)
    runs = emulated_run(tmp_path / "run", dilate=20.0), run_like(tmp_path / "real", "d2", 4)
    both, emulated_alone = (
        validate_runs(tmp_path / "p.json", some, cluster_path=None, force=True) for some in (runs, runs[:1])
    )
    assert [run.path for run in with_compared_runs(PROFILE, both).runs_compared] == [str(runs[1])]
    with pytest.raises(UserError, match="no run has times of real layers to compare"):
        with_compared_runs(PROFILE, emulated_alone)


def test_host_time_of_ranks_moves_only_the_intervals_upper_end(tmp_path: Path) -> None:
    write_profile(tmp_path / "p.json", PROFILE)
    pairs, noted = [], []
    for name, host_s, each_s in (("before", None, ()), ("none", 0.0, ()), ("some", 0.25, ()), ("each", 0.25, SPREAD_S)):
        run = emulated_run(tmp_path / name, dilate=20.0, host_s=host_s, host_iteration_s=each_s)
        report = validate_runs(tmp_path / "p.json", [run], cluster_path=None, force=False)
        pairs.append(next(pair for pair in report.pairs if pair.evaluator == "simulate"))
        noted.append(any("any part of it may show" in note for note in report.notes))
    before, none, some, each = pairs
    assert none.interval_s == before.interval_s
    # Of 21 iterations the last but one is what 95% take at most.
    for pair, host_s in ((some, 0.25), (each, 0.5)):
        above = math.hypot(before.interval_s[1] - before.predicted_s, 0.95 * host_s)
        assert pair.interval_s == pytest.approx((before.interval_s[0], before.predicted_s + above))
    assert some.predicted_s == each.predicted_s == before.predicted_s
    assert noted == [False, True, True, True]


def test_a_run_of_an_estimated_network_uses_its_own_file(tmp_path: Path) -> None:
    """Layers and iterations of a network that the profile does not describe: another tool's, or one like it."""
    write_profile(tmp_path / "p.json", msgspec.structs.replace(PROFILE, network={}))
    run = emulated_run(tmp_path / "run", dilate=20.0)
    with pytest.raises(UserError, match="no model"):
        validate_runs(tmp_path / "p.json", [run], cluster_path=None, force=False)
    write_network(run, CHAIN)
    report = validate_runs(tmp_path / "p.json", [run], cluster_path=None, force=False)
    assert next(pair for pair in report.pairs if pair.evaluator == "simulate").error == pytest.approx(0, abs=1e-9)


def test_a_run_that_slept_another_profiles_seconds_is_refused(tmp_path: Path) -> None:
    write_profile(tmp_path / "p.json", PROFILE)
    run = emulated_run(tmp_path / "run", dilate=20.0, slept=1.01)
    with pytest.raises(UserError, match=r"slept .* an iteration, and would sleep .* by this profile"):
        validate_runs(tmp_path / "p.json", [run], cluster_path=None, force=False)
    assert validate_runs(tmp_path / "p.json", [run], cluster_path=None, force=True).pairs


def test_a_slow_rank_is_predicted_slow_in_sleeps_not_copies(tmp_path: Path) -> None:
    write_profile(tmp_path / "p.json", PROFILE)
    slow = SlowRank(factor=1.5, rank=1)
    run = emulated_run(tmp_path / "run", dilate=20.0, slept=1.5, slow=slow)
    report = validate_runs(tmp_path / "p.json", [run], cluster_path=None, force=False)
    (pair,) = report.pairs
    point = Configuration(strategy=parse_strategy("d2"), settings=PlanSettings(batch=8))
    paces = [
        Predictor(
            CostModel(profile=emulated(PROFILE, 20.0), network=CHAIN, slow_rank=each), evaluator_named("simulate")
        ).predict(point)
        for each in (None, slow)
    ]
    assert pair.predicted_s == paces[1].iteration_s
    # Rank 1 sleeps half as long again, and everything else takes as long as before.
    assert paces[1].iteration_s - paces[0].iteration_s <= 20 * 0.5 * _compute_s() * (1 + 1e-9)
    assert paces[1].iteration_s > paces[0].iteration_s + 20 * 0.45 * _compute_s()


def test_memory_is_never_fitted_to_an_emulated_run(tmp_path: Path) -> None:
    run = emulated_run(tmp_path / "run", dilate=1.0)
    with pytest.raises(UserError, match=r"run is emulated: its layers slept"):
        read_memory_runs([run], (), {}, force=True)


def test_a_real_and_an_emulated_environment_are_unlike() -> None:
    slept = [
        msgspec.structs.replace(ENVIRONMENT, emulated=Emulation(layers=EmulatedLayers(profile_sha256="ab", dilate=k)))
        for k in (1.0, 2.0)
    ]
    assert all(each.differences(ENVIRONMENT) for each in slept)
    assert slept[0].differences(slept[1])
    assert not slept[0].computing.differences(ENVIRONMENT)


def test_a_table_that_lies_is_refused() -> None:
    good = {
        "profile": "p", "profile_sha256": "", "network_digest": "", "strategy": "serial", "batch": 1,
        "roles": [{"layers": {"a": {"FW": 1.0}}, "between": {}, "update_s": 0.0}], "role_of_rank": [0],
    }  # fmt: skip
    assert read_table(json.dumps(good).encode(), "t").of_rank(0).seconds("a", "FW") == 1.0
    negative = [{"layers": {"a": {"FW": -1.0}}, "between": {}, "update_s": 0.0}]
    for change in ({"role_of_rank": [1]}, {"role_of_rank": []}, {"roles": negative}, {"batch": "many"}):
        with pytest.raises(UserError, match=r"^t: "):
            read_table(json.dumps(good | change).encode(), "t")
