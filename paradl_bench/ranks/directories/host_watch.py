"""Looks at what else a host's cores do while something is measured: other processes, a hypervisor, a limit.

Linux counts every core's time in ``/proc/stat`` and every process's in ``/proc/PID/stat``. What cores were busy with,
less what the processes of this measurement took, was other processes' work. Only the cores that this measurement may
run on count, since a container sees all cores of its host. Without ``/proc`` nothing is known, and nothing is said.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from paradl_bench.core.errors import UserError
from paradl_bench.core.files.storage import read_whole
from paradl_bench.core.units import is_whole
from paradl_bench.ranks.rank_place import LAUNCHER_PID
from paradl_bench.records.hosts.host_load import HostLoad

BEFORE_S = 0.3
"""How long the host is looked at before anything is measured."""
STRETCH_S = 5.0
"""Seconds at least between two looks: a look reads the state of every process, which takes milliseconds."""

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_BUSY = (0, 1, 2, 5, 6)
"""user, nice, system, irq and softirq of a line of ``/proc/stat``; guests are in user already."""
_STOLEN = 7
_PARENT, _TIMES = 1, slice(11, 15)
"""Places in ``/proc/PID/stat`` behind the command's name: the parent, and times of a process and its dead children."""


class _Look(NamedTuple):
    """Seconds that were counted until a moment."""

    at_s: float
    busy_s: float
    own_s: float
    stolen_s: float
    throttled_s: float


class HostWatch:
    """Loads of the host, one stretch after the other.

    Args:
        cores: that the measurement may use; those of the first of its processes unless given.
        first: id of the process that all of the measurement's descend from.
    """

    def __init__(
        self,
        *,
        cores: Iterable[int] | None = None,
        first: int | None = None,
        proc: Path = Path("/proc"),
        cgroup: Path = Path("/sys/fs/cgroup"),
    ) -> None:
        self._first = first_process() if first is None else first
        self._cores = frozenset(_cores_of(self._first) if cores is None else cores)
        self._proc, self._cgroup = proc, cgroup
        self._last = self._look()

    def before(self) -> HostLoad | None:
        """The load of the next moment, in which this process does nothing."""
        self._last = self._look()
        time.sleep(BEFORE_S)
        load = self.stretch(at_least_s=0.0)
        return None if load is None else msgspec.structs.replace(load, while_measuring=False)

    def stretch(self, *, at_least_s: float = STRETCH_S) -> HostLoad | None:
        """The load since the last stretch ended; None where that is not long ago, or nothing is known."""
        if self._last is None or time.monotonic() - self._last.at_s < at_least_s:
            return None
        then, now = self._last, self._look()
        self._last = now
        if now is None or now.at_s <= then.at_s:
            return None
        seconds, count = now.at_s - then.at_s, max(len(self._cores), 1)

        def cores(taken_s: float) -> float:
            return min(max(taken_s / seconds, 0.0), float(count))

        return HostLoad(
            seconds=seconds,
            cores=count,
            other_cores=cores(now.busy_s - then.busy_s - (now.own_s - then.own_s)),
            stolen_cores=cores(now.stolen_s - then.stolen_s),
            throttled_cores=cores(now.throttled_s - then.throttled_s),
        )

    def _look(self) -> _Look | None:
        try:
            busy_s, stolen_s = self._of_cores()
            return _Look(time.monotonic(), busy_s, self._own_s(), stolen_s, self._throttled_s())
        except (OSError, ValueError, IndexError):
            return None

    def _of_cores(self) -> tuple[float, float]:
        """Seconds that the cores were busy, and that were stolen from them."""
        busy = stolen = counted = 0
        for line in _text(self._proc / "stat").splitlines():
            name, *counts = line.split()
            if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in self._cores:
                ticks = [int(count) for count in counts]
                busy += sum(ticks[place] for place in _BUSY)
                stolen += ticks[_STOLEN] if len(ticks) > _STOLEN else 0
                counted += 1
        if counted < len(self._cores):
            raise ValueError("the kernel does not count these cores")
        return busy / _TICKS_PER_S, stolen / _TICKS_PER_S

    def _own_s(self) -> float:
        """Seconds of the first process and all that descend from it, those that are gone included."""
        children: dict[int, list[int]] = defaultdict(list)
        ticks: dict[int, int] = {}
        for path in self._proc.iterdir():
            if not path.name.isdigit():
                continue
            # A process may end between the two.
            with contextlib.suppress(UserError):
                fields = _text(path / "stat").rpartition(")")[2].split()
                pid = int(path.name)
                children[int(fields[_PARENT])].append(pid)
                ticks[pid] = sum(map(int, fields[_TIMES]))
        ticks_used, waiting = 0, [self._first]
        while waiting:
            pid = waiting.pop()
            ticks_used += ticks.pop(pid, 0)
            waiting += children.pop(pid, [])
        return ticks_used / _TICKS_PER_S

    def _throttled_s(self) -> float:
        """Seconds that the control group's limit kept its threads from running; 0 without one."""
        for name, unit_s in (("throttled_usec", 1e-6), ("throttled_time", 1e-9)):
            for path in (self._cgroup / "cpu.stat", self._cgroup / "cpu" / "cpu.stat"):
                with contextlib.suppress(ValueError):
                    counts = dict(line.split() for line in _text(path).splitlines())
                    if name in counts:
                        return int(counts[name]) * unit_s
        return 0.0


def _text(path: Path) -> str:
    """What the kernel says in a file; a command's name may be of any bytes."""
    return read_whole(path).decode(errors="replace")


def first_process() -> int:
    """The process that those of this measurement descend from: a rank's launcher, or else this one."""
    launcher = os.environ.get(LAUNCHER_PID, "")
    if is_whole(launcher):
        return int(launcher)
    started = any(name in os.environ for name in ("TORCHELASTIC_RUN_ID", "SLURM_PROCID"))
    return os.getppid() if started else os.getpid()


def _cores_of(process: int) -> Iterable[int]:
    """Those that a process may run on: a rank is pinned to one of them."""
    try:
        return os.sched_getaffinity(process)
    except OSError:
        return os.sched_getaffinity(0)
