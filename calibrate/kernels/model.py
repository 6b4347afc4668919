"""Regressors of kernel times as a profile keeps them, and what they say of a shape; numpy alone.

A time is ``(floor + max(FLOPs / peak, bytes / bandwidth)) * exp(f(shape))``, where f is a sum of trees or a Gaussian
process, or ``exp(network(log sizes))``, or the geometric mean of two of these. Floor, peak and bandwidth are those that
the fitted kernels reached, so that a regressor goes on along the roofline where f has nothing more to say. Where times
grew in the course of a sweep, what was added to them is kept apart (:mod:`calibrate.fitting.kernels.kernel_drift`).

Arrays of all regressors of a profile lie in one NumPy archive beside it, which the profile names with its hash.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from calibrate.kernels.features import (
    Kernels,
    kernels_of,
    log_sizes,
    log_sizes_and_flops,
    process_features,
    roofline_features,
)
from calibrate.kernels.files import Arrays, read_arrays
from calibrate.kernels.mlp import evaluate_mlp
from calibrate.kernels.process import evaluate_process
from calibrate.kernels.trees import check_trees, evaluate_trees
from paradl_bench.core.bounds import Index, PositiveCount, Rate, Relative, Seconds, SignedRelative, SignedSeconds
from paradl_bench.core.errors import UserError
from paradl_bench.core.statistics import Z90, Floats
from paradl_bench.network.kernel import KernelShape, KernelStage

Regressor = Literal["trees", "process", "trees and process", "mlp", "trees and mlp", "plain trees", "share"]
"""Trees on roofline features; a Gaussian process; both, averaged in logs; the paper's network; trees and it; untuned
trees on log sizes and FLOPs; one share of the roofline for all shapes."""
ON_ROOFLINE: tuple[Regressor, ...] = ("trees", "process", "trees and process")
"""Those that are fitted to log(time / roofline), without a sweep's drift."""

INTERVALS, DRIFT = "interval", "drift"
"""Names of arrays: of each regressor that is held beside the chosen one, its ``interval_log``; what trees take for
``drift_s``."""
_SAME_SHAPE = 1e-9
"""Distance of logs of whole numbers: two that differ are farther apart."""
REFUSED_BEYOND = 2
"""Times the largest size seen (or below the smallest by as much) at which a regressor no longer answers."""


class KernelCandidate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How well one regressor did on kernels that it was not fitted on.

    Attributes:
        validation_re: mean |RE| over the 16% that regressors were chosen by; fitted on 64%.
        held_out_re, held_out_wre: mean |RE| and WRE over the 20% that nothing was chosen by, where
            RE = (estimated - measured) / measured, WRE = mean |estimated - measured| / mean measured (KernelMLP).
        held_out_bias: median RE, with its sign.
    """

    model: Regressor
    validation_re: Relative
    held_out_re: Relative
    held_out_wre: Relative
    held_out_bias: SignedRelative


class SizeRange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Smallest and largest of one operand size that was fitted on."""

    name: str
    low: Index
    high: Index

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"{self.name}: low is {self.low}, above high, {self.high}")


class KernelModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A regressor of one kernel kind, stage, settings and dtype.

    Attributes:
        kernels: how many shapes it was fitted on.
        model: what answers; of ``candidates`` the one with the least ``validation_re``.
        inputs: sizes in the order of the features, with their ranges; those with equal ends are no feature.
        floor_s, peak_flops, bandwidth_bytes_per_s: of the roofline, as the kernels reached them.
        interval_log: half width of the 90% interval of log(time), from kernels that the regressor had not seen.
        typical_distance: from an unseen kernel to the nearest fitted one; the interval widens beyond.
        drift_s: what a sweep added to a time from its beginning to its end, at evenly spaced places; empty for nothing.
        file, sha256: archive beside the profile. arrays: the prefix of this regressor's arrays in it.
        published: whose tables these kernels are from, of a profile that comes with the tool; unset for one's own.
    """

    kind: str
    stage: KernelStage
    dtype: str
    kernels: PositiveCount
    model: Regressor
    inputs: tuple[SizeRange, ...]
    floor_s: Seconds
    peak_flops: Rate
    bandwidth_bytes_per_s: Rate
    interval_log: Relative
    typical_distance: Relative
    candidates: tuple[KernelCandidate, ...]
    file: str
    sha256: str
    arrays: str
    settings: dict[str, str] = {}
    drift_s: tuple[SignedSeconds, ...] = ()
    published: str | msgspec.UnsetType = msgspec.UNSET

    @property
    def varied(self) -> tuple[str, ...]:
        """Names of the sizes that are features."""
        return tuple(size.name for size in self.inputs if size.low < size.high)

    @property
    def title(self) -> str:
        """``conv (conv2d) FW fp32``."""
        chosen = f" ({', '.join(self.settings[name] for name in sorted(self.settings))})" if self.settings else ""
        return f"{self.kind}{chosen} {self.stage} {self.dtype}"


class Estimate(NamedTuple):
    """Seconds of one shape, their deviation by the 90% interval, and in words what lies beyond the sizes fitted on.

    ``published`` says whose tables they are from; empty for one's own.
    """

    seconds: float
    relative_sd: float
    extrapolated: tuple[str, ...]
    published: str = ""


def roofline_s(kernels: Kernels, floor_s: float, peak_flops: float, bandwidth: float) -> Floats:
    """floor + max(FLOPs / peak, bytes / bandwidth); a rate of 0 is one that is not known."""
    compute = kernels.flops / peak_flops if peak_flops else 0.0 * kernels.flops
    memory = kernels.bytes / bandwidth if bandwidth else 0.0 * kernels.bytes
    return np.asarray(floor_s + np.maximum(compute, memory))


def log_times(
    model: Regressor, arrays: Mapping[str, NDArray[Any]], kernels: Kernels, names: Sequence[str], base_s: Floats
) -> Floats:
    """log(seconds) as one regressor estimates it; arrays are named as ``trees/leaf``, ``base_s`` is the roofline."""
    if model == "share":
        return np.asarray(np.log(base_s) + arrays["share/log"][0])
    if model == "plain trees":
        return evaluate_trees(_within(arrays, "plain"), log_sizes_and_flops(kernels, names))
    parts = model.split(" and ")
    logs = []
    if "trees" in parts:
        features = roofline_features(kernels, names)[1]
        logs.append(np.log(base_s) + evaluate_trees(_within(arrays, "trees"), features))
    if "process" in parts:
        features = process_features(kernels, names)
        logs.append(np.log(base_s) + evaluate_process(_within(arrays, "process"), features))
    if "mlp" in parts:
        logs.append(evaluate_mlp(_within(arrays, "mlp"), log_sizes(kernels, names)))
    return np.asarray(np.mean(logs, axis=0))


def _within(arrays: Mapping[str, NDArray[Any]], prefix: str) -> Arrays:
    return {name[len(prefix) + 1 :]: array for name, array in arrays.items() if name.startswith(f"{prefix}/")}


def with_typical_drift(kernel_s: Floats, drift_s: Sequence[float]) -> Floats:
    """A kernel's time plus what a sweep adds: of all times of the sweep the one with the least mean |RE|."""
    if not drift_s:
        return kernel_s
    places = np.linspace(0, 1, 101)
    added = np.interp(places, np.linspace(0, 1, len(drift_s)), drift_s)
    times = np.sort(kernel_s[:, None] + added, axis=1)
    # The median under weights of 1/time minimises the sum of |estimate - time| / time.
    weights = np.cumsum(1 / times, axis=1)
    middle = (weights >= weights[:, -1:] / 2).argmax(axis=1)
    return np.asarray(times[np.arange(len(times)), middle])


def estimate(model: KernelModel, shape: KernelShape) -> Estimate | None:
    """What a regressor says of a shape, the archive read where that was not done yet.

    Returns:
        None where the shape lies so far beyond what was fitted on that nobody should trust it.

    Raises:
        UserError: the archive is missing, broken, or not the one that the profile names.
    """
    beyond = _beyond(model, shape)
    if beyond is None:
        return None
    kernels = kernels_of([shape])
    base_s = roofline_s(kernels, model.floor_s, model.peak_flops, model.bandwidth_bytes_per_s)
    arrays = _checked_arrays(model)
    with _fitting(model):
        with np.errstate(all="ignore"):
            kernel_s = np.exp(log_times(model.model, arrays, kernels, model.varied, base_s))
            distance = float(distances(log_sizes(kernels, model.varied), arrays["seen"])[0])
            widening = max(1.0, distance / model.typical_distance) if model.typical_distance else 1.0
            seconds = float(with_typical_drift(kernel_s, model.drift_s)[0])
        relative_sd = math.expm1(model.interval_log) * widening / Z90
        if not (math.isfinite(seconds) and math.isfinite(relative_sd) and seconds > 0):
            raise ValueError(f"a time of {seconds:g} s")
    return Estimate(seconds, relative_sd, beyond, model.published or "")


@contextmanager
def _fitting(model: KernelModel) -> Iterator[None]:
    """Arrays that do not belong to their profile are one line."""
    try:
        yield
    except (KeyError, IndexError, ValueError, OverflowError) as error:
        raise UserError(
            f"{model.file}: arrays {model.arrays!r} do not fit the profile ({error}); run calibrate fit again"
        ) from None


def held_regressors(model: KernelModel) -> tuple[Regressor, ...]:
    """Regressors of a kernel whose arrays the profile holds, the one that its trial chose first.

    Raises:
        UserError: the archive is missing, broken, or not the one that the profile names.
    """
    arrays = _checked_arrays(model)
    return (model.model, *(candidate.model for candidate in model.candidates if _held(model, candidate.model, arrays)))


def _held(model: KernelModel, name: Regressor, arrays: Arrays) -> bool:
    return name != model.model and f"{INTERVALS}/{name}" in arrays


def with_regressor(model: KernelModel, name: Regressor) -> KernelModel | None:
    """The same kernel's regressor of another name, with the interval of its own; None where the profile lacks it.

    Raises:
        UserError: as of :func:`held_regressors`.
    """
    if name == model.model:
        return model
    arrays = _checked_arrays(model)
    if not _held(model, name, arrays):
        return None
    drift = np.ravel(arrays.get(DRIFT, np.zeros(0))) if name in ON_ROOFLINE else np.zeros(0)
    interval = float(arrays[f"{INTERVALS}/{name}"].max(initial=0.0))
    return msgspec.structs.replace(model, model=name, interval_log=interval, drift_s=tuple(drift.tolist()))


def was_fitted_on(model: KernelModel, shape: KernelShape) -> bool:
    """Whether a kernel of this very shape was among those that the regressor was fitted on.

    Raises:
        UserError: as of :func:`held_regressors`.
    """
    if _beyond(model, shape) != ():
        return False
    arrays = _checked_arrays(model)
    with _fitting(model):
        return float(distances(log_sizes(kernels_of([shape]), model.varied), arrays["seen"])[0]) < _SAME_SHAPE


def _checked_arrays(model: KernelModel) -> Arrays:
    with _fitting(model):
        return _read_checked(model.file, model.sha256, model.arrays)


@lru_cache(maxsize=64)
def _read_checked(file: str, sha256: str, prefix: str) -> Arrays:
    arrays = _within(read_arrays(Path(file), sha256), prefix)
    for trees in ("trees", "plain"):
        if grown := _within(arrays, trees):
            check_trees(grown)
    return arrays


def _beyond(model: KernelModel, shape: KernelShape) -> tuple[str, ...] | None:
    words = []
    for swept in model.inputs:
        size = shape.sizes.get(swept.name)
        if size is None:
            return None
        if swept.low <= size <= swept.high:
            continue
        far = size > swept.high * REFUSED_BEYOND or size * REFUSED_BEYOND < swept.low
        if far or swept.low == swept.high:
            return None
        words.append(f"{swept.name} {size} beyond {swept.low} to {swept.high}")
    return tuple(words) if len(shape.sizes) == len(model.inputs) else None


def distances(points: Floats, seen: Floats) -> Floats:
    """Of each row of log sizes to the nearest row of ``seen``, in Euclid's sense, in chunks that fit into a cache."""
    nearest = [
        np.sqrt(((points[at : at + 16, None, :] - seen[None]) ** 2).sum(axis=2)).min(axis=1)
        for at in range(0, len(points), 16)
    ]
    return np.concatenate(nearest) if nearest else np.zeros(0)
