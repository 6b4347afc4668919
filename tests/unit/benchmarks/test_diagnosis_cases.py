"""Runs made worse on purpose: every limitation that two cores can have is made, and a row is judged strictly."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "diagnosis"))

from diagnosis import Row, table
from diagnosis_cases import CAUSES, CLEAN, LAYERS, PROFILES, SHAPES, SWEEPS

from predict.validation.diagnosis import limitations as of


def row(**changes: object) -> Row:
    """Of a run with a slow link."""
    fields = {"run": "a", "made": "a slow link", "cause": of.HALO, "strategy": "s2", "emulated": False}
    found = {"named": (of.HALO,), "possible": (), "share": 0.2, "interval": (0.1, 0.3), "notes": ()}
    return Row(iteration_s=1.0, **{**fields, **found, **changes})  # type: ignore[arg-type]


def test_every_limitation_of_a_cpu_is_made_but_two() -> None:
    names = {limitation.name for limitation in of.LIMITATIONS}
    # A CPU's kernels run in the thread that calls them: only a GPU waits for its host.
    assert {case.cause for case in CAUSES} == names - {of.INPUT, of.MEMORY_STALLS, of.HOST_DISPATCH}
    assert not any(case.cause for case in CLEAN)


def test_cases_name_what_is_measured() -> None:
    cases = (*CAUSES, *CLEAN)
    assert len({case.name for case in cases}) == len(cases)
    assert {case.profile for case in cases} == set(PROFILES)
    assert {case.model for case in cases} | {model for model, _ in LAYERS.values()} == set(SHAPES)
    assert {sweep for sweeps in PROFILES.values() for sweep in sweeps} == set(SWEEPS)


@pytest.mark.parametrize(
    ("changes", "right"),
    [
        ({}, True),
        ({"named": (of.HALO, of.IMBALANCE)}, True),
        ({"named": (of.IMBALANCE, of.HALO)}, False),
        ({"named": ()}, False),
        ({"cause": "", "named": ()}, True),
        ({"cause": "", "named": (of.HALO,)}, False),
    ],
)
def test_a_cause_has_to_be_first(changes: dict[str, object], right: bool) -> None:
    assert row(**changes).right == right


def test_the_table_counts_worse_and_clean_runs() -> None:
    rows = [row(), row(named=()), row(cause="", named=()), row(cause="", named=(of.IMBALANCE,))]
    text = table(rows)
    assert "1 of 2 named first." in text
    assert "1 false of 2 clean runs" in text
    assert "20.0% (10.0% to 30.0%)" in text
