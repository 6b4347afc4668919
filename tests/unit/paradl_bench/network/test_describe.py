"""paradl-bench describe: layers one by one, or by the module that they lie in where there are many."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

COMMAND = importlib.import_module("paradl_bench.commands.describe").COMMAND
ROWS = 40


def described(*options: str) -> str:
    done = CliRunner().invoke(COMMAND, ["resnet18", *options], env={"COLUMNS": "100"})
    assert done.exit_code == 0, done.output
    return done.output


def parameters(printed: str) -> dict[str, int]:
    """Of each row of the table, by its first column."""
    rows = [line.split() for line in printed.splitlines() if line.startswith(" ")]
    return {row[0]: int(row[2].replace(",", "")) for row in rows if len(row) > 3 and row[2].replace(",", "").isdigit()}


def test_many_layers_are_folded_by_module() -> None:
    folded, whole = parameters(described()), parameters(described("--all"))
    assert len(folded) <= ROWS < len(whole)
    assert {"conv1", "layer1.0", "layer4.1", "fc"} <= folded.keys()
    assert "layer1.0.conv1" in whole
    block = sum(count for name, count in whole.items() if name.startswith("layer1.0."))
    assert folded["layer1.0"] == block > 0
    assert sum(folded.values()) == sum(whole.values()) == 11_689_512


@pytest.mark.parametrize("target", ["file", "-"])
def test_a_file_and_the_table_go_together(tmp_path: Path, target: str) -> None:
    path = str(tmp_path / "network.json") if target == "file" else "-"
    printed = described("-o", path)
    if target == "file":
        assert "layer1.0" in printed
        printed = Path(path).read_text()
    assert len(json.loads(printed)["layers"]) > ROWS
