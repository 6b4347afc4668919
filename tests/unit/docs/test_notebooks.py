"""Notebooks of docs/ do today what stands in them: those that measure nothing give the same outputs again.

After a change of the model: ``jupyter execute --inplace docs/notebooks/NAME.ipynb``.

The one that measures is run by tests/distributed/measuring/test_own_model_notebook.py.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import nbformat
import pytest
from notebook_runs import NOTEBOOKS, executed, texts

_MOST_BYTES = 150_000
_MEASURED = "own-model"
ALL = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))


def number(word: str) -> float | None:
    try:
        found = float(word.rstrip("%,").replace(",", ""))
    except ValueError:
        return None
    # What a table leaves empty equals itself as a word.
    return None if math.isnan(found) else found


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.long(minutes=2)
@pytest.mark.parametrize("name", [name for name in ALL if name != _MEASURED])
def test_a_notebook_gives_the_outputs_that_it_holds(name: str, tmp_path: Path) -> None:
    committed = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    found = executed(name, tmp_path)
    said, told = (" ".join(texts(each)).split() for each in (found, committed))
    pairs = list(zip(said, told, strict=True))
    assert not [pair for pair in pairs if pair[0] != pair[1] and None in map(number, pair)]
    # As in tests/contract/test_documented_examples.py: numbers are those of today's model within 5%.
    numbers = [pair for pair in ((number(each), number(other)) for each, other in pairs) if None not in pair]
    assert [each for each, _ in numbers] == pytest.approx([other for _, other in numbers], rel=0.05, abs=5e-4)
    assert any("image/png" in output.get("data", {}) for cell in found.cells for output in cell.get("outputs", ()))


@pytest.mark.parametrize("name", ALL)
def test_a_notebook_is_small_and_was_run_as_whole(name: str) -> None:
    path = NOTEBOOKS / f"{name}.ipynb"
    assert path.stat().st_size <= _MOST_BYTES
    document: dict[str, Any] = json.loads(path.read_text())
    nbformat.validate(document)
    code = [cell for cell in document["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    # A folder of the machine that it was run on, colours of a terminal or an error are no output for a reader.
    said = json.dumps([cell["outputs"] for cell in code])
    assert not [word for word in ("/tmp", "/home", "/root", "\\u001b", '"error"') if word in said]


def test_the_three_notebooks_are_there() -> None:
    assert ALL == ["nccl-tests", "own-model", "strategy-for-512"]
