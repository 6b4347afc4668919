"""What-if layers were others: a prediction of the network with layers replaced, beside that of the network as it is.

The scaling factor is T_1 / (N T_N) of OSF's paper (equation 1): the speed-up over one rank, a rank. What a model has as
a whole, its weight update and the time between operations, is taken from the unchanged model's measurement, by
parameters and by operations.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from calibrate.profile.profile import Profile
from paradl_bench.core.errors import UserError
from paradl_bench.network.replacement.replace import Replaced, replace_layers
from paradl_bench.network.replacement.written import parse_replacement
from predict.costs.cost_model import CostModel
from predict.prediction.prediction import Prediction, Predictor
from predict.prediction.request import Request, read_model, request_of
from predict.workload import Configuration, evaluator_named


class LayerSeconds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a whole layer takes on a rank's samples.

    Attributes:
        name, operation, output_shape: as of a network's layers. parameters: trained elements that it reads.
        is_new: whether it was put there; else it was there, and reads another shape now.
        fw_s, bw_s: seconds. fw_sd_s, bw_sd_s: standard deviation of what these rest on.
        fw_source, bw_source: where they come from, as in ``sources``.
    """

    name: str
    operation: str
    output_shape: tuple[int, ...]
    parameters: int
    is_new: bool
    fw_s: float
    fw_sd_s: float
    fw_source: str
    bw_s: float
    bw_sd_s: float
    bw_source: str


class Replacing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prediction, of the network as it is or with layers replaced.

    Attributes:
        replaced: what replaced layers, as it was given; nothing for the network as it is.
        parameters: trained elements. gradient_bytes: of all their gradients, which data parallelism exchanges.
        model_flops: forward and backward of the mini-batch.
        communication_s: all communication of a rank, unhindered. exposed_communication_s: what nothing hides of it.
        scaling_factor: T_1 / (N T_N), of the same network, with its 90% interval.
        speedup_over_base: samples/s over those of the network as it is.
        removed: names of layers that are gone. layers: those that are new or read other shapes, in forward order.
        interval_s, epoch_s, breakdown_s, memory_bytes, memory_interval_bytes, fits, sources, extrapolated, notes,
            spread_s: as of any prediction.
    """

    replaced: tuple[str, ...]
    strategy: str
    ranks: int
    batch: int
    local_batch: int
    evaluator: str
    model: str
    parameters: int
    gradient_bytes: int
    model_flops: float
    iteration_s: float
    interval_s: tuple[float, float]
    epoch_s: float | None
    samples_per_s: float
    speedup_over_base: float
    scaling_factor: float
    scaling_factor_interval: tuple[float, float]
    communication_s: float
    exposed_communication_s: float
    breakdown_s: dict[str, float]
    memory_bytes: int
    memory_interval_bytes: tuple[int, int] | None
    fits: bool | None
    removed: tuple[str, ...]
    layers: tuple[LayerSeconds, ...]
    sources: dict[str, float]
    extrapolated: tuple[str, ...]
    notes: tuple[str, ...]
    spread_s: dict[str, float]


class Replacings(msgspec.Struct, frozen=True, kw_only=True):
    """Rows, each network as it is before the changed one; and what of them is not possible, and why."""

    rows: tuple[Replacing, ...]
    left_out: tuple[str, ...]


def predict_replaced(options: Mapping[str, Any]) -> Replacings:
    """Predict every point that the options ask for twice, as the network is and with layers replaced.

    Raises:
        UserError: layers cannot be replaced so; or options, files or limits are wrong, of either network.
    """
    replacements = [parse_replacement(text) for text in options["replace"]]
    evaluator = evaluator_named(options["evaluator"])
    costs = read_model(options, evaluator)
    replaced = replace_layers(costs.network, replacements)
    before = request_of(costs, evaluator, options)
    after = request_of(_costs_of(costs, replaced), evaluator, options)
    strong, samples = options["scaling"] == "strong", options["dataset_samples"]
    predictors = [Predictor(request.costs, evaluator, samples, strong_scaling=strong) for request in (before, after)]
    texts = tuple(replacement.text for replacement in replacements)
    rows = []
    for point, changed in _pairs(before, after):
        base, other = predictors[0].predict(point), predictors[1].predict(changed)
        layers = _layers(after.costs, replaced, changed)
        rows += [_row(base, base, costs), _row(other, base, after.costs, texts, tuple(replaced.removed), layers)]
    if not rows:
        raise UserError(
            "--replace: no strategy and rank count is possible both with the original and with the replaced layers"
        )
    return Replacings(rows=tuple(rows), left_out=tuple(dict.fromkeys((*before.left_out, *after.left_out))))


def _costs_of(costs: CostModel, replaced: Replaced) -> CostModel:
    """The costs of the changed network on the same device and links."""
    profile = _of_own_model(costs.profile, costs.network.name, costs.dtype)
    return dataclasses.replace(costs, network=replaced.network, profile=profile)


def _of_own_model(profile: Profile, name: str, dtype: str) -> Profile:
    """The profile without other models' iterations, if it has some of this one: the changed network is most like it."""
    of_this_model = tuple(time for time in profile.model_times if time.model == name)
    if not any(time.dtype == dtype for time in of_this_model):
        return profile
    return msgspec.structs.replace(profile, model_times=of_this_model)


def _pairs(before: Request, after: Request) -> list[tuple[Configuration, Configuration]]:
    """Points that both networks have: limits of a strategy depend on the layers."""
    changed = {(str(point.strategy), point.settings.batch): point for point in after.points}
    keys = [(point, (str(point.strategy), point.settings.batch)) for point in before.points]
    return [(point, changed[key]) for point, key in keys if key in changed]


def _layers(costs: CostModel, replaced: Replaced, point: Configuration) -> tuple[LayerSeconds, ...]:
    named = {*replaced.inserted, *replaced.reshaped}
    layers = [layer for layer in replaced.network.layers if layer.name in named]
    seconds_of = costs.layer_costs([layer.name for layer in layers], costs.place(point.strategy, point.local_batch))
    elements = {parameter.name: parameter.elements for parameter in replaced.network.parameters}
    rows = []
    for layer in layers:
        forward, backward = seconds_of[layer.name, "FW"], seconds_of[layer.name, "BW"]
        sds = [math.hypot(cost.independent_sd_s, cost.batch_sd_s, cost.method_sd_s) for cost in (forward, backward)]
        rows.append(
            LayerSeconds(
                name=layer.name,
                operation=layer.operation,
                output_shape=layer.output_shape,
                parameters=sum(elements.get(name, 0) for name in layer.parameters),
                is_new=layer.name in replaced.inserted,
                fw_s=forward.seconds,
                fw_sd_s=sds[0],
                fw_source=forward.source.name.lower(),
                bw_s=backward.seconds,
                bw_sd_s=sds[1],
                bw_source=backward.source.name.lower(),
            )
        )
    return tuple(rows)


def _row(
    prediction: Prediction,
    base: Prediction,
    costs: CostModel,
    replaced: tuple[str, ...] = (),
    removed: tuple[str, ...] = (),
    layers: tuple[LayerSeconds, ...] = (),
) -> Replacing:
    return Replacing(
        replaced=replaced,
        removed=removed,
        layers=layers,
        parameters=costs.network.parameter_elements,
        gradient_bytes=costs.network.parameter_bytes,
        speedup_over_base=prediction.time.samples_per_s / base.time.samples_per_s,
        scaling_factor=prediction.use.efficiency,
        scaling_factor_interval=prediction.use.efficiency_interval,
        exposed_communication_s=prediction.time.breakdown_s["exposed_communication"],
        **prediction.fields_of(Replacing),
    )
