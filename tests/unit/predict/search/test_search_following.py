"""A search that follows another on changed hardware: what it keeps, what it finds, and what it looks at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from calibrate.profile.profile import read_profile
from paradl_bench.core.terminal.keywords import ask
from predict.costs.cost_model import CostModel
from predict.evaluators import simulate
from predict.prediction.prediction import Predictor
from predict.prediction.request import READ_PROFILE, read_model
from predict.search import following
from predict.search.command import search_command
from predict.search.following import Followed
from predict.search.ranking import Ranker
from predict.search.search import whole_search
from predict.what_if.what_if import changed_hardware

ROWS = 4
SLOW_LINKS = {"bandwidth": 0.02}


@pytest.fixture(scope="module")
def options() -> dict[str, Any]:
    words = ["--from-profile", "h100-sxm"]
    given = {"model": "resnet18", "ranks": 16, "batch": 64, "memory": "80GiB"}
    asked = ask(search_command, "predict search", words, given)
    return dict(asked.options) | {READ_PROFILE: read_profile(Path("h100-sxm"))}


@pytest.fixture(scope="module")
def costs(options: dict[str, Any]) -> CostModel:
    return read_model(options, simulate.EVALUATOR)


@pytest.fixture(scope="module")
def whole(options: dict[str, Any], costs: CostModel) -> Ranker:
    return whole_search(options, costs=costs)[1][0]


def seconds_on(followed: Followed, there: CostModel, rows: int = ROWS) -> dict[int, float]:
    """Seconds by candidate, the fastest first."""
    exact = followed.rank(there, Predictor(there, simulate.EVALUATOR), rows)
    return {one.candidate: one.timed.iteration_s for one in exact}


def test_a_following_search_predicts_the_same_on_the_same_hardware(whole: Ranker, costs: CostModel) -> None:
    followed = Followed.by(whole)
    found = seconds_on(followed, costs)
    best = min(one.timed.iteration_s for one in whole._done)
    assert next(iter(found.values())) == best
    assert set(followed.rows[:ROWS].tolist()) <= set(found)


def test_it_keeps_the_rows_that_need_less_memory(whole: Ranker) -> None:
    done = {one.candidate: one for one in whole._done}
    rows = [done[candidate] for candidate in Followed.by(whole).rows.tolist()]
    for one in whole._done:
        faster = [other for other in whole._done if other.timed.iteration_s < one.timed.iteration_s]
        if all(one.prediction.memory.memory_bytes < other.prediction.memory.memory_bytes for other in faster):
            assert one in rows
    assert {one.prediction.strategy for one in rows} == {one.prediction.strategy for one in whole._done}


@pytest.mark.parametrize("changed", [SLOW_LINKS, {"latency": 5.0}, {"peak-flops": 4.0, "memory-bandwidth": 4.0}])
def test_its_best_is_near_that_of_a_whole_search(
    options: dict[str, Any], costs: CostModel, whole: Ranker, changed: dict[str, float]
) -> None:
    there = costs.on(changed_hardware(costs, changed))
    found = seconds_on(Followed.by(whole), there)
    best = whole_search(options, costs=there)[0].rows[0].prediction.iteration_s
    assert list(found.values()) == sorted(found.values())
    assert next(iter(found.values())) <= 1.05 * best


def test_it_finds_what_was_slow_before(whole: Ranker, costs: CostModel) -> None:
    there = costs.on(changed_hardware(costs, SLOW_LINKS))
    found = seconds_on(Followed.by(whole), there, rows=1)
    assert next(iter(found)) != Followed.by(whole).rows[0]


def test_it_looks_at_few_and_learns(whole: Ranker, costs: CostModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "FAMILIES", 5)
    followed = Followed.by(whole)
    assert len(followed.fastest) == 5
    assert set(followed.family.tolist()) == set(range(5))
    assert set(followed.fastest.tolist()) <= set(followed.every.tolist())
    before = followed.corrections._factor.copy()
    seconds_on(followed, costs.on(changed_hardware(costs, SLOW_LINKS)))
    assert (followed.corrections._factor <= before).all()
    assert (whole._corrections._factor >= followed.corrections._factor).all()


def test_what_it_leaves_out_it_does_not_predict(whole: Ranker, costs: CostModel) -> None:
    followed = Followed.by(whole)
    found = seconds_on(followed, costs.on(changed_hardware(costs, SLOW_LINKS)))
    assert set(found) <= {*followed.every.tolist(), *followed.rows[:ROWS].tolist()}
    assert len(found) <= ROWS + following._CHALLENGERS
