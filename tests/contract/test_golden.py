"""Changes of structure keep every prediction, search, timeline, validation and fit as it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from golden_numbers import GOLDEN, kept, moved, record

ROUNDING = 1e-6
"""Relative: machines round sums otherwise, and fits iterate. `benchmarks/correctness/golden.py` sees the last bit."""
PREDICTIONS = 300


def test_numbers_are_those_of_before(tmp_path: Path) -> None:
    before = json.loads(GOLDEN.read_text())
    assert sum(path.endswith("/iteration_s") for numbers in before.values() for path in numbers) >= PREDICTIONS
    assert not any(path.startswith("refused") for numbers in before.values() for path in numbers)
    differ = moved(before, kept(record(tmp_path)), relative=ROUNDING)
    assert not differ, "\n".join(differ[:20])
