"""Inputs that would never end or fill the memory are refused in one line, by every command that is given them."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from calibrate.cli import group as calibrate
from paradl_bench.cli import group as paradl_bench
from paradl_bench.core.errors import UserError
from paradl_bench.importers.catalog import importers
from paradl_bench.importers.importer import ImportOptions, load_file
from predict.cli import group as predict


@pytest.mark.parametrize("piece", [b"[],", b"{},", b'{"a":1},'])
def test_a_small_packed_trace_of_very_many_values_is_refused(tmp_path: Path, piece: bytes) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents":[' + piece * (100_000_000 // len(piece)) + b"0]}", 1))
    assert path.stat().st_size < 1_000_000
    with pytest.raises(UserError, match=r"trace\.json\.gz holds more JSON values than fit in 2.* GiB"):
        importers()["kineto"].read(load_file(path), ImportOptions())


def test_a_small_packed_log_of_very_many_lines_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.gz"
    path.write_bytes(gzip.compress(b"\n" * 40_000_000, 1))
    with pytest.raises(UserError, match="lines; cut it into smaller ones"):
        load_file(path)


@pytest.fixture(params=["device", "pipe"])
def endless(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "device":
        return "/dev/zero"
    os.mkfifo(tmp_path / "pipe")
    return str(tmp_path / "pipe")


def test_every_command_refuses_what_is_no_regular_file(endless: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    for command, arguments in (
        (paradl_bench, ["import", "osu", endless, "-o", out]),
        (paradl_bench, ["import", "kineto", endless, "-o", out]),
        (paradl_bench, ["slurm", "resnet18", "--site", endless, "-o", out]),
        (calibrate, ["show", endless]),
        (calibrate, ["merge", endless, endless, "-o", out]),
        (calibrate, ["fit", endless, "-o", out]),
        (predict, ["--model", endless, "--strategy", "d2", "--batch", "2", "--profile", endless]),
        (predict, ["search", "--model", "a", "--ranks", "2", "--batch", "2", "--profile", endless]),
    ):
        result = CliRunner().invoke(command, arguments)
        assert result.exit_code != 0, arguments
        assert isinstance(result.exception, (UserError, SystemExit)), (arguments, result.exception)


@pytest.mark.parametrize("name", ["layers.jsonl", "collectives.jsonl", "network-a.json"])
def test_a_pipe_in_a_measurement_directory_is_refused(name: str, tmp_path: Path, measured: Path) -> None:
    (measured / name).unlink(missing_ok=True)
    os.mkfifo(measured / name)
    result = CliRunner().invoke(calibrate, ["fit", str(measured), "-o", str(tmp_path / "p.json")])
    assert isinstance(result.exception, UserError)
    assert f"{name}: it is a pipe; give a regular file" in str(result.exception)


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    log = tmp_path / "osu.log"
    rows = "\n".join(f"{8 << i} {1.5 + i}" for i in range(10))
    log.write_text(f"# OSU MPI Allreduce Latency Test v7.0\n# Size       Avg Latency(us)\n{rows}\n")
    output = tmp_path / "measured"
    arguments = ["import", "osu", str(log), "--ranks", "4", "--level", "node", "-o", str(output)]
    result = CliRunner().invoke(paradl_bench, arguments)
    assert result.exit_code == 0, result.output
    return output
