"""What compute before a collective adds to it, from pairs behind compute and back to back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from calibrate.fit.reading import Placed
from calibrate.profile.collectives.behind import BehindCompute, BehindPoint
from calibrate.statistics.pair_draws import Floats, Pair, by_block, covariance_of_next, draw_pairs, medians
from paradl_bench.core.statistics import MAD_TO_SD
from paradl_bench.plan.cost_terms.terms import CollectiveOperation
from paradl_bench.records.contexts.behind import BehindComputeSamples

_HUBER_K = 1.345
_ITERATIONS = 5
_Key = tuple[str, str, str]
"""(library, operation, level)."""


def fit_behind_compute(
    records: Iterable[Placed[BehindComputeSamples]], operations: Mapping[str, CollectiveOperation]
) -> tuple[tuple[BehindCompute, ...], tuple[str, ...]]:
    """Added latency and factor per (library, operation, level), and what was left out.

    Behind = added + factor x back to back, with added at least 0 and factor at least 1 (less is noise: compute before a
    call makes nothing faster), by relative errors under Huber's loss. Sizes of one alone leave the factor at 1.
    """
    groups: dict[_Key, list[Placed[BehindComputeSamples]]] = {}
    for directory, record in records:
        groups.setdefault((record.library, record.operation, record.level), []).append(Placed(directory, record))
    entries: list[BehindCompute] = []
    notes: list[str] = []
    for key, own in sorted(groups.items()):
        if key[1] not in operations:
            notes.append(f"{' '.join(key)} behind compute: no cost terms say how it grows: left out")
        else:
            entries.append(_fit(key, own, operations[key[1]]))
    return tuple(entries), tuple(notes)


def _fit(key: _Key, records: Sequence[Placed[BehindComputeSamples]], operation: CollectiveOperation) -> BehindCompute:
    points = sorted({(record.ranks, record.message_bytes) for _, record in records})
    blocks = sorted({(directory, record.block) for directory, record in records})
    pairs = [
        Pair(
            blocks.index((directory, record.block)),
            points.index((record.ranks, record.message_bytes)),
            operation.call_seconds(record.back_to_back_s),
            # A clock's tick is no time; relative errors need one.
            np.maximum(record.after_last_arrival_s(), 1e-9),
        )
        for directory, record in records
    ]
    alone_s, behind_s = medians(pairs)
    at = np.array([pair.at for pair in pairs])
    added_s, factor = solve(alone_s, behind_s, sizes=len(points))
    shown = tuple(
        BehindPoint(
            ranks=ranks,
            message_bytes=size,
            back_to_back_s=float(np.median(alone_s[at == index])),
            behind_s=float(np.median(behind_s[at == index])),
            fitted_s=added_s + factor * float(np.median(alone_s[at == index])),
        )
        for index, (ranks, size) in enumerate(points)
    )
    lags = [value for _, record in records for value in record.lags_s()]
    library, name, level = key
    return BehindCompute(
        library=library,
        operation=name,
        level=level,
        ranks=(points[0][0], points[-1][0]),
        bytes_range=(min(size for _, size in points), max(size for _, size in points)),
        compute_s=float(np.median([value for _, record in records for row in record.compute_s for value in row])),
        lag_s=float(np.median(lags)) if lags else None,
        added_s=added_s,
        factor=factor,
        covariance=covariance_of(pairs),
        residual_relative_median=float(np.median([abs(point.fitted_s / point.behind_s - 1) for point in shown])),
        samples=sum(pair.condition_s.size for pair in pairs),
        points=shown,
    )


def covariance_of(pairs: Sequence[Pair]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Of (added, factor) as a further block of time may have them: by resampling, and from block to block."""
    sizes, draws = len({pair.at for pair in pairs}), draw_pairs(pairs)
    drawn = np.array([solve(*row, sizes=sizes) for row in zip(draws.alone_s, draws.condition_s, strict=True)])
    of_blocks = np.array([solve(*medians(own), sizes=len({pair.at for pair in own})) for own in by_block(pairs)])
    (added, both), (_, slope) = covariance_of_next(drawn, of_blocks)
    return (float(added), float(both)), (float(both), float(slope))


def solve(alone_s: Floats, behind_s: Floats, *, sizes: int) -> tuple[float, float]:
    """(added, factor) that minimise Huber's loss of (added + factor alone - behind) / behind, at their bounds or above.

    Args:
        alone_s, behind_s: (pairs,) positive seconds.
        sizes: how many the pairs are of; one can't tell the factor, which is 1 then.
    """
    from scipy.optimize import nnls

    scale_s = float(np.median(behind_s))
    columns = [np.full(len(alone_s), scale_s)]
    if sizes > 1 and alone_s.max() > alone_s.min():
        columns.append(alone_s)
    design = np.stack(columns, axis=1) / behind_s[:, None]
    target = 1 - alone_s / behind_s
    weights = np.ones(len(target))
    found = np.zeros(len(columns))
    for _ in range(_ITERATIONS):
        root = np.sqrt(weights)
        found, _rest = nnls(design * root[:, None], target * root)
        residuals = np.abs(design @ found - target)
        scale = MAD_TO_SD * float(np.median(residuals))
        if scale < 1e-12:
            break
        weights = np.minimum(1.0, _HUBER_K * scale / np.maximum(residuals, 1e-300))
    return scale_s * float(found[0]), 1 + (float(found[1]) if len(found) > 1 else 0.0)
