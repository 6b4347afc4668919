"""The error of ``simulate`` itself, as runs show it that the profile was compared with (docs/model/interval.md)."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import numpy as np

from calibrate.profile.compared_runs import LEAST_CONFIGURATIONS, PredictionError, kinds_of, prediction_errors
from calibrate.profile.profile import Profile
from paradl_bench.core.cache_keys import Same
from predict.costs.priced import PricedPlan
from predict.costs.sourced import CorrelatedError, Remark


def with_simulation_error(priced: PricedPlan, profile: Profile) -> PricedPlan:
    """The plan with one more error that all of it shares: the largest of its kinds of axes, where these were compared.

    A profile that was compared with no run leaves it as it is.
    """
    errors = _errors(Same(profile))
    if not errors:
        return priced
    kinds = kinds_of(priced.plan.strategy)
    unknown = [kind for kind in kinds if kind not in errors or errors[kind].configurations < LEAST_CONFIGURATIONS]
    if unknown:
        text = (
            f"fewer than {LEAST_CONFIGURATIONS} configurations were compared of {' and '.join(unknown)}: the interval"
            " leaves out what the simulation itself is off by"
        )
        priced.remarks.add(Remark(text, False))
    kind, error = max(((kind, errors[kind]) for kind in kinds if kind in errors), key=_size, default=("", None))
    if error is None or not error.relative_sd:
        return priced
    if priced.plan.strategy.ranks > error.ranks:
        priced.remarks.add(Remark(f"errors of compared runs: beyond {error.ranks} ranks", True))
    costs, none = priced.costs, np.zeros(len(priced.costs.seconds))
    mode = CorrelatedError(f"compared runs, {kind}", error.relative_sd * costs.seconds, none, none)
    return dataclasses.replace(priced, costs=dataclasses.replace(costs, modes=(*costs.modes, mode)))


def _size(error: tuple[str, PredictionError]) -> float:
    return error[1].relative_sd


# Every prediction of a profile asks.
@lru_cache(maxsize=4)
def _errors(profile: Same[Profile]) -> dict[str, PredictionError]:
    return prediction_errors(profile.thing.runs_compared)
