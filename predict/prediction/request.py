"""From the options of ``predict`` to predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from calibrate.profile.emulated_profile import emulated
from calibrate.profile.profile import Profile, read_profile
from paradl_bench.core.errors import UserError
from paradl_bench.core.units import parse_memory, parse_recompute
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.kinds.autocast import computed_in
from paradl_bench.plan.axes.registry import read_options
from paradl_bench.plan.axis_planner import refuse_unused
from paradl_bench.plan.settings import AS_GIVEN, PlanSettings, library_blocks
from paradl_bench.plan.strategy import Strategy
from paradl_bench.records.kernel_settings import KernelSettings, choose_label
from paradl_bench.records.slow_rank import SlowRank, parse_slow_rank
from predict.costs.communication.fusion import fusion_options
from predict.costs.compute.layer_source import parse_layers
from predict.costs.cost_model import CostModel
from predict.costs.files import choose_measured, choose_network, read_cluster
from predict.costs.hardware.named_device import hardware_of_device
from predict.costs.hardware.what_if_hardware import AS_MEASURED
from predict.costs.input.input_terms import input_options
from predict.ledger.ledger import Ledger
from predict.prediction.interval import Timed
from predict.prediction.points import expand_points, left_out_lines
from predict.prediction.prediction import Prediction, Predictor
from predict.prediction.scaling import Sweep, check_fraction, with_knees
from predict.prediction.stage_balance import refuse_without_pipeline, with_balanced_stages
from predict.prediction.utilisation import check_price
from predict.workload import Configuration, Evaluator, evaluator_named

MEASURED = "measured"
"""What ``--stages`` takes for stages that balance the profile's seconds."""
READ_PROFILE = "read_profile"
"""Beside the options of a command: the profile, where it has been read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the options of ``predict`` and its commands ask for, read and checked; and what a sweep leaves out."""

    costs: CostModel
    evaluator: Evaluator
    settings: Callable[[int], PlanSettings]
    points: tuple[Configuration, ...]
    left_out: tuple[str, ...]


def read_request(options: Mapping[str, Any]) -> Request:
    """The request that the options of :data:`predict.prediction.command_options.point_options` make, by their names.

    Raises:
        UserError: whatever of the options, files or limits is wrong, in one line.
    """
    evaluator = evaluator_named(options["evaluator"])
    costs = read_model(options, evaluator)
    return request_of(costs, evaluator, options)


def request_of(costs: CostModel, evaluator: Evaluator, options: Mapping[str, Any]) -> Request:
    """The request of a cost model that has been read; what options say of it is not looked at again.

    Raises:
        UserError: options that no strategy has a use for, or a limit that is exceeded.
    """
    settings = settings_of(costs, options)
    points, left_out = expand_points(
        costs.network, options["strategy"], options["batch"], options["ranks"], options["scaling"], settings
    )
    refuse_unused(
        settings(1), [point.strategy for point in points], *(("split",) if options["split"] is not None else ())
    )
    refuse_without_pipeline(options["stages"], points)
    if options["stages"] == MEASURED:
        points = tuple(with_balanced_stages(costs, point) for point in points)
    return Request(costs=costs, evaluator=evaluator, settings=settings, points=points, left_out=left_out)


def read_model(options: Mapping[str, Any], evaluator: Evaluator) -> CostModel:
    """The cost model of the profile, model, cluster and choices that the options name.

    A profile that has been read stands under :data:`READ_PROFILE`; else the options name its file.

    Raises:
        UserError: a file is unreadable, or the profile lacks what is chosen.
    """
    profile = options.get(READ_PROFILE) or read_profile(options["profile"])
    if options.get("dilate") is not None:
        profile = emulated(profile, options["dilate"], drawn=options["spread"])
    network = choose_network(profile, options["model"], options["network"], options["profile"], options.get("sequence"))
    optimizer, dtype, kernel_settings = measured_choices(profile, network, options)
    cluster = read_cluster(options["cluster"]) if options["cluster"] else None
    device = options.get("device")
    return CostModel(
        profile=profile,
        network=network,
        optimizer=optimizer,
        dtype=dtype,
        kernel_settings=kernel_settings,
        cluster=cluster,
        hardware=hardware_of_device(device, profile, computed_in(dtype), kernel_settings, cluster)
        if device
        else AS_MEASURED,
        backend=options["backend"],
        input_options=input_options(evaluator.name, options),
        fusion=fusion_options(evaluator.name, options),
        slow_rank=slow_rank_option(evaluator.name, options.get("slow_rank")),
        layers_from=parse_layers(options.get("layers")),
    )


def limit_memory(model: CostModel, text: str | None) -> float | None:
    """Bytes of a rank's memory: as given, else of the cluster; predictions say by it what fits.

    Raises:
        UserError: the text is no size.
    """
    communication = model.communication
    if text is not None:
        limit = parse_memory(text, "--memory")
        communication.cluster = msgspec.structs.replace(communication.cluster, memory_bytes_per_rank=float(limit))
    return communication.cluster.memory_bytes_per_rank


class Predicted(NamedTuple):
    """Predictions, the sweeps over rank counts among them, what had to be left out, and why; ledgers, if asked for.

    Attributes:
        points: what each prediction is of. costs: by which they were made.
    """

    predictions: tuple[Prediction, ...]
    sweeps: tuple[Sweep, ...]
    left_out: tuple[str, ...]
    ledgers: tuple[Ledger, ...]
    points: tuple[Configuration, ...]
    costs: CostModel


def check_request(options: Mapping[str, Any]) -> None:
    """Refuse, by a UserError before any file is read, options of ``predict`` that can't be together."""
    check_price(options["price"])
    if options["spread"] and options["dilate"] is None:
        raise UserError("--spread is for emulated runs: give it with --dilate K (1 sleeps as long as measured)")
    check_fraction(options["knee"])


def predict_request(options: Mapping[str, Any], *, explain: bool = False) -> Predicted:
    """Predictions of every strategy, rank count and batch; ``options`` by the names of the command's parameters.

    Raises:
        UserError: whatever of the options or files is wrong, in one line; or no point at all is possible.
    """
    check_request(options)
    request = read_request(options)
    limit_memory(request.costs, options.get("memory"))
    strong = options["scaling"] == "strong"
    predictor = Predictor(
        request.costs,
        request.evaluator,
        dataset_samples=options["dataset_samples"],
        strong_scaling=strong,
        price_per_rank_hour=options["price"],
    )
    predicted: list[tuple[Prediction, Timed]] = []
    ledgers: list[Ledger] = []
    points: list[Configuration] = []
    refused: list[tuple[Strategy, UserError]] = []
    for point in request.points:
        try:
            predicted.append(predictor.predict_timed(point))
            points.append(point)
            if explain:
                ledgers.append(predictor.explain(point))
        except UserError as error:
            refused.append((point.strategy, error))
    if not predicted:
        raise refused[0][1]
    predictions, timed = zip(*predicted, strict=True)
    left_out = tuple(dict.fromkeys((*request.left_out, *left_out_lines(refused))))
    predictions, sweeps = with_knees(predictions, timed, strong=strong, fraction=options["knee"])
    return Predicted(predictions, sweeps, left_out, tuple(ledgers), tuple(points), request.costs)


def settings_of(costs: CostModel, options: Mapping[str, Any]) -> Callable[[int], PlanSettings]:
    """A plan's settings for a global mini-batch."""
    known = costs.communication.cluster.ranks_per_node
    given = {**options, "stages": None} if options["stages"] == MEASURED else options
    axes = tuple(axis_options.placed(lambda: known) for axis_options in read_options(given)[0])

    def settings(batch: int) -> PlanSettings:
        return PlanSettings(
            batch=batch,
            optimizer=costs.optimizer,
            recompute=parse_recompute(options["recompute"]),
            blocking=library_blocks(costs.communication.backend),
            dtype=costs.dtype,
            device=costs.device_kind,
            preset=options.get("preset") or "",
            axes=axes,
            **{name: options[name] for name in AS_GIVEN if options[name] is not None},
        )

    return settings


def measured_choices(profile: Profile, network: ModelGraph, options: Mapping[str, Any]) -> tuple[str, str, str]:
    """Optimizer, dtype and label of kernel settings: as given, else as measured.

    Raises:
        UserError: several were measured, and the options do not say which.
    """
    times = [time for time in profile.model_times if time.model == network.name] or list(profile.model_times)
    dtype = choose_measured("dtype", options["dtype"], [time.dtype for time in times], "fp32")
    measured = [time for time in (times or profile.layer_times) if time.dtype == dtype]
    given = {name: options.get(name) for name in KernelSettings.__struct_fields__}
    return (
        choose_measured("optimizer", options["optimizer"], [time.optimizer for time in times], "sgd"),
        dtype,
        choose_label(given, [time.kernel_settings for time in measured], network.name),
    )


def slow_rank_option(evaluator_name: str, text: str | None) -> SlowRank | None:
    """What ``--slow-rank FACTOR[@RANK]`` says, if given; a UserError of another evaluator than ``simulate``."""
    if text is None:
        return None
    if evaluator_name != "simulate":
        raise UserError(
            f"--slow-rank is for --evaluator simulate; {evaluator_name} assumes that all ranks are equally fast"
        )
    return parse_slow_rank(text)
