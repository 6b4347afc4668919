"""Which form describes a collective's times: chosen by the error on points that the fit had not seen.

A form is an algorithm (or each piece its own), a number of pieces over sizes, whether the first of them grows with the
logarithm of bytes (OSF eq. 18), and whether the reduction stands apart. Sizes left out in turn, and rank counts but the
smallest left out in turn where several were measured, count alike. Of forms within one standard error of the best
(Hastie, Tibshirani and Friedman, The Elements of Statistical Learning, section 7.10) the one with the fewest parameters
is taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from calibrate.communication_curve import Curve, Floats, Mask
from calibrate.communication_time import Piece, coefficients, piecewise_seconds
from calibrate.regression import fit_relative, told_apart
from paradl_bench.spec.cost_terms import Algorithm, CollectiveOperation

MIN_SIZES_OF_PIECE = 3
"""Two parameters and one point to check them."""
MAX_PIECES = 4
MAX_FOLDS = 24
"""Each size is left out in turn; of longer sweeps every 24th size at once."""
_ARITHMETIC = 1e-6
"""Relative errors closer than this differ by rounding."""


class Fitted(NamedTuple):
    """A piece fitted to some points.

    Attributes:
        loss: weighted residual over own points.
        starts_s, ends_s: at its smallest and largest size, for each rank count that was measured.
    """

    piece: Piece
    loss: float
    starts_s: Floats
    ends_s: Floats


@dataclass(slots=True)
class Known:
    """What was computed for one curve before: forms share their designs and pieces."""

    designs: dict[tuple[str, float], Floats] = field(default_factory=dict)
    pieces: dict[tuple[str, bool, float, bytes], Fitted] = field(default_factory=dict)


class Form(NamedTuple):
    """What is tried.

    Attributes:
        algorithms: each piece takes the one of these that fits it best (libraries use trees for small messages and
            rings for large ones).
        pieces: over sizes.
        logarithmic: whether the first piece grows with the logarithm of bytes.
        reduction: whether gamma_r is fitted apart from beta.
    """

    algorithms: tuple[Algorithm, ...]
    pieces: int = 1
    logarithmic: bool = False
    reduction: bool = False

    @property
    def parameters(self) -> int:
        """How many numbers it has to find, the algorithm of a piece counting as one where there is a choice."""
        each = 4 if any(algorithm.hierarchical for algorithm in self.algorithms) else 2
        return self.pieces * (each + self.reduction + (len(self.algorithms) > 1)) + self.pieces - 1

    @property
    def name(self) -> str:
        """In words: ``ring, 2 pieces, the first logarithmic``."""
        algorithm = self.algorithms[0].name
        if len(self.algorithms) > 1:
            hierarchical = any(each.hierarchical for each in self.algorithms)
            algorithm = f"each piece its own{', of all' if hierarchical else ''}"
        words = [algorithm, f"{self.pieces} piece{'s' if self.pieces > 1 else ''}"]
        words += ["the first logarithmic"] * self.logarithmic + ["reduction apart"] * self.reduction
        return ", ".join(words)


@dataclass(slots=True)
class Fitter:
    """Fits a form to subsets of a curve.

    Attributes:
        known: what was fitted before, shared between fitters of one curve.
    """

    curve: Curve
    form: Form
    known: Known = field(default_factory=Known)

    def design(self, algorithm: Algorithm, chosen: Mask, logarithmic_from: float | None = None) -> Floats:
        """(chosen points, 5) coefficients; gamma's is 0 where the reduction is part of beta."""
        key = algorithm.name, logarithmic_from or 0.0
        if key not in self.known.designs:
            curve = self.curve
            self.known.designs[key] = coefficients(
                algorithm, curve.ranks, curve.message_bytes, curve.ranks_per_node, logarithmic_from
            )
        rows = self.known.designs[key][chosen]
        if not self.form.reduction:
            rows[:, 2] = 0.0
        return rows

    def points_for(self, algorithm: Algorithm, chosen: Mask) -> Mask:
        """Of the chosen points, those that an algorithm is fitted to."""
        return chosen if algorithm.hierarchical else chosen & self.curve.own

    def pieces(self, training: Mask) -> tuple[Piece, ...] | None:
        """The best split of the training points into pieces over sizes; None where there are too few sizes.

        A split under which time would fall from one piece to the next, at a rank count that was measured, is no
        candidate.
        """
        sizes = np.unique(self.curve.message_bytes[training & self.curve.own])
        known: dict[tuple[int, int], Fitted] = {}
        best: tuple[float, list[Fitted]] | None = None
        for cuts in _splits(sizes, self.form.pieces):
            ends = list(itertools.pairwise([0, *cuts, len(sizes)]))
            for a, b in ends:
                if (a, b) not in known:
                    known[a, b] = self._best_piece(training, float(sizes[a]), float(sizes[b - 1]), a == 0)
            fitted = [known[end] for end in ends]
            loss = sum(each.loss for each in fitted)
            if (best is None or loss < best[0]) and _grows(fitted):
                best = loss, fitted
        return tuple(each.piece for each in best[1]) if best else None

    def _best_piece(self, training: Mask, low: float, high: float, first: bool) -> Fitted:
        inside = training & (self.curve.message_bytes >= low) & (self.curve.message_bytes <= high)
        logarithmic = first and self.form.logarithmic
        fits = [self._piece(each, inside, low, high, logarithmic) for each in self.form.algorithms]
        return min(fits, key=lambda fit: fit.loss)

    def _piece(self, algorithm: Algorithm, chosen: Mask, low: float, high: float, logarithmic: bool) -> Fitted:
        logarithmic_from = low if logarithmic else None
        key = algorithm.name, self.form.reduction, logarithmic_from or 0.0, chosen.tobytes()
        if key not in self.known.pieces:
            curve, inside = self.curve, self.points_for(algorithm, chosen)
            design, seconds = self.design(algorithm, inside, logarithmic_from), curve.seconds[inside]
            solution = fit_relative(design, seconds, noise=curve.noise, precision=curve.precision[inside])
            residuals = np.abs(design @ solution / seconds - 1) * curve.precision[inside]
            alpha_s, growth, gamma_s_per_byte, inner_alpha_s, inner_beta = map(float, solution)
            beta, doubling_s = (0.0, growth) if logarithmic else (growth, 0.0)
            piece = Piece(algorithm, low, high, alpha_s, beta, gamma_s_per_byte, doubling_s, inner_alpha_s, inner_beta)
            edges = piece.seconds(curve.places[:, :1], [low, high], curve.places[:, 1:])
            loss = float(residuals[curve.own[inside]].sum())
            self.known.pieces[key] = Fitted(piece, loss, edges[:, 0], edges[:, 1])
        return self.known.pieces[key]

    def held_out(self, folds: Sequence[Mask]) -> Floats | None:
        """Seconds predicted for each point by the fit without its fold, NaN for points of none.

        None where a fold leaves too few sizes.
        """
        curve = self.curve
        predicted = np.full(len(curve), np.nan)
        for fold in folds:
            pieces = self.pieces(~fold)
            if pieces is None:
                return None
            predicted[fold] = piecewise_seconds(
                pieces, curve.ranks[fold], curve.message_bytes[fold], curve.ranks_per_node[fold]
            )
        return predicted


def _grows(fitted: Sequence[Fitted]) -> bool:
    return all(bool((upper.starts_s >= lower.ends_s).all()) for lower, upper in itertools.pairwise(fitted))


def _splits(sizes: Floats, count: int) -> Iterable[tuple[int, ...]]:
    """Indices at which pieces after the first begin; of long sweeps, cuts near evenly spaced logarithms of size."""
    total = len(sizes)
    if count == 1:
        return [()]
    if total < count * MIN_SIZES_OF_PIECE:
        return []
    cuts = list(range(MIN_SIZES_OF_PIECE, total - MIN_SIZES_OF_PIECE + 1))
    if len(cuts) > MAX_FOLDS:
        grid = np.geomspace(sizes[cuts[0]], sizes[cuts[-1]], MAX_FOLDS)
        cuts = sorted({int(np.searchsorted(sizes, value)) for value in grid} & set(cuts))
    return (
        split
        for split in itertools.combinations(cuts, count - 1)
        if all(b - a >= MIN_SIZES_OF_PIECE for a, b in itertools.pairwise(split))
    )


def _folds(values: Floats, own: Mask) -> list[Mask]:
    """Masks of the points left out together: one distinct value of own points each, or every 24th of many."""
    distinct = np.unique(values[own])
    count = min(len(distinct), MAX_FOLDS)
    return [np.isin(values, distinct[fold::count]) for fold in range(count)]


class Choice(NamedTuple):
    """A fitted form and what it predicted for points that it had not seen.

    Attributes:
        held_out: with each point's size left out. held_out_ranks: with its rank count left out; None of one count.
    """

    fitter: Fitter
    held_out: Floats | None
    held_out_ranks: Floats | None

    def errors(self) -> tuple[float | None, float | None]:
        """Mean relative errors over sizes, and over rank counts, left out in turn."""
        curve = self.fitter.curve
        sizes, ranks = (
            None if predicted is None else float(_errors_by_size(predicted, curve).mean())
            for predicted in (self.held_out, self.held_out_ranks)
        )
        return sizes, ranks

    def errors_by_size(self) -> Floats | None:
        """What it is judged by: of each size, the error with it left out plus that with its rank count left out.

        None where too few sizes were left to fit.
        """
        curve = self.fitter.curve
        several = len(np.unique(curve.ranks[curve.own])) > 1
        if self.held_out is None or (several and self.held_out_ranks is None):
            return None
        sizes = _errors_by_size(self.held_out, curve)
        return sizes if self.held_out_ranks is None else sizes + _errors_by_size(self.held_out_ranks, curve)


def choose(curve: Curve, operation: CollectiveOperation, library: str) -> tuple[Choice, tuple[Choice, ...]]:
    """The form that does best on sizes and rank counts left out in turn, and all that were considered.

    With one rank count nothing tells one algorithm from another: the one that the library is known to run is taken.
    gamma_r is told from beta by three rank counts at least.
    """
    known = Known()
    choices = [_try(Fitter(curve, form, known)) for form in forms(curve, operation, library)]
    return choices[_simplest(choices)], tuple(choices)


def forms(curve: Curve, operation: CollectiveOperation, library: str) -> list[Form]:
    """What is tried for a curve, the fewest parameters first."""
    counts = len(np.unique(curve.ranks[curve.own]))
    expected = operation.algorithm_of(library)
    every = sorted(operation.algorithms.values(), key=lambda algorithm: algorithm.name != expected)
    flat = [algorithm for algorithm in every if not algorithm.hierarchical]
    over_nodes = bool(np.any(curve.ranks > curve.ranks_per_node) and np.any(curve.ranks_per_node > 1))
    usable = every if over_nodes else flat
    sets: list[tuple[Algorithm, ...]] = [(algorithm,) for algorithm in usable]
    sets += [tuple(group) for group in (flat, usable) if len(group) > 1]
    if counts == 1:
        sets = sets[:1]
    shapes = [(pieces, False) for pieces in range(1, MAX_PIECES + 1)] + [(2, True), (3, True)]
    found = [Form(algorithms, *shape) for algorithms in dict.fromkeys(sets) for shape in shapes]
    if counts > 2:
        everything = Fitter(curve, Form(tuple(flat), reduction=True))
        told = [
            each for each in flat if told_apart(everything.design(each, curve.own)[:, :3], curve.seconds[curve.own])
        ]
        found += [
            form._replace(reduction=True)
            for form in found
            if set(form.algorithms) <= set(told) and not form.logarithmic
        ]
    return sorted(found, key=lambda form: form.parameters)


def _try(fitter: Fitter) -> Choice:
    curve = fitter.curve
    # Without the smallest count: what a fit is asked for is more ranks, and what tells it for fewer misleads there.
    over_ranks = [fold for fold in _folds(curve.ranks, curve.own) if not np.any(fold[_fewest(curve)])]
    return Choice(
        fitter,
        fitter.held_out(_folds(curve.message_bytes, curve.own)),
        fitter.held_out(over_ranks) if over_ranks else None,
    )


def _fewest(curve: Curve) -> Mask:
    """Own points of the smallest rank count."""
    return np.asarray(curve.own & (curve.ranks == curve.ranks[curve.own].min()))


def _errors_by_size(predicted: Floats, curve: Curve) -> Floats:
    """Mean error of the own points of each size that were predicted, as precise points say it."""
    own, told = curve.own, np.isfinite(predicted[curve.own])
    error = np.abs(predicted[own] / curve.seconds[own] - 1) * curve.precision[own] / curve.precision[own].mean()
    _, index = np.unique(curve.message_bytes[own], return_inverse=True)
    sums = np.bincount(index[told], error[told], minlength=index.max() + 1)
    counts = np.bincount(index[told], minlength=index.max() + 1)
    # A size that only the smallest rank count was measured at is as good as the others.
    return np.asarray(np.where(counts, sums / np.maximum(counts, 1), sums.sum() / counts.sum()))


def _simplest(choices: Sequence[Choice]) -> int:
    """Index of the choice with the fewest parameters among those within one standard error of the best.

    Differences are paired by size: that is how many there are of, where two or three rank counts are left out. Of as
    many parameters the one with the least error is taken.
    """
    found = ((index, choice.errors_by_size()) for index, choice in enumerate(choices))
    tables = {index: table for index, table in found if table is not None}
    if not tables:
        return 0
    means = {index: float(table.mean()) for index, table in tables.items()}
    best = tables[min(tables, key=means.__getitem__)]
    good = [index for index, table in tables.items() if _as_good(table, best)]
    return min(good, key=lambda index: (choices[index].fitter.form.parameters, means[index] // _ARITHMETIC, index))


def _as_good(errors: Floats, best: Floats) -> bool:
    paired = errors - best
    standard_error = float(np.std(paired, ddof=1) / np.sqrt(len(paired))) if len(paired) > 1 else 0.0
    return float(paired.mean()) <= max(standard_error, _ARITHMETIC)
