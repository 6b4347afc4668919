"""Peak memory as predicted and as measured, and which runs are no test of it because it was fitted to them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec
import numpy as np

from calibrate.fitting.memory.memory_runs import configuration_hash, measured_peaks, run_hash
from calibrate.profile.memory_factors import MemoryMeasure
from calibrate.profile.profile import Profile
from predict.prediction.prediction import Prediction
from predict.validation.runs import Run

FittedTo = Literal["", "run", "configuration"]


class MemoryPair(msgspec.Struct, frozen=True, kw_only=True):
    """Peak memory of the rank that held most.

    Attributes:
        measured: whose peak: tensors as tracked, the allocator's, or the device's.
        covered: whether the interval holds it; None where there is no interval.
        fitted_to: ``run`` where the profile's memory factors were fitted to this very run, ``configuration`` where they
            were to a repetition of it, which holds the same bytes: the error is no test of a prediction then.
    """

    predicted_bytes: int
    measured_bytes: int
    error: float
    measured: MemoryMeasure = "tensors"
    interval_bytes: tuple[int, int] | None = None
    covered: bool | None = None
    fitted_to: FittedTo = ""


class MemoryScore(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of memory over the runs that nothing was fitted to.

    Attributes:
        left_out: runs that memory was fitted to, themselves or a repetition.
        interval_coverage: None where no run has an interval.
    """

    runs: int
    left_out: int
    mean_absolute_error: float | None
    worst_error: float | None
    interval_coverage: float | None


def memory_pair(profile: Profile, run: Run, prediction: Prediction) -> MemoryPair | None:
    """None where the run did not track its memory, or not what the factor was fitted to."""
    measured = measured_peaks(run.description).get(prediction.memory.memory_of)
    if not measured:
        return None
    interval = prediction.memory.memory_interval_bytes
    return MemoryPair(
        predicted_bytes=prediction.memory.memory_bytes,
        measured_bytes=measured,
        error=prediction.memory.memory_bytes / measured - 1,
        measured=prediction.memory.memory_of,
        interval_bytes=interval,
        covered=interval and interval[0] <= measured <= interval[1],
        fitted_to=_fitted_to(profile, run),
    )


def _fitted_to(profile: Profile, run: Run) -> FittedTo:
    if not profile.memory_runs:
        return ""
    sha256 = run_hash(run.path)
    if any(fitted.sha256 == sha256 for fitted in profile.memory_runs):
        return "run"
    repeated = configuration_hash(run.description)
    return "configuration" if any(fitted.configuration == repeated for fitted in profile.memory_runs) else ""


def memory_score(pairs: Iterable[MemoryPair]) -> MemoryScore:
    """Over the pairs of one evaluator."""
    every = list(pairs)
    tested = [pair for pair in every if not pair.fitted_to]
    errors = np.array([pair.error for pair in tested])
    covered = [pair.covered for pair in tested if pair.covered is not None]
    return MemoryScore(
        runs=len(tested),
        left_out=len(every) - len(tested),
        mean_absolute_error=float(np.mean(np.abs(errors))) if tested else None,
        worst_error=float(errors[int(np.argmax(np.abs(errors)))]) if tested else None,
        interval_coverage=float(np.mean(covered)) if covered else None,
    )
