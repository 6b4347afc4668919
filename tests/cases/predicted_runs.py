"""Runs that take what is predicted, and the profile that they are validated against."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from profile_factory import make_network, make_profile, model_times, write_training_run

from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import parse_strategy
from predict.costs.cost_model import CostModel
from predict.prediction.prediction import Prediction, Predictor
from predict.validation.validation import validate_runs
from predict.validation.validation_report import Report
from predict.workload import Configuration, evaluator_named

CHAIN = make_network()
PROFILE = make_profile(model_times=model_times(CHAIN, common_sd=0.02))
Phases = tuple[float, float, float, float]


def predicted(strategy: str, batch: int, evaluator: str = "simulate") -> Prediction:
    """The prediction that a run is held against."""
    costs = CostModel(profile=PROFILE, network=CHAIN)
    settings = PlanSettings(batch=batch)
    return Predictor(costs, evaluator_named(evaluator)).predict(
        Configuration(strategy=parse_strategy(strategy), settings=settings)
    )


def phases(strategy: str, batch: int, *, factor: float = 1.0, slow: str = "") -> Phases:
    """Seconds of the phases that are predicted, times a factor (in one phase, or in all)."""
    parts = predicted(strategy, batch).time.phases_s
    found = {name: parts[name] * (factor if slow in ("", name) else 1.0) for name in ("FW", "BW", "GE", "WU")}
    return found["FW"], found["BW"], found["GE"], found["WU"]


def run_like(
    directory: Path,
    strategy: str,
    batch: int,
    *,
    factor: float = 1.0,
    slow: str = "",
    iterations: int = 12,
    **more: object,
) -> Path:
    """A run that takes what is predicted, times a factor (in one phase, or in all)."""
    ranks = parse_strategy(strategy).ranks
    rows = [phases(strategy, batch, factor=factor, slow=slow)] * iterations
    return write_training_run(
        directory, CHAIN, strategy=strategy, ranks=ranks, batch=batch, phases_s=[rows] * ranks, **more
    )


def validate(profile: Path, runs: Sequence[Path], *, force: bool = False) -> Report:
    """The report on these runs, on the cluster of the profile."""
    return validate_runs(profile, runs, cluster_path=None, force=force)
