"""What ``predict search`` answers: rows and their commands, chances, the Pareto set, and mistakes in one line."""

from __future__ import annotations

import json
import re
import shlex
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from profile_factory import make_network
from search_cases import asked, found, profile_of

from calibrate.profile.profile import write_profile
from paradl_bench.core.errors import UserError
from paradl_bench.core.statistics import Z90
from paradl_bench.core.units import format_bytes
from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import parse_strategy
from predict.cli import group
from predict.costs.cost_model import CostModel
from predict.prediction.interval import Interval, Timed
from predict.prediction.prediction import Predictor
from predict.search import ranking
from predict.search.chances import chances_of_best, pareto, steps
from predict.search.presentation import _differing, in_all, settings_of_row
from predict.search.search import Row, most_predictions, rows_of
from predict.workload import Configuration, evaluator_named

NETWORK = make_network((64, 512, 256, 512, 32))


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    write_profile(tmp_path / "p.json", profile_of(NETWORK))
    return tmp_path / "p.json"


@pytest.mark.parametrize(
    "fed",
    [
        (),
        ("--preset", "naive", "--io-seconds", "0.002", "--h2d-seconds", "0.0005"),
        ("--preset", "caffe-mpi", "--prefetch", "3", "--io-seconds", "0.002", "--h2d-seconds", "0"),
        ("--preset", "megatron"),
    ],
    ids=["from memory", "naive", "copied ahead", "memory of a framework"],
)
def test_a_row_is_what_predict_says_to_its_command(profile: Path, fed: tuple[str, ...]) -> None:
    answer = found(profile, "--ranks", "4", "--batch", "16", "--dataset-samples", "1000", "--price", "2", *fed)
    assert len(answer["rows"]) >= 5
    for row in answer["rows"]:
        program, *words = shlex.split(row["predict_command"])
        assert program == "predict"
        result = CliRunner().invoke(group, [*words, "--json"])
        assert result.exit_code == 0, result.output
        assert json.loads(result.output) == [row["prediction"]]
        assert row["train_command"].startswith("paradl-bench train chain --sequence 64 --strategy")
        assert f"--strategy {row['prediction']['strategy']} " in row["train_command"]
        assert "--preset" not in row["train_command"]


def test_no_run_is_suggested_for_a_network_without_input(tmp_path: Path) -> None:
    """As of an imported trace, which names layers and no model that could be built."""
    network = msgspec.structs.replace(make_network(), input_shape=())
    write_profile(tmp_path / "p.json", profile_of(network))
    options = "--ranks", "2", "--batch", "8"
    assert all(row["train_command"] is None for row in found(tmp_path / "p.json", *options)["rows"])
    told = asked(tmp_path / "p.json", *options)
    assert told.exit_code == 0, told.output
    assert "to run the first" not in told.output


def test_settings_that_come_to_the_same_are_one_row() -> None:
    predictor = Predictor(CostModel(profile=profile_of(NETWORK), network=NETWORK), evaluator_named("simulate"))
    exact = []
    # Both buckets hold the whole model.
    for cap_bytes in (2**26, 2**27):
        settings = plan_settings(batch=8, first_bucket_bytes=cap_bytes, bucket_cap_bytes=cap_bytes)
        found = predictor.predict_timed(Configuration(strategy=parse_strategy("d2"), settings=settings))
        exact.append(ranking.Exact(len(exact), *found, found[1].iteration_s, "d2"))
    assert exact[0].timed.iteration_s == exact[1].timed.iteration_s
    options: dict[str, Any] = defaultdict(lambda: None, top=10, profile="p.json")
    rows, others, further = rows_of(exact, options)
    assert [row.prediction.bucket_cap_bytes for row in rows] == [2**26]
    assert (others, further) == (0, 0)


def test_rows_are_the_fastest_strategies_and_their_chances_sum(profile: Path) -> None:
    answer = found(profile, "--ranks", "4", "--batch", "16", "--top", "4", "--pareto")
    rows = answer["rows"]
    firsts = [row for row in rows if row["probability_best"] is not None]
    assert len({row["prediction"]["strategy"] for row in firsts}) >= 4
    seconds = [row["prediction"]["iteration_s"] for row in rows]
    assert seconds == sorted(seconds)
    total = sum(row["probability_best"] for row in firsts) + answer["probability_of_others"]
    assert total == pytest.approx(1)
    assert rows[0]["pareto"]
    assert any(
        row["pareto"] and row["prediction"]["memory_bytes"] < rows[0]["prediction"]["memory_bytes"] for row in rows
    )


def test_top_counts_rows_and_the_option_shows_the_rest(profile: Path) -> None:
    asked_for = "--ranks", "4", "--batch", "16", "--top", "1"
    few, every = found(profile, *asked_for), found(profile, *asked_for, "--pareto")
    assert len(few["rows"]) == 1
    assert few["further"] == len(every["rows"]) - 1 > 0
    assert every["further"] == 0
    assert f"In no row: {few['further']} other prediction" in asked(profile, *asked_for).output
    assert "In no row" not in asked(profile, *asked_for, "--pareto").output


def test_rows_unlike_in_an_option_alone_look_different() -> None:
    predictor = Predictor(CostModel(profile=profile_of(NETWORK), network=NETWORK), evaluator_named("simulate"))
    settings = plan_settings(batch=8)
    prediction = predictor.predict(Configuration(strategy=parse_strategy("d2"), settings=settings))
    common = {"recompute": "all", "ranks_per_node": "2"}
    rows = [
        Row(
            place=place,
            probability_best=None,
            pareto=False,
            estimate_s=1.0,
            predict_command="",
            train_command=None,
            prediction=msgspec.structs.replace(prediction, options=common | own),
        )
        for place, own in enumerate(({}, {"context_exchange": "ring"}, {"sequence_parallel": "on"}), start=1)
    ]
    shown = [settings_of_row(row.prediction, _differing(rows)) for row in rows]
    assert shown == [
        ["recompute all"],
        ["recompute all", "context-exchange ring"],
        ["recompute all", "sequence-parallel on"],
    ]
    assert in_all(shown) == ["recompute all"]
    assert in_all(shown[:1]) == []


def test_several_numbers_of_ranks_are_compared_by_rank_hours(profile: Path) -> None:
    answer = found(profile, "--ranks", "1:4:x2", "--batch", "16", "--pareto")
    assert [searched["ranks"] for searched in answer["searched"]] == [1, 2, 4]
    frontier = [row["prediction"] for row in answer["rows"] if row["pareto"]]
    cheapest = min(frontier, key=lambda own: own["rank_hours_per_million_samples"])
    assert cheapest["ranks"] < max(own["ranks"] for own in frontier)


def test_the_table_says_what_was_ruled_out_and_why(profile: Path) -> None:
    assert "does not part" not in asked(profile, "--ranks", "8", "--batch", "12").output
    result = asked(profile, "--ranks", "8", "--batch", "12", "--why")
    assert result.exit_code == 0, result.output
    assert "batch 12 does not split evenly over 8 replicas" in result.output
    left_out = "Not searched on 8 ranks: data parallelism of degree 8. Batch 12 does not split evenly over so many"
    assert f"{left_out} replicas; the nearest that do are 8 and 16." in result.output
    assert "candidates (a strategy with its settings): " in result.output
    assert "to run the first: paradl-bench train chain --sequence 64 --strategy " in result.output.replace("\n", " ")


def test_csv_has_a_row_each(profile: Path, tmp_path: Path) -> None:
    target = tmp_path / "found.csv"
    result = asked(profile, "--ranks", "2", "--batch", "8", "-o", str(target))
    assert result.exit_code == 0, result.output
    header, *rows = target.read_text().splitlines()
    assert {"place", "probability_best", "pareto", "predict_command"} <= set(header.split(","))
    assert len(rows) == len(found(profile, "--ranks", "2", "--batch", "8")["rows"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--ranks", "0", "--batch", "8"), "ranks"),
        (("--ranks", "2", "--batch", "8", "--preset", "naive"), "the profile holds no times of reading and copying"),
        (("--ranks", "2", "--batch", "8", "--io-seconds", "1", "--preset", "x"), "--preset x: choices are naive,"),
        (("--ranks", "2", "--batch", "8,16"), "takes one mini-batch"),
        (("--ranks", "9223372036854775807", "--batch", "8"), "predict search takes at most 999999999, as strategies"),
        (("--ranks", "2", "--batch", "8", "--memory", "lots"), "--memory: size 'lots' is not a size"),
        (
            ("--ranks", "2", "--batch", "8", "--memory", "1KiB"),
            "fits in 1.00 KiB a rank: the smallest that was found needs",
        ),
        (("--ranks", "2", "--batch", "8", "--strategy", "d2"), "--strategy: predict search tries all of them"),
        (("--ranks", "2", "--batch", "8", "--caps", "x"), "--caps x"),
        (("--ranks", "1048576", "--batch", "7"), "no strategy of chain on 1048576 ranks with batch 7"),
    ],
)
def test_mistakes_are_said_in_one_line(profile: Path, options: tuple[str, ...], said: str) -> None:
    result = asked(profile, *options)
    assert isinstance(result.exception, UserError), result.output
    assert said in str(result.exception)
    assert "\n" not in str(result.exception)


def test_what_needs_least_is_said_with_its_largest_rank(profile: Path) -> None:
    limited = "--ranks", "8", "--batch", "64", "--recompute", "none", "--memory", "1KiB"
    said = str(asked(profile, *limited).exception)
    _, needed, leanest = re.split("needs |, (?=[a-z])", said.partition(";")[0])
    strategy, *options = leanest.split()
    words = ["--from-profile", str(profile), "--model", "chain", "--batch", "64", "--strategy", strategy, *options]
    (predicted,) = json.loads(CliRunner().invoke(group, [*words, "--json"]).output)
    assert needed == format_bytes(predicted["memory_bytes"])


def timed(seconds: float, *, own_s: float = 0.0, **moved_s: tuple[float, float]) -> Timed:
    return Timed(seconds, Interval(0.0, 0.0, {}, dict(moved_s), own_s, ()))


def test_fewer_candidates_of_large_networks_are_predicted() -> None:
    assert [most_predictions(layers) for layers in (1, 952, 1_000)] == [60, 60, 60]
    large = [most_predictions(layers) for layers in (2_000, 5_000, 1_000_000)]
    assert large == [30, 12, 8]


def test_equal_predictions_are_equally_likely_best_despite_other_settings() -> None:
    """One strategy with three settings, of which two are slower, and its equal with one; sums may differ by an ulp."""
    predictor = Predictor(CostModel(profile=profile_of(NETWORK), network=NETWORK), evaluator_named("simulate"))
    exact = []
    for name, cap_bytes in (("d2", 2**26), ("f2", 2**26), ("d2", 2**17), ("d2", 2**16)):
        settings = plan_settings(batch=8, first_bucket_bytes=cap_bytes, bucket_cap_bytes=cap_bytes)
        prediction, _ = predictor.predict_timed(Configuration(strategy=parse_strategy(name), settings=settings))
        seconds = (1.0 + 1e-16) if cap_bytes == 2**26 else 1.02
        one = timed(seconds, own_s=0.1, spell=(1.2, 0.9))
        exact.append(ranking.Exact(len(exact), prediction, one, seconds, f"layers of {cap_bytes}"))
    rows, _, _ = rows_of(exact, defaultdict(lambda: None, top=10, profile="p.json"))
    chances = {row.prediction.strategy: row.probability_best for row in rows if row.probability_best is not None}
    assert chances == {"d2": 0.5, "f2": 0.5}


def test_a_time_with_a_wide_interval_is_never_negative() -> None:
    """Three deviations below 377 s, whose interval begins at 166 s, are not faster than 1.2 s."""
    far = timed(377.0, own_s=210.0, spell=(617.0, 166.0), links=(617.0, 166.0))
    assert chances_of_best([timed(1.2), far], "ab").tolist() == [1.0, 0.0]


def test_an_error_that_all_share_leaves_no_doubt() -> None:
    slow, fast = (timed(s, spell=(s * 1.1, s * 0.9)) for s in (1.01, 1.0))
    assert chances_of_best([slow, fast], ["a", "b"]).tolist() == [0.0, 1.0]


def test_independent_errors_give_chances_of_a_normal_difference() -> None:
    from math import erf, sqrt

    sd = 0.1
    both = [timed(seconds, own_s=Z90 * sd) for seconds in (1.0, 1.05)]
    expected = (1 + erf(0.05 / (sd * sqrt(2)) / sqrt(2))) / 2
    assert chances_of_best(both, ["a", "b"])[0] == pytest.approx(expected, abs=0.02)
    assert chances_of_best(both, ["a", "a"])[0] == 1.0


def test_a_draw_is_shared_by_those_that_tie() -> None:
    assert chances_of_best([timed(1.0), timed(1.0), timed(2.0)], "aab").tolist() == [0.5, 0.5, 0.0]


def test_the_pareto_set_holds_what_nothing_else_beats() -> None:
    assert pareto([(1, 5), (2, 3), (3, 4), (2, 3), (4, 1)]) == [True, True, False, True, True]


def test_steps_lead_from_the_fastest_to_the_smallest() -> None:
    seconds = np.array([3.0, 1.0, 2.0, 2.0, 4.0, np.inf, 0.5])
    sizes = np.array([2.0, 5.0, 4.0, 3.0, 3.0, 1.0, 9.0])
    assert steps(seconds, sizes, 9.0).tolist() == [1, 3, 0]
    assert steps(seconds, sizes, 2.0).tolist() == []


def test_possible_settings_outside_the_search_are_listed(profile: Path) -> None:
    said = asked(profile, "--ranks", "4", "--batch", "4096", "--predictions", "2", "--top", "1", "--why").output
    assert "not searched: more than 512 micro-batches; gradients exchanged by node leaders" in said
    (searched,) = found(profile, "--ranks", "1", "--batch", "8", "--predictions", "1")["searched"]
    assert searched["not_searched"] == []
