"""Which form describes a collective's times: chosen by the error on points that the fit had not seen.

Sizes left out in turn, and rank counts but the smallest left out in turn where several were measured, count alike. Of
forms within one standard error of the best (Hastie, Tibshirani and Friedman, The Elements of Statistical Learning,
section 7.10) the one with the fewest parameters is taken, as long as it is worse by no more than the noise of a point:
sizes at which times jump make that error large where nothing is noise. Where no algorithm's scaling holds between the
rank counts measured, each is fitted by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from calibrate.fitting.collectives.communication_curve import Curve, Mask
from calibrate.fitting.collectives.communication_segments import Fitted, Form, Segments
from calibrate.profile.collectives.communication_time import Piece, piecewise_seconds
from calibrate.statistics.regression import told_apart
from paradl_bench.core.statistics import Floats, grouped
from paradl_bench.plan.cost_terms.terms import Algorithm, CollectiveOperation

MAX_PIECES = 4
MAX_FOLDS = 24
"""Each size is left out in turn; of longer sweeps every 24th size at once."""
_ARITHMETIC = 1e-6
"""Relative errors closer than this differ by rounding."""


class Choice(NamedTuple):
    """A fitted form and what it predicted for points that it had not seen.

    Attributes:
        name: of the form, in words. parameters: how many numbers it has to find.
        pieces: fitted to all points; None where they have too few sizes.
        held_out: seconds of each point with its size left out, NaN for points at no size that was; None where a fold
            leaves too few sizes.
        held_out_ranks: likewise with its rank count left out; None where that leaves too few, or of one count.
    """

    name: str
    parameters: int
    reduction: bool
    pieces: tuple[Piece, ...] | None
    held_out: Floats | None
    held_out_ranks: Floats | None

    def errors(self, curve: Curve) -> tuple[float | None, float | None]:
        """Mean relative errors over sizes, and over rank counts, left out in turn."""
        sizes, ranks = (
            None if predicted is None else float(_errors_by_size(predicted, curve).mean())
            for predicted in (self.held_out, self.held_out_ranks)
        )
        return sizes, ranks

    def errors_by_size(self, curve: Curve) -> Floats | None:
        """What it is judged by: of each size, the error with it left out plus that with its rank count left out.

        None where too few sizes were left to fit.
        """
        several = len(np.unique(curve.ranks[curve.own])) > 1
        if self.pieces is None or self.held_out is None or (several and self.held_out_ranks is None):
            return None
        sizes = _errors_by_size(self.held_out, curve)
        return sizes if self.held_out_ranks is None else sizes + _errors_by_size(self.held_out_ranks, curve)


def choose(curve: Curve, operation: CollectiveOperation, library: str) -> tuple[Choice, tuple[Choice, ...]]:
    """The form that does best on sizes and rank counts left out in turn, and all that were considered.

    With one rank count nothing tells one algorithm from another: the one that the library is known to run is taken.
    gamma_r is told from beta by three rank counts at least.
    """
    choices = tried(curve, forms(curve, operation, library))
    chosen = choices[simplest(choices, curve)]
    if len(np.unique(curve.ranks[curve.own])) > 1:
        apart = [_counts_apart(curve, algorithm) for algorithm in _flat(operation, library)]
        other = apart[simplest(apart, curve)]
        if _no_scaling_holds(choices, other, curve):
            chosen = other
        choices += apart
    return chosen, tuple(choices)


def _no_scaling_holds(choices: Sequence[Choice], apart: Choice, curve: Curve) -> bool:
    """Whether rank counts fitted each by itself do better than every form, by more than one standard error.

    Where scaling holds, each count by itself still follows the jumps of sizes more closely.
    """
    errors = apart.errors_by_size(curve)
    tables = [table for choice in choices if (table := choice.errors_by_size(curve)) is not None]
    if errors is None or not tables:
        return errors is not None
    worse = min(tables, key=lambda table: float(table.mean())) - errors
    return float(worse.mean()) > max(_standard_error(worse), _ARITHMETIC)


def _flat(operation: CollectiveOperation, library: str) -> list[Algorithm]:
    """Algorithms that know one kind of link, the one that the library is known to run first."""
    expected = operation.algorithm_of(library)
    every = sorted(operation.algorithms.values(), key=lambda algorithm: algorithm.name != expected)
    return [algorithm for algorithm in every if not algorithm.hierarchical]


def forms(curve: Curve, operation: CollectiveOperation, library: str) -> list[Form]:
    """What is tried for a curve, the fewest parameters first."""
    counts = len(np.unique(curve.ranks[curve.own]))
    flat = _flat(operation, library)
    over_nodes = bool(np.any(curve.ranks > curve.ranks_per_node) and np.any(curve.ranks_per_node > 1))
    usable = [*flat, *(algo for algo in operation.algorithms.values() if algo.hierarchical)] if over_nodes else flat
    sets: list[tuple[Algorithm, ...]] = [(algorithm,) for algorithm in usable]
    sets += [tuple(group) for group in (flat, usable) if len(group) > 1]
    if counts == 1:
        sets = sets[:1]
    shapes = [form for algorithms in dict.fromkeys(sets) for form in _shapes(algorithms)]
    if counts > 1:
        shapes += [
            Form((algorithm,), pieces, of_step=True)
            for algorithm in usable
            if algorithm.cuts
            for pieces in range(2, MAX_PIECES + 1)
        ]
    if counts > 2:
        segments = Segments(curve, ())
        told = [algo for algo in flat if told_apart(segments.design(algo)[curve.own][:, :3], curve.seconds[curve.own])]
        shapes += [
            form._replace(reduction=True)
            for form in shapes
            if set(form.algorithms) <= set(told) and not form.logarithmic
        ]
    return sorted(shapes, key=lambda form: form.parameters)


def _shapes(algorithms: tuple[Algorithm, ...]) -> list[Form]:
    shapes = [(pieces, False) for pieces in range(1, MAX_PIECES + 1)] + [(2, True), (3, True)]
    return [Form(algorithms, *shape) for shape in shapes]


def tried(curve: Curve, candidates: Sequence[Form]) -> list[Choice]:
    """Every form fitted to a curve, to it without each size, and without each rank count but the smallest."""
    sizes = _folds(curve.message_bytes, curve.own)
    # Without the smallest count: what a fit is asked for is more ranks, and what tells it for fewer misleads there.
    fewest = curve.own & (curve.ranks == curve.ranks[curve.own].min())
    ranks = [fold for fold in _folds(curve.ranks, curve.own) if not np.any(fold[fewest])]
    splits = _Splits(curve, [np.ones(len(curve), bool), *(~fold for fold in (*sizes, *ranks))], candidates)
    over_ranks = range(1 + len(sizes), 1 + len(sizes) + len(ranks))
    return [
        Choice(
            form.name,
            form.parameters,
            form.reduction,
            splits.pieces(form),
            _held_out(splits, form, range(1, 1 + len(sizes)), sizes),
            _held_out(splits, form, over_ranks, ranks) if ranks else None,
        )
        for form in candidates
    ]


class _Splits:
    """Best splits by form and set of training points: forms that differ in the number of pieces are found together."""

    def __init__(self, curve: Curve, trainings: Sequence[Mask], candidates: Sequence[Form]) -> None:
        self.curve = curve
        cutters = dict.fromkeys(form.cutter for form in candidates)
        self._segments = {cutter: Segments(curve, trainings, cutter) for cutter in cutters}
        of_any_count = grouped(candidates, lambda form: form._replace(pieces=0))
        self._counts = {kin: [form.pieces for form in forms] for kin, forms in of_any_count.items()}
        self._found: dict[tuple[Form, int], dict[int, list[Fitted] | None]] = {}

    def of(self, form: Form, training: int) -> list[Fitted] | None:
        """The best pieces of a form on a set of training points."""
        kin = form._replace(pieces=0)
        if (kin, training) not in self._found:
            counts = self._counts[kin]
            best = self._segments[form.cutter].best(training, form, counts)
            self._found[kin, training] = dict(zip(counts, best, strict=True))
        return self._found[kin, training][form.pieces]

    def pieces(self, form: Form) -> tuple[Piece, ...] | None:
        """The best pieces of a form on all points."""
        fitted = self.of(form, 0)
        return None if fitted is None else tuple(piece for piece, _, _ in fitted)

    def predict(self, form: Form, training: int, chosen: Mask) -> Floats | None:
        """Seconds at the chosen points by a form fitted to a set of training points; None where it cannot be."""
        fitted = self.of(form, training)
        return None if fitted is None else self._segments[form.cutter].predict(fitted, chosen)


def _held_out(splits: _Splits, form: Form, trainings: range, folds: Sequence[Mask]) -> Floats | None:
    predicted = np.full(len(splits.curve), np.nan)
    for training, fold in zip(trainings, folds, strict=True):
        chosen = fold & splits.curve.own
        seconds = splits.predict(form, training, chosen)
        if seconds is None:
            return None
        predicted[chosen] = seconds
    return predicted


def _counts_apart(curve: Curve, algorithm: Algorithm) -> Choice:
    """Each rank count by itself, as where a node's links differ from set to set of its devices.

    Between counts time runs straight over their logarithms, beyond the algorithm goes on.
    """
    counts = np.unique(curve.ranks[curve.own])
    held_out = np.full(len(curve), np.nan)
    chosen: dict[float, Choice] = {}
    for count in counts:
        of_count = curve.own & (curve.ranks == count)
        part = curve.part(of_count)
        choices = tried(part, _shapes((algorithm,)))
        chosen[count] = choices[simplest(choices, part)]
        if chosen[count].held_out is not None:
            held_out[of_count] = chosen[count].held_out
    by_count = {
        count: tuple(piece._replace(at_ranks=count) for piece in choice.pieces or ())
        for count, choice in chosen.items()
    }
    held_out_ranks = np.full(len(curve), np.nan)
    for count in counts[1:]:
        of_count = curve.own & (curve.ranks == count)
        others = tuple(piece for other, pieces in by_count.items() if other != count for piece in pieces)
        held_out_ranks[of_count] = piecewise_seconds(others, curve.ranks[of_count], curve.message_bytes[of_count])
    return Choice(
        name=f"each rank count by itself, {algorithm.name} beyond",
        parameters=sum(choice.parameters for choice in chosen.values()),
        reduction=False,
        pieces=tuple(piece for pieces in by_count.values() for piece in pieces) if all(by_count.values()) else None,
        held_out=held_out if np.isfinite(held_out[curve.own]).all() else None,
        held_out_ranks=held_out_ranks
        if np.isfinite(held_out_ranks[curve.own & (curve.ranks > counts[0])]).all()
        else None,
    )


def _folds(values: Floats, measured: Mask) -> list[Mask]:
    """Masks of the points left out together: one distinct value of own points each, or every 24th of many."""
    distinct = np.unique(values[measured])
    count = min(len(distinct), MAX_FOLDS)
    return [np.isin(values, distinct[fold::count]) for fold in range(count)]


def _errors_by_size(predicted: Floats, curve: Curve) -> Floats:
    """Mean error of the own points of each size that were predicted, as precise points say it."""
    at_level, told = curve.own, np.isfinite(predicted[curve.own])
    error = (
        np.abs(predicted[at_level] / curve.seconds[at_level] - 1)
        * curve.precision[at_level]
        / curve.precision[at_level].mean()
    )
    _, index = np.unique(curve.message_bytes[at_level], return_inverse=True)
    sums = np.bincount(index[told], error[told], minlength=index.max() + 1)
    counts = np.bincount(index[told], minlength=index.max() + 1)
    # A size that only the smallest rank count was measured at is as good as the others.
    return np.asarray(np.where(counts, sums / np.maximum(counts, 1), sums.sum() / counts.sum()))


def simplest(choices: Sequence[Choice], curve: Curve) -> int:
    """Index of the choice with the fewest parameters among those that noise keeps from being told from the best.

    Differences are paired by size. Of as many parameters the one with the least error is taken.
    """
    errors = {index: choice.errors_by_size(curve) for index, choice in enumerate(choices)}
    tables = {index: table for index, table in errors.items() if table is not None}
    if not tables:
        return 0
    means = {index: float(table.mean()) for index, table in tables.items()}
    best = tables[min(tables, key=means.__getitem__)]
    good = []
    for index, table in tables.items():
        paired = table - best
        if float(paired.mean()) <= max(min(_standard_error(paired), curve.noise), _ARITHMETIC):
            good.append(index)
    return min(good, key=lambda index: (choices[index].parameters, means[index] // _ARITHMETIC, index))


def _standard_error(paired: Floats) -> float:
    return float(np.std(paired, ddof=1) / np.sqrt(len(paired))) if len(paired) > 1 else 0.0
