"""Measurements of one thing that differ by more than their spreads: sweeps of two directories, blocks of one.

A fit pools what it is given. Where a machine was busy, or another one, in one of them, what is pooled is neither.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from calibrate.fitting.reading import Measurements
from paradl_bench.core.statistics import Floats

LEAST_RATIO = 1.5
"""Of the slowest to the fastest that is said: shared cores change their speed by less from one second to the next."""

_Things = dict[Hashable, list[Floats]]
"""Samples, in seconds, by what was measured: of a sweep the sizes, of layers the phases of an iteration."""


class _Quartiles(NamedTuple):
    low: float
    middle: float
    high: float


class _Apart(NamedTuple):
    """Two that differ, and the ratio of the slower one's times to the faster one's: the median over what both have."""

    slow: Hashable
    fast: Hashable
    ratio: float


def disagreements(measured: Measurements) -> tuple[str, ...]:
    """Notes: what differs beyond its spreads, by how much, and where it was measured."""
    notes = []
    for what, blocks in _subjects(measured).items():
        directories: dict[Hashable, _Things] = defaultdict(lambda: defaultdict(list))
        for (directory, _), things in blocks.items():
            for thing, samples in things.items():
                directories[directory][thing] += samples
        paths = {index: measured.sources[index].path for index, _ in blocks}
        if (apart := _apart(directories)) is not None:
            slow, fast = (paths[int(str(directory))] for directory in (apart.slow, apart.fast))
            notes.append(_note(what, f"in {slow}", f"in {fast}", apart.ratio))
        for directory, path in paths.items():
            of_one: dict[Hashable, _Things] = {
                block: things for (index, block), things in blocks.items() if index == directory
            }
            if (apart := _apart(of_one)) is not None:
                notes.append(_note(what, f"in block {apart.slow} of {path}", f"in block {apart.fast}", apart.ratio))
    return tuple(notes)


def _note(what: str, slow: str, fast: str, ratio: float) -> str:
    return (
        f"{what} took {ratio:.1f} times as long {slow} as {fast}, which is beyond their spreads. All samples are"
        " used: if the host was busy, measure again and leave the slow part out"
    )


def _subjects(measured: Measurements) -> dict[str, dict[tuple[int, int], _Things]]:
    """Samples of everything measured in blocks, by what it is in words, then directory and block."""
    subjects: dict[str, dict[tuple[int, int], _Things]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for index, sweep in measured.collectives:
        ranks = f"{sweep.ranks} ranks" + (f", {sweep.concurrent} groups at once" if sweep.concurrent > 1 else "")
        what = f"{sweep.operation} through {sweep.library} among {ranks} (level {sweep.level})"
        # The slowest rank's, as in the fit.
        samples = np.asarray(sweep.samples_s).max(axis=0)
        subjects[what][index, sweep.block][sweep.message_bytes, sweep.dtype, sweep.buffers].append(samples)
    for index, record in measured.iterations:
        settings = " ".join(part for part in (record.dtype, record.shard, record.kernel_settings) if part)
        what = f"{record.model} of batch {record.batch} ({settings}, {record.ranks_on_host} at once on the host)"
        for phase in ("fw", "bw", "wu"):
            samples = np.asarray(getattr(record, f"{phase}_s"))
            subjects[what][index, record.block][phase, record.optimizer, record.rank, record.position].append(samples)
    return subjects


def _apart(of_units: Mapping[Hashable, _Things]) -> _Apart | None:
    """The slowest and the fastest, if quartiles of most that both measured do not overlap."""
    quartiles = {
        unit: {
            thing: _Quartiles(*np.quantile(np.concatenate(parts), [0.25, 0.5, 0.75])) for thing, parts in things.items()
        }
        for unit, things in of_units.items()
    }
    paces = dict(_paces(quartiles))
    if len(paces) < 2:
        return None
    slow, fast = max(paces, key=paces.__getitem__), min(paces, key=paces.__getitem__)
    both = [(quartiles[slow][thing], quartiles[fast][thing]) for thing in quartiles[slow] if thing in quartiles[fast]]
    if not both or 2 * sum(slower.low > faster.high for slower, faster in both) <= len(both):
        return None
    ratio = float(np.median([slower.middle / max(faster.middle, 1e-12) for slower, faster in both]))
    return _Apart(slow, fast, ratio) if ratio >= LEAST_RATIO else None


def _paces(quartiles: Mapping[Hashable, Mapping[Hashable, _Quartiles]]) -> Iterator[tuple[Hashable, float]]:
    """How slow each is: the median, over what it measured, of its time over the mean of all that measured it."""
    of_things: dict[Hashable, list[float]] = defaultdict(list)
    for things in quartiles.values():
        for thing, time in things.items():
            of_things[thing].append(time.middle)
    for unit, things in quartiles.items():
        relative = [time.middle / max(float(np.mean(of_things[thing])), 1e-12) for thing, time in things.items()]
        if relative:
            yield unit, float(np.median(relative))
