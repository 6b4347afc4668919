"""Gradients moved into and out of exchange buckets, or added up: seconds per tensor and per byte, over the models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from calibrate.fitting.reading import Placed
from calibrate.profile.profile import CopyTime
from calibrate.statistics.blocks import pull_in
from calibrate.statistics.regression import deviation, fit_line
from paradl_bench.core.statistics import Floats, grouped
from paradl_bench.records.samples import CopySamples


class _Model(NamedTuple):
    name: str
    tensors: int
    bytes: int


def fit_copies(records: Iterable[Placed[CopySamples]]) -> tuple[CopyTime, ...]:
    """Fit time = alpha tensors + beta bytes by relative errors, per direction and number of ranks on the host.

    Where the models do not tell the two apart (one model, or all with equal bytes a tensor), all of it is beta.
    """
    groups = grouped((record for _, record in records), lambda record: (record.direction, record.ranks_on_host))
    fits = (_fit(*key, groups[key]) for key in sorted(groups))
    return tuple(fit for fit in fits if fit is not None)


def _fit(direction: str, ranks_on_host: int, records: Sequence[CopySamples]) -> CopyTime | None:
    models: dict[_Model, list[Floats]] = {}
    for record in records:
        model = _Model(record.model, record.tensors, record.bytes)
        models.setdefault(model, []).append(np.array(record.samples_s))
    medians_s = {model: float(np.median(np.concatenate(blocks))) for model, blocks in models.items()}
    timed = {model: median_s for model, median_s in medians_s.items() if median_s > 0 and model.bytes > 0}
    if not timed:
        return None
    seconds = np.array(list(timed.values()))
    design = np.array([[model.tensors, model.bytes] for model in timed], float)
    alpha_s, beta_s_per_byte, parameters = fit_line(design, seconds)
    # How far the median of one block of one model lies from the fit: the fit's misses and the machine's drift.
    residuals: list[float] = []
    for model, blocks in models.items():
        fitted_s = model.tensors * alpha_s + model.bytes * beta_s_per_byte
        if fitted_s > 0:
            residuals += [float(np.median(block)) / fitted_s - 1 for block in blocks]
    return CopyTime(
        direction=direction,
        ranks_on_host=ranks_on_host,
        alpha_s=alpha_s,
        beta_s_per_byte=beta_s_per_byte,
        relative_sd=deviation(pull_in(residuals, middle=0.0), len(residuals) - parameters),
        models=tuple(sorted({model.name for model in timed})),
    )
