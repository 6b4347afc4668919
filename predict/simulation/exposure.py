"""What lies beside what: when streams are busy, and how much of communication for layers no compute runs beside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paradl_bench.plan.tasks import Stream
from predict.costs.sourced import Floats
from predict.simulation.simulator import BLOCKING, Timeline


class StreamTimes(NamedTuple):
    """Start and end of tasks that never overlap, in order; seconds."""

    start_s: Floats
    end_s: Floats

    def busy_until(self, moments: Floats) -> Floats:
        """Seconds of the tasks' before each moment."""
        if not len(self.start_s):
            return np.zeros(len(moments))
        busy = np.cumsum(self.end_s - self.start_s)
        before = np.concatenate([[0.0], busy[:-1]])
        points, values = np.column_stack([self.start_s, self.end_s]), np.column_stack([before, busy])
        return np.asarray(np.interp(moments, points.ravel(), values.ravel()))

    @classmethod
    def union(cls, start_s: Floats, end_s: Floats) -> StreamTimes:
        """When any of some tasks is active, which may overlap and come in any order."""
        order = np.argsort(start_s, kind="stable")
        start, end = start_s[order], end_s[order]
        so_far = np.maximum.accumulate(end) if len(end) else end
        # A span begins where all before it have ended.
        begins = np.append(True, start[1:] >= so_far[:-1])[: len(start)]
        last = np.append(begins[1:], True)[: len(start)]
        return cls(start[begins], so_far[last])

    @property
    def busy_s(self) -> float:
        """Seconds of all tasks."""
        return float(np.sum(self.end_s - self.start_s))


def exposed_seconds(
    line: Timeline, on_compute: NDArray[np.bool_], segments: Mapping[str, Sequence[int]]
) -> dict[str, float]:
    """Seconds of communication while the rank's compute is not active, by name.

    Args:
        on_compute: the rank's segments that compute; in order, one at a time. segments: of communication, by name.
    """
    if not segments:
        return {}
    computing = np.column_stack([line.start_s[on_compute], line.end_s[on_compute]])
    busy = np.cumsum(computing[:, 1] - computing[:, 0])
    moments = computing.ravel()
    computed = np.column_stack([busy - (computing[:, 1] - computing[:, 0]), busy]).ravel()
    exposed_s = {}
    for name, messages in segments.items():
        start, end = line.start_s[messages], line.end_s[messages]
        beside = np.interp(end, moments, computed) - np.interp(start, moments, computed)
        exposed_s[name] = float(np.sum(end - start - beside))
    return exposed_s


def overlapped_and_exposed(start_s: Floats, end_s: Floats, lane: NDArray[np.integer]) -> tuple[float, float]:
    """Seconds of a rank's communication beside compute, and without; a :class:`Timeline` has them.

    Args:
        lane: per task, in order on each: a stream, or that of calls beside what is in flight.
    """
    on_compute = lane == Stream.COMPUTE
    communicates = (lane == Stream.COMMUNICATION) | (lane == BLOCKING)
    computing = StreamTimes(start_s[on_compute], end_s[on_compute])
    communicating = StreamTimes.union(start_s[communicates], end_s[communicates])
    beside = computing.busy_until(communicating.end_s) - computing.busy_until(communicating.start_s)
    overlap_s = float(np.sum(beside))
    return overlap_s, communicating.busy_s - overlap_s
