"""What-if: a prediction on other links, another device, other rank counts or batches, beside the one as measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from paradl_bench.core.errors import UserError
from paradl_bench.plan.strategy import Strategy
from paradl_bench.records.cluster import ClusterFile
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.pipeline.axis import PipelineOptions
from predict.costs.compute.host_dispatch import HOST_BOUND, dispatch_of
from predict.costs.cost_model import CostModel
from predict.costs.hardware.named_device import hardware_of_device
from predict.costs.hardware.what_if_hardware import Hardware
from predict.costs.sourced import HOST_DISPATCH
from predict.ledger.ledger import exposed_effect_s, shown_role
from predict.prediction.prediction import Prediction, Predictor
from predict.prediction.request import Request, read_request
from predict.prediction.stage_balance import with_balanced_stages
from predict.what_if.quantities import DEVICE, Setting, doubled, hardware_of, number_of, parse_varied, settings_of
from predict.workload import Configuration, Evaluator

Bound = Literal["compute", "exposed communication", "idle", "input", "host dispatch"]
BOUNDS: tuple[Bound, ...] = get_args(Bound)


class WhatIf(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prediction of a what-if; seconds.

    Attributes:
        varied: the value of each quantity that was varied; nothing for the prediction as measured, the base.
        layers_from: what the seconds of layers are taken from, as ``--layers`` says it.
        speedup_over_base: samples/s over those of the base, the same strategy as measured.
        bound_by: what most of the iteration is, of ``seconds_of``, whose values add up to the iteration; the host where
            it is compute whose kernels wait for the host.
        interval_s, epoch_s, memory_bytes, memory_interval_bytes, fits, sources, extrapolated, notes: as of any
            prediction.
    """

    varied: Setting
    layers_from: str
    strategy: str
    ranks: int
    batch: int
    evaluator: str
    model: str
    iteration_s: float
    interval_s: tuple[float, float]
    epoch_s: float | None
    samples_per_s: float
    speedup_over_base: float
    bound_by: Bound
    seconds_of: dict[Bound, float]
    breakdown_s: dict[str, float]
    memory_bytes: int
    memory_interval_bytes: tuple[int, int] | None
    fits: bool | None
    sources: dict[str, float]
    extrapolated: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfs:
    """Rows of a what-if, each base before what was varied of it; and what of it is not possible, and why."""

    rows: tuple[WhatIf, ...]
    left_out: tuple[str, ...]


def vary(options: Mapping[str, Any]) -> WhatIfs:
    """What-ifs of all that the options of ``predict what-if`` ask for, by each source of layers' seconds.

    Raises:
        UserError: as :func:`what_if`; or whatever of the options and files is wrong, in one line.
    """
    varied = [parse_varied(text) for text in options["vary"]]
    settings = settings_of(varied, grid=options["grid"]) if varied else None
    # Every source is read before any of them is predicted from, so that a wrong one costs nothing.
    requests = [read_request({**options, "layers": source}) for source in _sources(options["layers"])]
    strong, samples = options["scaling"] == "strong", options["dataset_samples"]
    answers = [what_if(request, settings, dataset_samples=samples, strong_scaling=strong) for request in requests]
    left_out = dict.fromkeys(line for answer in answers for line in answer.left_out)
    return WhatIfs(rows=tuple(row for answer in answers for row in answer.rows), left_out=tuple(left_out))


def _sources(layers: str) -> list[str]:
    """The sources of layers' seconds that ``--layers`` lists, each once."""
    sources = [source.strip() for source in layers.split(",")]
    if len(set(sources)) < len(sources):
        raise UserError(f"--layers {layers} names a source twice")
    return sources


def what_if(
    request: Request,
    settings: Sequence[Setting] | None,
    *,
    dataset_samples: int | None = None,
    strong_scaling: bool = False,
) -> WhatIfs:
    """Predict every point of a request as measured, then under every setting.

    Args:
        settings: None for twice as much of everything (:func:`predict.what_if.quantities.doubled`), what helps most
            first.
        dataset_samples: of an epoch; None leaves epochs out.
        strong_scaling: other rank counts keep the global mini-batch; else it grows with them.

    Raises:
        UserError: a setting names a level that the cluster lacks, a point is not possible as measured, or nothing of
            what was varied is.
    """
    cluster = request.costs.communication.cluster
    for setting in settings or ():
        hardware_of(setting).check_levels(cluster)
    rows: list[WhatIf] = []
    refused: list[UserError] = []
    predict = _remembering(request.costs, request.evaluator, dataset_samples)
    layers_from = str(request.costs.layers_from)
    for point in request.points:
        base = predict({}, point)
        levels = [level.name for level in cluster.levels]
        tried = doubled(point.strategy.ranks, point.settings.batch, levels) if settings is None else settings
        changed = []
        for setting in tried:
            try:
                varied = _varied_point(request, point, setting, strong_scaling=strong_scaling)
                changed.append(_row(setting, layers_from, predict(setting, varied), base))
            except UserError as error:
                refused.append(error)
        if settings is None:
            changed.sort(key=lambda row: -row.speedup_over_base)
        rows += [_row({}, layers_from, base, base), *changed]
    if len(rows) == len(request.points):
        raise refused[0]
    left_out = dict.fromkeys((*request.left_out, *map(str, refused)))
    return WhatIfs(rows=tuple(rows), left_out=tuple(left_out))


class _Predicted(NamedTuple):
    """A prediction, and seconds of its iteration that the device waits for its host."""

    prediction: Prediction
    host_s: float


def _remembering(
    model: CostModel, evaluator: Evaluator, dataset_samples: int | None
) -> Callable[[Setting, Configuration], _Predicted]:
    """Predictions under a setting; the cost model of the hardware last asked for is kept."""
    has_host = dispatch_of(model.profile, dtype=model.dtype) is not None
    known = model.hardware
    predictor = Predictor(model, evaluator, dataset_samples)

    def predict(setting: Setting, point: Configuration) -> _Predicted:
        nonlocal known, predictor
        hardware = changed_hardware(model, setting)
        if hardware != known:
            known = hardware
            predictor = Predictor(model.on(hardware), evaluator, dataset_samples)
        prediction = predictor.predict(point)
        role = shown_role(predictor.explain(point).roles) if has_host else None
        return _Predicted(prediction, 0.0 if role is None else exposed_effect_s(role, HOST_DISPATCH))

    return predict


def changed_hardware(model: CostModel, setting: Setting) -> Hardware:
    """What the options change of the hardware that was measured, and on top of it what a setting does.

    Raises:
        UserError: the setting names a device that is unknown, or a second one.
    """
    hardware, name = model.hardware, setting.get(DEVICE)
    if name is not None:
        if hardware.device is not None:
            raise UserError(f"--device and --vary {DEVICE} both name the device: give only one of them")
        cluster = model.cluster if isinstance(model.cluster, ClusterFile) else None
        named = hardware_of_device(str(name), model.profile, model.dtype, model.kernel_settings, cluster)
        hardware = hardware.times(named)
    return hardware.times(hardware_of(setting))


def _varied_point(request: Request, point: Configuration, setting: Setting, *, strong_scaling: bool) -> Configuration:
    """The point with the ranks and the batch of a setting; refused, with the reason, where that is not possible."""
    if not setting.keys() & {"ranks", "batch"}:
        return point
    ranks = int(number_of(setting, "ranks", point.strategy.ranks))
    strategy = point.strategy if ranks == point.strategy.ranks else _with_ranks(point.strategy, ranks)
    batch = int(number_of(setting, "batch", point.settings.batch))
    if "batch" not in setting and not strong_scaling:
        grown = batch * ranks
        if grown % point.strategy.ranks:
            raise UserError(
                f"batch {batch} of {point.strategy} does not scale to a whole number of samples on {ranks} ranks:"
                " vary the batch too, or keep it with --scaling strong"
            )
        batch = grown // point.strategy.ranks
    settings = request.settings(batch)
    planner_for(strategy).check(request.costs.network, strategy, settings)
    varied = Configuration(strategy=strategy, settings=settings)
    # Stages that nobody named were balanced by measured seconds, which other ranks and batches balance anew.
    before, after = (given.of(PipelineOptions).stages for given in (point.settings, settings))
    return with_balanced_stages(request.costs, varied) if after != before else varied


def _with_ranks(strategy: Strategy, ranks: int) -> Strategy:
    """The strategy with its outermost axis grown, or shrunk, to so many ranks."""
    if not strategy.axes:
        raise UserError("serial has one rank: vary the ranks of another strategy, as --strategy d2")
    first = strategy.axes[0]
    inner = strategy.ranks // first.degree
    if len(first.extents) > 1 or ranks % inner:
        raise UserError(f"{strategy} does not grow to {ranks} ranks by its outermost axis, {first.kind}")
    grown = msgspec.structs.replace(first, extents=(ranks // inner,))
    return Strategy(axes=(grown, *strategy.axes[1:]))


def _row(setting: Setting, layers_from: str, predicted: _Predicted, base: _Predicted) -> WhatIf:
    prediction, seconds = predicted.prediction, seconds_of(predicted.prediction, predicted.host_s)
    return WhatIf(
        varied=setting,
        layers_from=layers_from,
        speedup_over_base=prediction.time.samples_per_s / base.prediction.time.samples_per_s,
        bound_by=_bound_by(prediction, seconds),
        seconds_of=seconds,
        **prediction.fields_of(WhatIf),
    )


def _bound_by(prediction: Prediction, seconds: Mapping[Bound, float]) -> Bound:
    """The largest part; the host instead of compute whose kernels wait for it, as shorter ones would wait longer."""
    largest = max(seconds, key=lambda name: seconds[name])
    said = (*prediction.provenance.extrapolated, *prediction.provenance.notes)
    waits = seconds["host dispatch"] > 0 and HOST_BOUND in said
    return "host dispatch" if largest == "compute" and waits else largest


def seconds_of(prediction: Prediction, host_s: float) -> dict[Bound, float]:
    """What the iteration of the slowest rank is made of, by :data:`BOUNDS`; adds up to the iteration.

    In a pipeline what a stage waits for before it computes is idle time, messages included; the exposed part there is
    that of the gradient exchange and of layers.

    Args:
        host_s: that the device waits for its host, which the breakdown counts as compute.
    """
    parts = prediction.time.breakdown_s
    idle, waiting = parts.get("pipeline_idle", 0.0), parts.get("input", 0.0) + parts.get("h2d", 0.0)
    exposed = parts["exposed_communication"]
    if idle:
        counted = ("FW", "BW", "WU", "pipeline_idle", "input", "h2d", "exposed_communication")
        exposed = sum(seconds for name, seconds in parts.items() if name not in counted)
    computed = prediction.iteration_s - exposed - idle - waiting
    host_s = min(host_s, computed)
    return dict(zip(BOUNDS, (computed - host_s, exposed, idle, waiting, host_s), strict=True))
