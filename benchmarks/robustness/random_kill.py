"""Kill measurements at random moments by SIGKILL, and count how many can be read and go on: all of them, by design.

    python benchmarks/robustness/random_kill.py --kills 100 --seed 0 -o random-kill.json

`layers`, `collectives` and `train` (two ranks), `kernels`, `io`, `import`, `calibrate fit` and `merge`, and
`predict -o` are run again and again in a directory of their own, each time until a moment drawn evenly from the length
of a whole run; then every process of it gets SIGKILL at once.
After each kill what is there is read: each whole row has to be valid, and those of before the kill have to be there
still. The next run of the same command has to take it up. When a run comes to its end its result has to be complete,
each point once, and a new directory is begun.

Ranks are forked from a process that has loaded torch, so that kills fall on joining, measuring and writing and not on
imports (`--whole` starts the command as a user does, launcher and all). Exit code 1 if anything was lost.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import platform
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from kill_subjects import RANKS, Lost, Subject, subjects  # noqa: E402

from calibrate.cli import main as calibrate  # noqa: E402
from calibrate.profile.profile import read_profile  # noqa: E402
from paradl_bench.cli import main as paradl_bench  # noqa: E402
from paradl_bench.core.errors import ParadlError  # noqa: E402
from paradl_bench.core.files.json_lines import unfinished  # noqa: E402
from paradl_bench.network.kernel import KERNELS_FILE, KernelSamples  # noqa: E402
from paradl_bench.ranks.environment import ALLOCATOR_VARIABLES  # noqa: E402
from paradl_bench.records.input_record import FILES_FILE, LOADER_FILE, FileSamples, LoaderSamples  # noqa: E402
from paradl_bench.records.measurement import (  # noqa: E402
    COLLECTIVES_FILE,
    COPIES_FILE,
    ITERATIONS_FILE,
    LAYERS_FILE,
    MANIFEST_NAME,
    read_manifest,
    read_records,
    torn_rows,
)
from paradl_bench.records.samples import CollectiveSamples, CopySamples, IterationSamples, LayerSamples  # noqa: E402
from paradl_bench.records.training.training_record import RUN_NAME, TRAINING_FILE, TrainingIterations, read_run  # noqa: E402
from predict.cli import main as predict  # noqa: E402

_RECORDS = {
    LAYERS_FILE: LayerSamples,
    ITERATIONS_FILE: IterationSamples,
    COPIES_FILE: CopySamples,
    COLLECTIVES_FILE: CollectiveSamples,
    TRAINING_FILE: TrainingIterations,
    FILES_FILE: FileSamples,
    LOADER_FILE: LoaderSamples,
    KERNELS_FILE: KernelSamples,
}
_LONGEST_RUN_S = 600.0


@dataclass(slots=True)
class Tally:
    """What became of the runs of one command."""

    kills: int = 0
    resumable: int = 0
    whole: int = 0
    torn_rows: int = 0
    unfinished: int = 0
    struck: collections.Counter[str] = field(default_factory=collections.Counter)
    lost: list[str] = field(default_factory=list)


class Running:
    """The processes of one run, each in a process group of its own; what they print is kept for a failure."""

    def __init__(self, subject: Subject, output: Path, *, whole: bool) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        arguments = [*subject.arguments, "-o", str(output)]
        self._pids = (
            [self._start(subject, arguments)]
            if whole or subject.name == "calibrate"
            else self._fork(subject, arguments)
        )
        self._codes: dict[int, int] = {}

    def _start(self, subject: Subject, arguments: list[str]) -> int:
        program = {calibrate: "calibrate", predict: "predict"}.get(subject.main, "paradl_bench")
        return subprocess.Popen(
            [sys.executable, "-m", program, *arguments],
            cwd=ROOT,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        ).pid

    def _fork(self, subject: Subject, arguments: list[str]) -> list[int]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        return [self._rank(subject, arguments, rank, port) for rank in range(subject.ranks)]

    def _rank(self, subject: Subject, arguments: list[str], rank: int, port: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            os.setsid()
            for stream in (1, 2):
                os.dup2(self._log.fileno(), stream)
            sys.argv = ["paradl-bench", *arguments]
            if subject.ranks > 1:
                os.environ |= {
                    "SLURM_PROCID": str(rank),
                    "SLURM_LOCALID": str(rank),
                    "SLURM_NTASKS": str(subject.ranks),
                }
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
                sys.argv += ["--launcher", "srun"]
            subject.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def ended(self) -> bool:
        """Whether all processes have ended."""
        for pid in self._pids:
            if pid not in self._codes:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    self._codes[pid] = os.waitstatus_to_exitcode(status)
        return len(self._codes) == len(self._pids)

    def kill(self) -> None:
        """SIGKILL to every process and those that it started; ranks of a launcher end with it."""
        for pid in self._pids:
            if pid not in self._codes:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
                os.kill(pid, signal.SIGKILL)
        for pid in self._pids:
            if pid not in self._codes:
                self._codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def check_ended_well(self) -> None:
        """Raise with the last lines that were printed unless every process ended with 0."""
        if any(self._codes.values()):
            self._log.seek(0)
            lines = self._log.read().decode(errors="replace").strip().splitlines()
            raise Lost(f"exit codes {sorted(self._codes.values())}: {' | '.join(lines[-3:])}")


def run(subject: Subject, output: Path, limit_s: float, *, whole: bool) -> bool:
    """Whether it came to its end within the limit; killed otherwise.

    Raises:
        Lost: it ended badly.
    """
    running = Running(subject, output, whole=whole)
    end = time.monotonic() + limit_s
    while not running.ended():
        if time.monotonic() >= end:
            running.kill()
            return False
        time.sleep(0.001)
    running.check_ended_well()
    return True


def check_readable(output: Path, tally: Tally) -> dict[str, list[bytes]]:
    """Whole rows of every file that a killed run left, each of them valid.

    Raises:
        Lost: something cannot be read.
    """
    if output.suffix == ".json":
        if output.exists() and isinstance(json.loads(output.read_text()), dict):
            read_profile(output)
        tally.struck["result written before" if output.exists() else "nothing written yet"] += 1
        return {}
    if not (output / MANIFEST_NAME).exists():
        tally.struck["nothing written yet"] += 1
        return {}
    read_manifest(output)
    if (output / RUN_NAME).exists():
        read_run(output)
    torn = torn_rows(output)
    tally.torn_rows += len(torn)
    for name, record in _RECORDS.items():
        read_records(output, name, record)
    # Rows of a point that was being written are taken back, and measured again.
    ends = unfinished(output)
    tally.unfinished += bool(ends)
    rows = {path.name: path.read_bytes()[: ends.get(path.name)].split(b"\n")[:-1] for path in output.glob("*.jsonl")}
    tally.struck["rows there" if any(rows.values()) else "manifest alone"] += 1
    return rows


def check_kept(before: dict[str, list[bytes]], output: Path) -> None:
    """Rows of before a run are there after it; of a chunk that not all ranks wrote, training measures all again."""
    for name, rows in before.items():
        wanted = set(rows)
        if name == TRAINING_FILE:
            first = collections.Counter(json.loads(row)["first_iteration"] for row in rows)
            wanted = {row for row in rows if first[json.loads(row)["first_iteration"]] == RANKS}
        missing = wanted - set((output / name).read_bytes().split(b"\n"))
        if missing:
            raise Lost(f"{len(missing)} of {len(wanted)} rows of {name} are gone")


def strike(subject: Subject, kills: int, place: Path, drawn: random.Random, *, whole: bool) -> Tally:
    """Kill one command so often, and check what is left each time."""
    tally = Tally()
    begin = time.monotonic()
    finished = place / f"{subject.name}-0"
    output = _output(subject, finished)
    run(subject, output, _LONGEST_RUN_S, whole=whole)
    span_s = time.monotonic() - begin
    subject.check_whole(output)
    number, before, killed = 1, {}, False
    output = _output(subject, place / f"{subject.name}-{number}")
    while tally.kills < kills or killed:
        limit_s = drawn.uniform(0, span_s) if tally.kills < kills else _LONGEST_RUN_S
        try:
            ended = run(subject, output, limit_s, whole=whole)
            tally.resumable += killed
            rows = {} if ended else check_readable(output, tally)
            check_kept(before, output)
            if ended:
                subject.check_whole(output)
        except (Lost, ParadlError, OSError, ValueError) as error:
            tally.lost.append(f"{output.name} behind kill {tally.kills}: {error}")
            ended, rows = True, {}
        killed, before = not ended, rows
        tally.kills += killed
        if ended:
            tally.whole += 1
            number += 1
            output = _output(subject, place / f"{subject.name}-{number}")
    return tally


def _output(subject: Subject, path: Path) -> Path:
    return path.with_name(f"{path.name}.json") if subject.main is not paradl_bench else path


def _share(kills: int, chosen: list[Subject], number: int) -> int:
    """How many of the kills fall on a command: a run of several ranks takes longer, and gets half as many."""
    weights = [1 if subject.ranks > 1 or subject.loads_itself else 2 for subject in chosen]
    bounds = [kills * sum(weights[:count]) // sum(weights) for count in (number, number + 1)]
    return bounds[1] - bounds[0]


def report(tallies: dict[str, Tally], options: argparse.Namespace) -> dict[str, Any]:
    """What ``-o`` keeps."""
    described = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return {
        "command": f"python benchmarks/robustness/random_kill.py --kills {options.kills} --seed {options.seed}"
        + (f" --only {options.only}" if options.only else "")
        + (" --whole" if options.whole else ""),
        "commit": described.stdout.strip() or "unknown",
        "host": f"{platform.system()} {platform.release()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "kills": sum(tally.kills for tally in tallies.values()),
        "resumable": sum(tally.resumable for tally in tallies.values()),
        "corrupt": sum(len(tally.lost) for tally in tallies.values()),
        "commands": {
            name: {
                "kills": tally.kills,
                "resumable": tally.resumable,
                "corrupt": len(tally.lost),
                "came to their end": tally.whole,
                "torn rows found": tally.torn_rows,
                "points half written": tally.unfinished,
                "struck with": dict(sorted(tally.struck.items())),
                "lost": tally.lost,
            }
            for name, tally in tallies.items()
        },
    }


def main() -> None:
    """Share the kills over the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="over all commands, evenly")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--only", default="", help="commands, parted by commas")
    parser.add_argument("--whole", action="store_true", help="start commands as a user does")
    parser.add_argument("-o", "--output", type=Path, help="keep the counts in this JSON file")
    options = parser.parse_args()
    os.environ |= ALLOCATOR_VARIABLES | {"OMP_NUM_THREADS": "1", "PARADL_PROGRESS": "0"}
    import torch.distributed.nn.functional  # noqa: F401

    tallies: dict[str, Tally] = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        measured = place / "measured"
        measured.mkdir()
        chosen = [s for s in subjects(measured) if not options.only or s.name in options.only.split(",")]
        for number, subject in enumerate(chosen):
            kills = _share(options.kills, chosen, number)
            drawn = random.Random(f"{options.seed} {subject.name}")
            tallies[subject.name] = tally = strike(subject, kills, place, drawn, whole=options.whole)
            if subject.name in ("layers", "collectives"):
                (place / f"{subject.name}-0").rename(measured / subject.name)
                profile = {"layers": "profile.json", "collectives": "other.json"}[subject.name]
                fit = ["fit", str(measured / subject.name), "-o", str(measured / profile)]
                subprocess.run([sys.executable, "-m", "calibrate", *fit], cwd=ROOT, check=True, capture_output=True)
            print(
                f"{subject.name}: {tally.resumable} of {tally.kills} resumable, {len(tally.lost)} corrupt", flush=True
            )
            print(*(f"  {line}" for line in tally.lost), sep="\n", end="")
            if options.output is not None:
                options.output.write_text(json.dumps(report(tallies, options), indent=1) + "\n")
    found = report(tallies, options)
    print(f"{found['resumable']} of {found['kills']} resumable, {found['corrupt']} corrupt")
    sys.exit(1 if found["corrupt"] or found["resumable"] != found["kills"] else 0)


if __name__ == "__main__":
    main()
