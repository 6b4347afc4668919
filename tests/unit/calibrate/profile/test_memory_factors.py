"""Memory factors and the paper's rho: fitted to peaks of runs, used by predictions, left out of their validation."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from profile_factory import ENVIRONMENT, make_network, make_profile, write_training_run

from calibrate.fitting.memory.memory_fit import fit_memory
from calibrate.fitting.memory.memory_runs import read_memory_runs
from calibrate.profile.memory_factors import MemoryRun
from calibrate.profile.profile import Profile, write_profile
from paradl_bench.core.errors import UserError
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.ranks.directories.directory import write_network
from paradl_bench.records.training.training_record import RUN_NAME, MemoryPeak, read_run
from paradl_bench.strategies.memory.of_plan import memory_of_plan, paradl_memory_of_plan
from paradl_bench.strategies.memory.paradl import has_papers_row
from predict.costs.cost_model import CostModel
from predict.prediction.prediction import Prediction, Predictor
from predict.prediction.presentation import flat_row
from predict.validation.validation import validate_runs
from predict.workload import Configuration, evaluator_named

GIB = 2**30
MODELS = ("a", "b", "c", "d", "e")


def run(model: str, tensor_bytes: float, measured_bytes: float, number: int = 0, **changes: object) -> MemoryRun:
    values: dict[str, object] = {
        "path": f"runs/{model}-{number}",
        "command_line": ("paradl-bench", "train", model),
        "created_utc": "2026-11-01T00:00:00Z",
        "sha256": f"{model}{number}",
        "configuration": f"{model}-{number}",
        "environment": 0,
        "device": "GPU",
        "model": model,
        "strategy": "d2",
        "batch": 8,
        "dtype": "fp32",
        "optimizer": "sgd",
        "tensor_bytes": round(tensor_bytes),
        "paradl_bytes": round(2 * tensor_bytes),
        "measured_bytes": {"tensors": round(tensor_bytes), "device": round(measured_bytes)},
    }
    return MemoryRun(**(values | changes))  # type: ignore[arg-type]


def drawn(seed: int, *, fixed: float, factor: float, sd: float) -> list[MemoryRun]:
    """Five models with four runs each; half of what is random belongs to a model."""
    draw = np.random.default_rng(seed)
    runs = []
    for model in MODELS:
        of_model = draw.normal(0, sd)
        for number, tensors in enumerate(np.exp(draw.uniform(np.log(0.2 * GIB), np.log(12 * GIB), 4))):
            peak = (fixed + factor * tensors) * (1 + of_model + draw.normal(0, sd))
            runs.append(run(model, tensors, peak, number))
    return runs


def test_known_bytes_and_factors_are_recovered_in_their_intervals() -> None:
    fixed, factor = 0.6 * GIB, 1.12
    held = {"fixed": 0, "factor": 0, "unseen": 0}
    seeds = 60
    for seed in range(seeds):
        (found,) = fit_memory(drawn(seed, fixed=fixed, factor=factor, sd=0.01)).factors
        reach = found.deviations_90 * np.sqrt(np.diag(found.covariance))
        held["fixed"] += abs(found.fixed_bytes - fixed) <= reach[0]
        held["factor"] += abs(found.factor - factor) <= reach[1]
        draw = np.random.default_rng(1000 + seed)
        unseen = (fixed + factor * 3 * GIB) * (1 + draw.normal(0, 0.01) + draw.normal(0, 0.01))
        estimate = found.estimate(3 * GIB)
        held["unseen"] += abs(estimate.peak_bytes - unseen) <= estimate.half_width_bytes
    # 90% of 60 is 54; five models make intervals wide rather than narrow.
    assert min(held.values()) >= 48, held
    assert (found.measured, found.runs, found.models) == ("device", 20, MODELS)


def test_an_outlying_run_bends_the_line_little_but_widens_spread() -> None:
    clean = drawn(3, fixed=0.5 * GIB, factor=1.1, sd=0.003)
    spoiled = [*clean, run("c", 2 * GIB, 6 * GIB, 99)]
    (one,), (other,) = fit_memory(clean).factors, fit_memory(spoiled).factors
    assert other.factor == pytest.approx(one.factor, rel=0.02)
    assert other.relative_sd > 5 * one.relative_sd


def test_no_factor_is_below_zero() -> None:
    runs = [run("a", size * GIB, (1.2 * size - 0.1) * GIB, size) for size in (1, 2, 4, 8)]
    (found,) = fit_memory(runs).factors
    assert found.fixed_bytes == 0
    assert found.factor > 1


def test_repetitions_count_once_and_few_runs_say_little() -> None:
    same = [run("a", GIB, 1.1 * GIB, number, configuration="one") for number in range(5)]
    nothing = fit_memory(same)
    assert (nothing.factors, nothing.reuse) == ((), ())
    assert "one configuration" in nothing.notes[0]
    (found,) = fit_memory([*same, run("b", 2 * GIB, 2.3 * GIB)]).factors
    assert (found.runs, found.fixed_bytes) == (2, 0)
    assert found.deviations_90 > 6
    assert fit_memory([]) == ((), (), ())


def test_rho_is_fitted_per_model_and_overall_with_equal_weights() -> None:
    rhos = dict(zip(MODELS, (0.5, 0.55, 0.6, 0.52, 0.58), strict=True))
    runs = [
        run(model, size * GIB, rho * 2 * size * GIB, size)
        for model, rho in rhos.items()
        for size in ((1, 2, 3) if model != "a" else range(1, 40))
    ]
    found = {each.model: each for each in fit_memory(runs).reuse}
    assert {model: each.rho for model, each in found.items() if model} == pytest.approx(rhos)
    over_all = found.pop("")
    assert over_all.rho == pytest.approx(0.55, abs=0.015)
    reach = over_all.estimate(1.0).half_width_bytes
    assert all(abs(rho - over_all.rho) <= reach for rho in rhos.values())
    assert all(each.relative_sd < 1e-6 for each in found.values())


def test_rho_is_one_at_most_and_that_is_said() -> None:
    fit = fit_memory([run(model, GIB, 3 * GIB * size, size) for model in "ab" for size in (1, 2)])
    assert {each.rho for each in fit.reuse} == {1.0}
    assert "times the paper's sum" in fit.notes[0]


@pytest.mark.parametrize(
    ("text", "has_row"),
    [("serial", True), ("d4", True), ("d2f2", True), ("s2x2", True), ("p4", True), ("d2p2", False), ("z3d2", False)],
)
def test_the_papers_table_has_rows_of_its_own_strategies(text: str, has_row: bool) -> None:
    assert has_papers_row(parse_strategy(text)) == has_row


# From directories of runs to predictions

WIDTHS = ((64, 128, 32), (64, 256, 256, 32), (300, 500, 20))


def train(directory: Path, strategy: str, batch: int, widths: tuple[int, ...] = WIDTHS[0], **changes: object) -> Path:
    """A run on the factory's environment that held 1.02 times its plan's tensors and 1000 bytes."""
    network = make_network(widths, name=f"chain{widths[1]}")
    parsed = parse_strategy(strategy)
    rows = [[(1.0, 2.0, 0.1, 0.2)] * 6] * parsed.ranks
    write_training_run(directory, network, strategy=strategy, ranks=parsed.ranks, batch=batch, phases_s=rows, **changes)
    about = read_run(directory)
    size = round(1.02 * memory_of_plan(network, parsed, about.settings).peak_bytes) + 1000
    peaks = tuple(
        MemoryPeak(rank=rank, tracked_bytes=size - rank, parts_bytes={"parameters": size - rank})
        for rank in range(parsed.ranks)
    )
    (directory / RUN_NAME).write_bytes(msgspec.json.encode(msgspec.structs.replace(about, memory=peaks)))
    write_network(directory, network)
    return directory


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for number, widths in enumerate(WIDTHS):
        for strategy, batch in (("serial", 8), ("d2", 64)):
            train(tmp_path / "runs" / f"{number}-{strategy}", strategy, batch, widths)
    return tmp_path / "runs"


def fitted(*paths: Path, **changes: object) -> Profile:
    """A profile of the first chain with memory factors of runs."""
    profile = make_profile(make_network(WIDTHS[0], name="chain128"))
    found = read_memory_runs(paths, profile.environments, {}, force=False)
    memory = fit_memory(found.runs)
    return msgspec.structs.replace(
        profile, memory_runs=found.runs, memory_factors=memory.factors, memory_reuse=memory.reuse, **changes
    )


def predict(profile: Profile, strategy: str, batch: int, evaluator: str = "simulate") -> Prediction:
    model = CostModel(profile=profile, network=profile.network["chain128"])
    point = Configuration(strategy=parse_strategy(strategy), settings=PlanSettings(batch=batch))
    return Predictor(model, evaluator_named(evaluator)).predict(point)


def test_runs_give_the_factor_that_their_peaks_were_made_with(runs: Path) -> None:
    profile = fitted(runs)
    (factor,) = profile.memory_factors
    assert (factor.device, factor.measured, factor.runs) == (ENVIRONMENT.device_name, "tensors", 6)
    assert factor.factor == pytest.approx(1.02, rel=1e-4)
    assert factor.fixed_bytes == pytest.approx(1000, rel=0.05)
    assert {each.model for each in profile.memory_reuse} == {"", "chain128", "chain256", "chain500"}
    assert all(run.paradl_bytes for run in profile.memory_runs)


def test_predicted_memory_has_factor_and_interval_and_consistent_parts(runs: Path) -> None:
    before, after = predict(fitted(), "d2", 256), predict(fitted(runs), "d2", 256)
    assert before.memory.memory_interval_bytes is None
    assert after.memory.memory_bytes == pytest.approx(1.02 * before.memory.memory_bytes + 1000, rel=1e-4)
    assert sum(after.memory.memory_parts_bytes.values()) == after.memory.memory_bytes
    low, high = after.memory.memory_interval_bytes or (0, 0)
    assert low <= after.memory.memory_bytes <= high
    assert {"memory_interval_bytes.low", "memory_interval_bytes.high"} <= flat_row(after.record()).keys()


def test_the_papers_sum_takes_rho_of_the_model(runs: Path) -> None:
    profile = fitted(runs)
    network = profile.network["chain128"]
    whole = paradl_memory_of_plan(network, parse_strategy("d2"), PlanSettings(batch=256)).peak_bytes
    own, over_all = (
        msgspec.structs.replace(profile.memory_reuse[0], model=model, rho=rho, relative_sd=0.1)
        for model, rho in (("chain128", 0.5), ("", 0.25))
    )
    for reuse, rho in (((own, over_all), 0.5), ((over_all,), 0.25)):
        found = predict(msgspec.structs.replace(profile, memory_reuse=reuse), "d2", 256, "paradl")
        assert found.memory.memory_bytes == pytest.approx(rho * whole, rel=1e-6)
        low, high = found.memory.memory_interval_bytes or (0, 0)
        assert high - low == pytest.approx(2 * own.deviations_90 * 0.1 * rho * whole, rel=1e-3)
    assert predict(fitted(), "d2", 256, "paradl").memory.memory_bytes == whole


def test_factors_of_another_device_are_not_taken(runs: Path) -> None:
    profile = fitted(runs)
    elsewhere = msgspec.structs.replace(profile.devices[0], name="another")
    assert predict(msgspec.structs.replace(profile, devices=(elsewhere,)), "d2", 8).memory.memory_interval_bytes is None


def test_a_limit_inside_the_interval_is_said(runs: Path) -> None:
    profile = fitted(runs)
    spread = msgspec.structs.replace(profile.memory_factors[0], relative_sd=0.1)
    peak = predict(profile, "d2", 8).memory.memory_bytes
    for limit, uncertain, fits in ((peak * 1.05, True, True), (peak * 0.95, True, False), (peak * 3, False, True)):
        cluster = msgspec.structs.replace(profile.cluster, memory_bytes_per_rank=limit)
        found = predict(msgspec.structs.replace(profile, cluster=cluster, memory_factors=(spread,)), "d2", 8)
        assert any("it may not fit" in note for note in found.provenance.notes) == uncertain
        assert found.memory.fits == fits


def test_runs_of_the_memory_fit_are_excluded_from_its_errors(runs: Path, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    repeated = train(tmp_path / "again", "d2", 64, cores=(1, 2))
    unseen = train(tmp_path / "unseen", "serial", 32)
    write_profile(path, fitted(runs))
    report = validate_runs(path, [runs / "0-d2", repeated, unseen], cluster_path=None, force=False)
    pairs = {pair.run: pair.memory for pair in report.pairs if pair.evaluator == "simulate"}
    assert [pair and pair.fitted_to for pair in pairs.values()] == ["run", "configuration", ""]
    score = report.overall["simulate"].memory
    assert score is not None
    assert (score.runs, score.left_out, score.interval_coverage) == (1, 2, 1.0)
    assert score.worst_error == pytest.approx(0, abs=1e-3)
    write_profile(path, fitted())
    report = validate_runs(path, [runs / "0-d2"], cluster_path=None, force=False)
    score = report.overall["simulate"].memory
    assert score is not None
    assert (score.runs, score.left_out) == (1, 0)


def test_what_is_no_usable_run_is_refused_or_said(runs: Path, tmp_path: Path) -> None:
    def read(*paths: Path, force: bool = False) -> tuple[str, ...]:
        return read_memory_runs(paths, (ENVIRONMENT,), {}, force=force).notes

    with pytest.raises(UserError, match="hold the same run"):
        read(runs, runs / "0-d2")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="is not a training run and holds none"):
        read(tmp_path / "empty")
    (runs / "0-d2" / "network-chain128.json").unlink()
    with pytest.raises(UserError, match="paradl-bench describe chain128 --input-shape 64 -o"):
        read(runs)
    elsewhere = msgspec.structs.replace(ENVIRONMENT, device_name="another")
    other = train(tmp_path / "other", "serial", 8, environment=elsewhere)
    with pytest.raises(UserError, match="another environment"):
        read(other)
    assert "its memory is used because of --force" in read(other, force=True)[0]
    about = read_run(other)
    (other / RUN_NAME).write_bytes(msgspec.json.encode(msgspec.structs.replace(about, memory=())))
    assert "no memory was tracked" in read(other)[0]
