"""Regressors of kernel times, fitted to sweeps for a profile: of every group the one that a trial chose.

The trial (:mod:`calibrate.fitting.kernels.kernel_trial`) leaves kernels out; what goes into the profile is fitted on
all of them, but for the network, which needs its validation part to stop. The interval is of kernels that the regressor
had not seen.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from calibrate.fitting.kernels.kernel_trial import (
    Timed,
    Trial,
    fit_plain_trees,
    fit_smooth,
    fit_trees,
    prefixed,
    timed_kernels,
    try_candidates,
)
from calibrate.fitting.kernels.share_fit import FEWEST_FOR_SHARE, fit_share, model_of
from calibrate.kernels.features import log_sizes
from calibrate.kernels.files import Arrays
from calibrate.kernels.model import (
    DRIFT,
    INTERVALS,
    ON_ROOFLINE,
    KernelModel,
    Regressor,
    distances,
)
from paradl_bench.core.errors import WorkError
from paradl_bench.network.kernel import KernelSamples

FEWEST_KERNELS = 50
"""Below, a fifth held out says nothing, and a share of the roofline stands for a regressor."""
_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFit:
    """Regressors of all groups, the arrays that go into their archive, and what to say of them.

    ``models`` name no archive yet: its hash is known once it is written.
    """

    models: tuple[KernelModel, ...] = ()
    arrays: Arrays = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def fit_kernels(records: Sequence[KernelSamples]) -> KernelFit:
    """Regressors of everything that was swept.

    Raises:
        WorkError: LightGBM is missing.
    """
    if importlib.util.find_spec("lightgbm") is None:
        raise WorkError("fitting regressors of kernels needs LightGBM: pip install 'paradl[kernels]'")
    with_mlp = importlib.util.find_spec("torch") is not None
    models: list[KernelModel] = []
    arrays: Arrays = {}
    without = "torch is not installed: kernels were fitted only by trees, without the paper's neural network"
    notes = [] if with_mlp else [without]
    for timed in timed_kernels(records):
        if len(timed.shapes) < FEWEST_FOR_SHARE or not timed.names:
            notes.append(
                f"{_title(timed)}: {len(timed.shapes)} shapes are too few for an estimate ({FEWEST_FOR_SHARE})"
            )
            continue
        prefix = f"{len(models)}"
        if len(timed.shapes) < FEWEST_KERNELS:
            model, of_group = fit_share(timed, prefix)
            models.append(model)
            arrays |= prefixed(prefix, of_group)
            notes.append(
                f"{model.title}: {len(timed.shapes)} shapes are too few for a regressor; they give one share of the"
                " roofline"
            )
            continue
        model, of_group = _fit_group(timed, prefix, with_mlp=with_mlp)
        models.append(model)
        arrays |= prefixed(prefix, of_group)
        if model.drift_s:
            notes.append(
                f"{model.title}: times grew by {model.drift_s[-1] * 1e3:.3g} ms from the first kernel swept to"
                " the last, at all shapes. The fit leaves this drift out, and an estimate adds the sweep's"
                " typical drift"
            )
    return KernelFit(models=tuple(models), arrays=arrays, notes=tuple(notes))


def _title(timed: Timed) -> str:
    shape = timed.shapes[0]
    return " ".join((shape.kind, *shape.settings.values(), shape.stage, timed.dtype))


def _fit_group(timed: Timed, prefix: str, *, with_mlp: bool) -> tuple[KernelModel, Arrays]:
    trial = try_candidates(timed, seed=_SEED, with_mlp=with_mlp)
    chosen = trial.chosen
    whole = fit_trees(timed, trial.fitted.drift_s, _SEED)
    if "process" in chosen:
        whole = whole.beside(fit_smooth(timed, whole, _SEED, known=trial.fitted))
    if chosen == "plain trees":
        whole = whole.beside(fit_plain_trees(timed, _SEED))
    network = {name: array for name, array in trial.fitted.arrays.items() if name.startswith("mlp/")}
    # What is fitted anyhow is kept, for who asks for it by name; a process takes long, and untuned trees serve nobody.
    parts = {"trees", "mlp", *chosen.split(" and ")}
    kept = tuple("plain/" if part == "plain trees" else f"{part}/" for part in parts)
    used = {name: array for name, array in (whole.arrays | network).items() if name.startswith(kept)}
    validation = trial.validation
    intervals = {candidate.model: _interval_log(trial, candidate.model) for candidate in trial.candidates}
    held = {name: log for name, log in intervals.items() if name != chosen and parts.issuperset(name.split(" and "))}
    seen = log_sizes(timed.kernels, timed.names)
    apart = distances(log_sizes(validation.kernels, timed.names), log_sizes(trial.training.kernels, timed.names))
    candidate = next(candidate for candidate in trial.candidates if candidate.model == chosen)
    distance = float(np.quantile(apart, 0.9))
    model = msgspec.structs.replace(
        model_of(timed, prefix, whole.roofline, candidate, intervals[chosen], distance),
        candidates=trial.candidates,
        drift_s=whole.drift_s if chosen in ON_ROOFLINE else (),
    )
    beside = {f"{INTERVALS}/{name}": np.array([log]) for name, log in held.items()}
    if held and whole.drift_s:
        beside[DRIFT] = np.array(whole.drift_s)
    return model, {**used, **beside, "seen": seen}


def _interval_log(trial: Trial, model: Regressor) -> float:
    """Half width of the 90% interval of log(time), on kernels that the regressor was not fitted on."""
    validation = trial.validation
    return float(np.quantile(np.abs(np.log(trial.fitted.seconds(model, validation) / validation.seconds)), 0.9))
