"""Regressors of one group of kernels, each tried on kernels that it was not fitted on: split, candidates, choice.

Kernels are split as the paper splits them, 64/16/20, by shape, so that no shape stands on two sides. Candidates are
fitted on the first part; the second chooses between them and says whether times drifted in the course of the sweep; the
third is read once, for the errors that are reported. Trees are fitted again on the first two parts before that; the
network can't, since it needs its validation part to stop.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibrate.fitting.kernels.kernel_drift import fit_drift, hats
from calibrate.kernels.features import (
    Kernels,
    kernels_of,
    log_sizes,
    log_sizes_and_flops,
    process_features,
    roofline_features,
)
from calibrate.kernels.files import Arrays
from calibrate.kernels.mlp import train_mlp
from calibrate.kernels.model import (
    ON_ROOFLINE,
    KernelCandidate,
    Regressor,
    log_times,
    roofline_s,
    with_typical_drift,
)
from calibrate.kernels.process import fit_process
from calibrate.kernels.trees import PARAMETERS, UNTUNED, UNTUNED_ROUNDS, evaluate_trees, grow_trees
from paradl_bench.core.statistics import Floats, grouped
from paradl_bench.network.kernel import KernelSamples, KernelShape

Ints = NDArray[np.int64]

_DRIFT_ROUNDS = 150
_DRIFT_PAYS = 0.9
"""Drift is taken for real where it lowers the validation error at least by a tenth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Kernels of one kind, stage, settings and dtype, each shape once, in the order in which they were measured.

    ``names`` are of the sizes that differ between them, ``order`` is the place in the sweep, 0 to 1.
    """

    shapes: Sequence[KernelShape]
    dtype: str
    kernels: Kernels
    names: tuple[str, ...]
    seconds: Floats
    order: Floats

    def at(self, rows: Ints) -> Timed:
        """Some of them; the names stay."""
        shapes = [self.shapes[row] for row in rows]
        seconds, order = self.seconds[rows], self.order[rows]
        return replace(self, shapes=shapes, kernels=kernels_of(shapes), seconds=seconds, order=order)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Regressors fitted on some kernels: arrays, the roofline under them, and the drift taken out."""

    arrays: Arrays
    roofline: tuple[float, float, float]
    drift_s: tuple[float, ...] = ()

    def beside(self, arrays: Arrays) -> Fitted:
        """These and others' arrays."""
        return replace(self, arrays=self.arrays | arrays)

    def seconds(self, model: Regressor, timed: Timed, *, in_order: bool = False) -> Floats:
        """Estimates of kernels; with ``in_order`` with the drift of their place in the sweep, else what is typical."""
        base_s = roofline_s(timed.kernels, *self.roofline)
        kernel_s = np.exp(log_times(model, self.arrays, timed.kernels, timed.names, base_s))
        if model not in ON_ROOFLINE:
            return kernel_s
        if in_order and self.drift_s:
            return np.asarray(kernel_s + hats(timed.order) @ np.array(self.drift_s))
        return with_typical_drift(kernel_s, self.drift_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """All candidates on one split.

    Attributes:
        fitted: on the 64%. refitted: trees on the 80%.
        in_order_re: mean |RE| of the trees on the held-out part with the drift of its place known.
    """

    candidates: tuple[KernelCandidate, ...]
    fitted: Fitted
    refitted: Fitted
    training: Timed
    validation: Timed
    held_out: Timed
    in_order_re: float

    @property
    def chosen(self) -> Regressor:
        """Of what the profile can keep, the candidate with the least validation error."""
        return min(self.candidates, key=lambda candidate: candidate.validation_re).model


def timed_kernels(records: Iterable[KernelSamples]) -> tuple[Timed, ...]:
    """Records by kind, stage, settings and dtype; of blocks of a shape the median counts."""
    groups = grouped(records, _kind_of)
    return tuple(_timed(groups[kind]) for kind in sorted(groups, key=str))


def _kind_of(record: KernelSamples) -> tuple[object, ...]:
    shape = record.shape
    return shape.kind, shape.stage, tuple(sorted(shape.settings.items())), tuple(shape.sizes), record.dtype


def _timed(records: Sequence[KernelSamples]) -> Timed:
    of_shapes = list(grouped(records, lambda record: tuple(record.shape.sizes.values())).values())
    medians = [float(np.median([statistics.median(block.samples_s) for block in blocks])) for blocks in of_shapes]
    kept = [(blocks[0].shape, seconds) for blocks, seconds in zip(of_shapes, medians, strict=True) if seconds > 0]
    return timed_shapes([shape for shape, _ in kept], [seconds for _, seconds in kept], records[0].dtype)


def timed_shapes(shapes: Sequence[KernelShape], seconds: Sequence[float], dtype: str) -> Timed:
    """Shapes in the order of measuring, each once, with their times."""
    kernels = kernels_of(shapes)
    names = tuple(name for name, values in kernels.sizes.items() if values.min() < values.max())
    order = np.linspace(0, 1, len(shapes)) if len(shapes) > 1 else np.zeros(len(shapes))
    return Timed(shapes=shapes, dtype=dtype, kernels=kernels, names=names, seconds=np.array(seconds), order=order)


def try_candidates(timed: Timed, *, seed: int, with_mlp: bool = True) -> Trial:
    """Fit all regressors on 64% of the kernels and read their errors off the others."""
    shuffled = np.random.default_rng(seed).permutation(len(timed.seconds))
    held, watched = round(0.2 * len(shuffled)), round(0.16 * len(shuffled))
    held_out, validation, training, both = (
        timed.at(np.sort(rows))
        for rows in (shuffled[:held], shuffled[held : held + watched], shuffled[held + watched :], shuffled[held:])
    )
    network = _mlp(training, validation, seed) if with_mlp else {}
    models: list[Regressor] = [*ON_ROOFLINE, "plain trees", *(("mlp", "trees and mlp") if with_mlp else ())]
    fitted = _with_drift_where_it_pays(training, validation, seed)
    fitted = fitted.beside(fit_smooth(training, fitted, seed) | fit_plain_trees(training, seed) | network)
    refitted = fit_trees(both, fitted.drift_s, seed)
    smooth = fit_smooth(both, refitted, seed, known=fitted)
    refitted = refitted.beside(smooth | fit_plain_trees(both, seed) | network)
    return Trial(
        candidates=tuple(_candidate(model, fitted, refitted, validation, held_out) for model in models),
        fitted=fitted,
        refitted=refitted,
        training=training,
        validation=validation,
        held_out=held_out,
        in_order_re=_mean_re(refitted.seconds("trees", held_out, in_order=True), held_out),
    )


def _with_drift_where_it_pays(training: Timed, validation: Timed, seed: int) -> Fitted:
    plain = fit_trees(training, (), seed)
    drifting = fit_trees(training, _drift(training, seed), seed)
    without, with_it = (
        _mean_re(fitted.seconds("trees", validation, in_order=True), validation) for fitted in (plain, drifting)
    )
    return drifting if with_it < _DRIFT_PAYS * without else plain


def _drift(timed: Timed, seed: int) -> tuple[float, ...]:
    roofline = reached(timed)
    base_s = roofline_s(timed.kernels, *roofline)
    features = roofline_features(timed.kernels, timed.names)[1]
    half = np.random.default_rng(seed).permutation(len(base_s)) % 2 == 0

    def fit_unseen(kernel_s: Floats) -> Floats:
        log_ratio = np.log(kernel_s / base_s)
        estimated = np.zeros(len(base_s))
        for part in (half, ~half):
            faster = {**PARAMETERS, "learning_rate": 0.1}
            arrays = grow_trees(features[~part], log_ratio[~part], seed=seed, rounds=_DRIFT_ROUNDS, parameters=faster)
            estimated[part] = evaluate_trees(arrays, features[part])
        return np.asarray(base_s * np.exp(estimated))

    return fit_drift(timed.order, timed.seconds, fit_unseen)


def reached(timed: Timed) -> tuple[float, float, float]:
    """(floor, peak FLOP/s, bytes/s) that the kernels reached, but for the best thousandth, which may be an error."""
    peak, bandwidth = (np.quantile(work / timed.seconds, 0.999) for work in (timed.kernels.flops, timed.kernels.bytes))
    return float(np.quantile(timed.seconds, 0.005)), float(peak), float(bandwidth)


def fit_trees(timed: Timed, drift_s: tuple[float, ...], seed: int) -> Fitted:
    """Trees on roofline features, fitted to what the drift leaves of the times."""
    roofline = reached(timed)
    features = roofline_features(timed.kernels, timed.names)[1]
    arrays = grow_trees(features, _log_ratio(timed, roofline, drift_s), seed=seed)
    return Fitted(arrays=prefixed("trees", arrays), roofline=roofline, drift_s=drift_s)


def fit_smooth(timed: Timed, trees: Fitted, seed: int, *, known: Fitted | None = None) -> Arrays:
    """The Gaussian process over the roofline of trees; length scales are those of a ``known`` fit to some kernels."""
    learned = None if known is None else {name: known.arrays[f"process/{name}"] for name in ("length", "variances")}
    target = _log_ratio(timed, trees.roofline, trees.drift_s)
    features = process_features(timed.kernels, timed.names)
    return prefixed("process", fit_process(features, target, seed=seed, known=learned))


def _log_ratio(timed: Timed, roofline: tuple[float, float, float], drift_s: tuple[float, ...]) -> Floats:
    kernel_s = timed.seconds
    if drift_s:
        kernel_s = np.maximum(kernel_s - hats(timed.order) @ np.array(drift_s), 0.3 * roofline[0])
    return np.asarray(np.log(kernel_s / roofline_s(timed.kernels, *roofline)))


def fit_plain_trees(timed: Timed, seed: int) -> Arrays:
    """Untuned trees on log sizes and FLOPs, drift and all."""
    inputs = log_sizes_and_flops(timed.kernels, timed.names)
    grown = grow_trees(inputs, np.log(timed.seconds), seed=seed, rounds=UNTUNED_ROUNDS, parameters=UNTUNED)
    return prefixed("plain", grown)


def _mlp(training: Timed, validation: Timed, seed: int) -> Arrays:
    parts = [log_sizes(part.kernels, part.names) for part in (training, validation)]
    logs = [np.log(part.seconds) for part in (training, validation)]
    return prefixed("mlp", train_mlp(parts[0], logs[0], parts[1], logs[1], seed=seed))


def prefixed(prefix: str, arrays: Mapping[str, NDArray[Any]]) -> Arrays:
    """Arrays under names that tell one regressor's from another's."""
    return {f"{prefix}/{name}": array for name, array in arrays.items()}


def _mean_re(estimated: Floats, timed: Timed) -> float:
    return float(np.mean(np.abs(estimated / timed.seconds - 1)))


def _candidate(
    model: Regressor, fitted: Fitted, refitted: Fitted, validation: Timed, held_out: Timed
) -> KernelCandidate:
    estimated = refitted.seconds(model, held_out)
    return KernelCandidate(
        model=model,
        validation_re=_mean_re(fitted.seconds(model, validation), validation),
        held_out_re=_mean_re(estimated, held_out),
        held_out_wre=float(np.mean(np.abs(estimated - held_out.seconds)) / np.mean(held_out.seconds)),
        held_out_bias=float(np.median(estimated / held_out.seconds - 1)),
    )
