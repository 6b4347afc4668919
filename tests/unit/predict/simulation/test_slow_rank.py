"""One rank that computes slower than measured: what the others wait for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from profile_factory import make_network, make_profile, model_times, ring_fit

from calibrate.profile.profile import Profile, write_profile
from paradl_bench.core.errors import UserError
from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.records.slow_rank import SlowRank
from predict.cli import group
from predict.costs.cost_model import CostModel
from predict.costs.spread.stragglers import RankSpread
from predict.prediction.prediction import Prediction, Predictor
from predict.prediction.request import slow_rank_option
from predict.workload import Configuration, evaluator_named

CHAIN = make_network((64, 128, 256, 32))
EVEN = tuple(0.9 + 0.02 * i for i in range(11))
OPERATIONS = ("all_reduce", "all_gather", "send_recv")


def profile_of(**model: object) -> Profile:
    return make_profile(
        CHAIN,
        model_times=model_times(CHAIN, **model),  # type: ignore[arg-type]
        communication=tuple(ring_fit(operation) for operation in OPERATIONS),
    )


def predicted(profile: Profile, text: str, slow: SlowRank | None, batch: int = 16, **settings: object) -> Prediction:
    one_bucket = {"first_bucket_bytes": 1 << 40, "bucket_cap_bytes": 1 << 40}
    wanted = plan_settings(batch=batch, **(one_bucket | settings))  # type: ignore[arg-type]
    costs = CostModel(profile=profile, network=CHAIN, slow_rank=slow)
    return Predictor(costs, evaluator_named("simulate")).predict(
        Configuration(strategy=parse_strategy(text), settings=wanted)
    )


@pytest.mark.parametrize(("text", "batch"), [("serial", 4), ("d4", 16), ("f4", 4), ("d2f2", 8)])
def test_all_wait_for_it_where_ranks_meet(text: str, batch: int) -> None:
    found = predicted(profile_of(), text, SlowRank(factor=1.5), batch)
    assert found.iteration_s == pytest.approx(1.5 * found.time.compute_s + found.time.communication_s)
    assert found.time.straggler == pytest.approx(1.5)
    assert any("rank 0 computes 1.5 times as long" in note for note in found.provenance.notes)


def test_among_equal_ranks_it_is_irrelevant_which_is_slow() -> None:
    first, last = (predicted(profile_of(), "d4", SlowRank(factor=1.5, rank=rank)) for rank in (0, 3))
    assert first.iteration_s == last.iteration_s


def test_a_factor_of_1_changes_nothing() -> None:
    for text in ("d4", "p2", "d2p2"):
        profile = profile_of(quantiles=EVEN, samples=1000)
        plain, same = (predicted(profile, text, slow).iteration_s for slow in (None, SlowRank(factor=1.0)))
        assert same == pytest.approx(plain, rel=1e-12)


def test_speed_up_is_against_a_rank_as_measured() -> None:
    slow, plain = (predicted(profile_of(), "d4", each) for each in (SlowRank(factor=2.0, rank=3), None))
    assert slow.use.speedup / plain.use.speedup == pytest.approx(plain.iteration_s / slow.iteration_s)


@pytest.mark.parametrize("slower", [1.01, 1.05, 1.15, 1.5])
def test_the_wait_behind_a_slow_rank_equals_that_of_draws(slower: float) -> None:
    spread = RankSpread(quantiles=EVEN, samples=1000)
    draws = np.random.default_rng(1).uniform(0.9, 1.1, (200_000, 4))
    draws[:, 0] *= slower
    assert spread.wait(4, slower) == pytest.approx(draws.max(axis=1).mean() - slower, abs=3e-4)
    assert spread.wait(4, slower) < spread.wait(4)
    assert spread.wait(1, slower) == 0.0


def test_a_slow_rank_among_spread_ranks_is_not_always_last() -> None:
    profile = profile_of(quantiles=EVEN, samples=1000)
    waits = RankSpread(quantiles=EVEN, samples=1000)
    found = [predicted(profile, "d4", SlowRank(factor=factor)).time.straggler for factor in (1.0, 1.05, 1.5)]
    assert found == pytest.approx([1 + waits.wait(4), 1.05 + waits.wait(4, 1.05), 1.5])


def pipeline_s(stages_s: list[float], micro_batches: int) -> float:
    """GPipe, messages of no time: forward, then backward of twice that, stage by stage."""
    free, ready = [0.0] * len(stages_s), [0.0] * micro_batches
    for factor, order in ((1, range(len(stages_s))), (2, range(len(stages_s) - 1, -1, -1))):
        for stage in order:
            for batch in range(micro_batches):
                free[stage] = max(free[stage], ready[batch]) + factor * stages_s[stage]
                ready[batch] = free[stage]
    return max(free)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_in_a_pipeline_it_slows_its_own_stage(rank: int) -> None:
    quick = tuple(ring_fit(operation, alpha_s=1e-15, beta_s_per_byte=0.0) for operation in OPERATIONS)
    network = make_network((64, 64, 64, 64))
    profile = make_profile(network, model_times=model_times(network, wu_s=0.0), communication=quick)
    settings = plan_settings(batch=16, micro_batches=4)
    point = Configuration(strategy=parse_strategy("p3"), settings=settings)

    def iteration_s(slow: SlowRank | None) -> float:
        return (
            Predictor(CostModel(profile=profile, network=network, slow_rank=slow), evaluator_named("simulate"))
            .predict(point)
            .iteration_s
        )

    # A layer and its activation of 65e-6 s a sample each, on 4 of them.
    stages_s = [2 * 65e-6 * 4] * 3
    assert iteration_s(None) == pytest.approx(pipeline_s(stages_s, 4))
    stages_s[rank] *= 2.5
    assert iteration_s(SlowRank(factor=2.5, rank=rank)) == pytest.approx(pipeline_s(stages_s, 4))


def test_one_slow_pipeline_replica_delays_the_others() -> None:
    profile = profile_of(quantiles=EVEN, samples=1000)
    plain, little, much = (
        predicted(profile, "d4p2", slow, micro_batches=4).iteration_s
        for slow in (None, SlowRank(factor=1.02, rank=5), SlowRank(factor=2.0, rank=5))
    )
    assert plain < little < much
    still = profile_of()
    alone = predicted(still, "d4p2", SlowRank(factor=2.0, rank=5), micro_batches=4).iteration_s
    # So slow a rank is the last for sure; the rest of its own replica, and it, still spread.
    assert much == pytest.approx(alone, rel=0.03)


@pytest.mark.parametrize("text", ["fast", "0.9", "nan", "inf", "1.5@", "1.5@-1", "1.5@x", ""])
def test_what_is_no_slow_rank_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"is no FACTOR\[@RANK\], as 1.5 or 1.5@3"):
        slow_rank_option("simulate", text)


def test_it_is_for_simulate() -> None:
    assert slow_rank_option("simulate", None) is slow_rank_option("paradl", None) is None
    assert slow_rank_option("simulate", "1.5") == SlowRank(factor=1.5)
    assert slow_rank_option("simulate", "2@3") == SlowRank(factor=2.0, rank=3)
    with pytest.raises(UserError, match="--slow-rank is for --evaluator simulate; paradl assumes that all ranks"):
        slow_rank_option("paradl", "1.5")


def test_slow_rank_option_leaves_out_points_without_that_rank(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write_profile(path, profile_of())
    asked = ["--from-profile", str(path), "--model", "chain", "--batch", "16", "--slow-rank", "1.5@3"]
    result = CliRunner().invoke(group, [*asked, "--strategy", "d2,d4", "--json"])
    assert result.exit_code == 0, result.output
    assert "left out: --slow-rank 1.5@3: d2 has ranks 0 to 1" in result.stderr
    (found,) = json.loads(result.stdout)
    assert (found["strategy"], found["straggler"]) == ("d4", pytest.approx(1.5))
    refused = CliRunner().invoke(group, [*asked, "--strategy", "serial"])
    assert "serial has rank 0 alone" in str(refused.exception)
