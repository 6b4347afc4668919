"""Measurement directories that a killed process left, that another one writes, or that a job takes to another node."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import msgspec
import pytest
from synthetic_measurements import ENVIRONMENT

from paradl_bench.core.errors import UserError
from paradl_bench.ranks.directories.directory import MeasurementDirectory, refuse_unusable
from paradl_bench.ranks.directories.writer_lock import LOCK_NAME
from paradl_bench.records.measurement import (
    COLLECTIVES_FILE,
    ITERATIONS_FILE,
    LAYERS_FILE,
    MANIFEST_NAME,
    Environment,
    MeasurementKind,
    read_manifest,
    read_records,
    torn_rows,
)
from paradl_bench.records.samples import CollectiveSamples, IterationSamples, LayerSamples
from paradl_bench.records.training.training_record import TRAINING_FILE, TrainingIterations

DATA = Path(__file__).parents[3] / "data"


def open_it(
    path: Path, kind: MeasurementKind = "layers", environment: Environment = ENVIRONMENT
) -> MeasurementDirectory:
    return MeasurementDirectory.open(
        path, kind=kind, arguments={"batch": "4"}, command_line=("paradl-bench",), environment=environment
    )


@pytest.mark.parametrize(
    ("folder", "name", "record"),
    [
        ("layers-v1", LAYERS_FILE, LayerSamples),
        ("layers-v1", ITERATIONS_FILE, IterationSamples),
        ("collectives-v1", COLLECTIVES_FILE, CollectiveSamples),
        ("training-v1", TRAINING_FILE, TrainingIterations),
    ],
)
def test_a_file_cut_anywhere_loses_only_its_last_row(
    folder: str, name: str, record: type[msgspec.Struct], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = b"".join((DATA / folder / name).read_bytes().splitlines(keepends=True)[:2])
    kind = read_manifest(DATA / folder).kind
    open_it(tmp_path / "out", kind)
    path = tmp_path / "out" / name
    beside = tmp_path / "out" / "beside.jsonl"
    beside.write_bytes(b'{"whole":1}\n')
    path.write_bytes(whole)
    rows = read_records(tmp_path / "out", name, record)
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        end = whole[:length].rfind(b"\n") + 1
        kept = rows[: whole[:length].count(b"\n")]
        assert torn_rows(tmp_path / "out") == ({name: length - end} if length > end else {})
        assert read_records(tmp_path / "out", name, record) == kept
        capsys.readouterr()
        directory = open_it(tmp_path / "out", kind)
        said = capsys.readouterr().err
        cut = f"its {length - end} bytes are dropped and it is measured again"
        dropped = f"{path}: its last row was only partly written; {cut}\n"
        assert said == (dropped if length > end else "")
        assert (path.read_bytes(), beside.read_bytes()) == (whole[:end], b'{"whole":1}\n')
        directory.append(name, rows[len(kept) :])
        assert read_records(tmp_path / "out", name, record) == rows


def test_leftovers_of_a_process_killed_before_its_manifest_are_ignored(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).write_text("process 1 on node1\n")
    (tmp_path / ".0123456789abcdef.tmp").write_bytes(b'{"schema_ver')
    refuse_unusable(tmp_path, "layers")
    directory = open_it(tmp_path)
    directory.finish()
    assert open_it(tmp_path).resumed
    assert {path.name for path in tmp_path.iterdir()} == {MANIFEST_NAME, LOCK_NAME}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.tmp").touch()
    with pytest.raises(UserError, match="is not empty and holds no measurement"):
        refuse_unusable(tmp_path / "other", "layers")


def test_another_measurements_directory_is_refused_before_ranks_start(tmp_path: Path) -> None:
    open_it(tmp_path).finish()
    refuse_unusable(tmp_path, "layers", {"batch": "4"})
    # Ranks alone know what a training run is made of.
    refuse_unusable(tmp_path, "layers")
    with pytest.raises(UserError, match="measured with batch 4, not 8"):
        refuse_unusable(tmp_path, "layers", {"batch": "8"})
    with pytest.raises(UserError, match="holds a measurement of layers, not of training"):
        refuse_unusable(tmp_path, "training")


def test_a_directory_has_one_writer_until_its_process_ends(tmp_path: Path) -> None:
    program = (
        "import os, sys, time; sys.path.insert(0, sys.argv[2]); from test_measurement_directory import open_it;"
        "from pathlib import Path; open_it(Path(sys.argv[1])); child = os.fork();"
        "os.write(1, b'%d\\n' % child); time.sleep(60)"
    )
    paths = [str(tmp_path / "out"), str(Path(__file__).parent)]
    places = ";".join(["import sys", *(f"sys.path.append({path!r})" for path in sys.path)])
    with subprocess.Popen([sys.executable, "-c", f"{places};{program}", *paths], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        # Both write a line, the child a zero once it has let go of the lock. Each is one call, so lines cannot mix.
        child = max(int(other.stdout.readline()) for _ in range(2))
        held = rf"out is being written by process {other.pid} on \S+: wait for it, or give another directory"
        for refused in (open_it, partial(refuse_unusable, kind="layers")):
            with pytest.raises(UserError, match=held):
                refused(tmp_path / "out")
        other.kill()
    # The file is there still. The lock is not: what the writer has forked, as workers of a loader, does not hold it.
    os.kill(child, 0)
    assert (tmp_path / "out" / LOCK_NAME).exists()
    refuse_unusable(tmp_path / "out", "layers", {"batch": "4"})
    open_it(tmp_path / "out").finish()
    assert not (tmp_path / "out" / LOCK_NAME).exists()
    os.kill(child, signal.SIGKILL)


def test_a_writer_that_is_refused_leaves_the_directory_to_others(tmp_path: Path) -> None:
    open_it(tmp_path).finish()
    with pytest.raises(UserError, match="holds a measurement of layers, not of collectives"):
        open_it(tmp_path, "collectives")
    assert not (tmp_path / LOCK_NAME).exists()


def test_a_requeued_job_resumes_on_another_node_of_its_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def on(host: str, job: str | None, **changes: object) -> Environment:
        variables = {} if job is None else {"SLURM_JOB_ID": job}
        return msgspec.structs.replace(ENVIRONMENT, hostname=host, variables=variables, **changes)

    open_it(tmp_path, environment=on("node1", "7"))
    for refused in (on("node2", None), on("node2", "7", device_name="Other CPU")):
        with pytest.raises(UserError, match="was measured elsewhere"):
            open_it(tmp_path, environment=refused)
    for _ in range(2):
        open_it(tmp_path, environment=on("node2", "8"))
    assert read_manifest(tmp_path).also_on == ("node2",)
    said = capsys.readouterr().err.splitlines()
    assert said == [f"{tmp_path} was begun on node1 and continues on node2; its manifest says so"]
