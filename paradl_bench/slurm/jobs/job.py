"""A job of the chain: its commands, what it waits for, and what it gives to the profile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paradl_bench.slurm.jobs.site import Use

Module = Literal["paradl_bench", "calibrate", "predict"]


@dataclass(frozen=True, slots=True)
class Below:
    """A path below the calibration's folder, as a word of a command."""

    path: str


Word = str | Below


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One command of a job.

    Attributes:
        name: what it is called in messages, and its result: a path below the calibration's folder.
        ranks: that the launcher starts, as many on each node; 0 for a command that runs by itself.
        starts_own: the command is one process to the launcher, and starts its ranks (or srun) itself.
        those_of: measurement directories that are given as far as they are there, behind the words.
        replaces: the result is made anew every time, from what was measured.
        writes: whether it has a result at all.
        estimate_s: about how long it takes; None where nothing is known.
    """

    name: str
    module: Module = "paradl_bench"
    words: tuple[Word, ...]
    nodes: int = 1
    ranks: int = 0
    starts_own: bool = False
    those_of: tuple[str, ...] = ()
    replaces: bool = False
    writes: bool = True
    estimate_s: float | None = None

    @property
    def mark(self) -> str:
        """File name of what the script notes of it."""
        return self.name.replace("/", "-")

    @property
    def is_measurement(self) -> bool:
        """Whether its result is a measurement directory."""
        return self.writes and not self.replaces


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One sbatch script.

    Attributes:
        use: which of the site's time limits holds.
        adds: what the profile, or its reader, gets from it, in words.
        gpus: that each node gives; 0 for none.
        array: every command is a task of its own, else they run one after another.
        after_ok, after_any: names of jobs that have to have ended well, or at all.
    """

    name: str
    use: Use
    title: str
    adds: str
    tasks: tuple[Task, ...]
    nodes: int = 1
    ranks_per_node: int = 1
    gpus: int = 0
    array: bool = False
    after_ok: tuple[str, ...] = ()
    after_any: tuple[str, ...] = ()

    @property
    def measures(self) -> bool:
        """Whether it needs the nodes' devices, in quiet."""
        return self.use != "analysis"
