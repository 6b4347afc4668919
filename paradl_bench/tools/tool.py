"""What a tool that sweeps collectives is: its programs, how they are told what to do, and who reads what they print."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paradl_bench.importers.importer import Imported, ImportOptions, LogFile

Launcher = Literal["own", "mpirun", "srun"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One start of one program.

    Attributes:
        message_bytes: as the operation defines them.
        ranks: of one group; a send and receive has two.
        own: whether no launcher starts it, so that one process drives all ranks.
        folder: where it may keep files of its own (lists of sizes, reports), by a name that begins with ``stem``.
        report: whether the program can write a JSON report.
        point_s: seconds of repetitions of one size, for programs that can be told.
        concurrent: how many groups of so many ranks the program runs at once.
    """

    operation: str
    message_bytes: tuple[int, ...]
    ranks: int
    own: bool
    folder: Path
    stem: str
    report: bool
    point_s: float
    concurrent: int = 1

    @property
    def report_path(self) -> Path:
        """Where a program that can writes its report."""
        return self.folder / f"{self.stem}.json"


def _one_run(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(sizes)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepTool:
    """A tool; a file of this package declares one as ``TOOL``.

    Attributes:
        name: as ``--tool`` takes it.
        backend: what its collectives run on (``nccl``, ``mpi``).
        programs: by our operation, names of the program, the likeliest first.
        arguments: of a job, everything behind the program.
        places: folders below ``--tool-path`` in which installations keep programs.
        alone: whether one process can drive several ranks, so that no launcher is needed.
        at_once: splits sizes into runs that one start of the program can sweep.
        groups: whether one start runs several groups of ranks at once (``at once``), and whether it measures them alone
            as well, in turn (``with alone``); empty for tools that can't, of which ``no_groups`` says why.
        variables: of the environment, that a job needs beside its arguments.
        report_flag: what a program's help names where it can write a JSON report; empty where none can.
        reads: the importer that reads what it prints; empty where ``read`` does.
        read: reads what a program of our own wrote; None for others.
    """

    name: str
    backend: str
    programs: Mapping[str, tuple[str, ...]]
    arguments: Callable[[Job], list[str]]
    places: tuple[str, ...] = ("",)
    alone: bool = False
    at_once: Callable[[Sequence[int]], list[tuple[int, ...]]] = _one_run
    groups: Literal["", "at once", "with alone"] = ""
    no_groups: str = ""
    variables: Callable[[Job], Mapping[str, str]] = lambda _job: {}
    report_flag: str = ""
    reads: str = ""
    read: Callable[[LogFile, ImportOptions], Imported] | None = None


def geometric_runs(sizes: Sequence[int], *, factors: Sequence[int] | None = None) -> list[tuple[int, ...]]:
    """Ascending sizes cut into runs of one whole factor, of ``factors`` where given; what fits none is by itself."""
    runs: list[list[int]] = []
    for size in sizes:
        run = runs[-1] if runs else []
        if run and size % run[-1] == 0:
            factor = size // run[-1]
            steady = len(run) == 1 or factor * run[-2] == run[-1]
            if factor > 1 and steady and (factors is None or factor in factors):
                run.append(size)
                continue
        runs.append([size])
    return [tuple(run) for run in runs]
