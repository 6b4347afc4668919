"""Fits of collectives: alpha and beta per (library, operation, level) on the algorithms' cost terms.

What is chosen (pieces over sizes, the algorithm, a reduction term of its own) is chosen by the error on points that
the fit had not seen, and by the one-standard-error rule (Hastie, Tibshirani and Friedman, The Elements of Statistical
Learning, section 7.10): the simplest candidate whose error is within one standard error of the best one's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from calibrate.blocks import between_block_sd, block_sd, quantile_covariance
from calibrate.communication_time import Piece, piecewise_seconds
from calibrate.profile import CommunicationFit, CommunicationPoint
from calibrate.regression import fit_relative, relative_covariance, told_apart
from paradl_bench.spec.cost_terms import Algorithm, CollectiveOperation
from paradl_bench.spec.measurement import CollectiveSamples
from paradl_bench.spec.registry import lookup
from paradl_bench.spec.statistics import IQR_TO_SD, MAD_TO_SD
from paradl_bench.terminal import progress

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

MIN_SIZES_OF_PIECE = 3
"""Two parameters and one point to check them."""
MAX_PIECES = 4
MAX_FOLDS = 24
"""Each size is left out in turn; of longer sweeps every 24th size at once."""
DRAWS = 200
_ARITHMETIC = 1e-6
"""Relative errors closer than this differ by rounding."""

_TOOLS = ("torch", "nccl-tests", "rccl-tests", "osu", "imb")

_TRACES = ("kineto",)
"""Tools that watch a run: a collective's time on a rank begins when that rank comes to it."""

Key = tuple[str, str, str]
"""(library, operation, level)."""


class Variant(NamedTuple):
    """What measurements of one collective may differ in besides ranks and size; unlike ones do not mix in a fit."""

    tool: str
    dtype: str
    buffers: str

    @property
    def words(self) -> str:
        """As a note names it."""
        return " ".join(part.replace("_", " ") for part in self if part)


class Point(NamedTuple):
    """One (ranks, size): seconds of each call, an array a block."""

    ranks: int
    message_bytes: int
    blocks: tuple[Floats, ...]

    @property
    def seconds(self) -> float:
        """Median over all calls."""
        return float(np.median(np.concatenate(self.blocks)))


@dataclass(frozen=True, slots=True)
class Curve:
    """Points of one (library, operation, level) as arrays.

    Attributes:
        noise: relative standard deviation of a point's time, as the samples show it (median over points).
        precision: how much each point counts in the fit and in choosing it (:func:`_precision`).
        drawn: (draws, points) times under resampled blocks.
    """

    ranks: Floats
    message_bytes: Floats
    seconds: Floats
    noise: float
    precision: Floats
    drawn: Floats


def fit_communication(
    samples: Iterable[CollectiveSamples], operations: Mapping[str, CollectiveOperation]
) -> tuple[tuple[CommunicationFit, ...], tuple[str, ...]]:
    """Fit every (library, operation, level).

    Args:
        operations: by name, with the algorithms' cost terms.

    Returns:
        The fits, and what was left out and why.

    Raises:
        UserError: an operation that has no cost terms; one that was imported is left out instead.
    """
    fits: list[CommunicationFit] = []
    notes: list[str] = []
    groups, of_runs = _by_key(samples)
    notes += [f"{' '.join(key)}: times from traces of runs hold the wait for other ranks: left out" for key in of_runs]
    with progress("fitting", len(groups)) as bar:
        for key, group in sorted(groups.items()):
            bar.describe(f"fitting {' '.join(key)}")
            if key[1] not in operations and all(sample.source for sample in group):
                notes.append(f"{' '.join(key)}: imported, and no cost terms say how it grows: left out")
                bar.advance()
                continue
            operation = lookup(dict(operations), key[1], "collective")
            points, more = _points(key, group, operation)
            notes += more
            sizes = len({point.message_bytes for point in points})
            if sizes >= MIN_SIZES_OF_PIECE:
                fits += fit_points(key, points, operation)
            else:
                notes.append(f"{' '.join(key)}: measured at {sizes} sizes; a fit needs {MIN_SIZES_OF_PIECE}: left out")
            bar.advance()
    return tuple(fits), tuple(notes)


def _by_key(samples: Iterable[CollectiveSamples]) -> tuple[dict[Key, list[CollectiveSamples]], list[Key]]:
    """Sweeps by what is fitted, and the keys of what was seen in traces of runs, which is not."""
    groups: dict[Key, list[CollectiveSamples]] = {}
    of_runs: set[Key] = set()
    for sample in samples:
        key = (sample.library, sample.operation, sample.level)
        if sample.tool in _TRACES:
            of_runs.add(key)
        elif sample.ranks > 1:
            groups.setdefault(key, []).append(sample)
    return groups, sorted(of_runs)


def _points(
    key: Key, samples: list[CollectiveSamples], operation: CollectiveOperation
) -> tuple[list[Point], list[str]]:
    """Points of one tool, dtype and way of buffers: those that :func:`_preference` puts first."""
    variants: dict[Variant, list[CollectiveSamples]] = {}
    for sample in samples:
        variants.setdefault(Variant(sample.tool, sample.dtype, sample.buffers), []).append(sample)
    chosen = min(variants, key=lambda name: _preference(name, len(variants[name]), operation))
    notes = [
        f"{' '.join(key)}: fitted on {chosen.words}; what {other.words} measured is left out"
        for other in sorted(variants)
        if other != chosen
    ]
    notes += _means_noted(key, variants[chosen])
    calls: dict[tuple[int, int], list[Floats]] = {}
    for sample in variants[chosen]:
        calls.setdefault((sample.ranks, sample.message_bytes), []).append(operation.call_seconds(sample.samples_s))
    points = [Point(*place, tuple(blocks)) for place, blocks in sorted(calls.items())]
    timed = [point for point in points if point.seconds > 0 and point.message_bytes > 0]
    if len(timed) < len(points):
        notes.append(f"{' '.join(key)}: {len(points) - len(timed)} sizes of no bytes or no time are left out")
    wrong = sum(not sample.verified for sample in variants[chosen])
    if wrong:
        notes.append(f"{' '.join(key)}: the results of {wrong} of {len(variants[chosen])} records were not verified")
    return timed, notes


def _preference(variant: Variant, samples: int, operation: CollectiveOperation) -> tuple[object, ...]:
    """What decides between variants, the smallest first.

    torch's measurements before those of other tools, since they are made as a run's collectives are; the buffers that
    such runs use; the most samples.
    """
    tool = _TOOLS.index(variant.tool) if variant.tool in _TOOLS else len(_TOOLS)
    usual = "in_place" if operation.in_place else "out_of_place"
    return tool, variant.buffers not in ("", usual), -samples, variant


def _means_noted(key: Key, samples: Sequence[CollectiveSamples]) -> list[str]:
    """What means over many calls can't say of a fit's interval."""
    means = [sample for sample in samples if sample.calls_per_sample > 1]
    if not means:
        return []
    points = {(sample.ranks, sample.message_bytes) for sample in means}
    calls = sorted({sample.calls_per_sample for sample in means})
    of = str(calls[0]) if len(calls) == 1 else f"{calls[0]} to {calls[-1]}"
    spread = (
        "spread between runs is known where several were imported"
        if len(points) < len(means)
        else "no spread between calls or runs is known"
    )
    return [
        f"{' '.join(key)}: {len(means)} of {len(samples)} times are means over {of} calls; {spread}, and the interval"
        " is that of the residuals"
    ]


def build_curve(points: Sequence[Point], *, seed: int = 0) -> Curve:
    """Arrays of the points, and their times under resampled blocks.

    All points draw the same blocks, since what slows a block slows all sizes in it; a point of one block draws
    repetitions. Deviations are stretched by sqrt(n / (n - 1)) of n blocks, which resampling alone leaves out.
    """
    generator = np.random.default_rng(seed)
    seconds = np.array([point.seconds for point in points])
    picks = generator.random((DRAWS, max(len(point.blocks) for point in points)))
    drawn = np.empty((DRAWS, len(points)))
    for index, point in enumerate(points):
        drawn[:, index] = _draw_medians(point.blocks, picks, generator)
    drawn = np.maximum(drawn, seconds * 1e-3)
    relative_sd = np.sqrt(np.diag(quantile_covariance(drawn / seconds)))
    return Curve(
        ranks=np.array([point.ranks for point in points], float),
        message_bytes=np.array([point.message_bytes for point in points], float),
        seconds=seconds,
        noise=float(np.median(relative_sd)),
        precision=_precision(np.maximum(relative_sd, [_spread_of_calls(point) for point in points])),
        drawn=drawn,
    )


def _spread_of_calls(point: Point) -> float:
    """Interquartile range of single calls as a relative standard deviation, over the root of the number of blocks.

    A median of calls that take one of two times hardly moves from draw to draw while one of them has the majority.
    """
    low, high = np.quantile(np.concatenate(point.blocks), [0.25, 0.75])
    return IQR_TO_SD * float(high - low) / point.seconds / float(np.sqrt(len(point.blocks)))


def _precision(relative_sd: Floats) -> Floats:
    """Weights of points from the relative standard deviations of their times: min(1, (2 quartile / sd)^2).

    Inverse variance for points that are noisier than twice the lower quartile over points; the others count in full,
    since a point's own spread is known from a few blocks only and small messages are to count as much as large ones.
    So sizes whose time jumps between two modes (gloo's small messages, when its threads share a pinned core) do not
    decide a line that the others fix.
    """
    quartile = max(float(np.quantile(relative_sd, 0.25)), 1e-6)
    return np.asarray(np.minimum(1.0, (2 * quartile / np.maximum(relative_sd, 1e-6)) ** 2))


def _draw_medians(blocks: tuple[Floats, ...], picks: Floats, generator: np.random.Generator) -> Floats:
    count = len(blocks)
    if count == 1:
        calls = blocks[0]
        medians = np.median(generator.choice(calls, size=(len(picks), calls.size)), axis=1)
        return np.asarray(medians)
    longest = max(block.size for block in blocks)
    table = np.stack([np.resize(block, longest) for block in blocks])
    chosen = table[(picks[:, :count] * count).astype(int)].reshape(len(picks), -1)
    middle = np.median(np.concatenate(blocks))
    return np.asarray(middle + (np.median(chosen, axis=1) - middle) * np.sqrt(count / (count - 1)))


@dataclass(slots=True)
class Fitter:
    """Fits pieces over sizes to subsets of a curve, remembering those fitted before.

    Attributes:
        algorithms: each piece takes the one of these that fits it best (libraries use trees for small messages and
            rings for large ones).
        reduction: whether the reduction term (gamma_r) is fitted apart from beta.
    """

    curve: Curve
    algorithms: tuple[Algorithm, ...]
    reduction: bool
    _known: dict[bytes, tuple[Algorithm, Floats, float]] = field(default_factory=dict)
    _designs: dict[str, Floats] = field(default_factory=dict)

    def design(self, algorithm: Algorithm) -> Floats:
        """(points, 3) cost terms; the third column is 0 where the reduction is part of beta."""
        if algorithm.name not in self._designs:
            terms = algorithm.terms(self.curve.ranks, self.curve.message_bytes)
            gamma = terms.gamma_bytes if self.reduction else np.zeros_like(terms.gamma_bytes)
            self._designs[algorithm.name] = np.stack([terms.alpha_count, terms.beta_bytes, gamma], axis=1)
        return self._designs[algorithm.name]

    def parameters(self, chosen: Mask) -> tuple[Algorithm, Floats, float]:
        """Algorithm and (alpha, beta, gamma) that fit the chosen points best, and their weighted residual."""
        key = chosen.tobytes()
        if key not in self._known:
            seconds = self.curve.seconds[chosen]
            fits = []
            for algorithm in self.algorithms:
                design = self.design(algorithm)[chosen]
                precision = self.curve.precision[chosen]
                solution = fit_relative(design, seconds, noise=self.curve.noise, precision=precision)
                fits.append((algorithm, solution, float(precision @ np.abs(design @ solution / seconds - 1))))
            self._known[key] = min(fits, key=lambda fit: fit[2])
        return self._known[key]

    def pieces(self, count: int, training: Mask) -> tuple[Piece, ...] | None:
        """The best split of the training points into ``count`` pieces over sizes; None where there are too few sizes.

        A split under which time would fall from one piece to the next, at a rank count that was measured, is no
        candidate.
        """
        sizes = np.unique(self.curve.message_bytes[training])
        known: dict[tuple[int, int], tuple[Piece, float]] = {}
        best: tuple[float, tuple[Piece, ...]] | None = None
        for cuts in _splits(sizes, count):
            edges = [0, *cuts, len(sizes)]
            ends = list(itertools.pairwise(edges))
            for a, b in ends:
                if (a, b) not in known:
                    known[a, b] = self._piece(training, float(sizes[a]), float(sizes[b - 1]))
            loss = sum(known[end][1] for end in ends)
            pieces = tuple(known[end][0] for end in ends)
            if (best is None or loss < best[0]) and self._grows(pieces):
                best = loss, pieces
        return best[1] if best else None

    def _piece(self, training: Mask, low: float, high: float) -> tuple[Piece, float]:
        inside = training & (self.curve.message_bytes >= low) & (self.curve.message_bytes <= high)
        algorithm, solution, loss = self.parameters(inside)
        alpha_s, beta_s_per_byte, gamma_s_per_byte = map(float, solution)
        return Piece(algorithm, low, high, alpha_s, beta_s_per_byte, gamma_s_per_byte), loss

    def _grows(self, pieces: tuple[Piece, ...]) -> bool:
        ranks = np.unique(self.curve.ranks)
        return all(
            bool(np.all(upper.seconds(ranks, upper.low_bytes) >= lower.seconds(ranks, lower.high_bytes)))
            for lower, upper in itertools.pairwise(pieces)
        )

    def held_out(self, count: int, folds: Sequence[Mask]) -> Floats | None:
        """Seconds predicted for each point by the fit without its fold; None where a fold leaves too few sizes."""
        predicted = np.full(len(self.curve.seconds), np.nan)
        for fold in folds:
            pieces = self.pieces(count, ~fold)
            if pieces is None:
                return None
            predicted[fold] = piecewise_seconds(pieces, self.curve.ranks[fold], self.curve.message_bytes[fold])
        return predicted


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


def _folds(values: Floats) -> list[Mask]:
    """Masks of the points left out together: one distinct value each, or every 24th of many."""
    distinct, index = np.unique(values, return_inverse=True)
    count = min(len(distinct), MAX_FOLDS)
    return [np.asarray(index % count == fold) for fold in range(count)]


class Choice(NamedTuple):
    """A fitted candidate and what it predicted for points that it had not seen."""

    fitter: Fitter
    piece_count: int
    held_out: Floats
    held_out_ranks: Floats | None


def choose(curve: Curve, operation: CollectiveOperation, library: str) -> Choice:
    """The algorithm, its number of pieces, and whether the reduction is apart, by held-out error.

    Sizes left out in turn decide the pieces. Where several rank counts were measured, counts left out in turn decide
    the algorithm (one for all sizes, or each piece its own), and from three counts on whether gamma_r is told from
    beta; else the one that the library is known to run is taken.
    """
    counts = len(np.unique(curve.ranks))
    expected = operation.algorithm_of(library)
    algorithms = sorted(operation.algorithms.values(), key=lambda algorithm: algorithm.name != expected)
    candidates: list[tuple[Algorithm, ...]] = [(algorithm,) for algorithm in algorithms]
    if len(candidates) > 1:
        candidates.append(tuple(algorithms))
    if counts == 1:
        candidates = candidates[:1]
    fitters = [Fitter(curve, algorithms, False) for algorithms in candidates]
    if counts > 2:
        apart = [Fitter(curve, algorithms, True) for algorithms in candidates]
        fitters += [
            fitter
            for fitter in apart
            if all(told_apart(fitter.design(algorithm), curve.seconds) for algorithm in fitter.algorithms)
        ]
    choices = [_choose_pieces(fitter) for fitter in fitters]
    if len(choices) == 1:
        return choices[0]
    return choices[_simplest([choice.held_out_ranks for choice in choices], curve, curve.ranks)]


def _choose_pieces(fitter: Fitter) -> Choice:
    curve = fitter.curve
    folds = _folds(curve.message_bytes)
    predicted: list[Floats] = []
    for count in range(1, MAX_PIECES + 1):
        guess = fitter.held_out(count, folds)
        if guess is None:
            break
        predicted.append(guess)
    count = _simplest(predicted, curve, curve.message_bytes) + 1
    over_ranks = _folds(curve.ranks)
    held_out_ranks = fitter.held_out(count, over_ranks) if len(over_ranks) > 1 else None
    return Choice(fitter, count, predicted[count - 1], held_out_ranks)


def _simplest(predicted: Sequence[Floats | None], curve: Curve, groups: Floats) -> int:
    """Index of the first candidate whose held-out error is within one standard error of the best one's (paired)."""
    distinct = np.unique(groups)

    def errors(guess: Floats) -> Floats:
        error = np.abs(guess / curve.seconds - 1) * curve.precision / curve.precision.mean()
        return np.array([error[groups == value].mean() for value in distinct])

    table = [errors(guess) if guess is not None else np.full(len(distinct), np.inf) for guess in predicted]
    best = min(table, key=lambda row: float(row.mean()))
    for index, row in enumerate(table):
        if not np.all(np.isfinite(row)):
            continue
        difference = row - best
        standard_error = float(np.std(difference, ddof=1)) / np.sqrt(len(distinct)) if len(distinct) > 1 else 0.0
        if float(difference.mean()) <= max(standard_error, _ARITHMETIC):
            return index
    return 0


def fit_points(key: Key, points: Sequence[Point], operation: CollectiveOperation) -> list[CommunicationFit]:
    """Fits of one (library, operation, level), one a regime, from at least three sizes."""
    curve = build_curve(points)
    choice = choose(curve, operation, key[0])
    everything = np.ones(len(points), bool)
    # Every split of all points may fall where those of the folds did not; one piece always stands.
    pieces = choice.fitter.pieces(choice.piece_count, everything) or choice.fitter.pieces(1, everything) or ()
    return [_describe(key, points, choice, pieces, index) for index in range(len(pieces))]


def _describe(
    key: Key, points: Sequence[Point], choice: Choice, pieces: tuple[Piece, ...], index: int
) -> CommunicationFit:
    fitter, curve, piece = choice.fitter, choice.fitter.curve, pieces[index]
    inside = (curve.message_bytes >= piece.low_bytes) & (curve.message_bytes <= piece.high_bytes)
    indices = [int(index) for index in np.flatnonzero(inside)]
    fitted = piecewise_seconds(pieces, curve.ranks, curve.message_bytes)
    library, operation, level = key
    return CommunicationFit(
        library=library,
        operation=operation,
        algorithm=piece.algorithm.name,
        level=level,
        regime=_regime(pieces, index),
        alpha_s=piece.alpha_s,
        beta_s_per_byte=piece.beta_s_per_byte,
        gamma_s_per_byte=piece.gamma_s_per_byte,
        covariance=_covariance(fitter, piece, inside),
        bytes_range=(int(piece.low_bytes), int(piece.high_bytes)),
        ranks_range=(int(curve.ranks[inside].min()), int(curve.ranks[inside].max())),
        residual_relative_median=_median_error(fitted, curve, inside),
        held_out_relative_error=_median_error(choice.held_out, curve, inside),
        held_out_ranks_relative_error=(
            None if choice.held_out_ranks is None else _median_error(choice.held_out_ranks, curve, inside)
        ),
        block_relative_sd=_common_drift([points[i] for i in indices], curve.precision[inside]),
        points=int(inside.sum()),
        measured=tuple(
            CommunicationPoint(
                ranks=points[i].ranks,
                message_bytes=points[i].message_bytes,
                measured_s=float(curve.seconds[i]),
                fitted_s=float(fitted[i]),
                held_out_s=float(choice.held_out[i]),
            )
            for i in indices
        ),
    )


def _common_drift(points: Sequence[Point], precision: Floats) -> float:
    """Standard deviation between blocks of what all sizes share: their weighted mean time relative to their medians.

    What each size has by itself is in the fit's covariance; as drift of everything it would count twice, and, where
    single sizes jump between two modes, for far too much.
    """
    count = min(len(point.blocks) for point in points)
    if count < 2:
        return float(np.median([between_block_sd(point.blocks) for point in points]))
    relative = np.array([[np.median(block) / point.seconds for block in point.blocks[:count]] for point in points])
    return block_sd(precision @ relative / precision.sum())


def _median_error(predicted: Floats, curve: Curve, inside: Mask) -> float:
    return float(np.median(np.abs(predicted[inside] / curve.seconds[inside] - 1)))


def _regime(pieces: tuple[Piece, ...], index: int) -> str:
    low, high = int(pieces[index].low_bytes), int(pieces[index].high_bytes)
    if len(pieces) == 1:
        return "all"
    if index == 0:
        return f"<={high}"
    return f">={low}" if index == len(pieces) - 1 else f"{low}..{high}"


def _covariance(fitter: Fitter, piece: Piece, inside: Mask) -> tuple[tuple[float, float], tuple[float, float]]:
    """Covariance of (alpha, beta): refits of resampled times, and what the line misses beyond their spread."""
    curve, design = fitter.curve, fitter.design(piece.algorithm)[inside]
    precision = curve.precision[inside]
    drawn = np.stack(
        [fit_relative(design, times[inside], noise=curve.noise, precision=precision) for times in curve.drawn]
    )
    sampling = quantile_covariance(drawn[:, :2])
    solution = np.array([piece.alpha_s, piece.beta_s_per_byte, piece.gamma_s_per_byte])
    free = solution > 0
    seconds = curve.seconds[inside]
    spare = max(len(seconds) - int(free.sum()), 1)
    residual_sd = MAD_TO_SD * float(np.median(np.abs(design @ solution / seconds - 1)))
    excess = max(0.0, residual_sd**2 * len(seconds) / spare - curve.noise**2)
    total = sampling + relative_covariance(design, seconds, excess, free)[:2, :2]
    return (float(total[0, 0]), float(total[0, 1])), (float(total[1, 0]), float(total[1, 1]))
