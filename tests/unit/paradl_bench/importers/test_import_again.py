"""An import that was killed, or whose disk was full, is repeated by the same command; rows are whole or not there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from paradl_bench.cli import group
from paradl_bench.core.files import json_lines, storage
from paradl_bench.core.files.json_lines import UNFINISHED, append_together, undo_unfinished
from paradl_bench.records.measurement import COLLECTIVES_FILE, read_manifest, read_records
from paradl_bench.records.samples import CollectiveSamples

_ROWS = 10


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    log = tmp_path / "osu.log"
    rows = "\n".join(f"{8 << i} {1.5 + i}" for i in range(_ROWS))
    log.write_text(f"# OSU MPI Allreduce Latency Test v7.0\n# Size       Avg Latency(us)\n{rows}\n")
    return ["import", "osu", str(log), "--ranks", "4", "--level", "node", "-o", str(tmp_path / "out")]


@pytest.mark.parametrize("writes", range(1, 5))
def test_an_import_that_is_killed_at_any_write_is_repeated(arguments: list[str], tmp_path: Path, writes: int) -> None:
    program = (
        "import os, signal, sys\n"
        "from paradl_bench.core.files import storage\n"
        "from paradl_bench.cli import main\n"
        "real, left = os.replace, [int(sys.argv.pop(1))]\n"
        "def replace(*paths):\n"
        "    left[0] -= 1\n"
        "    if not left[0]: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    real(*paths)\n"
        "storage.os.replace = replace\n"
        "main()\n"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(writes), *arguments], capture_output=True, check=False)
    out = tmp_path / "out"
    assert killed.returncode in (0, -signal.SIGKILL)
    if killed.returncode:
        again = CliRunner().invoke(group, arguments)
        assert again.exit_code == 0, again.output
    assert read_manifest(out).complete
    assert len(read_records(out, COLLECTIVES_FILE, CollectiveSamples)) == _ROWS
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    repeated = CliRunner().invoke(group, arguments)
    assert repeated.exit_code == 0, repeated.output
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    # Another number of ranks, or another device, is another import.
    ranks = ["8" if word == "4" else word for word in arguments]
    for other in (ranks, [*arguments, "--device-name", "Example GPU"]):
        assert "exists already; give an empty or new directory" in str(CliRunner().invoke(group, other).exception)


class Row(msgspec.Struct):
    number: int


def test_rows_of_several_files_are_whole_or_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = {"a.jsonl": [Row(1)], "b.jsonl": [Row(2), Row(3)], "logs/c.jsonl": [Row(4)]}
    append_together(tmp_path, first)
    before = {name: (tmp_path / name).read_bytes() for name in first}
    assert not (tmp_path / UNFINISHED).exists()
    real = json_lines._append

    def killed_at(path: Path, content: bytes) -> None:
        if path.name == "b.jsonl":
            real(path, content[: len(content) // 2])
            raise KeyboardInterrupt
        real(path, content)

    monkeypatch.setattr(json_lines, "_append", killed_at)
    with pytest.raises(KeyboardInterrupt):
        append_together(tmp_path, {name: [Row(9), Row(10)] for name in first})
    assert (tmp_path / "a.jsonl").read_bytes() != before["a.jsonl"]
    assert undo_unfinished(tmp_path) > 0
    assert {name: (tmp_path / name).read_bytes() for name in first} == before
    assert undo_unfinished(tmp_path) == 0


def test_completely_written_rows_stay_when_only_their_note_remains(tmp_path: Path) -> None:
    append_together(tmp_path, {"a.jsonl": [Row(1)]})
    first = (tmp_path / "a.jsonl").read_bytes()
    append_together(tmp_path, {"a.jsonl": [Row(2)]})
    whole = (tmp_path / "a.jsonl").read_bytes()
    # Killed right before the note is removed.
    (tmp_path / UNFINISHED).write_bytes(msgspec.json.encode({"a.jsonl": (len(first), len(whole))}))
    assert undo_unfinished(tmp_path) == 0
    assert (tmp_path / "a.jsonl").read_bytes() == whole
    assert not (tmp_path / UNFINISHED).exists()


@pytest.mark.parametrize("name", ["../precious", "/etc/passwd", "a/../../precious", ".lock"])
def test_nothing_outside_of_the_directory_is_cut(tmp_path: Path, name: str) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    directory = tmp_path / "measured"
    directory.mkdir()
    (directory / UNFINISHED).write_bytes(msgspec.json.encode({name: (0, 9)}))
    with pytest.raises(storage.UserError):
        undo_unfinished(directory)
    os.symlink(precious, directory / "layers.jsonl")
    (directory / UNFINISHED).write_bytes(msgspec.json.encode({"layers.jsonl": (0, 9)}))
    with pytest.raises(storage.UserError, match="is a link"):
        undo_unfinished(directory)
    assert precious.read_text() == "kept"


def test_failed_launches_among_logs_are_named_and_others_are_read(tmp_path: Path) -> None:
    rows = "\n".join(f"{8 << i} {1.5 + i}" for i in range(_ROWS))
    paths = []
    for number in range(40):
        path = tmp_path / f"{number}.log"
        path.write_text(f"# OSU MPI Allreduce Latency Test v7.0\n# Size       Avg Latency(us)\n{rows}{number}\n")
        paths.append(str(path))
    for number in (3, 7, 11):
        Path(paths[number]).write_text("srun: error: Unable to create step\n")  # the same bytes three times
    Path(paths[20]).write_bytes(b"\x1f\x8bbroken")
    out = tmp_path / "out"
    options = ["--ranks", "4", "--level", "node", "-o", str(out), "--json"]
    result = CliRunner().invoke(group, ["import", "osu", *paths, *options])
    assert result.exit_code == 0, result.output
    warnings = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
    assert warnings[0] == "warning: 4 of 40 files are left out:"
    for number in (3, 7, 11, 20):
        assert any(paths[number] in line for line in warnings)
    summary = msgspec.json.decode(result.stdout)
    assert [entry["file"] for entry in summary["not_read"]] == [paths[number] for number in (3, 7, 11, 20)]
    assert len(summary["files"]) == len(read_manifest(out).imported) == 36
    assert len(read_records(out, COLLECTIVES_FILE, CollectiveSamples)) == 36 * _ROWS
    failed = [paths[number] for number in (3, 7)]
    refused = CliRunner().invoke(group, ["import", "osu", *failed, "-o", str(tmp_path / "none")])
    assert f"{failed[0]} holds no table of the OSU micro-benchmarks" in str(refused.exception)
    assert "nor could 1 more be read" in str(refused.exception)


def test_a_full_disk_is_one_line_that_names_the_file(arguments: list[str], tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a file system takes root")
    try:
        (disk / "fill").write_bytes(b"x" * 4096)
        command = [sys.executable, "-m", "paradl_bench", *arguments[:-1], str(disk / "out")]
        failed = subprocess.run(command, capture_output=True, text=True, check=False)
        assert failed.returncode == 3
        assert failed.stderr.startswith(f"paradl-bench: error: cannot write {disk / 'out'}/")
        assert "No space left on device; free some there" in failed.stderr
        (disk / "fill").unlink()
        subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
        assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    finally:
        subprocess.run(["umount", str(disk)], check=True)
