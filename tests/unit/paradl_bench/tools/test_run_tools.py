"""Programs of other tools are run: found, told what to sweep, watched, and their rows kept when they fail half way."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import time
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result
from fake_tools import write_programs

from calibrate.fitting.fit import fit_profile
from paradl_bench.cli import group
from paradl_bench.core.errors import UserError
from paradl_bench.importers.importer import ImportOptions, LogFile
from paradl_bench.measure.collectives.summary import verified_word
from paradl_bench.measure.machine.doctor import examine
from paradl_bench.records.measurement import COLLECTIVES_FILE, read_manifest, read_records
from paradl_bench.records.samples import CollectiveSamples
from paradl_bench.tools.catalog import tools
from paradl_bench.tools.mpi_sweep import Head, read
from paradl_bench.tools.processes import run_program
from paradl_bench.tools.tool import geometric_runs


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_programs(tmp_path_factory.mktemp("fake") / "bin")


@pytest.fixture(autouse=True)
def _on_path(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    for name in ("SLURM_JOB_NUM_NODES", "SLURM_NNODES", "FAKE_MODE"):
        monkeypatch.delenv(name, raising=False)


def sweep(tool: str, output: Path, *more: str) -> Result:
    sizes = [] if any(each.startswith("--sizes") for each in more) else ["--sizes", "1K:16K:4"]
    arguments = ["collectives", "--tool", tool, "--ranks", "4", "--blocks", "2", *sizes, *more, "-o", str(output)]
    return CliRunner().invoke(group, arguments)


def error_of(done: Result) -> tuple[int, str]:
    return getattr(done.exception, "exit_code", 0), str(done.exception)


def points(output: Path) -> set[tuple[str, int, int, int]]:
    records = read_records(output, COLLECTIVES_FILE, CollectiveSamples)
    return {(r.operation, r.message_bytes, r.ranks, r.block) for r in records}


OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")


def test_nccl_tests_on_one_gpu_run_but_give_no_fit(tmp_path: Path) -> None:
    done = sweep("nccl-tests", tmp_path / "out", "--ranks", "1", "--ops", ",".join(OPERATIONS))
    assert done.exit_code == 0, done.output
    found = read_records(tmp_path / "out", COLLECTIVES_FILE, CollectiveSamples)
    assert {(r.operation, r.message_bytes, r.ranks, r.level) for r in found} == {
        (name, size, 1, "node") for name in OPERATIONS for size in (1024, 4096, 16384)
    }
    # A copy inside of one GPU says nothing of a link.
    with pytest.raises(UserError, match="out: no measurements that can be fitted"):
        fit_profile([tmp_path / "out"], command_line=("calibrate", "fit"), force=False)
    for words in (["--tool", "imb"], ["--backend", "gloo"]):
        refused = CliRunner().invoke(group, ["collectives", "--ranks", "1", *words, "-o", str(tmp_path / "no")])
        code, said = error_of(refused)
        assert (code, "--ranks 1: a collective needs at least 2 ranks" in said) == (2, True)


def test_nccl_tests_sweeps_every_operation_by_one_process(tmp_path: Path) -> None:
    done = sweep("nccl-tests", tmp_path / "out", "--ops", ",".join(OPERATIONS), "--json")
    assert done.exit_code == 0, done.output
    assert points(tmp_path / "out") == {
        (name, size, 4, block) for name in OPERATIONS for size in (1024, 4096, 16384) for block in (0, 1)
    }
    manifest = read_manifest(tmp_path / "out")
    assert manifest.complete
    assert manifest.environment.versions == {"nccl": "2.28.7", "nccl-tests": "2.17.6"}
    assert (manifest.environment.device_name, manifest.environment.device_count) == ("Fake GPU", 4)
    assert len(manifest.environment.settings["all_reduce_perf"]) == 16
    log = (tmp_path / "out" / "logs" / "all_gather-0-0.log").read_text()
    # nccl-tests counts what all ranks gather together.
    assert log.splitlines()[0].endswith("all_gather_perf -b 4096 -e 65536 -f 4 -g 4")
    assert json.loads(done.output)["collectives"][0]["operation"] == "all_gather"
    profile = fit_profile([tmp_path / "out"], command_line=("calibrate",), force=False)
    assert {fit.operation for fit in profile.communication} == set(OPERATIONS)


def test_a_json_report_is_requested_from_programs_that_support_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_MODE", "json")
    assert sweep("nccl-tests", tmp_path / "out", "--ops", "all_reduce").exit_code == 0
    records = read_records(tmp_path / "out", COLLECTIVES_FILE, CollectiveSamples)
    assert {record.source.split(":")[0] for record in records} == {
        "logs/all_reduce-0-0.json",
        "logs/all_reduce-1-0.json",
    }


def test_a_failed_program_keeps_its_rows_and_shows_last_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_MODE", "fail")
    out = tmp_path / "out"
    done = sweep("nccl-tests", out, "--ops", "all_reduce,broadcast", "--blocks", "1")
    code, text = error_of(done)
    assert code == 3
    assert "all_reduce_perf (all_reduce): exit code 7, 2 rows kept; broadcast_perf (broadcast): exit code 7" in text
    assert "Test NCCL failure all_reduce.cu:99" in done.stderr
    assert points(out) == {(name, size, 4, 0) for name in ("all_reduce", "broadcast") for size in (1024, 4096)}
    assert not read_manifest(out).complete
    # The same command goes on with what is missing, and keeps the first log.
    monkeypatch.delenv("FAKE_MODE")
    assert sweep("nccl-tests", out, "--ops", "all_reduce,broadcast", "--blocks", "1").exit_code == 0
    assert len(read_records(out, COLLECTIVES_FILE, CollectiveSamples)) == 2 * 2 * 3
    again = (out / "logs" / "all_reduce-0-0-again1.log").read_text()
    assert "-b 16384 -e 16384" in again
    assert read_manifest(out).complete


def test_a_killed_program_shows_its_signal_without_control_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_MODE", "kill")
    done = sweep("nccl-tests", tmp_path / "out", "--ops", "all_reduce", "--blocks", "1")
    code, text = error_of(done)
    assert (code, "all_reduce_perf (all_reduce): killed by signal 9 (SIGKILL), 2 rows kept" in text) == (3, True)
    assert "  fakehost: out of memory\n" in done.stderr
    assert not {character for character in done.stderr if character < " "} - {"\n"}


def test_a_program_failing_after_its_last_row_is_not_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ("--ops", "all_reduce", "--blocks", "1", "--sizes", "1K:4K:4", "--launcher", "mpirun")
    monkeypatch.setenv("FAKE_MODE", "fail late")
    code, text = error_of(sweep("imb", tmp_path / "out", *settings))
    assert (code, "2 rows kept" in text) == (3, True)
    monkeypatch.delenv("FAKE_MODE")
    assert sweep("imb", tmp_path / "out", *settings).exit_code == 0
    assert len(read_records(tmp_path / "out", COLLECTIVES_FILE, CollectiveSamples)) == 2
    assert read_manifest(tmp_path / "out").complete


def test_a_hanging_program_is_ended_with_all_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_MODE", "hang")
    start = time.monotonic()
    done = sweep("nccl-tests", tmp_path / "out", "--ops", "all_reduce", "--timeout", "2", "--launcher", "mpirun")
    assert time.monotonic() - start < 60
    code, text = error_of(done)
    assert code == 3
    assert "its time was up, 2 rows kept" in text
    assert points(tmp_path / "out") == {("all_reduce", 1024, 4, 0), ("all_reduce", 4096, 4, 0)}


def test_nothing_that_a_program_started_is_left_behind(tmp_path: Path) -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True)"
    ended = run_program([sys.executable, "-c", code], tmp_path / "log", timeout_s=30, variables={})
    assert ended.well
    state = Path("/proc") / ended.last_lines[-1] / "stat"
    until = time.monotonic() + 10
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < until, "what a program left behind still runs"
        time.sleep(0.05)


@pytest.mark.parametrize(("mode", "expected"), [("wrong", "wrong results"), ("silent", "exit code 0, 0 rows kept")])
def test_wrong_results_and_silence_are_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, expected: str
) -> None:
    monkeypatch.setenv("FAKE_MODE", mode)
    code, text = error_of(sweep("nccl-tests", tmp_path / "out", "--ops", "all_reduce", "--blocks", "1"))
    assert code == 3
    assert expected in text
    # Neither counts as measured: the same command starts it again.
    monkeypatch.delenv("FAKE_MODE")
    assert sweep("nccl-tests", tmp_path / "out", "--ops", "all_reduce", "--blocks", "1").exit_code == 0
    assert {size for _, size, _, _ in points(tmp_path / "out")} == {1024, 4096, 16384}


def test_a_program_without_mpi_is_noticed_by_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_MODE", "alone")
    settings = ("--ops", "all_reduce", "--blocks", "1", "--launcher", "mpirun")
    code, text = error_of(sweep("nccl-tests", tmp_path / "out", *settings))
    assert code == 3
    assert "0 rows kept, 1 dropped (measured on 1 ranks, not 4: is the program built with MPI?)" in text
    assert points(tmp_path / "out") == set()


def test_osu_and_imb_run_under_a_launcher(tmp_path: Path) -> None:
    done = sweep(
        "osu", tmp_path / "osu", "--ops", "all_reduce,reduce_scatter,send_recv", "--launcher-arg=--bind-to=core"
    )
    assert done.exit_code == 0, done.output
    assert points(tmp_path / "osu") == {
        (name, size, ranks, block)
        for name, ranks in (("all_reduce", 4), ("reduce_scatter", 4), ("send_recv", 2))
        for size in (1024, 4096, 16384)
        for block in (0, 1)
    }
    log = (tmp_path / "osu" / "logs" / "reduce_scatter-0-0.log").read_text()
    assert "mpirun -np 4 --bind-to=core" in log
    assert "-m 4096:4096" in log  # of all ranks together
    done = sweep("imb", tmp_path / "imb", "--ops", "all_reduce,send_recv", "--launcher", "srun", "--level", "rack")
    assert done.exit_code == 0, done.output
    records = read_records(tmp_path / "imb", COLLECTIVES_FILE, CollectiveSamples)
    assert {(r.tool, r.level, r.library, r.calls_per_sample) for r in records} == {("imb", "rack", "mpi", 1000)}


def test_results_a_tool_does_not_verify_are_not_called_wrong(tmp_path: Path) -> None:
    done = sweep("osu", tmp_path / "out", "--ops", "all_reduce", "--sizes", "1K")
    assert done.exit_code == 0, done.output
    assert "WRONG" not in done.output
    assert done.output.split("1.00 KiB")[1].split("\n")[0].split()[-1] == "no"
    assert verified_word("torch", verified=False) == "WRONG"


def test_a_program_that_measures_nothing_is_started_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_MODE", "refuse")
    out = tmp_path / "out"
    code, text = error_of(sweep("osu", out, "--ops", "all_reduce,broadcast", "--sizes", "1K,5K"))
    assert code == 3
    assert text.count("exit code 1, 0 rows kept") == 2
    assert len(list((out / "logs").glob("*.log"))) == 2
    monkeypatch.delenv("FAKE_MODE")
    assert sweep("osu", out, "--ops", "all_reduce,broadcast", "--sizes", "1K,5K").exit_code == 0
    assert len(points(out)) == 2 * 2 * 2


def test_sizes_are_cut_into_what_one_start_can_sweep() -> None:
    assert geometric_runs([1, 2, 4, 8]) == [(1, 2, 4, 8)]
    assert geometric_runs([1, 3, 9, 10, 20]) == [(1, 3, 9), (10, 20)]
    assert geometric_runs([2, 4, 12, 36]) == [(2, 4), (12, 36)]
    assert tools()["osu"].at_once([1, 4, 8]) == [(1,), (4, 8)]
    assert tools()["imb"].at_once([5, 7, 100]) == [(5, 7, 100)]
    assert geometric_runs([]) == []


def test_what_is_asked_wrongly_or_missing_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: Path
) -> None:
    out = tmp_path / "out"
    assert "--point-seconds is for --tool torch" in error_of(sweep("osu", out, "--point-seconds", "1"))[1]
    assert "--backend gloo: nccl-tests runs on nccl" in error_of(sweep("nccl-tests", out, "--backend", "gloo"))[1]
    assert "a launcher has to start its ranks" in error_of(sweep("osu", out, "--launcher", "own"))[1]
    assert "torchrun starts Python programs" in error_of(sweep("osu", out, "--launcher", "torchrun"))[1]
    assert "--level is for --tool" in error_of(sweep("torch", out, "--level", "node"))[1]
    code, text = error_of(sweep("osu", out, "--ops", "all_gather"))
    assert (code, text) == (3, "osu_allgather of osu is not on PATH; say where it is with --tool-path DIR")
    assert error_of(sweep("nccl-tests", out, "--tool-path", str(tmp_path / "no")))[0] == 2
    empty = tmp_path / "empty"
    empty.mkdir()
    assert error_of(sweep("nccl-tests", out, "--tool-path", str(empty), "--ops", "all_reduce")) == (
        3,
        f"--tool-path {empty} holds no all_reduce_perf of nccl-tests",
    )
    assert not out.exists()
    assert sweep("nccl-tests", out, "--tool-path", str(programs), "--ops", "all_reduce").exit_code == 0
    code, text = error_of(sweep("nccl-tests", out, "--tool-path", str(programs), "--ops", "broadcast"))
    assert (code, "measured with other settings (operations)" in text) == (2, True)


def test_doctor_tells_which_tools_were_found() -> None:
    found = {finding.name: finding.found for finding in examine()}
    for tool in ("nccl-tests", "imb", "osu"):
        assert found[tool]
        assert "all_reduce" in found[tool]


def test_an_mpi_sweep_is_read_up_to_a_torn_line(tmp_path: Path) -> None:
    record = CollectiveSamples(
        library="mpi",
        tool="mpi4py",
        operation="all_reduce",
        level="node",
        ranks=2,
        message_bytes=1024,
        dtype="fp32",
        block=0,
        samples_s=((1e-6, 2e-6), (3e-6, 1e-6)),
        verified=True,
    )
    head = Head(hosts=("a", "a", "b"), device_name="cpu", versions={"mpi": "x"})
    wrong = msgspec.structs.replace(record, verified=False)
    content = b"\n".join(msgspec.json.encode(each) for each in (head, record, wrong)) + b'\n{"library":"mp'
    held = read(LogFile(path="x.json", content=content), ImportOptions())
    assert [r.samples_s for r in held.collectives] == [record.samples_s]
    assert [(item.line, item.why.split(":")[0]) for item in held.dropped] == [(3, "wrong results"), (4, "torn")]
    assert held.ranks_per_host == 2
    with pytest.raises(UserError, match="no sweep over MPI"):
        read(LogFile(path="x.json", content=b"\xff"), ImportOptions())


@pytest.mark.distributed
def test_two_ranks_sweep_over_a_real_mpi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: Path) -> None:
    monkeypatch.setenv("PATH", os.environ["PATH"].replace(f"{programs}{os.pathsep}", "", 1))
    if shutil.which("mpirun") is None or importlib.util.find_spec("mpi4py") is None:
        pytest.skip("no MPI here: mpirun and mpi4py are needed")
    # Containers run tests as root, which OpenMPI refuses unless told.
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    settings = ["--backend", "mpi", "--ranks", "2", "--blocks", "1", "--sizes", "1K:64K:8", "--point-seconds", "0.01"]
    done = CliRunner().invoke(group, ["collectives", *settings, "-o", str(tmp_path / "out")])
    assert done.exit_code == 0, (done.output, done.exception)
    records = read_records(tmp_path / "out", COLLECTIVES_FILE, CollectiveSamples)
    assert {(r.operation, r.message_bytes) for r in records} == {
        (name, size) for name in (*OPERATIONS, "send_recv") for size in (1024, 8192, 65536)
    }
    assert all(r.verified and len(r.samples_s) == 2 and len(r.samples_s[0]) >= 5 for r in records)
    manifest = read_manifest(tmp_path / "out")
    assert manifest.environment.versions["mpi"]
    assert manifest.environment.device_count == 2


@pytest.mark.parametrize("tool", ["nccl-tests", "imb"])
def test_groups_at_once_are_started_in_turn_with_one_alone(tool: str, tmp_path: Path) -> None:
    """Beside every start of two groups of four there is one of four alone; an interrupted sweep goes on."""
    out = tmp_path / "out"
    more = ("--ops", "all_reduce", "--launcher", "mpirun", "--contexts", "groups=2", "--json")
    done = sweep(tool, out, *more)
    assert done.exit_code == 0, done.output
    records = read_records(out, COLLECTIVES_FILE, CollectiveSamples)
    assert {(r.ranks, r.concurrent, r.block) for r in records} == {(4, k, b) for k in (1, 2) for b in (0, 1)}
    rows = {row["message_bytes"]: row["ratio"] for row in json.loads(done.stdout)["contexts"]}
    assert rows[16384] > rows[1024] > 1
    (out / "logs" / "done.jsonl").write_text("")
    assert sweep(tool, out, *more).exit_code == 0
    assert len(read_records(out, COLLECTIVES_FILE, CollectiveSamples)) == 2 * len(records)
    log = (out / "logs" / "all_reduce-0-0-2groups.log").read_text().splitlines()[0]
    assert ("NCCL_TESTS_SPLIT='MOD 2'" in log) == (tool == "nccl-tests")
    assert " -np 8 " in log


def test_groups_that_were_not_made_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_MODE", "unsplit")
    done = sweep(
        "nccl-tests", tmp_path / "out", "--ops", "all_reduce", "--launcher", "mpirun", "--contexts", "groups=2"
    )
    assert error_of(done)[0] == 3
    records = read_records(tmp_path / "out", COLLECTIVES_FILE, CollectiveSamples)
    assert {(r.ranks, r.concurrent) for r in records} == {(4, 1)}


@pytest.mark.parametrize(("tool", "said"), [("osu", "can't run groups of ranks at once"), ("nccl-tests", "mpirun")])
def test_a_tool_that_knows_no_groups_is_refused(tool: str, said: str, tmp_path: Path) -> None:
    code, text = error_of(sweep(tool, tmp_path / "out", "--ops", "all_reduce", "--contexts", "groups=2"))
    assert code == 2
    assert said in text
