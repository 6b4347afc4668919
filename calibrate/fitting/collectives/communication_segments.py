"""Fits of algorithms to runs of consecutive sizes of a curve, and the best way to put such runs together.

Choosing a form tries some dozens of forms on the curve without each size and each rank count in turn. They share their
runs: a run without the size left out is the same as in the whole curve. So every distinct run is fitted once for each
algorithm, all of them in one batch, and the best split into pieces is found over the table of their losses.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from calibrate.fitting.collectives.communication_curve import Curve, Mask
from calibrate.profile.collectives.communication_time import Piece, coefficients, logarithmic_design
from calibrate.statistics.regression import fit_relative_many
from paradl_bench.core.statistics import Floats
from paradl_bench.plan.cost_terms.terms import Algorithm

Indices = NDArray[np.int64]

MIN_SIZES_OF_PIECE = 3
"""Two parameters and one point to check them."""
MAX_CUTS = 24
"""Of longer sweeps, pieces may begin at so many sizes, near evenly spaced in logarithm."""
_TIE = 1e-9
_BATCHES = 6
"""Runs of like length are fitted together, so that few are padded by much."""


class Form(NamedTuple):
    """What is tried.

    Attributes:
        algorithms: each piece takes the one of these that fits it best (libraries use trees for small messages and
            rings for large ones).
        pieces: over sizes.
        logarithmic: whether the first piece grows with the logarithm of bytes (OSF eq. 18).
        reduction: whether gamma_r is fitted apart from beta.
        of_step: whether the pieces are ranges of the bytes that one step of the one algorithm sends.
    """

    algorithms: tuple[Algorithm, ...]
    pieces: int = 1
    logarithmic: bool = False
    reduction: bool = False
    of_step: bool = False

    @property
    def cutter(self) -> Algorithm | None:
        """The algorithm whose steps' bytes the pieces are ranges of; None where they are of the whole message's."""
        return self.algorithms[0] if self.of_step else None

    @property
    def parameters(self) -> int:
        """How many numbers it has to find, the algorithm of a piece counting as one where there is a choice."""
        of_algorithm = 4 if any(algorithm.hierarchical for algorithm in self.algorithms) else 2
        return self.pieces * (of_algorithm + self.reduction + (len(self.algorithms) > 1)) + self.pieces - 1

    @property
    def name(self) -> str:
        """In words: ``ring, 2 pieces, the first logarithmic``."""
        algorithm = self.algorithms[0].name
        if len(self.algorithms) > 1:
            hierarchical = any(choice.hierarchical for choice in self.algorithms)
            algorithm = f"each piece its own{', of all' if hierarchical else ''}"
        words = [algorithm, f"{self.pieces} piece{'s' if self.pieces > 1 else ''}"]
        words[1] += " over a step's bytes" * self.of_step
        words += ["the first logarithmic"] * self.logarithmic + ["reduction apart"] * self.reduction
        return ", ".join(words)


class Solutions(NamedTuple):
    """One algorithm fitted to every run.

    Attributes:
        parameters: (runs, 5). loss: (runs,) weighted residual over own points; infinite where it is no candidate.
        starts_s, ends_s: (runs, places) at a run's smallest and largest size, for each place that was measured.
    """

    parameters: Floats
    loss: Floats
    starts_s: Floats
    ends_s: Floats


class Fitted(NamedTuple):
    """A piece, and its time at its ends for each place that was measured."""

    piece: Piece
    starts_s: Floats
    ends_s: Floats


class Segments:
    """Every run of a curve's sizes under some sets of training points.

    Args:
        trainings: masks over the curve's points; what is asked for later is the number of one of them.
        cutter: sizes are those of one step of this algorithm, which cuts the message; None takes the whole message.
    """

    def __init__(self, curve: Curve, trainings: Sequence[Mask], cutter: Algorithm | None = None) -> None:
        self.curve = curve
        self.cutter = cutter
        self._at = curve.message_bytes / self._parts(curve.ranks)
        self.sizes = np.unique(self._at)
        self._masks: list[Mask] = []
        self._ends: list[tuple[float, float]] = []
        self._first: set[int] = set()
        self._numbers: dict[bytes, int] = {}
        self._solutions: dict[tuple[str, bool, bool], Solutions] = {}
        self._designs: dict[str, Floats] = {}
        self._runs = tuple(self._runs_of(training) for training in trainings)

    def _parts(self, ranks: Floats) -> Floats:
        return np.ones_like(ranks) if self.cutter is None else self.cutter.parts(ranks)

    def _runs_of(self, training: Mask) -> Indices:
        """(cuts, cuts) number of the run that begins at one cut and ends before another; -1 where there is none."""
        sizes = np.unique(self._at[training & self.curve.own])
        cuts = [0, *_cuts(sizes), len(sizes)]
        runs = np.full((len(cuts), len(cuts)), -1)
        for i, j in itertools.combinations(range(len(cuts)), 2):
            whole = i == 0 and j == len(cuts) - 1
            if cuts[j] > cuts[i] and (whole or cuts[j] - cuts[i] >= MIN_SIZES_OF_PIECE):
                runs[i, j] = self._number(training, float(sizes[cuts[i]]), float(sizes[cuts[j] - 1]))
                if i == 0:
                    self._first.add(int(runs[i, j]))
        return runs

    def _number(self, training: Mask, low: float, high: float) -> int:
        inside = training & (self._at >= low) & (self._at <= high)
        key = inside.tobytes()
        if key not in self._numbers:
            self._numbers[key] = len(self._masks)
            self._masks.append(inside)
            self._ends.append((low, high))
        return self._numbers[key]

    def design(self, algorithm: Algorithm) -> Floats:
        """(points, 5) coefficients at every point of the curve."""
        if algorithm.name not in self._designs:
            curve = self.curve
            self._designs[algorithm.name] = coefficients(
                algorithm, curve.ranks, curve.message_bytes, curve.ranks_per_node
            )
        return self._designs[algorithm.name]

    def solutions(self, algorithm: Algorithm, form: Form) -> Solutions:
        """An algorithm fitted to every run; logarithmic ones to those that begin at the smallest size."""
        key = algorithm.name, form.reduction, form.logarithmic
        if key not in self._solutions:
            self._solutions[key] = self._solve(algorithm, form.reduction, form.logarithmic)
        return self._solutions[key]

    def _solve(self, algorithm: Algorithm, reduction: bool, logarithmic: bool) -> Solutions:
        curve, total = self.curve, len(self._masks)
        asked = np.array(sorted(self._first)) if logarithmic else np.arange(total)
        parameters, loss = np.zeros((total, 5)), np.full(total, np.inf)
        masks = np.array(self._masks) if algorithm.hierarchical else np.array(self._masks) & curve.own
        counts = masks.sum(axis=1)
        ordered = asked[np.argsort(counts[asked], kind="stable")]
        for batch in np.array_split(ordered, _BATCHES):
            if len(batch):
                lows = np.array([self._ends[run][0] for run in batch]) if logarithmic else None
                parameters[batch], loss[batch] = self._fit(algorithm, masks[batch], reduction, lows)
        starts_s, ends_s = self._edges(algorithm, parameters, logarithmic)
        return Solutions(parameters, loss, starts_s, ends_s)

    def _fit(
        self, algorithm: Algorithm, masks: NDArray[np.bool_], reduction: bool, lows: Floats | None
    ) -> tuple[Floats, Floats]:
        curve = self.curve
        order = np.argsort(~masks, axis=1, kind="stable")[:, : int(masks.sum(axis=1).max())]
        told = np.take_along_axis(masks, order, axis=1)
        design = self.design(algorithm)[order]
        if lows is not None:
            design = logarithmic_design(design, curve.message_bytes[order] / lows[:, None])
        if not reduction:
            design[..., 2] = 0.0
        seconds, precision = curve.seconds[order], np.where(told, curve.precision[order], 0.0)
        parameters = fit_relative_many(design, seconds, noise=curve.noise, precision=precision)
        residuals = np.abs((design @ parameters[..., None])[..., 0] / seconds - 1) * precision * curve.own[order]
        return parameters, np.asarray(residuals.sum(axis=1))

    def _edges(self, algorithm: Algorithm, parameters: Floats, logarithmic: bool) -> tuple[Floats, Floats]:
        ranks, per_node = self.curve.places[:, :1], self.curve.places[:, 1:]
        table = coefficients(algorithm, ranks, self.sizes * self._parts(ranks), per_node)
        low, high = np.array(self._ends).T
        edges = []
        for at in (low, high):
            rows = table[:, np.searchsorted(self.sizes, at)].swapaxes(0, 1)
            if logarithmic:
                rows = logarithmic_design(rows, (at / low)[:, None])
            edges.append((rows @ parameters[..., None])[..., 0])
        return edges[0], edges[1]

    def best(self, training: int, form: Form, counts: Sequence[int]) -> list[list[Fitted] | None]:
        """The best split of a set of training points into each of these numbers of pieces; None where there is none.

        A split under which time would fall from one piece to the next, at a place that was measured, is no candidate.
        """
        runs = self._runs[training]
        opening, following = self._table(runs, form), self._table(runs, form._replace(logarithmic=False))
        last = len(runs) - 1
        losses = np.where(np.arange(last + 1)[:, None] == 0, opening.loss, np.inf)
        grows, trail = _grows(opening, following), list[Indices]()
        best_of_count: dict[int, list[Fitted] | None] = {}
        for count in range(1, max(counts) + 1):
            if count > 1:
                # (before, from, to): the run from..to follows the run before..from.
                candidates = np.where(grows, losses[:, :, None], np.inf)
                trail.append(np.asarray(candidates.argmin(axis=0)))
                losses = candidates.min(axis=0) + following.loss
                grows = _grows(following, following) if count == 2 else grows
            begin = int(losses[:, last].argmin())
            if count in counts:
                whole = np.isfinite(losses[begin, last])
                best_of_count[count] = self._traced(runs, begin, trail, (opening, following)) if whole else None
        return [best_of_count[count] for count in counts]

    def _table(self, runs: Indices, form: Form) -> _Table:
        solved = [self.solutions(algorithm, form) for algorithm in form.algorithms]
        losses = np.stack([np.where(runs >= 0, solution.loss[runs], np.inf) for solution in solved])
        # Where one rank count is left, some algorithms fit equally well: the first of them, whatever rounding says.
        which = (losses <= losses.min(axis=0) * (1 + _TIE) + _TIE).argmax(axis=0)
        taken = np.take_along_axis(losses, which[None], axis=0)[0]
        starts, ends = (
            np.stack([edge[runs] for edge in edges])[which, *np.indices(runs.shape)]
            for edges in ([solution.starts_s for solution in solved], [solution.ends_s for solution in solved])
        )
        return _Table(form, which, taken, starts, ends)

    def _traced(
        self, runs: Indices, begin: int, trail: Sequence[Indices], tables: tuple[_Table, _Table]
    ) -> list[Fitted]:
        cuts = [len(runs) - 1, begin]
        for before in reversed(trail):
            cuts.append(int(before[cuts[-1], cuts[-2]]))
        cuts.reverse()
        return [self._piece(runs, i, j, tables[at > 0]) for at, (i, j) in enumerate(itertools.pairwise(cuts))]

    def _piece(self, runs: Indices, i: int, j: int, table: _Table) -> Fitted:
        algorithm, run = table.form.algorithms[table.which[i, j]], int(runs[i, j])
        solved = self.solutions(algorithm, table.form)
        alpha_s, growth, gamma_s_per_byte, inner_alpha_s, inner_beta = map(float, solved.parameters[run])
        beta, doubling_s = (0.0, growth) if table.form.logarithmic else (growth, 0.0)
        low, high = self._ends[run]
        piece = Piece(
            *(algorithm, low, high, alpha_s, beta, gamma_s_per_byte, doubling_s, inner_alpha_s, inner_beta),
            of_step=self.cutter is not None,
        )
        return Fitted(piece, solved.starts_s[run], solved.ends_s[run])

    def predict(self, fitted: Sequence[Fitted], chosen: Mask) -> Floats:
        """Seconds of pieces at the chosen points, those of ``piecewise_seconds``."""
        sizes, place = self._at[chosen], self.curve.place[chosen]
        seconds = self._seconds(fitted[0].piece, chosen)
        for lower, upper in itertools.pairwise(fitted):
            low, high = lower.piece.high_bytes, upper.piece.low_bytes
            start, end = lower.ends_s[place], upper.starts_s[place]
            seconds = np.where(sizes > low, start + (end - start) * (sizes - low) / (high - low), seconds)
            seconds = np.where(sizes >= high, self._seconds(upper.piece, chosen), seconds)
        return seconds

    def _seconds(self, piece: Piece, chosen: Mask) -> Floats:
        design = self.design(piece.algorithm)[chosen]
        if piece.doubling_s:
            design = logarithmic_design(design, self.curve.message_bytes[chosen] / piece.low_bytes)
        return np.asarray(design @ piece.parameters)


class _Table(NamedTuple):
    """Of every run, the best algorithm of a form, its loss, (cuts, cuts), and ends, (cuts, cuts, places)."""

    form: Form
    which: Indices
    loss: Floats
    starts_s: Floats
    ends_s: Floats


def _grows(lower: _Table, upper: _Table) -> NDArray[np.bool_]:
    """(before, from, to) whether time does not fall from the run before..from to the run from..to."""
    return np.asarray((upper.starts_s[None] >= lower.ends_s[:, :, None]).all(axis=-1))


def _cuts(sizes: Floats) -> list[int]:
    """Indices at which pieces after the first may begin."""
    cuts = list(range(MIN_SIZES_OF_PIECE, len(sizes) - MIN_SIZES_OF_PIECE + 1))
    if len(cuts) <= MAX_CUTS:
        return cuts
    grid = np.geomspace(sizes[cuts[0]], sizes[cuts[-1]], MAX_CUTS)
    return sorted({int(np.searchsorted(sizes, value)) for value in grid} & set(cuts))
