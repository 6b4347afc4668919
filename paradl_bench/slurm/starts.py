"""What a start of a command costs, from Slurm's start of its ranks until these have met and begin to measure.

As the site file states it; else as earlier commands of the same calibration took; else torch's loading, as measured
where the scripts are written, and an assumption for the rest. The source goes with the figure.
"""

from __future__ import annotations

import datetime
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from paradl_bench.core.errors import UserError
from paradl_bench.records.measurement import MANIFEST_NAME, read_manifest
from paradl_bench.slurm.attempts import read_attempts
from paradl_bench.slurm.jobs.plan import PLAN, read_plan
from paradl_bench.slurm.jobs.site import Site

ASSUMED_S = 20.0
"""For srun, a busy file system and ranks that meet, where nothing is known."""


class Start(NamedTuple):
    """Seconds of a start, and where they come from, in words."""

    seconds: float
    source: str


ASSUMED = Start(ASSUMED_S, "assumed")


def start_of(site: Site, output: Path, load_s: float | None) -> Start:
    """What a start is taken to cost; ``load_s``: that torch took to load here, None where that is not known."""
    stated = site.estimate.start_s
    if stated is not None:
        return Start(stated, "stated by the site file")
    recorded = list(_recorded_s(output))
    if recorded:
        starts = f"{len(recorded)} starts" if len(recorded) > 1 else "one start"
        return Start(statistics.median(recorded), f"median of {starts} recorded in {output.name}/state")
    if load_s is None:
        return ASSUMED
    return Start(ASSUMED_S + load_s, f"torch took {load_s:.1f} s to load here, and {ASSUMED_S:g} s more are assumed")


def load_torch() -> float | None:
    """Load torch; returns the seconds that it took, None where it is missing or was loaded before."""
    if "torch" in sys.modules:
        return None
    begin_s = time.perf_counter()
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError:
        return None
    return time.perf_counter() - begin_s


def _recorded_s(output: Path) -> Iterator[float]:
    """From the note of each measurement's first attempt to when its first rank opened its directory.

    Both are of the first node's calendar, in whole seconds.
    """
    try:
        plan = read_plan(output) if (output / PLAN).exists() else None
    except UserError:
        # What is wrong with it is said when it is written to.
        plan = None
    for task in (task for job in plan.jobs for task in job.tasks) if plan else ():
        attempts = read_attempts(output, task.mark)
        if not task.measurement or not attempts or not (output / task.name / MANIFEST_NAME).exists():
            continue
        try:
            opened = _moment(read_manifest(output / task.name).created_utc)
            begun = _moment(attempts[0].begun_utc)
        except (UserError, ValueError):
            continue
        seconds = (opened - begun).total_seconds()
        last_s = attempts[0].seconds
        # One that was begun by hand before, or by an attempt that met nobody, tells nothing.
        if seconds >= 0 and (last_s is None or seconds <= last_s):
            yield seconds


def _moment(utc: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(utc)
