"""Runs that validation reads: what is measured of them, and which are skipped, refused or only named."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from predicted_runs import CHAIN, PROFILE, predicted, run_like, validate
from profile_factory import ENVIRONMENT, source, write_training_run

from calibrate.profile.input_side import InputSide, LoaderRate
from calibrate.profile.profile import write_profile
from paradl_bench.core.errors import UserError
from paradl_bench.core.files.json_lines import append_lines
from paradl_bench.core.terminal.printed import in_markdown
from paradl_bench.ranks.directories.directory import write_network
from paradl_bench.records.emulation import EmulatedNodes, Emulation
from paradl_bench.records.hosts.host_load import LOAD_FILE, HostLoad
from paradl_bench.records.measurement import read_records
from paradl_bench.records.training.input_times import RunInput
from paradl_bench.records.training.training_record import TRAINING_FILE, MemoryShortage, TrainingIterations
from predict.validation.runs import noise_floor, read_runs
from predict.validation.shown.report import markdown, print_report, write_report


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    write_profile(tmp_path / "profile.json", PROFILE)
    return tmp_path / "profile.json"


def test_a_real_run_is_not_validated_against_emulated_links(tmp_path: Path) -> None:
    """Though the layers that the profile holds beside them are of the run's own environment."""
    nodes = EmulatedNodes(nodes=2, ranks_per_node=2, link_bytes_per_s=1e8, shaping="tbf")
    swept = msgspec.structs.replace(ENVIRONMENT, emulated=Emulation(nodes=nodes))
    write_profile(tmp_path / "p.json", msgspec.structs.replace(PROFILE, environments=(ENVIRONMENT, swept)))
    run = run_like(tmp_path / "run", "d2", 8)
    with pytest.raises(UserError, match="ran on real links, and the profile was measured on"):
        validate(tmp_path / "p.json", [run])
    (note,) = [line for line in validate(tmp_path / "p.json", [run], force=True).notes if "real links" in line]
    assert "compared by force" in note


def test_measurements_and_runs_of_a_busy_host_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load = HostLoad(seconds=9.0, cores=2, other_cores=1.5)
    write_profile(tmp_path / "p.json", msgspec.structs.replace(PROFILE, sources=(source("layers", load),)))
    off, quiet = run_like(tmp_path / "off", "d2", 8, factor=3.0), run_like(tmp_path / "quiet", "d2", 8)
    append_lines(off / LOAD_FILE, [msgspec.structs.replace(load, other_cores=1.2)])
    append_lines(quiet / LOAD_FILE, [msgspec.structs.replace(load, other_cores=0.0)])
    report = validate(tmp_path / "p.json", [off, quiet])
    line = (
        f"measured on a busy host: layers (other processes took 1.5 of 2 cores), {off} (other processes took 1.2 of 2"
        " cores); measure them again on a quiet host"
    )
    print_report(report, tmp_path / "report.md", "table")
    told = capfd.readouterr().out.splitlines()
    (outlier,) = (place for place, said in enumerate(told) if said.startswith("outside its interval"))
    assert told[outlier + 1] == line
    assert in_markdown(line) in markdown(report)
    write_profile(tmp_path / "p.json", PROFILE)
    assert validate(tmp_path / "p.json", [quiet]).busy_hosts == ()


def test_an_iteration_takes_what_its_slowest_rank_takes(tmp_path: Path) -> None:
    fast, slow = (1.0, 2.0, 3.0, 1.0), (2.0, 3.0, 1.0, 1.5)
    rows = [[fast, slow] * 3, [slow, fast] * 3]
    (run,), _ = read_runs([write_training_run(tmp_path / "run", CHAIN, phases_s=rows)])
    assert run.iteration_s.tolist() == [7.5] * 6
    # Phases are those of the rank that finishes backward last.
    assert run.phases_s() == {"FW": 2.0, "BW": 3.0, "GE": 1.0, "WU": 1.5}


def test_runs_that_read_are_held_against_their_own_input(tmp_path: Path) -> None:
    rates = (LoaderRate(workers=0, batch=8, sample_s=1e-2, relative_sd=0.1),)
    side = InputSide(source=str(tmp_path / "images"), loader=rates)
    write_profile(tmp_path / "p.json", msgspec.structs.replace(PROFILE, input_side=(side,)))
    about = RunInput(source=str(tmp_path / "images"), files=9, crop=8, workers=0, preset="naive")
    free = predicted("d2", 8).time.phases_s
    rows = [tuple(free[name] for name in ("FW", "BW", "GE", "WU"))] * 12
    path = write_training_run(tmp_path / "run", CHAIN, batch=8, phases_s=[rows, rows], input=about)
    records = read_records(path, TRAINING_FILE, TrainingIterations)
    fed = [
        msgspec.structs.replace(record, iteration_s=tuple(whole + 0.05 for whole in record.iteration_s))
        for record in records
    ]
    (path / TRAINING_FILE).write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in fed))
    pairs = {pair.evaluator: pair for pair in validate(tmp_path / "p.json", [path]).pairs}
    waiting = pairs["simulate"].input
    assert waiting is not None
    # Four samples on each rank.
    assert (waiting.predicted_s, waiting.measured_s) == (pytest.approx(0.04), pytest.approx(0.05))
    assert pairs["simulate"].explained_by == "input"
    assert pairs["simulate"].predicted_s == pytest.approx(sum(free.values()) + 0.04)
    assert pairs["dag"].input is not None


def test_pipeline_phases_are_those_of_the_predicted_stage(tmp_path: Path) -> None:
    first, busiest, last = (2.0, 3.0, 0.0, 0.1), (4.0, 5.0, 0.0, 0.2), (1.0, 2.0, 0.0, 0.9)
    by_rank = [first, busiest, (2.5, 3.5, 0.0, 0.1), last]
    path = write_training_run(
        tmp_path / "run", CHAIN, strategy="d2p2", ranks=4, phases_s=[[row] * 6 for row in by_rank]
    )
    (run,), _ = read_runs([path])
    assert run.phases_s()["WU"] == 0.2
    # Ranks 0 and 2 hold the first stage of the two replicas; 1 and 3 the second.
    assert run.phases_s(0) == {"FW": 2.5, "BW": 3.5, "GE": 0.0, "WU": 0.1}
    assert run.phases_s(1) == {"FW": 4.0, "BW": 5.0, "GE": 0.0, "WU": 0.2}


def test_chunks_of_a_run_join_without_iterations_a_rank_lacks(tmp_path: Path) -> None:
    path = write_training_run(tmp_path / "run", CHAIN, phases_s=[[(1.0, 1.0, 1.0, 1.0)] * 6] * 2)
    lines = (path / TRAINING_FILE).read_bytes().splitlines(keepends=True)
    later = [json.loads(line) | {"first_iteration": 9} for line in lines]
    torn = {key: value[:4] if isinstance(value, list) else value for key, value in later[1].items()}
    (path / TRAINING_FILE).write_bytes(
        b"".join([*lines, *(json.dumps(record).encode() + b"\n" for record in (later[0], torn))])
    )
    (run,), _ = read_runs([path])
    assert len(run.iteration_s) == 6 + 4


def test_the_noise_floor_is_between_runs_or_else_between_halves(tmp_path: Path) -> None:
    def steady(seconds: float, name: str, **more: object) -> Path:
        return write_training_run(tmp_path / name, CHAIN, phases_s=[[(seconds, 0, 0, 0)] * 6] * 2, **more)

    halves = write_training_run(
        tmp_path / "h", CHAIN, batch=4, phases_s=[[(1.0, 0, 0, 0)] * 5 + [(1.2, 0, 0, 0)] * 5] * 2
    )
    runs, _ = read_runs([steady(1.0, "a"), steady(1.1, "b"), halves])
    assert noise_floor(runs[0], runs) == (pytest.approx(0.1 / 1.05), "2 runs")
    assert noise_floor(runs[2], runs) == (pytest.approx(0.2 / 1.1), "halves of the run")


def test_incomplete_runs_are_used_with_notice_and_short_ones_skipped(profile: Path, tmp_path: Path) -> None:
    half = run_like(tmp_path / "half", "serial", 8, complete=False)
    short = run_like(tmp_path / "short", "serial", 8, iterations=4)
    report = validate(profile, [half, short])
    assert len(report.pairs) == 5
    assert not report.pairs[0].complete
    assert any("half: incomplete, its 12 iterations are used" in line for line in report.notes)
    assert any("short: skipped, 4 iterations" in line for line in report.notes)
    with pytest.raises(UserError, match=r"no run to compare with: .*short: skipped"):
        validate(profile, [short])


def test_a_run_of_another_environment_is_refused_by_what_differs(profile: Path, tmp_path: Path) -> None:
    other = msgspec.structs.replace(ENVIRONMENT, hostname="elsewhere", versions={"torch": "2.6"})
    run = run_like(tmp_path / "run", "serial", 8, environment=other)
    with pytest.raises(UserError, match=r"'test' against 'elsewhere'; versions.torch.*\(profile .*\); give --force"):
        validate(profile, [run])
    report = validate(profile, [run], force=True)
    assert any("compared by force" in line and "elsewhere" in line for line in report.notes)


def test_a_run_of_another_network_is_refused(profile: Path, tmp_path: Path) -> None:
    run = run_like(tmp_path / "run", "serial", 8, network_digest="0", input_shape=(32,))
    with pytest.raises(UserError, match="input 64 against 32"):
        validate(profile, [run])


def test_a_run_brings_its_network_where_the_profile_lacks_it(profile: Path, tmp_path: Path) -> None:
    run = run_like(tmp_path / "run", "serial", 8, model="other")
    with pytest.raises(UserError, match=r"/run: unknown model 'other'.*; profile .* holds chain; add it: paradl-bench"):
        validate(profile, [run])
    write_network(run, msgspec.structs.replace(CHAIN, name="other"))
    (pair,) = (pair for pair in validate(profile, [run]).pairs if pair.evaluator == "simulate")
    assert pair.predicted_s > 0


def test_directories_of_something_else_are_refused(profile: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        validate(profile, [tmp_path / "nothing"])
    run = run_like(tmp_path / "run", "serial", 8)
    manifest = (run / "manifest.json").read_text()
    (run / "manifest.json").write_text(manifest.replace('"kind": "training"', '"kind": "layers"'))
    with pytest.raises(UserError, match="holds layers, no training run"):
        validate(profile, [run])


def test_runs_that_memory_ended_stand_beside_their_predicted_memory(profile: Path, tmp_path: Path) -> None:
    short = MemoryShortage(rank=1, phase="backward", requested_bytes=5, needed_bytes=3000, had_bytes=2000)
    ended = {
        name: run_like(tmp_path / name, "d2", 16, did_not_fit=(short,), complete=False) for name in ("early", "late")
    }
    (ended["early"] / TRAINING_FILE).unlink()
    whole = run_like(tmp_path / "whole", "d2", 16)
    report = validate(profile, [whole, *ended.values()])
    assert [(unfit.run, unfit.needed_bytes, unfit.had_bytes) for unfit in report.did_not_fit] == [
        (str(path), 3000, 2000) for path in ended.values()
    ]
    assert {unfit.predicted_bytes for unfit in report.did_not_fit} == {predicted("d2", 16).memory.memory_bytes}
    assert {pair.run for pair in report.pairs} == {str(whole), str(ended["late"])}

    alone = validate(profile, [ended["early"]])
    assert (alone.pairs, len(alone.did_not_fit)) == ((), 1)
    print_report(alone, write_report(tmp_path / "report", alone), "table")
    text = (tmp_path / "report" / "report.md").read_text()
    assert "did not fit, as predicted: chain d2 batch 16, rank 1 in backward needed 2.93 KiB and had 1.95 KiB" in text


def test_collectives_unlike_the_plan_are_a_finding(profile: Path, tmp_path: Path) -> None:
    report = validate(profile, [run_like(tmp_path / "run", "d2", 8, issued_equals_plan=False)])
    assert "its collectives differ from the plan" in markdown(report)
