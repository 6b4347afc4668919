"""The ParaDL paper's own files, the whole way through the commands: import, fit, predict by every evaluator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from calibrate.cli import group as calibrate
from paradl_bench.cli import group as paradl_bench
from predict.cli import group as predict

MADE = Path(__file__).parents[3] / "data" / "imports"
_PARTED = "forward and backward were imported as one time, which is split by FLOPs"
_BATCH = 32
_SECONDS = {"CONV_1": 0.0031, "BNORM": 0.0004, "RELU": 0.0002, "MPOOL": 0.0003, "CONV_2": 0.0012, "FC": 0.0009}
"""Of ``small.net_sc``: forward and backward of a sample."""


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A profile and a cluster file."""
    place = tmp_path_factory.mktemp("paper")
    files = [str(MADE / name) for name in ("small.net_sc", "ABCI.plat")]
    _run(paradl_bench, "import", "paradl-net", *files, "-o", str(place / "imported"))
    _run(calibrate, "fit", str(place / "imported"), "-o", str(place / "profile.json"))
    cluster = place / "imported" / "cluster-ABCI.yaml"
    # The file states the network between nodes alone, as import says.
    stated = cluster.read_text().replace("alpha_s: null", "alpha_s: 1e-6").replace("byte: null", "byte: 2e-11")
    cluster.write_text(stated)
    return place / "profile.json", cluster


def _run(command: Any, *arguments: str) -> str:
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, (arguments, result.output, result.exception)
    return result.stdout


def _predicted(fitted: tuple[Path, Path], strategy: str, evaluator: str) -> dict[str, Any]:
    profile, cluster = fitted
    output = _run(
        predict,
        *("--from-profile", str(profile), "--model", "Small", "--strategy", strategy, "--batch", str(_BATCH)),
        *("--cluster", str(cluster), "--evaluator", evaluator, "--json"),
    )
    (found,) = json.loads(output)
    return dict(found)


@pytest.mark.parametrize(
    ("strategy", "evaluator"),
    [
        *((strategy, "simulate") for strategy in ("serial", "d4", "d16", "f4", "c4", "s2x2", "p2", "d2f2")),
        *((strategy, "paradl") for strategy in ("serial", "d4", "d16", "f4", "c4", "s2x2", "p2", "d2f2")),
        *((strategy, "osf") for strategy in ("serial", "d4", "d16")),
    ],
)
def test_the_papers_networks_are_predicted(fitted: tuple[Path, Path], strategy: str, evaluator: str) -> None:
    found = _predicted(fitted, strategy, evaluator)
    assert any(line.startswith(_PARTED) for line in found["extrapolated"])
    assert found["sources"]["measured"] == 0


@pytest.mark.parametrize("evaluator", ["paradl", "osf", "simulate"])
def test_what_was_parted_adds_up_to_what_was_measured(fitted: tuple[Path, Path], evaluator: str) -> None:
    phases = _predicted(fitted, "serial", evaluator)["phases_s"]
    assert phases["FW"] + phases["BW"] == pytest.approx(sum(_SECONDS.values()) * _BATCH)
    assert phases["FW"] == pytest.approx(sum(_SECONDS.values()) * _BATCH / 3)


def test_the_platforms_units_are_read(fitted: tuple[Path, Path]) -> None:
    text = fitted[1].read_text()
    assert "alpha_s: 5.0e-07" in text
    assert "beta_s_per_byte: 8.0e-11" in text
    assert "memory_bytes_per_rank: 4000000000.0" in text


def test_a_models_name_is_shown_and_not_obeyed(tmp_path: Path) -> None:
    name = "a[/]<img onerror=x>\x1b]0;title\x07[bold]$\\frac$\x9b31m"
    files = [str(MADE / name_of_file) for name_of_file in ("small.net_sc", "ABCI.plat")]
    imported, profile = str(tmp_path / "imported"), str(tmp_path / "[/]profile.json")
    outputs = [
        _run(paradl_bench, "import", "paradl-net", *files, "--model", name, "-o", imported),
        _run(calibrate, "fit", imported, "-o", profile),
        _run(calibrate, "show", profile),
        _run(calibrate, "diff", profile, profile),
        _run(predict, "--from-profile", profile, "--model", name, "--strategy", "serial", "--batch", "2"),
        _run(predict, "timeline", "--from-profile", profile, "--model", name, "--strategy", "serial", "--batch", "2"),
    ]
    for output in outputs:
        assert not {"\x1b", "\x07", "\x9b"} & set(output)
    assert "a[/]<img onerror=x>[bold]$\\frac$" in outputs[2] + outputs[4]
    drawn = tmp_path / "drawn.png"
    arguments = ("--from-profile", profile, "--model", name, "--strategy", "serial", "--batch", "2")
    _run(predict, "what-if", *arguments, "--vary", "batch=2:8:x2", "--plot", str(drawn))
    assert drawn.stat().st_size > 1000
