"""Communication for layers that a rank waits for: which it is, and how much of it no compute runs beside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from paradl_bench.plan.tasks import Work
from predict.simulation.simulator import Timeline


def names_of_layer_communication(works: Sequence[Work]) -> tuple[str, ...]:
    """Per work, what it is called in breakdowns; empty for all else, a pipeline's transfers and buffers included."""
    return tuple(work.name_in_breakdowns for work in works)


def exposed_seconds(
    line: Timeline, on_compute: NDArray[np.bool_], segments: Mapping[str, Sequence[int]]
) -> dict[str, float]:
    """Seconds of communication while the rank's compute is not active, by name.

    Args:
        on_compute: the rank's segments that compute; in order, one at a time.
        segments: of communication, by name.
    """
    if not segments:
        return {}
    computing = np.column_stack([line.start_s[on_compute], line.end_s[on_compute]])
    busy = np.cumsum(computing[:, 1] - computing[:, 0])
    moments = computing.ravel()
    computed = np.column_stack([busy - (computing[:, 1] - computing[:, 0]), busy]).ravel()
    found = {}
    for name, own in segments.items():
        start, end = line.start_s[own], line.end_s[own]
        beside = np.interp(end, moments, computed) - np.interp(start, moments, computed)
        found[name] = float(np.sum(end - start - beside))
    return found
