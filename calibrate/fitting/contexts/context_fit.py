"""What contexts do to collectives: added latency and factor, from pairs of calls idle and in the context.

Whatever surrounds a call, its times are fitted alike: in context = added + factor x idle by relative errors under
Huber's loss, with added at least 0 and factor at least 1 (nothing makes a call faster; less is noise). Sizes of one
alone leave the factor at 1. Of groups at once, the factor is of what bytes take, and nothing is added: the start-up
needs no link.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from calibrate.fitting.contexts.byte_shares import byte_shares
from calibrate.fitting.contexts.pairs import TICK_S, About, Measured, NotFitted, paired
from calibrate.fitting.reading import Placed
from calibrate.profile.collectives.communication import CommunicationFit
from calibrate.profile.collectives.contexts import ContextPoint, InContext
from calibrate.statistics.pair_draws import Pair, by_block, covariance_of_next, draw_pairs, medians
from calibrate.statistics.regression import HUBER_K
from paradl_bench.core.statistics import IQR_TO_SD, MAD_TO_SD, Floats
from paradl_bench.plan.cost_terms.terms import CollectiveOperation
from paradl_bench.records.contexts.context import ContextSamples

_ITERATIONS = 5


def fit_contexts(
    records: Iterable[Placed[ContextSamples]],
    fits: Sequence[CommunicationFit],
    operations: Mapping[str, CollectiveOperation],
) -> tuple[tuple[InContext, ...], tuple[str, ...]]:
    """An entry a library, operation, level, context and number of ranks, and what was left out and why.

    Args:
        fits: of alpha and beta, which say what bytes take.
    """
    groups: dict[About, list[Measured]] = {}
    for about, measured in paired(records, operations):
        groups.setdefault(about, []).append(measured)
    entries: list[InContext] = []
    notes: list[str] = []
    for about, measured_of in sorted(groups.items()):
        try:
            whole = [sample for sample in measured_of if sample.idle_s.size and sample.in_context_s.size]
            of_call = [fit for fit in fits if fit.key == (about.library, about.operation, about.level)]
            entries.append(_entry(about, whole, operations[about.operation], of_call))
        except NotFitted as reason:
            notes.append(f"{about.words}: {reason}: left out")
    return tuple(entries), tuple(notes)


def _entry(
    about: About,
    measured: Sequence[Measured],
    operation: CollectiveOperation,
    fits: Sequence[CommunicationFit],
) -> InContext:
    groups = about.context == "groups"
    if not measured:
        alone = "no matching calls ran alone (same tool, ranks, size and level)"
        raise NotFitted(alone if groups else "no call began before the other work ended")
    points = sorted({sample.point for sample in measured})
    blocks = sorted({sample.block for sample in measured})
    pairs = [
        Pair(blocks.index(sample.block), points.index(sample.point), sample.idle_s, sample.in_context_s)
        for sample in measured
    ]
    solver = Solver(len(points), byte_shares(points, operation, fits) if groups else None)
    at = np.array([pair.at for pair in pairs])
    idle_s, in_context_s = medians(pairs)
    added_s, factor = solver.solve(idle_s, in_context_s, at)
    shown = [
        ContextPoint(
            ranks=point.ranks,
            message_bytes=point.message_bytes,
            idle_s=(idle := float(np.median(idle_s[at == index]))),
            in_context_s=float(np.median(in_context_s[at == index])),
            fitted_s=added_s + idle + (factor - 1) * idle * solver.share(index),
        )
        for index, point in enumerate(points)
    ]
    return InContext(
        library=about.library,
        operation=about.operation,
        level=about.level,
        context=about.context,
        groups=about.groups,
        neighbour_level=about.neighbour_level,
        ranks=(min(point.ranks for point in points), max(point.ranks for point in points)),
        bytes_range=(min(point.message_bytes for point in points), max(point.message_bytes for point in points)),
        added_s=added_s,
        factor=factor,
        covariance=solver.covariance(pairs),
        **_of_neighbours(measured),
        residual_relative_median=float(np.median([abs(point.fitted_s / point.in_context_s - 1) for point in shown])),
        samples=sum(pair.condition_s.size for pair in pairs),
        points=tuple(shown),
    )


def _of_neighbours(measured: Sequence[Measured]) -> dict[str, Any]:
    """What an entry holds of what surrounded the calls."""
    records = [sample.record for sample in measured]
    waited, begun = np.sum([record.queued() for record in records], axis=0)
    fields: dict[str, Any] = {
        "neighbours": tuple(sorted({record.neighbour for record in records} - {""})),
        "waiting": float(waited / begun),
    }
    if seconds := [np.ravel(record.neighbour_s) for record in records if record.neighbour_s]:
        fields["neighbour_s"] = float(np.median(np.concatenate(seconds)))
    compute = [(record.neighbour_s, record.neighbour_idle_s) for record in records if record.neighbour_idle_s]
    if compute:
        slower = np.concatenate([np.ravel(np.divide(beside, np.maximum(alone, TICK_S))) for beside, alone in compute])
        fields["neighbour_factor"] = max(1.0, float(np.median(slower)))
        # Of what ran, kernels and sizes together: one number stands for all of them.
        fields["neighbour_sd"] = float(np.subtract(*np.percentile(slower, [75, 25]))) * IQR_TO_SD
    return fields


class Solver(NamedTuple):
    """Finds (added, factor) of one collective in one context.

    Attributes:
        sizes: how many the pairs are of; one can't tell the factor, which is 1 then.
        shares: by size, the part of an idle call that the factor multiplies; None for all, with latency beside it.
    """

    sizes: int
    shares: Floats | None = None

    def share(self, at: int) -> float:
        """Of one size."""
        return 1.0 if self.shares is None else float(self.shares[at])

    def solve(self, idle_s: Floats, in_context_s: Floats, at: np.ndarray) -> tuple[float, float]:
        """Those that minimise Huber's loss of (added + idle + (factor - 1) share idle - in context) / in context.

        Seconds are positive, one a pair; ``at`` is the size that each is of.
        """
        if self.shares is not None:
            return 0.0, _phi(in_context_s / idle_s, self.shares[at])
        from scipy.optimize import nnls

        scale_s = float(np.median(in_context_s))
        columns = [np.full(len(idle_s), scale_s)]
        if self.sizes > 1 and idle_s.max() > idle_s.min():
            columns.append(idle_s)
        design = np.stack(columns, axis=1) / in_context_s[:, None]
        target = 1 - idle_s / in_context_s
        weights = np.ones(len(target))
        solution = np.zeros(len(columns))
        for _ in range(_ITERATIONS):
            root = np.sqrt(weights)
            solution, _rest = nnls(design * root[:, None], target * root)
            residuals = np.abs(design @ solution - target)
            scale = MAD_TO_SD * float(np.median(residuals))
            if scale < 1e-12:
                break
            weights = np.minimum(1.0, HUBER_K * scale / np.maximum(residuals, 1e-300))
        return scale_s * float(solution[0]), 1 + (float(solution[1]) if len(solution) > 1 else 0.0)

    def covariance(self, pairs: Sequence[Pair]) -> tuple[tuple[float, float], tuple[float, float]]:
        """Of (added, factor) as a further block of time may have them: by resampling, and from block to block."""
        at, draws = np.array([pair.at for pair in pairs]), draw_pairs(pairs)
        rows = zip(draws.alone_s, draws.condition_s, at[draws.chosen], strict=True)
        drawn = np.array([self.solve(*row) for row in rows])
        # Resampling alone: with it intervals of phi hold committed runs, and few blocks make them several times wider.
        blocks = by_block(pairs) if self.shares is None else []
        of_blocks = [
            self._replace(sizes=len({pair.at for pair in part})).solve(*medians(part), np.array([p.at for p in part]))
            for part in blocks
        ]
        (added, both), (_, slope) = covariance_of_next(drawn, np.array(of_blocks))
        return (float(added), float(both)), (float(both), float(slope))


def _phi(ratios: Floats, shares: Floats) -> float:
    """The median of 1 + (ratio - 1) / share, weighted by the shares: least absolute errors of the ratios."""
    told = shares > 0
    if not told.any():
        return 1.0
    estimates, weights = (ratios[told] - 1) / shares[told], shares[told]
    order = np.argsort(estimates)
    reached = np.cumsum(weights[order])
    return 1 + max(0.0, float(estimates[order][np.searchsorted(reached, reached[-1] / 2)]))
