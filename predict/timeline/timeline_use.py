"""How busy a role's streams are: computing, communicating, both at once, neither."""

from __future__ import annotations

import msgspec
import numpy as np

from predict.costs.sourced import Floats
from predict.simulation.exposure import StreamTimes


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """How a role spends an iteration: compute, exposed communication and idle time add up to it.

    Attributes:
        compute_s, communication_s: how long each of the two is active.
        overlap_s: both active. exposed_communication_s: communication alone.
        idle_s: neither; in a pipeline the bubble, else waiting for roles that are slower.
        utilisation, bubble: shares of the iteration in which compute is active, and in which nothing is.
    """

    compute_s: float
    communication_s: float
    overlap_s: float
    exposed_communication_s: float
    idle_s: float
    utilisation: float
    bubble: float


def use_of(compute: StreamTimes, communication: StreamTimes, iteration_s: float) -> Use:
    """Use of two streams in an iteration."""
    overlap_s = float(
        np.sum(compute.busy_until(communication.end_s) - compute.busy_until(communication.start_s), initial=0.0)
    )
    exposed_s = max(communication.busy_s - overlap_s, 0.0)
    idle_s = max(iteration_s - compute.busy_s - exposed_s, 0.0)
    return Use(
        compute_s=compute.busy_s,
        communication_s=communication.busy_s,
        overlap_s=overlap_s,
        exposed_communication_s=exposed_s,
        idle_s=idle_s,
        utilisation=compute.busy_s / iteration_s if iteration_s else 0.0,
        bubble=idle_s / iteration_s if iteration_s else 0.0,
    )


def exposed_until(compute: StreamTimes, communication: StreamTimes, moments: Floats) -> Floats:
    """Seconds before each moment in which communication is active and compute is not."""
    if not len(communication.start_s):
        return np.zeros(len(moments))
    points = np.unique(np.concatenate([*compute, *communication, moments]))
    lengths = np.diff(points)
    active, computing = (np.diff(stream.busy_until(points)) > lengths / 2 for stream in (communication, compute))
    total = np.concatenate([[0.0], np.cumsum(np.where(active & ~computing, lengths, 0.0))])
    return np.asarray(np.interp(moments, points, total))
