"""``paradl-bench import`` of logs of collectives: what it writes, what a fit makes of it, and mistakes in one line."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from recorded_logs import DATA, read_log

from calibrate.fitting.collectives.communication_fit import fit_communication
from calibrate.fitting.fit import fit_profile
from paradl_bench.cli import group
from paradl_bench.core.errors import UserError
from paradl_bench.importers.catalog import importers
from paradl_bench.importers.importer import ImportOptions
from paradl_bench.plan.collectives.catalog import operations
from paradl_bench.records.measurement import COLLECTIVES_FILE, DROPPED_FILE, DroppedRow, read_manifest, read_records
from paradl_bench.records.samples import CollectiveSamples


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(group, ["import", *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        return getattr(done.exception, "exit_code", 1), str(done.exception)
    return done.exit_code, done.output


def test_the_command_writes_a_measurement_that_calibrate_fits(tmp_path: Path) -> None:
    out = tmp_path / "imported"
    log = DATA / "nccl-tests-2.17.log"
    code, output = run("nccl-tests", str(log), "-o", str(out), "--cluster", "ours", "--memory", "80GiB", "--json")
    assert code == 0
    summary = json.loads(output)
    assert summary["rows"] == 8
    assert [set(item) for item in summary["dropped"]] == [{"file", "line", "text", "why"}] * 3
    assert read_records(out, DROPPED_FILE, DroppedRow)[0].file == str(log)
    manifest = read_manifest(out)
    (source,) = manifest.imported
    assert (source.format, source.tool_version, source.rows, source.dropped) == ("nccl-tests", "2.17.6", 8, 3)
    assert len(source.sha256) == 64
    assert (manifest.environment.hostname, manifest.environment.device_name) == ("ours", "Example H100")
    records = read_records(out, COLLECTIVES_FILE, CollectiveSamples)
    assert all(record.source.startswith(f"{log}:") for record in records)
    profile = fit_profile([out], command_line=("calibrate",), force=False)
    (fit, *_) = [each for each in profile.communication if each.operation == "all_reduce"]
    assert (fit.alpha_s, fit.beta_s_per_byte) == (pytest.approx(4e-6, rel=0.02), pytest.approx(1 / 50e9, rel=0.02))
    assert any("in place; what nccl-tests fp32 out of place measured is left out" in note for note in profile.notes)
    assert any("are means over 20 calls; no spread between calls or runs is known" in note for note in profile.notes)
    assert profile.cluster.memory_bytes_per_rank == 80 * 1024**3


def test_the_last_line_names_the_next_command(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    code, output = run("nccl-tests", str(DATA / "nccl-tests-2.17.log"), "-o", out)
    assert code == 0
    assert output.splitlines()[-1] == f"wrote {out}; next: calibrate fit {out} ... -o PROFILE"


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    assert run("nccl_tests", str(DATA / "rccl-tests.log"), "-o", out) == (
        2,
        "unknown format 'nccl_tests': did you mean nccl-tests or rccl-tests? choices are "
        + ", ".join(sorted(importers())),
    )
    assert "holds no table of nccl-tests" in run("nccl-tests", str(DATA / "osu-5.7.log"), "-o", out)[1]
    assert "does not say whether ranks shared a host" in run("imb", str(DATA / "imb-mpi1-2021.log"), "-o", out)[1]
    assert (
        "no row could be used; 4 were dropped"
        in run("nccl-tests", str(DATA / "nccl-tests-in-markdown.md"), "-o", out)[1]
    )
    unlike = [str(DATA / name) for name in ("nccl-tests-2.17.log", "nccl-tests-2.4.log")]
    assert (
        "different environments (device 'Example H100' against 'Example V100')"
        in run("nccl-tests", *unlike, "-o", out)[1]
    )
    assert not Path(out).exists()
    assert run("nccl-tests", *unlike, "-o", out, "--force")[0] == 0
    assert "exists already; give an empty or new directory" in run("nccl-tests", unlike[0], "-o", out)[1]


@pytest.mark.parametrize(
    ("asked", "file", "told"),
    [
        ("osu", "nccl-tests-2.17.log", "nccl-tests and rccl-tests can read it"),
        ("nccl-tests", "osu-5.7.log", "osu can read it"),
        ("nccl-tests", "imb-mpi1-2021.log", "imb can read it"),
        ("osu", "kineto-rank2.json", "kineto can read it"),
        ("osu", "osu-5.7.log", ""),
    ],
)
def test_a_file_of_another_format_is_named(asked: str, file: str, told: str, tmp_path: Path) -> None:
    code, output = run(asked, str(DATA / file), "-o", str(tmp_path / "out"))
    assert code == 2
    assert ("can read it" in output) == bool(told)
    assert output.strip().endswith(told)


def test_several_runs_of_one_point_are_blocks_with_known_spread(tmp_path: Path) -> None:
    text = (DATA / "nccl-tests-2.17.log").read_text()
    (tmp_path / "again.log").write_text(text + "\n# second run\n")
    files = [str(DATA / "nccl-tests-2.17.log"), str(tmp_path / "again.log")]
    assert run("nccl-tests", *files, "-o", str(tmp_path / "out"))[0] == 0
    records = read_records(tmp_path / "out", COLLECTIVES_FILE, CollectiveSamples)
    assert {record.block for record in records} == {0, 1}
    _, _, notes = fit_communication(records, operations())
    assert any("spread between runs is known where several were imported" in note for note in notes)


def test_an_operation_without_cost_terms_is_not_fitted_but_noted() -> None:
    path = DATA / "rccl-tests.log"
    records = read_log("rccl-tests", path, ImportOptions(operation="all_reduce")).collectives
    others = [msgspec.structs.replace(record, operation="hypercube") for record in records]
    fits, _, notes = fit_communication([*records, *others], operations())
    assert {fit.operation for fit in fits} == {"all_reduce"}
    assert "rccl hypercube node: left out, because it was imported and no cost terms say how it scales" in notes


def test_a_level_smaller_than_the_run_is_no_node(tmp_path: Path) -> None:
    arguments = ["import", "osu", str(DATA / "osu-5.7.log"), "--ranks", "8", "--level", "node", "--ranks-per-node", "4"]
    result = CliRunner().invoke(group, [*arguments, "-o", str(tmp_path / "out")])
    assert isinstance(result.exception, UserError)
    assert "give --level system" in str(result.exception)


ONE_RANK = """# nThread 1 nGpus 1 minBytes 1024 maxBytes 4096 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1
# Using devices
#  Rank  0 Group  0 Pid   4000 on        n01 device  0 [0000:10:00] Example H100
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
        1024           256     float     sum      -1     2.10    0.49    0.00      0     0.50    2.05    0.00      0
        2048           512     float     sum      -1     2.10    0.98    0.00      0     0.50    4.10    0.00      0
        4096          1024     float     sum      -1     2.10    1.95    0.00      0     0.50    8.19    0.00      0
"""


def test_rows_of_one_rank_are_reported_as_not_fitted(tmp_path: Path) -> None:
    log = tmp_path / "all_reduce_alone.log"
    log.write_text(ONE_RANK)
    arguments = ["import", "nccl-tests", str(log), "--level", "node", "--op", "all_reduce"]
    done = CliRunner().invoke(group, [*arguments, "-o", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert f"note: {log}: 6 rows of one rank, which sends nothing: calibrate fit leaves them out" in done.output
    with pytest.raises(UserError) as error:
        fit_profile([tmp_path / "out"], command_line=(), force=False)
    assert f"nccl all_reduce node: 6 rows of one rank, which sends nothing, are left out ({log})" in str(error.value)
