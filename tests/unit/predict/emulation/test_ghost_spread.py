"""Sleeps that are drawn: reproducible, as far apart as the profile's iterations, and predicted with the same spread."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from in_process import run_in_process
from profile_factory import layer_times, make_network, make_profile, model_times

from calibrate.profile.emulated_profile import emulated
from calibrate.profile.profile import Profile, write_profile
from paradl_bench.emulation.draws import IterationDraws
from paradl_bench.emulation.sleeper import Sleeper
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.records.training.ghost_record import GhostSpread, GhostTable, read_table
from paradl_bench.strategies.nesting.catalog import planner_for
from predict.cli import main as predict
from predict.costs.cost_model import CostModel
from predict.emulation.ghost import table_of, with_spread
from predict.prediction.prediction import Predictor
from predict.workload import Configuration, evaluator_named

CHAIN = make_network()
QUANTILES = (0.85, 0.92, 0.97, 1.0, 1.04, 1.12, 1.3)
SPREAD = GhostSpread(tied_quantiles=(-0.2, -0.05, 0.0, 0.08, 0.3), samples=30)


def profile_of(*, layer_iqr: float) -> Profile:
    """Iterations that spread, and layers by themselves, by an interquartile range relative to their median."""
    times = tuple(
        msgspec.structs.replace(time, time=msgspec.structs.replace(time.time, iqr_s=layer_iqr * time.time.median_s))
        for time in layer_times(CHAIN)
    )
    return make_profile(layer_times=times, model_times=model_times(CHAIN, quantiles=QUANTILES, wu_s=2e-3))


def table_for(profile: Profile, strategy: str, batch: int) -> tuple[GhostTable, CostModel]:
    model, parsed = CostModel(profile=profile, network=CHAIN), parse_strategy(strategy)
    plan = planner_for(parsed).plan(CHAIN, parsed, PlanSettings(batch=batch))
    table = table_of(model, plan, PlanSettings(batch=batch), profile="p", sha256="")
    return with_spread(table, model, plan), model


def drawn_iterations(table: GhostTable, rank: int, count: int) -> list[float]:
    """Seconds that a rank sleeps in iterations, every layer once forward and backward."""
    assert table.spread is not None
    role, found = table.of_rank(rank), []
    for iteration in range(count):
        draws = IterationDraws(table.spread, seed=5, rank=rank, iteration=iteration)
        slept = role.update_s * draws.factor(role.update_own_relative_sd)
        for layer, phases in role.layers.items():
            for phase in phases:
                slept += role.seconds(layer, phase) * draws.factor(role.relative_sd(layer, phase))
        found.append(slept)
    return found


def test_draws_hang_on_seed_rank_and_iteration_alone() -> None:
    def factors(seed: int, rank: int, iteration: int) -> list[float]:
        draws = IterationDraws(SPREAD, seed=seed, rank=rank, iteration=iteration)
        return [draws.factor(0.1) for _ in range(4)]

    first = factors(1, 2, 3)
    assert factors(1, 2, 3) == first
    others = [factors(*which) for which in ((0, 2, 3), (1, 3, 3), (1, 2, 4), (1, 3, 2), (2, 1, 3))]
    assert all(set(other).isdisjoint(first) for other in others)


def test_a_rank_is_slow_for_whole_iterations_by_the_quantiles() -> None:
    tied = np.array([IterationDraws(SPREAD, seed=0, rank=0, iteration=each).tied for each in range(4000)])
    draws = IterationDraws(SPREAD, seed=0, rank=0, iteration=7)
    assert [draws.factor(0.0) for _ in range(3)] == [1 + tied[7]] * 3
    assert tied.min() >= -0.2
    assert tied.max() <= 0.3
    # 4000 draws: a share of a quarter is known to 0.7%.
    for share, quantile in zip((0.25, 0.5, 0.75), SPREAD.tied_quantiles[1:4], strict=True):
        assert np.mean(tied <= quantile) == pytest.approx(share, abs=0.025)


@pytest.mark.parametrize("own", [0.05, 0.5, 2.0])
def test_single_sleeps_are_positive_with_their_mean_and_deviation(own: float) -> None:
    level = GhostSpread(tied_quantiles=(0.0, 0.0), samples=2)
    draws = IterationDraws(level, seed=0, rank=0, iteration=0)
    found = np.array([draws.factor(own) for _ in range(40_000)])
    assert found.min() >= 0
    assert found.mean() == pytest.approx(1, abs=4 * own / 200)
    assert found.std() == pytest.approx(own, rel=0.1)


def test_a_sleeper_sleeps_the_drawn_and_books_the_requested_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr("time.sleep", lambda seconds: now.__setitem__(0, now[0] + seconds + 1e-4))
    sleeper = Sleeper(dilate=2.0)
    sleeper.draws = IterationDraws(SPREAD, seed=4, rank=1, iteration=2)
    with sleeper.awake():
        sleeper.ask("FW", 1.0, 0.3)
        sleeper.settle()
    assert now[0] == 0
    # What nobody slept, nobody drew.
    again = IterationDraws(SPREAD, seed=4, rank=1, iteration=2)
    wanted = 2 * again.factor(0.3) + 2 * again.factor(0.0)
    sleeper.ask("FW", 1.0, 0.3)
    sleeper.ask("FW", 1.0)
    sleeper.settle()
    assert now[0] == pytest.approx(wanted)
    assert sleeper.take_asked() == {"FW": 6.0}


@pytest.mark.parametrize("layer_iqr", [0.0, 0.2, 2.0])
def test_drawn_iterations_spread_as_measured_for_any_tied_share(layer_iqr: float) -> None:
    table, model = table_for(profile_of(layer_iqr=layer_iqr), "serial", 8)
    spread, _ = model.own_deviations(
        planner_for(parse_strategy("serial")).plan(CHAIN, parse_strategy("serial"), PlanSettings(batch=8))
    )
    assert (spread.common_variance == 1) == (layer_iqr == 0)
    assert (spread.common_variance == 0) == (layer_iqr == 2.0)
    slept = np.array(drawn_iterations(table, 0, 3000))
    role = table.of_rank(0)
    asked_s = role.update_s + sum(role.seconds(name, phase) for name, of in role.layers.items() for phase in of)
    assert slept.mean() == pytest.approx(asked_s, rel=0.01)
    assert slept.std() / asked_s == pytest.approx(spread.relative_sd, rel=0.07)


def test_the_last_of_drawn_ranks_takes_the_simulators_expectation() -> None:
    profile = profile_of(layer_iqr=0.0)
    table, _ = table_for(profile, "d4", 32)
    point = Configuration(strategy=parse_strategy("d4"), settings=PlanSettings(batch=32))
    level, drawn = (
        Predictor(
            CostModel(profile=emulated(profile, 1.0, drawn=each), network=CHAIN), evaluator_named("simulate")
        ).predict(point)
        for each in (False, True)
    )
    # Nothing but messages stands between the ranks' draws and the iteration.
    ranks = np.array([drawn_iterations(table, rank, 1500) for rank in range(4)])
    late_s = float(ranks.max(axis=0).mean() - ranks.mean())
    assert late_s > 0.05 * ranks.mean()
    assert drawn.iteration_s - level.iteration_s == pytest.approx(late_s, rel=0.1)


def test_a_shard_spreads_as_what_it_is_scaled_from() -> None:
    profile = profile_of(layer_iqr=0.2)
    whole, shared = (table_for(profile, strategy, 8)[0] for strategy in ("serial", "f2"))
    assert shared.of_rank(0).seconds("fc1", "FW") < whole.of_rank(0).seconds("fc1", "FW")
    assert shared.of_rank(0).relative_sd("fc1", "FW") == pytest.approx(whole.of_rank(0).relative_sd("fc1", "FW"))


@pytest.mark.parametrize("samples", [1, 20])
def test_a_profile_without_spread_is_refused_with_its_measuring_command(samples: int, tmp_path: Path) -> None:
    quantiles = QUANTILES if samples == 1 else (1.0, 1.0)
    write_profile(
        tmp_path / "p.json", make_profile(model_times=model_times(CHAIN, quantiles=quantiles, samples=samples))
    )
    words = "ghost --from-profile p.json --model chain --strategy d2 --batch 16 --spread -o -"
    result = run_in_process(tmp_path, *words.split(), main=predict, program="predict")
    assert (result.returncode, result.stdout) == (2, "")
    assert "--spread draws from several measured iterations of chain, and the profile holds none" in result.stderr
    assert "paradl-bench layers chain --batch 8 -o DIR" in result.stderr


def test_the_table_of_the_command_holds_what_is_drawn_from(tmp_path: Path) -> None:
    write_profile(tmp_path / "p.json", profile_of(layer_iqr=0.2))
    words = "ghost --from-profile p.json --model chain --strategy d2 --batch 16 -o"
    for name, more in (("level.json", ()), ("drawn.json", ("--spread",))):
        result = run_in_process(tmp_path, *words.split(), name, *more, main=predict, program="predict")
        assert result.returncode == 0, result.stderr
    level, drawn = (read_table((tmp_path / name).read_bytes(), name) for name in ("level.json", "drawn.json"))
    assert level.spread is None
    assert drawn.spread is not None
    assert (drawn.spread.samples, len(drawn.spread.tied_quantiles)) == (20, len(QUANTILES))
    assert [role.layers for role in drawn.roles] == [role.layers for role in level.roles]
    assert drawn.of_rank(1).update_own_relative_sd > 0


def test_drawn_sleeps_are_predicted_of_emulated_runs_alone(tmp_path: Path) -> None:
    write_profile(tmp_path / "p.json", profile_of(layer_iqr=0.2))
    words = "--from-profile p.json --model chain --strategy d2 --batch 16 --spread"
    result = run_in_process(tmp_path, *words.split(), main=predict, program="predict")
    assert result.returncode == 2
    assert "--spread is for emulated runs: give it with --dilate K" in result.stderr
    assert run_in_process(tmp_path, *words.split(), "--dilate", "2", main=predict, program="predict").returncode == 0


@pytest.mark.parametrize(
    ("quantiles", "samples", "said"),
    [
        ((0.0,), 2, "at least two"),
        ((0.1, 0.0), 2, "do not fall"),
        ((-1.0, 0.0), 2, "more than -1"),
    ],
)
def test_a_spread_that_nothing_can_be_drawn_from_is_refused(
    quantiles: tuple[float, ...], samples: int, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        GhostSpread(tied_quantiles=quantiles, samples=samples)
