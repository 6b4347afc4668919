"""Gradients moved into and out of exchange buckets, or added up: seconds per tensor and per byte, over the models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from calibrate.fit.reading import Placed
from calibrate.profile.profile import CopyTime
from calibrate.statistics.blocks import pull_in
from calibrate.statistics.regression import fit_relative, told_apart
from paradl_bench.records.samples import CopySamples

Floats = NDArray[np.float64]


class _Model(NamedTuple):
    name: str
    tensors: int
    bytes: int


def fit_copies(records: Iterable[Placed[CopySamples]]) -> tuple[CopyTime, ...]:
    """Fit time = alpha tensors + beta bytes by relative errors, per direction and number of ranks on the host.

    Where the models do not tell the two apart (one model, or all with equal bytes a tensor), all of it is beta.
    """
    groups: dict[tuple[str, int], dict[_Model, list[Floats]]] = {}
    for _, record in records:
        model = _Model(record.model, record.tensors, record.bytes)
        group = groups.setdefault((record.direction, record.ranks_on_host), {})
        group.setdefault(model, []).append(np.array(record.samples_s))
    fits = (_fit(*key, groups[key]) for key in sorted(groups))
    return tuple(fit for fit in fits if fit is not None)


def _fit(direction: str, ranks_on_host: int, models: dict[_Model, list[Floats]]) -> CopyTime | None:
    medians_s = {model: float(np.median(np.concatenate(blocks))) for model, blocks in models.items()}
    timed = {model: median_s for model, median_s in medians_s.items() if median_s > 0 and model.bytes > 0}
    if not timed:
        return None
    seconds = np.array(list(timed.values()))
    design = np.array([[model.tensors, model.bytes] for model in timed], float)
    apart = told_apart(design, seconds)
    solution = fit_relative(design if apart else design * [0, 1], seconds)
    return CopyTime(
        direction=direction,
        ranks_on_host=ranks_on_host,
        alpha_s=float(solution[0]),
        beta_s_per_byte=float(solution[1]),
        relative_sd=_relative_sd(models, solution, 2 if apart else 1),
        models=tuple(sorted({model.name for model in timed})),
    )


def _relative_sd(models: dict[_Model, list[Floats]], solution: Floats, parameters: int) -> float:
    """How far the median of one block of one model lies from the fit: the fit's misses and the machine's drift.

    Blocks that were held up count as in :func:`calibrate.statistics.blocks.block_sd`.
    """
    residuals = []
    for model, blocks in models.items():
        fitted = model.tensors * solution[0] + model.bytes * solution[1]
        if fitted > 0:
            residuals += [float(np.median(block)) / fitted - 1 for block in blocks]
    spare = max(len(residuals) - parameters, 1)
    return float(np.sqrt(np.sum(np.square(pull_in(residuals, middle=0.0))) / spare))
