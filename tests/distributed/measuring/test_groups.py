"""Groups of real gloo and MPI ranks at once, and collectives behind compute: what is kept, resumed, fitted and said."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("torch")

from in_process import run_in_process

from calibrate.fitting.fit import fit_profile
from paradl_bench.plan.collectives.catalog import operations, routines
from paradl_bench.ranks.launcher import launch_ranks
from paradl_bench.records.contexts.context import CONTEXTS_FILE, OF_GROUP, ContextSamples
from paradl_bench.records.measurement import COLLECTIVES_FILE, read_manifest, read_records
from paradl_bench.records.samples import CollectiveSamples

pytestmark = pytest.mark.distributed

SIZES = (1024, 8192, 65536)
QUICK = ["--blocks", "1", "--point-seconds", "0.002"]


def collectives(output: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_in_process(Path.cwd(), "collectives", *QUICK, *arguments, "-o", str(output))


def swept(output: Path) -> list[CollectiveSamples]:
    return read_records(output, COLLECTIVES_FILE, CollectiveSamples)


@pytest.mark.slow
def test_groups_call_at_once_and_alone_with_verified_results(tmp_path: Path) -> None:
    """Two groups of two: each block has, of every operation and size, both groups alone and in pairs at once."""
    output = tmp_path / "out"
    result = collectives(output, "--ranks", "2", "--contexts", "groups=2", "--sizes", "2K", "--json")
    assert result.returncode == 0, result.stderr
    assert "4 ranks share" in result.stderr or "2 groups of 2 ranks" in result.stderr
    records = swept(output)
    for record in records:
        assert record.verified
        assert (record.ranks, record.ranks_per_node, record.level) == (2, 2, "node")
        assert len(record.samples_s) == len(routines()[record.operation].sides(2))
    pairs = read_records(output, CONTEXTS_FILE, ContextSamples)
    for record in pairs:
        assert (record.context, record.groups, record.ranks_per_node) == ("groups", 2, 2)
        assert len(record.idle_end_s) == len(record.end_s) == len(routines()[record.operation].sides(2))
    for of in (records, pairs):
        # Every group has a record of its own.
        found = Counter((each.operation, each.message_bytes, each.block, each.ranks) for each in of)
        assert found == Counter({(name, 2048, 0, 2): 2 for name in operations()})
    shown = json.loads(result.stdout)
    assert {row["operation"] for row in shown["contexts"]} == set(operations())
    assert all(row["ratio"] > 0 for row in shown["contexts"])
    # A point whose last record is missing is measured again.
    whole = (output / CONTEXTS_FILE).read_bytes().splitlines(keepends=True)
    (output / CONTEXTS_FILE).write_bytes(b"".join(whole[:-1]) + whole[-1][:30])
    again = collectives(output, "--ranks", "2", "--contexts", "groups=2", "--sizes", "2K")
    assert again.returncode == 0, again.stderr
    assert "1 measurement to go" in again.stderr
    assert read_manifest(output).complete
    other = collectives(output, "--ranks", "4", "--sizes", "2K")
    assert other.returncode == 2


def test_ranks_that_do_not_part_into_the_groups_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = {"TORCHELASTIC_RUN_ID": "test", "RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0"}
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    result = collectives(tmp_path / "out", "--contexts", "groups=2")
    assert result.returncode == 2
    assert "--contexts groups=2 of 1 ranks: torchrun started 3 ranks" in result.stderr


def test_collectives_after_compute_are_kept_with_stamps_and_fitted(tmp_path: Path) -> None:
    output, arguments = tmp_path / "out", ("--ranks", "2", "--ops", "all_reduce,send_recv", "--sizes", "1K:1M:8")
    result = collectives(output, *arguments, "--contexts", "after-compute", "--json")
    assert result.returncode == 0, result.stderr
    records = read_records(output, CONTEXTS_FILE, ContextSamples)
    sizes = {1024, 8192, 65536, 524288}
    assert {(r.operation, r.message_bytes, r.block) for r in records} == {
        (name, size, block) for name in ("all_reduce", "send_recv") for size in sizes for block in (0,)
    }
    for record in records:
        assert record.one_clock
        # The first to arrive is the zero of its repetition, and nobody goes on before the call began.
        assert all(min(starts) == 0 for starts in zip(*record.start_s, strict=True))
        assert min(record.in_context_s(max)) > 0
        assert min(value for row in record.neighbour_s for value in row) > 1e-5
    assert {row["operation"] for row in json.loads(result.stdout)["contexts"]} == {"all_reduce", "send_recv"}
    profile = fit_profile([output], command_line=("calibrate",), force=False)
    assert {(entry.context, entry.operation) for entry in profile.contexts} == {
        ("after-compute", "all_reduce"),
        ("after-compute", "send_recv"),
    }
    lines = (output / CONTEXTS_FILE).read_bytes().splitlines(keepends=True)
    (output / CONTEXTS_FILE).write_bytes(b"".join(lines[:-2]))
    again = collectives(output, *arguments, "--contexts", "after-compute")
    assert "2 measurements to go" in again.stderr
    assert len(read_records(output, CONTEXTS_FILE, ContextSamples)) == len(lines)


def test_calls_beside_an_all_reduce_are_stamped_and_fitted(tmp_path: Path) -> None:
    output, arguments = tmp_path / "out", ("--ranks", "2", "--ops", "all_gather,send_recv", "--sizes", "8K,128K,4M")
    result = collectives(output, *arguments, "--contexts", "with-all-reduce", "--json")
    assert result.returncode == 0, result.stderr
    records = read_records(output, CONTEXTS_FILE, ContextSamples)
    # What would outlast the all-reduce is left out.
    found = {(record.operation, record.message_bytes) for record in records}
    assert found == {(name, size) for name in ("all_gather", "send_recv") for size in (8192, 131072)}
    for record in records:
        assert record.one_clock
        assert min(record.idle_s(max)) > 0
        assert min(value for row in record.neighbour_s for value in row) > 0
        # gloo's all-reduces run on threads of their own: the first call finds it in flight, and need not wait for it.
        assert any(row[0] for row in record.begun)
    assert {row["operation"] for row in json.loads(result.stdout)["contexts"]} == {"all_gather", "send_recv"}
    profile = fit_profile([output], command_line=("calibrate",), force=False)
    assert {entry.operation for entry in profile.contexts} == {"all_gather", "send_recv"}
    lines = (output / CONTEXTS_FILE).read_bytes().splitlines(keepends=True)
    (output / CONTEXTS_FILE).write_bytes(b"".join(lines[:-1]))
    again = collectives(output, *arguments, "--contexts", "with-all-reduce")
    assert "1 measurement to go" in again.stderr
    assert len(read_records(output, CONTEXTS_FILE, ContextSamples)) == len(lines)


@pytest.mark.parametrize(
    "options",
    [("--contexts", "groups=2,after-compute"), ("--concurrent", "2", "--behind-compute")],
)
def test_groups_at_once_and_compute_are_not_mixed(options: tuple[str, ...], tmp_path: Path) -> None:
    """Nor by the options of the version before."""
    result = collectives(tmp_path / "out", "--ranks", "2", *options)
    assert result.returncode == 2
    assert "groups=2 needs a sweep of its own: measure after-compute in another sweep" in result.stderr


def test_groups_of_an_mpi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("mpirun") is None or importlib.util.find_spec("mpi4py") is None:
        pytest.skip("no MPI here: mpirun and mpi4py are needed")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    output = tmp_path / "out"
    settings = ("--backend", "mpi", "--ranks", "2", "--contexts", "groups=2", "--launcher-arg=--oversubscribe")
    result = collectives(output, *settings, "--ops", "all_reduce,send_recv", "--sizes", "1K,64K")
    assert result.returncode == 0, result.stderr
    found = Counter((r.operation, r.message_bytes, r.block, r.concurrent) for r in swept(output) if r.verified)
    assert found == Counter(
        {
            (name, size, block, groups): 2
            for name in ("all_reduce", "send_recv")
            for size in (1024, 65536)
            for block in (0,)
            for groups in (1, 2)
        }
    )


def test_groups_side_by_side_sweep_beside_all_reduces_over_all(tmp_path: Path) -> None:
    output, arguments = tmp_path / "out", ("--ranks", "4", "--side-by-side", "2", "--ops", "all_reduce,send_recv")
    asked = (*arguments, "--sizes", "1K,8K,64K", "--contexts", "after-compute,with-all-reduce,with-compute")
    result = collectives(output, *asked, "--json")
    assert result.returncode == 0, result.stderr
    assert "2 groups of 2 ranks" in result.stderr
    records = swept(output)
    assert all(each.verified and (each.ranks, each.level, each.concurrent) == (2, "node", 1) for each in records)
    points = {(name, size, first) for name in ("all_reduce", "send_recv") for size in SIZES for first in (0, 2)}
    assert Counter((r.operation, r.message_bytes, r.first_rank) for r in records) == Counter(dict.fromkeys(points, 1))
    of = {
        name: [r for r in read_records(output, CONTEXTS_FILE, ContextSamples) if r.context == name] for name in OF_GROUP
    }
    for name in ("after-compute", "with-all-reduce"):
        found = Counter((r.operation, r.message_bytes, r.first_rank) for r in of[name])
        assert found == Counter(dict.fromkeys(points, 1))
    beside = of["with-all-reduce"]
    assert {(each.ranks, each.level, each.neighbour_level) for each in beside} == {(2, "node", "node")}
    assert any(any(row) for each in beside for row in each.begun)
    both = of["with-compute"]
    assert {(each.ranks, each.level, len(each.end_s)) for each in both} == {(2, "node", 2)}
    assert sorted({each.first_rank for each in both}) == [0, 2]
    # Late ranks are told by their number among all.
    assert [each["rank"] for each in json.loads(result.stdout)["pace"]["arrivals"]] == [0, 1, 2, 3]
    profile = fit_profile([output], command_line=("calibrate",), force=False)
    assert {fit.ranks_range for fit in profile.communication} == {(2, 2)}
    assert {entry.context for entry in profile.contexts} == set(OF_GROUP)
    # A step of which one group's record is missing is measured again.
    lines = (output / CONTEXTS_FILE).read_bytes().splitlines(keepends=True)
    (output / CONTEXTS_FILE).write_bytes(b"".join(lines[:-1]))
    again = collectives(output, *asked)
    assert "1 measurement to go" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--ranks", "4", "--side-by-side", "3"), "4 ranks cannot be divided into several such groups"),
        (("--ranks", "4", "--side-by-side", "4"), "from 2 to 2"),
        (("--ranks", "2", "--contexts", "groups=2", "--side-by-side", "2"), "give --contexts groups=K"),
    ],
)
def test_groups_side_by_side_that_cannot_be_are_refused(arguments: tuple[str, ...], why: str, tmp_path: Path) -> None:
    result = collectives(tmp_path / "out", *arguments)
    assert result.returncode == 2
    assert why in result.stderr


def test_silent_groups_move_nothing_and_leave_other_groups_alone(tmp_path: Path) -> None:
    program = Path(__file__).parent / "silent_program.py"
    launch_ranks([sys.executable, str(program), str(tmp_path)], ranks=2, device="cpu", timeout_s=240)
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_bytes())
        assert found["silent"] == [True, False, False]
        assert (found["kept"], found["summed"]) == ([1.0, 1.0], [2.0, 2.0])
        assert found["own"] == [rank + 1.0] * 3
        assert found["mean"] == [1.5] * 3
