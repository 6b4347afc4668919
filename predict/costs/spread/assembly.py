"""From single costs to arrays: parts with the modes of error that they share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paradl_bench.core.cache_keys import numbered
from predict.costs.sourced import CorrelatedError, Cost, Costs, Floats, Ints, Source


class Priced(NamedTuple):
    """A part with its cost, how often it occurs, which measurement it shares, and its own modes.

    Attributes:
        slowdown: of compute and of communication side by side; of what is blocking the latter beside an all-reduce.
        blocking: a call that goes on beside an all-reduce in flight instead of queueing behind it.
    """

    cost: Cost
    occurrences: float
    measurement: object
    is_communication: bool = False
    modes: tuple[tuple[str, float], ...] = ()
    slowdown: tuple[float, float] = (1.0, 1.0)
    slowdown_sd: tuple[float, float] = (0.0, 0.0)
    blocking: bool = False


def assemble(parts: Sequence[Priced], common_relative_sd: float) -> Costs:
    """Parts as arrays, with the modes that they share: ``common_relative_sd`` is of all that computes."""
    # Blocks repeat their works, and one part stands for all of these.
    first, alike = numbered(map(id, parts))
    costs = _assemble([parts[index] for index in first], common_relative_sd)
    return costs if len(first) == len(parts) else _repeat(costs, np.array(alike))


def _repeat(costs: Costs, alike: Ints) -> Costs:
    """Parts in another order, some of them several times."""
    names = [field.name for field in dataclasses.fields(costs) if field.name != "modes"]
    modes = (CorrelatedError(mode.name, *(shift[alike] for shift in mode[1:])) for mode in costs.modes)
    return Costs(**{name: getattr(costs, name)[alike] for name in names}, modes=tuple(modes))


def _assemble(parts: Sequence[Priced], common_relative_sd: float) -> Costs:
    count = len(parts)
    seconds = np.array([part.cost.seconds for part in parts], float)
    is_communication = np.array([part.is_communication for part in parts], bool)
    measurements: dict[object, int] = {}
    source = np.zeros((count, len(Source)))
    source[np.arange(count), [part.cost.source for part in parts]] = 1.0
    shifts: dict[str, Floats] = {
        "compute, all layers": np.where(is_communication, 0.0, seconds * common_relative_sd),
        "batch": np.array([part.cost.batch_sd_s for part in parts], float),
    }
    for index, part in enumerate(parts):
        if part.cost.method_sd_s:
            method = f"scaling, {part.cost.method}" if part.cost.method else "scaling"
            shifts.setdefault(method, np.zeros(count))[index] = part.cost.method_sd_s
        for name, shift in part.modes:
            shifts.setdefault(name, np.zeros(count))[index] += shift
    none = np.zeros(count)
    of_compute, of_communication = np.array([part.slowdown_sd for part in parts], float).reshape(count, 2).T
    modes = [CorrelatedError(name, moved, none, none) for name, moved in shifts.items() if moved.any()]
    if of_compute.any():
        modes.append(CorrelatedError("interference, compute", none, of_compute, none))
    if of_communication.any():
        modes.append(CorrelatedError("interference, communication", none, none, of_communication))
    return Costs(
        seconds=seconds,
        counts=np.array([part.occurrences for part in parts], float),
        source=source,
        independent_sd_s=np.array([part.cost.independent_sd_s for part in parts], float),
        measurement=np.array(
            [measurements.setdefault(part.measurement, len(measurements)) for part in parts], np.int64
        ),
        is_communication=is_communication,
        compute_slowdown=np.array([part.slowdown[0] for part in parts], float),
        communication_slowdown=np.array([part.slowdown[1] for part in parts], float),
        modes=tuple(modes),
    )


def add_up(groups: Sequence[Costs]) -> Costs:
    """Each group as one part that occurs once; groups share their modes by name, and no measurement."""
    return join([_as_one(group) for group in groups])


def join(groups: Sequence[Costs]) -> Costs:
    """The parts of all groups one after the other; groups share their modes by name, and no measurement."""
    sizes = [len(group.seconds) for group in groups]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    shifts: dict[str, Floats] = {}
    for group, start, size in zip(groups, starts, sizes, strict=False):
        for mode in group.modes:
            rows = shifts.setdefault(mode.name, np.zeros((3, int(starts[-1]))))
            rows[:, start : start + size] = mode[1:]
    offsets = np.cumsum([0, *(int(group.measurement.max(initial=-1)) + 1 for group in groups)])
    return Costs(
        seconds=np.concatenate([group.seconds for group in groups]),
        counts=np.concatenate([group.counts for group in groups]),
        source=np.concatenate([group.source for group in groups]),
        independent_sd_s=np.concatenate([group.independent_sd_s for group in groups]),
        measurement=np.concatenate([g.measurement + offset for g, offset in zip(groups, offsets, strict=False)]),
        is_communication=np.concatenate([group.is_communication for group in groups]),
        compute_slowdown=np.concatenate([group.compute_slowdown for group in groups]),
        communication_slowdown=np.concatenate([group.communication_slowdown for group in groups]),
        modes=tuple(CorrelatedError(name, *rows) for name, rows in shifts.items()),
    )


def _as_one(group: Costs) -> Costs:
    """One part that stands for all; sources stay as shares."""
    total = group.total_s
    whole = float(total.sum())
    shares = total @ group.source / whole if whole else group.source[:1].mean(axis=0)
    ones = np.ones(1)
    return Costs(
        seconds=np.array([whole]),
        counts=ones,
        source=np.reshape(shares, (1, -1)),
        independent_sd_s=np.array([group.independent_total_sd_s]),
        measurement=np.zeros(1, np.int64),
        is_communication=group.is_communication[:1],
        compute_slowdown=ones,
        communication_slowdown=ones,
        modes=tuple(
            CorrelatedError(mode.name, np.array([float(mode.seconds @ group.counts)]), np.zeros(1), np.zeros(1))
            for mode in group.modes
        ),
    )
