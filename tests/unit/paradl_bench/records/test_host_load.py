"""What else a host does beside a measurement: seen, said, kept, and repeated by calibrate."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from synthetic_measurements import ENVIRONMENT, CollectivesSpec, LayersSpec, write_collectives, write_layers

from calibrate.cli import group
from calibrate.fitting.fit import fit_profile
from calibrate.profile.profile import encode_profile, read_profile, write_profile
from paradl_bench.core.files.json_lines import append_lines
from paradl_bench.ranks.directories import directory as directories
from paradl_bench.ranks.directories import host_watch
from paradl_bench.ranks.directories.directory import MeasurementDirectory
from paradl_bench.ranks.directories.host_watch import HostWatch
from paradl_bench.records.hosts.host_load import LOAD_FILE, HostLoad, busy_lines, load_of, read_load

FIRST, RANK, GONE, FOREIGN = 100, 101, 102, 200


def write_proc(
    proc: Path, *, busy: int, own: int = 0, gone: int = 0, foreign: int = 0, stolen: int = 0, others: int = 0
) -> None:
    """The kernel's counts, in hundredths of seconds: of two cores that count, of one that does not, of processes.

    Args:
        busy: of both cores. own: of a rank; gone: of a child of it that has ended. others: of the third core.
    """
    proc.mkdir(exist_ok=True)
    half = busy // 2
    lines = [
        f"cpu  {busy + others} 0 0 0 0 0 0 {stolen} 0 0",
        f"cpu0 {half} 0 0 999 0 0 0 {stolen} 0 0",
        f"cpu1 0 0 {busy - half} 999 7 0 0 0 0 0",
        f"cpu2 {others} 0 0 0 0 0 0 0 0 0",
        "intr 1 2 3",
    ]
    (proc / "stat").write_text("\n".join(lines))
    parents = {FIRST: (1, 0, 0), RANK: (FIRST, own, gone), FOREIGN: (1, foreign, 0)}
    for pid, (parent, user, children) in parents.items():
        (proc / str(pid)).mkdir(exist_ok=True)
        fields = ["S", parent, *[0] * 9, user, 0, children, 0, 20]
        (proc / str(pid) / "stat").write_text(f"{pid} (a) name ({pid}) {' '.join(map(str, fields))}\n")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(host_watch.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(host_watch, "_TICKS_PER_S", 100)
    return now


def watch(tmp_path: Path) -> HostWatch:
    return HostWatch(cores=(0, 1), first=FIRST, proc=tmp_path / "proc", cgroup=tmp_path / "cgroup")


def test_what_is_not_the_measurements_own_work_is_others(tmp_path: Path, clock: list[float]) -> None:
    write_proc(tmp_path / "proc", busy=1000, own=500, foreign=500)
    seen = watch(tmp_path)
    clock[0] = 10.0
    # Of 20 seconds of two cores 16 were busy: 9 with ranks, one of whose children has ended.
    write_proc(tmp_path / "proc", busy=2600, own=1300, gone=100, foreign=1200, stolen=100, others=5000)
    load = seen.stretch()
    assert load is not None
    assert (load.seconds, load.cores) == (10.0, 2)
    assert load.other_cores == pytest.approx(0.7)
    assert load.stolen_cores == pytest.approx(0.1)
    assert load.is_busy
    assert load.words == "other processes took 0.7 of 2 cores, the hypervisor took 0.1 of 2 cores"


def test_a_host_that_runs_the_measurement_alone_is_quiet(tmp_path: Path, clock: list[float]) -> None:
    write_proc(tmp_path / "proc", busy=1000)
    seen = watch(tmp_path)
    clock[0] = 10.0
    write_proc(tmp_path / "proc", busy=3005, own=2000, others=1000)
    load = seen.stretch()
    assert load is not None
    assert not load.is_busy
    assert load.words == ""


@pytest.mark.parametrize(
    ("file", "text"),
    [("cpu.stat", "usage_usec 5\nthrottled_usec {}000000\n"), ("cpu/cpu.stat", "throttled_time {}000000000\n")],
)
def test_a_limit_of_the_control_group_is_seen(tmp_path: Path, clock: list[float], file: str, text: str) -> None:
    write_proc(tmp_path / "proc", busy=0)
    path = tmp_path / "cgroup" / file
    path.parent.mkdir(parents=True)
    path.write_text(text.format(1))
    seen = watch(tmp_path)
    clock[0] = 10.0
    path.write_text(text.format(6))
    load = seen.stretch()
    assert load is not None
    assert load.words == "a limit of the control group kept back 0.5 of 2 cores"


def test_the_host_watch_samples_rarely_and_guesses_nothing(tmp_path: Path, clock: list[float]) -> None:
    write_proc(tmp_path / "proc", busy=0)
    seen = watch(tmp_path)
    clock[0] = 1.0
    assert seen.stretch() is None
    (tmp_path / "proc" / "stat").write_text("cpu 1 2 3\n")
    clock[0] = 100.0
    assert seen.stretch() is None
    assert HostWatch(cores=(0,), first=1, proc=tmp_path / "none").stretch(at_least_s=0.0) is None


def test_a_real_process_beside_it_is_noticed() -> None:
    idle = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        load = HostWatch(first=idle.pid).before()
    finally:
        busy.kill()
        idle.kill()
        busy.wait()
        idle.wait()
    assert load is not None
    assert not load.while_measuring
    assert load.is_busy


class Busy:
    """A host that other processes keep busy."""

    def before(self) -> HostLoad:
        return HostLoad(seconds=0.3, cores=2, other_cores=1.9, while_measuring=False)

    def stretch(self, *, at_least_s: float = 0.0) -> HostLoad:
        return HostLoad(seconds=6.0, cores=2, other_cores=1.5)


def test_a_measurement_on_a_busy_host_is_marked_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(directories, "HostWatch", Busy)
    made = MeasurementDirectory.open(
        tmp_path / "m", kind="layers", arguments={}, command_line=("x",), environment=ENVIRONMENT, watch=True
    )
    assert "this host is busy: other processes took 1.9 of 2 cores" in capsys.readouterr().err
    made.append("layers.jsonl", [])
    made.finish()
    assert "was measured on a busy host: other processes took 1.5 of 2 cores" in capsys.readouterr().err
    load = read_load(tmp_path / "m")
    assert load is not None
    assert (load.seconds, load.other_cores) == (12.0, 1.5)
    # What is complete is not looked at again: its files stay as they are hashed.
    before = (tmp_path / "m" / LOAD_FILE).read_bytes()
    MeasurementDirectory.open(
        tmp_path / "m", kind="layers", arguments={}, command_line=("x",), environment=ENVIRONMENT, watch=True
    ).finish()
    assert (tmp_path / "m" / LOAD_FILE).read_bytes() == before


def test_a_fit_says_which_measurements_are_of_a_busy_host(tmp_path: Path) -> None:
    quiet, busy = (write_layers(tmp_path / name, LayersSpec(seed=seed)) for name, seed in (("quiet", 0), ("busy", 1)))
    append_lines(quiet / LOAD_FILE, [HostLoad(seconds=9.0, cores=2, other_cores=0.01)])
    append_lines(busy / LOAD_FILE, [HostLoad(seconds=9.0, cores=2, other_cores=1.2)])
    profile = fit_profile([quiet, busy], command_line=(), force=False)
    (note,) = (note for note in profile.notes if "busy" in note)
    assert note.startswith(f"{busy} was measured on a busy host: other processes took 1.2 of 2 cores")
    write_profile(tmp_path / "p.json", profile)
    assert encode_profile(read_profile(tmp_path / "p.json")) == encode_profile(profile)
    shown = CliRunner().invoke(group, ["show", str(tmp_path / "p.json")], env={"COLUMNS": "200"}).output
    assert " quiet " in shown
    assert " busy " in shown


def test_busy_measurements_are_named_in_one_line_busiest_first() -> None:
    def load(taken: float) -> HostLoad:
        return HostLoad(seconds=9.0, cores=2, other_cores=taken)

    unknown, quiet = ("imported", None), ("quiet", load(0.01))
    assert busy_lines([unknown, quiet]) == []
    assert busy_lines([quiet, ("a", load(1.2))]) == [
        "measured on a busy host: a (other processes took 1.2 of 2 cores); measure it again on a quiet host"
    ]
    (line,) = busy_lines([*((str(taken), load(taken / 10)) for taken in range(3, 10)), unknown, quiet])
    named, _, rest = line.partition("; ")
    assert [part.split(" (")[0] for part in named.removeprefix("measured on a busy host: ").split("), ")] == list(
        "98765"
    )
    assert named.endswith(" and 2 more")
    assert rest == "measure them again on a quiet host"


def test_loads_are_weighted_by_their_seconds() -> None:
    assert load_of([]) is None
    mean = load_of([HostLoad(seconds=1.0, cores=2, other_cores=2.0), HostLoad(seconds=3.0, cores=2)])
    assert mean is not None
    assert mean.other_cores == 0.5


def test_sweeps_that_differ_beyond_their_spreads_are_named(tmp_path: Path) -> None:
    one = write_collectives(tmp_path / "one")
    slow = dict.fromkeys(CollectivesSpec().sizes, 32.0)
    other = write_collectives(tmp_path / "other", CollectivesSpec(slow=slow, seed=1))
    notes = fit_profile([one, other], command_line=(), force=False).notes
    found = [note for note in notes if "beyond their spreads" in note]
    assert len(found) == 2
    assert found[0].startswith("all_reduce through gloo among 2 ranks (level node) took 32.")
    assert f" times as long in {other} as in {one}, which is beyond their spreads" in found[0]
    alone = fit_profile([one], command_line=(), force=False).notes
    alike = write_collectives(tmp_path / "alike", CollectivesSpec(seed=2))
    for these in (alone, fit_profile([one, alike], command_line=(), force=False).notes):
        assert not [note for note in these if "beyond their spreads" in note]


def test_blocks_that_differ_beyond_their_spreads_are_named(tmp_path: Path) -> None:
    drifting = write_layers(tmp_path / "drifting", LayersSpec(drift=1.0, blocks=3))
    steady = write_layers(tmp_path / "steady", LayersSpec(seed=4))
    (note,) = (n for n in fit_profile([drifting], command_line=(), force=False).notes if "beyond" in n)
    assert note.startswith("toy of batch 4 (fp32, 1 at once on the host) took ")
    assert f" of {drifting} as in block " in note
    assert not [n for n in fit_profile([steady], command_line=(), force=False).notes if "beyond" in n]
