"""What few kernels tell: one share of the roofline for all of them, with an interval that knows how few they are.

The interval is conformal: of n kernels each held against the others, the ceil(0.9 (n + 1))-th smallest error covers a
further one with 90%, whatever the errors' distribution (Vovk et al. 2005). With fewer than nine there is no such error.
"""

from __future__ import annotations

import math

import numpy as np

from calibrate.fitting.kernels.kernel_trial import Timed, reached
from calibrate.kernels.features import log_sizes
from calibrate.kernels.files import Arrays
from calibrate.kernels.model import KernelCandidate, KernelModel, Regressor, SizeRange, distances, roofline_s
from paradl_bench.core.statistics import Floats

FEWEST_FOR_SHARE = 9
"""The fewest errors of which one bounds a further error with 90%."""
_COVERED = 0.9


def fit_share(timed: Timed, prefix: str) -> tuple[KernelModel, Arrays]:
    """A share for at least :data:`FEWEST_FOR_SHARE` shapes, which differ in some size."""
    roofline = reached(timed)
    logs = np.log(timed.seconds / roofline_s(timed.kernels, *roofline))
    errors = np.array([float(np.median(np.delete(logs, row))) - log for row, log in enumerate(logs)])
    seen = log_sizes(timed.kernels, timed.names)
    arrays = {"share/log": np.array([np.median(logs)]), "seen": seen}
    apart = np.array([distances(seen[[row]], np.delete(seen, row, axis=0))[0] for row in range(len(seen))])
    candidate = candidate_of("share", np.expm1(errors), timed.seconds)
    return model_of(timed, prefix, roofline, candidate, bound_90(errors), float(np.quantile(apart, 0.9))), arrays


def bound_90(errors: Floats) -> float:
    """The size that a further error stays below with 90%; the largest where they are fewer than nine."""
    sizes = np.sort(np.abs(errors))
    return float(sizes[min(len(sizes), math.ceil(_COVERED * (len(sizes) + 1))) - 1])


def candidate_of(name: Regressor, errors: Floats, seconds: Floats) -> KernelCandidate:
    """What a regressor did on kernels that it had not seen: relative errors, with the times measured."""
    mean = float(np.mean(np.abs(errors)))
    weighted = float(np.sum(np.abs(errors) * seconds) / np.sum(seconds))
    return KernelCandidate(
        model=name,
        validation_re=mean,
        held_out_re=mean,
        held_out_wre=weighted,
        held_out_bias=float(np.median(errors)),
    )


def model_of(
    timed: Timed,
    prefix: str,
    roofline: tuple[float, float, float],
    candidate: KernelCandidate,
    interval_log: float,
    typical_distance: float,
) -> KernelModel:
    """The entry of a profile for a regressor that was tried; it names no archive yet."""
    shape = timed.shapes[0]
    floor_s, peak, bandwidth = roofline
    return KernelModel(
        kind=shape.kind,
        stage=shape.stage,
        settings=shape.settings,
        dtype=timed.dtype,
        kernels=len(timed.shapes),
        model=candidate.model,
        inputs=tuple(
            SizeRange(name=name, low=int(values.min()), high=int(values.max()))
            for name, values in timed.kernels.sizes.items()
        ),
        floor_s=floor_s,
        peak_flops=peak,
        bandwidth_bytes_per_s=bandwidth,
        interval_log=interval_log,
        typical_distance=typical_distance,
        candidates=(candidate,),
        file="",
        sha256="",
        arrays=prefix,
    )
