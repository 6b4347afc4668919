"""Slow-downs of compute and communication that run side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from calibrate.fit.reading import Placed
from calibrate.profile.collectives.communication import Interference
from paradl_bench.core.errors import UserError
from paradl_bench.records.emulation import GHOSTS
from paradl_bench.records.samples import InterferenceSamples

Floats = NDArray[np.float64]
Key = tuple[str, str, str, int, bool]
"""(library, operation, level, ranks, whether beside ghosts)."""


_MIN_BLOCKS = 3
_CLEAR = 2.0


class Ratios(NamedTuple):
    """Slow-downs of one record, one an A-B group."""

    message_bytes: int
    kernel: str
    block: tuple[int, int]
    compute: Floats
    communication: Floats


def fit_interference(
    records: Iterable[Placed[InterferenceSamples]],
) -> tuple[tuple[Interference, ...], tuple[str, ...]]:
    """Median slow-downs per (library, operation, level, ranks), at least 1, over sizes, kernels, ranks and blocks.

    What was measured beside ghosts stands apart from what was beside compute.

    Sizes get entries of their own where that predicts blocks that it has not seen better than one entry for all does,
    clearly (:func:`depends_on`). A dependence on the kernel is only noted: its spread is in the interquartile range.

    Raises:
        UserError: a time alone is 0.
    """
    groups: dict[Key, list[Ratios]] = {}
    for directory, record in records:
        key = record.library, record.operation, record.level, record.ranks, record.kernel == GHOSTS
        groups.setdefault(key, []).append(_ratios(directory, record))
    entries: list[Interference] = []
    notes: list[str] = []
    for key, ratios in sorted(groups.items()):
        if depends_on(ratios, lambda r: r.message_bytes):
            sizes = sorted({ratio.message_bytes for ratio in ratios})
            entries += [_entry(key, [ratio for ratio in ratios if ratio.message_bytes == size]) for size in sizes]
        else:
            entries.append(_entry(key, ratios))
        if depends_on(ratios, lambda r: r.kernel):
            notes.append(_kernel_note(key, ratios))
    return tuple(entries), tuple(notes)


def _ratios(directory: int, record: InterferenceSamples) -> Ratios:
    lists = [
        np.array(values, float)
        for values in (
            record.compute_alone_s,
            record.compute_beside_s,
            record.communication_alone_s,
            record.communication_beside_s,
        )
    ]
    if min(lists[0].min(), lists[2].min()) <= 0:
        where = f"interference of {record.operation} of {record.message_bytes} bytes with {record.kernel}"
        raise UserError(f"{where}: a time alone of 0 seconds is no measurement")
    return Ratios(
        record.message_bytes, record.kernel, (directory, record.block), lists[1] / lists[0], lists[3] / lists[2]
    )


def depends_on(ratios: Sequence[Ratios], group_of: Callable[[Ratios], object]) -> bool:
    """Whether slow-downs of blocks left out in turn are predicted clearly better from their own group than from all.

    Both slow-downs count, as logarithms; clearly is by more than two standard errors. Fewer than three blocks, or one
    group, show no dependence.
    """
    blocks = sorted({ratio.block for ratio in ratios})
    if len(blocks) < _MIN_BLOCKS or len({group_of(ratio) for ratio in ratios}) < 2:
        return False
    gains = []
    for block in blocks:
        seen = [ratio for ratio in ratios if ratio.block != block]
        error = {"all": 0.0, "group": 0.0}
        for left_out in (ratio for ratio in ratios if ratio.block == block):
            own = [ratio for ratio in seen if group_of(ratio) == group_of(left_out)] or seen
            error["all"] += _distance(left_out, seen)
            error["group"] += _distance(left_out, own)
        gains.append((error["all"] - error["group"]) / sum(ratio.block == block for ratio in ratios))
    standard_error = float(np.std(gains, ddof=1)) / np.sqrt(len(gains))
    return bool(np.mean(gains) > _CLEAR * standard_error)


def _distance(left_out: Ratios, seen: Sequence[Ratios]) -> float:
    return sum(
        abs(float(np.log(np.median(measured))) - float(np.log(np.median(np.concatenate(known)))))
        for measured, known in (
            (left_out.compute, [ratio.compute for ratio in seen]),
            (left_out.communication, [ratio.communication for ratio in seen]),
        )
    )


def _entry(key: Key, ratios: Sequence[Ratios]) -> Interference:
    compute = np.concatenate([ratio.compute for ratio in ratios])
    communication = np.concatenate([ratio.communication for ratio in ratios])
    sizes = [ratio.message_bytes for ratio in ratios]
    library, operation, level, ranks, _ = key
    return Interference(
        library=library,
        operation=operation,
        level=level,
        ranks=ranks,
        message_bytes=(min(sizes), max(sizes)),
        # Below 1 is noise: running side by side makes nothing faster.
        compute_slowdown=max(1.0, float(np.median(compute))),
        communication_slowdown=max(1.0, float(np.median(communication))),
        compute_slowdown_iqr=float(np.subtract(*np.percentile(compute, [75, 25]))),
        communication_slowdown_iqr=float(np.subtract(*np.percentile(communication, [75, 25]))),
        samples=int(compute.size),
        kernels=tuple(sorted({ratio.kernel for ratio in ratios})),
    )


def _kernel_note(key: Key, ratios: Sequence[Ratios]) -> str:
    medians = {
        kernel: float(np.median(np.concatenate([ratio.compute for ratio in ratios if ratio.kernel == kernel])))
        for kernel in sorted({ratio.kernel for ratio in ratios})
    }
    listed = ", ".join(f"{kernel} {value:.2f}" for kernel, value in medians.items())
    return f"{' '.join(key[:3])} on {key[3]} ranks: slow-down depends on the kernel (compute: {listed}); one is used"
