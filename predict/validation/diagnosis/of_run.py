"""The run that a diagnosis is held against: its costs, its configuration, and the options that predict it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from calibrate.profile.profile import read_profile
from paradl_bench.core.errors import UserError
from paradl_bench.plan.settings import from_words
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.records.kernel_settings import settings_of_label
from paradl_bench.strategies.exchange.options import ExchangeOptions
from predict.costs.compute.layer_source import parse_layers
from predict.costs.cost_model import CostModel
from predict.costs.files import read_cluster
from predict.validation.run_predictors import RunPredictors
from predict.validation.runs import Run, read_runs
from predict.workload import Configuration


class RunToDiagnose(NamedTuple):
    """A run with what predicts it, and what there is to know of it."""

    run: Run
    costs: CostModel
    point: Configuration
    notes: tuple[str, ...]


def read_run_to_diagnose(directory: Path, options: Mapping[str, Any]) -> RunToDiagnose:
    """The run of a directory, as ``predict validate`` reads it.

    Raises:
        UserError: it can't be read, or is unlike what the profile was measured in and ``force`` is not given.
    """
    path, cluster = options["profile"], options["cluster"]
    ((run,), notes) = read_runs([directory])
    read = read_cluster(cluster) if cluster else None
    predictors = RunPredictors(read_profile(path), path, read, parse_layers(options["layers"]))
    differences = predictors.differences(run)
    if differences and not options["force"]:
        raise UserError(f"{differences[0]} (profile {path}); give --force to compare nevertheless")
    about = run.description
    point = Configuration(strategy=parse_strategy(about.strategy), settings=about.settings)
    forced = tuple(f"compared by force: {line}" for line in differences)
    return RunToDiagnose(run, predictors.costs_of(run), point, (*notes, *forced))


def options_of_run(run: Run, options: Mapping[str, Any], *, knows_input: bool) -> dict[str, Any]:
    """The options that predict a run, beside the profile and the cluster.

    Args:
        knows_input: whether the profile knows of an input, which a run has none of.

    Raises:
        UserError: a run that read images, or exchanged gradients in messages of its own, which no option gives.
    """
    about = run.description
    if fused_by := about.settings.of(ExchangeOptions).fused_by:
        raise UserError(f"the run used --fusion {fused_by}, and remedies are not tried with fusion")
    if about.input is not None:
        raise UserError("the run read images, and remedies are not tried with images")
    asked = {**options, "model": about.model, "strategy": about.strategy, "batch": str(about.settings.batch)}
    asked |= {"optimizer": about.optimizer, "dtype": about.dtype}
    asked |= {"backend": about.backend if about.ranks > 1 else None}
    asked |= msgspec.structs.asdict(settings_of_label(about.kernel_settings)) if about.kernel_settings else {}
    asked |= from_words(about.settings.options)
    # A run names its stages whatever they were cut by; given by name they would count as the user's.
    if asked.pop("cut_by", "") == "FLOPs":
        asked["stages"] = None
    asked["bucket_cap_mb"] = about.settings.of(ExchangeOptions).bucket_cap_bytes / 1024**2
    asked |= {"io_seconds": 0.0, "h2d_seconds": 0.0} if knows_input else {}
    if about.ghost is not None:
        slow = about.ghost.slow_rank
        asked |= {"dilate": about.ghost.dilate, "spread": about.ghost.drawn is not None}
        asked |= {"slow_rank": None if slow is None else str(slow)}
    return asked
