"""Layers by regressors or the roofline against what a profile measured of them: KernelMLP's figure 2.

Errors are the paper's (section 3.4.2). Of a layer's stage k, RE = (estimated - measured) / measured, and equation 2,
WRE_k = (estimated - measured) / mean measured seconds of the layers that it is compared with; equation 3, WRE of these
layers together, is the mean of |WRE_k|. RE of several layers is that of their sums.

Inputs and answers stay apart: no estimate reads a measured layer. Regressors are fitted on kernels that were swept by
themselves; where one was of a layer's very shape, the regressor had seen the answer of another measurement, and the
layer is no kernel held out. Both are counted apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from calibrate.profile.profile import LayerTime, ModelTime, Profile
from paradl_bench.core.errors import UserError
from paradl_bench.core.statistics import grouped
from paradl_bench.network.graph import Layer, ModelGraph
from paradl_bench.network.kinds.autocast import kept_dtype
from paradl_bench.network.kinds.kernel_shape import optimizer_shape
from paradl_bench.records.measurement import PhaseName
from predict.costs.compute.kernel_costs import KernelCosts
from predict.costs.compute.layer_costs import LayerCosts
from predict.costs.compute.layer_source import LayersFrom, of_layers_from, refuse_without_source
from predict.costs.compute.model_costs import ModelCosts
from predict.costs.files import of_kernel_settings
from predict.costs.sourced import Cost, Remarks, Source

STAGES = ("FW", "BW", "WU")
UPDATE = "weight update"
_PHASES: tuple[PhaseName, ...] = ("FW", "BW")


class LayerError(msgspec.Struct, frozen=True, kw_only=True):
    """One layer in one stage, or the weight update of the whole network.

    Attributes:
        block: of the model's name hierarchy. source: of the estimate.
        re: (estimated - measured) / measured; None where nothing was measured of it but 0 s.
        wre: (estimated - measured) / mean measured seconds of its stage (equation 2).
        fitted_on: whether the regressor was fitted on a kernel of this very shape.
    """

    layer: str
    kind: str
    block: str
    stage: str
    measured_s: float
    estimated_s: float
    source: str
    re: float | None
    wre: float
    fitted_on: bool


class Errors(msgspec.Struct, frozen=True, kw_only=True):
    """Several layers' stages together.

    Attributes:
        count: of layers' stages.
        re: (estimated - measured) / measured, of the sums, in which errors of either sign cancel.
        mean_re: mean |RE| of single ones. wre: mean |WRE| of single ones, against their own mean (equation 3).
    """

    count: int
    measured_s: float
    estimated_s: float
    re: float | None
    mean_re: float | None
    wre: float | None


class LayerValidation(msgspec.Struct, frozen=True, kw_only=True):
    """What a profile's regressors, or its roofline, say of its measured layers.

    Attributes:
        sources: share of the estimated seconds by source.
        held_out, fitted_on: regressed layers of shapes that their regressor was not, and was, fitted on; None where
            there are none.
        unmeasured: layers' stages that were not measured at this batch, so not compared.
        extrapolated, notes: what is to be said of the estimates, and of what was compared with what.
    """

    profile: str
    model: str
    layers_from: str
    batch: int
    ranks_on_host: int
    dtype: str
    optimizer: str
    layers: tuple[LayerError, ...]
    stages: dict[str, Errors]
    blocks: dict[str, Errors]
    network: Errors
    sources: dict[str, float]
    held_out: Errors | None
    fitted_on: Errors | None
    unmeasured: tuple[str, ...]
    extrapolated: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def of_regressed(self) -> tuple[int, int]:
        """How many regressed layers' stages have shapes that their regressor was fitted on, and how many there are."""
        fitted_on = self.fitted_on.count if self.fitted_on else 0
        return fitted_on, fitted_on + (self.held_out.count if self.held_out else 0)


class Compared(NamedTuple):
    """What is compared: a network of a profile, and in what it computed."""

    profile: Profile
    network: ModelGraph
    optimizer: str
    dtype: str
    kernel_settings: str = ""


class _Place(NamedTuple):
    batch: int
    ranks_on_host: int


class _Row(NamedTuple):
    layer: str
    kind: str
    block: str
    stage: str
    measured_s: float
    estimate: Cost
    fitted_on: bool


def validate_layers(
    compared: Compared, layers_from: LayersFrom, *, batch: int | None = None, depth: int = 2, profile_path: str = ""
) -> LayerValidation:
    """Hold estimates against measured layers, at one local batch and with the fewest ranks that were on a host.

    Args:
        batch: local; None takes the largest that was measured. depth: names of a block at most (``layer1.0``).

    Raises:
        UserError: measured times are asked for, the profile measured no layer of the network (at that batch), or has
            nothing that says what one takes.
    """
    if layers_from.measured:
        raise UserError("--layers measured: validate-layers compares with measured layers; give regressed or roofline")
    of_settings = of_kernel_settings(compared.profile, compared.kernel_settings)
    network, dtype = compared.network, compared.dtype
    place = _place_of(of_settings, network, dtype, batch)
    times = _times_at(of_settings, network, dtype, place)
    asked = of_layers_from(of_settings, layers_from)
    refuse_without_source(asked, layers_from, dtype, compared.kernel_settings, network.name)
    rows = _layer_rows(asked, compared, layers_from, place, times, depth)
    rows += _update_rows(of_settings, asked, compared, layers_from, place)
    remarks = Remarks()
    remarks.add(*(remark for row in rows for remark in row.estimate.remarks))
    layers = _with_errors(rows)
    regressed = [layer for layer in layers if layer.source == Source.REGRESSED.name.lower()]
    by_block = grouped(layers, lambda layer: layer.block)
    return LayerValidation(
        profile=profile_path,
        model=network.name,
        layers_from=str(layers_from),
        **place._asdict(),
        dtype=dtype,
        optimizer=compared.optimizer,
        layers=layers,
        stages={stage: _errors(of) for stage in STAGES if (of := [layer for layer in layers if layer.stage == stage])},
        blocks={block: _errors(of) for block, of in by_block.items()},
        network=_errors(layers),
        sources=_shares(layers),
        held_out=_errors_if_any(layer for layer in regressed if not layer.fitted_on),
        fitted_on=_errors_if_any(layer for layer in regressed if layer.fitted_on),
        unmeasured=tuple(
            f"{layer.name} {phase}"
            for layer in network.layers
            for phase in _PHASES
            if (layer.operation, phase) not in times
        ),
        extrapolated=remarks.extrapolated(),
        notes=(*remarks.notes(), *_apart(of_settings, layers_from), *_alone(times)),
    )


def _place_of(profile: Profile, network: ModelGraph, dtype: str, batch: int | None) -> _Place:
    operations = {layer.operation for layer in network.layers}
    times = [time for time in profile.layer_times if time.operation in operations and time.dtype == dtype]
    batches = sorted({time.batch for time in times if not time.shard and time.phase in _PHASES})
    if not batches:
        raise UserError(
            f"the profile holds no measured layers of {network.name} in {dtype}, with which to compare estimates;"
            f" measure them: paradl-bench layers {network.name} --batch N -o DIR, then calibrate fit"
        )
    if batch is not None and batch not in batches:
        raise UserError(
            f"--batch {batch}: layers of {network.name} were measured at batch {', '.join(map(str, batches))};"
            " give one of these"
        )
    at = batches[-1] if batch is None else batch
    return _Place(at, min(time.ranks_on_host for time in times if time.batch == at and not time.shard))


def _times_at(
    profile: Profile, network: ModelGraph, dtype: str, place: _Place
) -> dict[tuple[str, PhaseName], LayerTime]:
    """By operation and phase; times inside iterations before those alone."""
    operations = {layer.operation for layer in network.layers}
    time_of: dict[tuple[str, PhaseName], LayerTime] = {}
    for time in sorted(profile.layer_times, key=lambda time: time.mode != "isolated"):
        at = time.batch, time.ranks_on_host
        if time.operation in operations and time.dtype == dtype and not time.shard and at == place:
            time_of[time.operation, time.phase] = time
    return time_of


def _layer_rows(
    asked: Profile,
    compared: Compared,
    layers_from: LayersFrom,
    place: _Place,
    times: dict[tuple[str, PhaseName], LayerTime],
    depth: int,
) -> list[_Row]:
    network, dtype = compared.network, compared.dtype
    costs, kernels = LayerCosts(asked, network, dtype, layers_from), KernelCosts(asked.kernel_models, dtype)
    rows = []
    for phase in _PHASES:
        for layer in network.layers:
            time = times.get((layer.operation, phase))
            if time is None:
                continue
            estimate = costs.cost(layer.operation, phase, "", *place)
            fitted_on = estimate.source is Source.REGRESSED and kernels.was_fitted_on(layer, phase, place.batch)
            block = _block(layer, depth)
            rows.append(_Row(layer.name, layer.kind, block, phase, time.time.typical_s, estimate, fitted_on))
    return rows


def _update_rows(
    of_settings: Profile, asked: Profile, compared: Compared, layers_from: LayersFrom, place: _Place
) -> list[_Row]:
    """The weight update of the whole network, where it was measured; it does not depend on the batch."""
    time = _update_time(of_settings, compared, place)
    if time is None:
        return []
    network, optimizer = compared.network, compared.optimizer
    costs = ModelCosts(asked, network, dtype=compared.dtype, optimizer=optimizer, layers_from=layers_from)
    estimate = costs.weight_update(*place)
    parameters, dtype = network.parameters, kept_dtype(compared.dtype)
    shape = optimizer_shape(optimizer, sum(parameter.elements for parameter in parameters), len(parameters), dtype)
    kernels = KernelCosts(asked.kernel_models, dtype)
    fitted_on = estimate.source is Source.REGRESSED and kernels.shape_was_fitted_on(shape)
    return [_Row(UPDATE, optimizer, UPDATE, "WU", time.wu.typical_s, estimate, fitted_on)]


def _update_time(profile: Profile, compared: Compared, place: _Place) -> ModelTime | None:
    chosen = compared.network.name, compared.dtype, compared.optimizer, *place
    return next(
        (
            time
            for time in profile.model_times
            if (time.model, time.dtype, time.optimizer, time.batch, time.ranks_on_host) == chosen
        ),
        None,
    )


def _block(layer: Layer, depth: int) -> str:
    """The module that holds the layer, by so many names at most; of a layer of the model itself, its own name."""
    names = layer.name.split(".")
    return ".".join(names[: min(depth, max(len(names) - 1, 1))])


def _with_errors(rows: Sequence[_Row]) -> tuple[LayerError, ...]:
    """With equations 1 and 2, of its stage's mean."""
    means = {
        stage: sum(row.measured_s for row in of_stage) / len(of_stage)
        for stage, of_stage in grouped(rows, lambda row: row.stage).items()
    }
    return tuple(
        LayerError(
            layer=row.layer,
            kind=row.kind,
            block=row.block,
            stage=row.stage,
            measured_s=row.measured_s,
            estimated_s=row.estimate.seconds,
            source=row.estimate.source.name.lower(),
            re=_ratio(row.estimate.seconds - row.measured_s, row.measured_s),
            wre=_ratio(row.estimate.seconds - row.measured_s, means[row.stage]) or 0.0,
            fitted_on=row.fitted_on,
        )
        for row in rows
    )


def _errors(layers: Sequence[LayerError]) -> Errors:
    measured_s, estimated_s = (sum(getattr(layer, name) for layer in layers) for name in ("measured_s", "estimated_s"))
    single = [abs(layer.re) for layer in layers if layer.re is not None]
    return Errors(
        count=len(layers),
        measured_s=measured_s,
        estimated_s=estimated_s,
        re=_ratio(estimated_s - measured_s, measured_s),
        mean_re=sum(single) / len(single) if single else None,
        # Mean |difference| over mean measured: both means are of the same layers.
        wre=_ratio(sum(abs(layer.estimated_s - layer.measured_s) for layer in layers), measured_s),
    )


def _errors_if_any(layers: Iterable[LayerError]) -> Errors | None:
    present = list(layers)
    return _errors(present) if present else None


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _shares(layers: Sequence[LayerError]) -> dict[str, float]:
    whole = sum(layer.estimated_s for layer in layers)
    by_source = grouped(layers, lambda layer: layer.source)
    return {source: sum(layer.estimated_s for layer in of) / whole for source, of in by_source.items()} if whole else {}


def _apart(profile: Profile, layers_from: LayersFrom) -> tuple[str, ...]:
    """Of which measurements regressors and layers are; they are apart where a sweep measures kernels by itself."""
    if layers_from.way != "regressed":
        return ()
    sweeps = [source.path for source in profile.sources if source.kind == "kernels"]
    measured = [source.path for source in profile.sources if source.kind == "layers"]
    if not sweeps:
        return (
            "the profile does not say on which kernels its regressors were fitted: these errors may be errors on"
            " training data",
        )
    layers = f"; layers were measured alone in {', '.join(measured)}" if measured else ""
    return (f"regressors were fitted on kernels swept in {', '.join(sweeps)}{layers}",)


def _alone(times: dict[Any, LayerTime]) -> tuple[str, ...]:
    alone = sum(time.mode == "isolated" for time in times.values())
    return (f"{alone} of {len(times)} times are of operations run alone, not inside an iteration",) if alone else ()
