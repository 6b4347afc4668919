"""The best candidate of a search beside the median and the worst, of what was predicted and of all that fits."""

from __future__ import annotations

import shlex
from pathlib import Path
from statistics import median_low
from typing import Any

import numpy as np
import pytest
from profile_factory import make_network
from search_cases import asked, exactly, found, profile_of

from calibrate.profile.profile import write_profile
from paradl_bench.plan.settings import PlanSettings
from predict.costs.cost_model import CostModel
from predict.search.candidates.space import Space, find_space
from predict.search.contrast import contrast_of

NETWORK = make_network((64, 512, 256, 512, 32))
RANKS, BATCH = 4, 8
ASKED = ("--ranks", str(RANKS), "--batch", str(BATCH), "--caps", "1")


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    write_profile(tmp_path / "p.json", profile_of(NETWORK))
    return tmp_path / "p.json"


def exact_times() -> tuple[Space, list[float]]:
    costs = CostModel(profile=profile_of(NETWORK), network=NETWORK)
    space = find_space(NETWORK, PlanSettings(batch=BATCH, blocking=True), RANKS, (1,))
    strategies = (str(space.strategies[number]) for number in space.strategy.tolist())
    return space, [exactly(costs, space.settings_of(number), each) for number, each in enumerate(strategies)]


def searched(profile: Path, *options: str) -> dict[str, Any]:
    (one,) = found(profile, *ASKED, *options)["searched"]
    return dict(one)


@pytest.mark.parametrize(
    ("seconds", "median", "worst"),
    [([3.0], 3.0, 3.0), ([4.0, 2.0], 2.0, 4.0), ([9.0, 2.0, 4.0], 4.0, 9.0), ([8.0, 2.0, 4.0, 6.0], 4.0, 8.0)],
)
def test_the_middle_one_of_an_even_number_is_the_faster(seconds: list[float], median: float, worst: float) -> None:
    found = contrast_of(np.array(seconds), 2.0, lambda place: str(seconds[place]))
    assert found.candidates == len(seconds)
    assert (found.median.iteration_s, found.worst.iteration_s) == (median, worst)
    assert (found.median.best_is_faster, found.worst.best_is_faster) == (median / 2, worst / 2)
    assert (found.median.candidate, found.worst.candidate) == (str(median), str(worst))


def test_all_predicted_are_held_against_exact_seconds(profile: Path) -> None:
    """With no candidate left to an estimate, median and worst are those of everything simulated one by one."""
    space, times = exact_times()
    # The leanest come last, so that more than those that may be the best are predicted.
    one = searched(profile, "--predictions", "4000", "--top", "1000")
    predicted, every = one["of_predicted"], one["of_all"]
    assert predicted["candidates"] == one["predicted"]
    assert every["candidates"] == one["predicted"] + one["too_slow"] + one["open"] == len(space)
    assert one["best_s"] == pytest.approx(min(times))
    for told in (predicted["median"], predicted["worst"]):
        assert min(abs(told["iteration_s"] / exact_s - 1) for exact_s in times) < 1e-9
        assert told["best_is_faster"] == pytest.approx(told["iteration_s"] / min(times))
    assert min(times) <= predicted["median"]["iteration_s"] <= predicted["worst"]["iteration_s"] <= max(times)


def test_of_all_median_and_worst_are_no_more_than_exact(profile: Path) -> None:
    """Estimates are from below where layers run whole; of shards they may be off by a few percent either way."""
    _, times = exact_times()
    every = searched(profile, "--predictions", "20")["of_all"]
    assert every["median"]["iteration_s"] <= median_low(times) * 1.05
    assert every["worst"]["iteration_s"] <= max(times) * 1.05


def test_what_memory_rules_out_is_in_no_contrast(profile: Path) -> None:
    free, limited = searched(profile), searched(profile, "--memory", "4MiB")
    assert limited["too_large"] > 0
    assert limited["of_all"]["candidates"] == limited["candidates"] - limited["too_large"]
    assert limited["of_all"]["candidates"] < free["of_all"]["candidates"]


def test_text_says_how_many_and_of_what(profile: Path) -> None:
    one = searched(profile)
    shown = asked(profile, *ASKED, "--why").stdout
    assert f"of {one['predicted']} candidates predicted, median " in shown
    assert f"of all {one['of_all']['candidates']:,} that memory does not rule out, by their estimates" in shown
    assert f"({shlex.join([one['of_predicted']['worst']['candidate']]).strip(chr(39))}; the best is " in shown
