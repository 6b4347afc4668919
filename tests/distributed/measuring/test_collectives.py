"""Sweeps on real gloo ranks: verified results, kept times, resumption, interference, wrong results and refusals."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from in_process import run_in_process

from paradl_bench.core.errors import WorkError
from paradl_bench.measure.collectives import beside_compute
from paradl_bench.plan.collectives.catalog import operations, routines
from paradl_bench.ranks.launcher import launch_ranks
from paradl_bench.records.contexts.context import CONTEXTS_FILE, ContextSamples
from paradl_bench.records.measurement import COLLECTIVES_FILE, read_manifest, read_records
from paradl_bench.records.samples import CollectiveSamples

pytestmark = pytest.mark.distributed

QUICK = ["--blocks", "2", "--point-seconds", "0.005"]


def collectives(output: Path, *arguments: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    words = ("collectives", *arguments, "-o", str(output))
    if not launcher:
        return run_in_process(Path.cwd(), *words)
    command = [sys.executable, *launcher, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def swept(output: Path) -> list[CollectiveSamples]:
    return read_records(output, COLLECTIVES_FILE, CollectiveSamples)


def keys(output: Path) -> Counter[tuple[str, int, int]]:
    return Counter((record.operation, record.message_bytes, record.block) for record in swept(output))


def test_every_operation_is_verified_at_every_size_on_three_ranks(tmp_path: Path) -> None:
    """Sizes of one element, of no whole pattern, and of several segments; the ranks share cores, which is said."""
    sizes = (4, 2044, 65536, 3_000_000)
    result = collectives(tmp_path / "out", "--ranks", "3", "--sizes", ",".join(map(str, sizes)), "--json", *QUICK)
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)["collectives"]
    assert {(row["operation"], row["message_bytes"]) for row in rows} == {(o, s) for o in operations() for s in sizes}
    assert all(row["verified"] and row["median_s"] > 0 for row in rows)
    assert keys(tmp_path / "out") == Counter((o, s, b) for o in operations() for s in sizes for b in range(2))
    for record in swept(tmp_path / "out"):
        assert (record.library, record.tool, record.level, record.ranks) == ("gloo", "torch", "node", 3)
        assert len(record.samples_s) == len(routines()[record.operation].sides(3))
        assert len({len(times) for times in record.samples_s}) == 1
    assert read_manifest(tmp_path / "out").complete
    assert "about" in result.stderr


def test_a_torn_sweep_resumes_unless_its_arguments_differ(tmp_path: Path) -> None:
    output, arguments = tmp_path / "out", ("--ranks", "2", "--ops", "all_reduce,send_recv", "--sizes", "1K,64K", *QUICK)
    assert collectives(output, *arguments).returncode == 0
    whole = (output / COLLECTIVES_FILE).read_bytes()
    lines = whole.splitlines(keepends=True)
    (output / COLLECTIVES_FILE).write_bytes(b"".join(lines[:5]) + lines[5][:20])
    torn = collectives(output, *arguments)
    assert torn.returncode == 0, torn.stderr
    assert "3 measurements to go" in torn.stderr
    assert (output / COLLECTIVES_FILE).read_bytes().startswith(b"".join(lines[:5]))
    assert keys(output) == Counter(
        (o, s, b) for o in ("all_reduce", "send_recv") for s in (1024, 65536) for b in range(2)
    )
    other = collectives(output, *arguments[:-1], "0.006")
    assert other.returncode == 2
    assert "was measured with point_s 0.005, not 0.006" in other.stderr


def test_interruption_keeps_what_was_measured(tmp_path: Path) -> None:
    output = tmp_path / "out"
    arguments = ["collectives", "--ranks", "2", "--ops", "all_reduce", "--sizes", "1K,1M", "--blocks", "1000"]
    command = [sys.executable, "-m", "paradl_bench", *arguments, "-o", str(output)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    # The file is there an instant before its first line is.
    path = output / COLLECTIVES_FILE
    while time.monotonic() < end and not (path.exists() and path.read_bytes().endswith(b"\n")):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "what was measured is kept" in stderr
    assert {record.block for record in swept(output)} >= {0}
    assert not read_manifest(output).complete
    assert max(keys(output).values()) == 1


def test_every_rank_measures_compute_beside_communication(tmp_path: Path) -> None:
    output = tmp_path / "out"
    arguments = ("--ranks", "2", "--ops", "broadcast", "--sizes", "4K", "--blocks", "1", "--point-seconds", "0.005")
    result = collectives(output, *arguments, "--contexts", "with-compute", "--json")
    assert result.returncode == 0, result.stderr
    records = read_records(output, CONTEXTS_FILE, ContextSamples)
    points = Counter((record.neighbour, record.message_bytes) for record in records)
    assert points == Counter((k, s) for k in beside_compute.KERNELS for s in beside_compute.MESSAGE_BYTES)
    for record in records:
        assert [len(row) for row in record.neighbour_idle_s] == [beside_compute.GROUPS] * 2
        assert min(value for row in (*record.neighbour_idle_s, *record.end_s) for value in row) > 0
    rows: list[dict[str, Any]] = json.loads(result.stdout)["contexts"]
    assert {(row["neighbour"], row["message_bytes"]) for row in rows} == set(points)
    before = [(output / name).read_bytes() for name in (COLLECTIVES_FILE, CONTEXTS_FILE)]
    finished = collectives(output, *arguments, "--beside-compute")
    assert finished.returncode == 0, finished.stderr
    assert "with-compute conv2d" in finished.stdout
    assert [(output / name).read_bytes() for name in (COLLECTIVES_FILE, CONTEXTS_FILE)] == before


def test_torchrun_starts_the_ranks_as_well(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "paradl_bench")
    arguments = ("--ops", "all_reduce", "--sizes", "1K", *QUICK)
    result = collectives(tmp_path / "out", *arguments, launcher=launcher)
    assert result.returncode == 0, result.stderr
    assert "all_reduce" in result.stdout
    assert keys(tmp_path / "out") == Counter({("all_reduce", 1024, 0): 1, ("all_reduce", 1024, 1): 1})
    wrong = collectives(tmp_path / "other", "--ranks", "3", *arguments, launcher=launcher)
    assert wrong.returncode != 0
    assert "torchrun started 2 ranks" in wrong.stderr


FAULTY = """
import dataclasses, sys
from pathlib import Path
from paradl_bench.plan.collectives import catalog
from paradl_bench.measure.collectives import sweep as collectives
from paradl_bench.measure.collectives.request import CollectivesRequest
from paradl_bench.ranks.groups.process_groups import join_ranks
from paradl_bench.core.terminal.command_line import run_command
import click

def lose_the_last_element(buffers, rank, ranks, group):
    work = known["all_reduce"].call(buffers, rank, ranks, group)
    work.wait()
    if rank == 1:
        buffers.output[-1] += 1

def refuse(buffers, rank, ranks, group):
    raise RuntimeError("this backend does not support broadcast")

known = catalog.routines()
faulty = {**known,
    "all_reduce": dataclasses.replace(known["all_reduce"], call=lose_the_last_element),
    "broadcast": dataclasses.replace(known["broadcast"], call=refuse)}
collectives.routines = lambda: faulty

@click.command()
@click.argument("output", type=click.Path(path_type=Path))
def main(output):
    request = CollectivesRequest(ranks=2, backend="gloo", device="cpu", sizes=(1024,), blocks=1, point_s=0.005, seed=0,
        operations=("all_reduce", "broadcast", "send_recv"))
    with join_ranks("gloo", "cpu", timeout_s=60) as context:
        collectives.measure_collectives(request, context, output, ("test",))

run_command(main, "test")
"""


def test_wrong_results_are_kept_and_reported_and_refused_operations_skipped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    with pytest.raises(WorkError, match=r"1 results were wrong \(all_reduce of 1024 bytes\)"):
        launch_ranks([sys.executable, "-c", FAULTY, str(output)], ranks=2, device="cpu", timeout_s=60)
    assert {record.operation: record.verified for record in swept(output)} == {"all_reduce": False, "send_recv": True}
    assert (
        "skipped broadcast: backend gloo refuses it: this backend does not support broadcast" in capfd.readouterr().err
    )


def test_a_directory_without_a_measurement_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    result = collectives(tmp_path, "--ranks", "2", "--ops", "all_reduce", "--sizes", "1K", *QUICK)
    assert result.returncode == 2
    assert result.stderr.strip().splitlines()[-1].startswith("paradl-bench: error: ")
    assert "is not empty and holds no measurement" in result.stderr
    assert (tmp_path / "notes.txt").read_text() == "mine"
