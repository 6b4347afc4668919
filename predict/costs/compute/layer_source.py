"""What the seconds of layers are taken from: measured times first, or regressors of kernels, or only the roofline.

A network predicted from regressors alone is what KernelMLP's figure 2 holds against measured layers. Such a prediction
reads a profile without its measured layers: neither their times, nor what was scaled from them, nor rates of the device
that they reached, nor how much longer they took inside an iteration than alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, get_args

import msgspec

from calibrate.kernels.model import KernelModel, Regressor, held_regressors, with_regressor
from calibrate.profile.device_roofline import rates_of_sheet, roofline_rates
from calibrate.profile.profile import Device, Profile
from calibrate.profile.roofline_rates import DATA_SHEET, rate_of
from paradl_bench.core.errors import UserError, unknown_choice
from paradl_bench.network.graph import Layer, ModelGraph
from paradl_bench.network.kinds.autocast import computed_in
from paradl_bench.network.kinds.kind import layer_kinds
from predict.costs.sourced import UNKNOWN_RELATIVE_SD, Cost, Remark, Source

Way = Literal["measured", "regressed", "roofline"]
_OPTIMIZER = "optimizer"
_DOCTOR = "paradl-bench doctor --measure -o DIR"


class LayersFrom(NamedTuple):
    """What ``--layers`` says.

    Attributes:
        regressor: that is asked by name, of ``regressed``; None takes of each kernel the one that its trial chose.
    """

    way: Way = "measured"
    regressor: Regressor | None = None

    @property
    def measured(self) -> bool:
        """Whether measured times come first."""
        return self.way == "measured"

    @property
    def asked(self) -> str:
        """The option that asks for other than measured times; empty where they come first."""
        return "" if self.measured else f"--layers {self}"

    def __str__(self) -> str:
        return self.way if self.regressor is None else f"{self.way}:{self.regressor}"


MEASURED_FIRST = LayersFrom()


def parse_layers(text: str | None) -> LayersFrom:
    """``measured``, ``regressed``, ``regressed:mlp`` (or another regressor's name), ``roofline``; None is measured.

    Raises:
        UserError: another word, or a regressor that there is none of.
    """
    if text is None:
        return MEASURED_FIRST
    word, _, name = (part.strip() for part in text.partition(":"))
    way = next((choice for choice in get_args(Way) if choice == word), None)
    if way is None or (":" in text and way != "regressed"):
        raise unknown_choice("--layers", text, [*get_args(Way), "regressed:REGRESSOR"])
    regressor = next((choice for choice in get_args(Regressor) if choice == name), None)
    if ":" in text and regressor is None:
        raise unknown_choice("regressor", name, get_args(Regressor))
    return LayersFrom(way, regressor)


def of_layers_from(profile: Profile, layers: LayersFrom) -> Profile:
    """The profile that costs are read from: without measured layers where these do not come first.

    Raises:
        UserError: no kernel holds the regressor that is asked by name, or the regressors' file is missing or broken.
    """
    if layers.measured:
        return profile
    models = _asked(profile.kernel_models, layers) if layers.way == "regressed" else ()
    devices = tuple(_unreached(device) for device in profile.devices)
    # Runs were compared with predictions from measured layers.
    return msgspec.structs.replace(
        profile, layer_times=(), devices=devices, kernel_models=models, compared_runs=msgspec.UNSET
    )


def _asked(models: Iterable[KernelModel], layers: LayersFrom) -> tuple[KernelModel, ...]:
    models, name = tuple(models), layers.regressor
    if name is None:
        return models
    asked_for = tuple(asked for asked in (with_regressor(model, name) for model in models) if asked is not None)
    if models and not asked_for:
        held = sorted({regressor_name for model in models for regressor_name in held_regressors(model)})
        raise UserError(
            f"{layers.asked}: no kernel of the profile has that regressor, only {', '.join(held)}; of a kind of which"
            " enough kernels were swept, calibrate fit keeps trees, mlp if torch is installed, and what a trial chose"
        )
    return asked_for


def _unreached(device: Device) -> Device:
    """A device without the rates that measured layers reached: one of these would else predict itself."""
    if device.rates_from in ("measured by doctor", "reached by kernels", DATA_SHEET):
        return device
    return msgspec.structs.replace(device, peak_flops=None, memory_bandwidth_bytes_per_s=None)


def refuse_without_source(profile: Profile, layers: LayersFrom, dtype: str, kernel_settings: str, model: str) -> None:
    """Raise a UserError where a profile (of :func:`of_layers_from`) has nothing at all of what is asked for."""
    dtype = computed_in(dtype)
    if layers.way == "regressed" and not any(kernel_model.dtype == dtype for kernel_model in profile.kernel_models):
        if kernel_settings:
            raise UserError(
                f"{layers.asked}: regressors hold for kernels without settings, and the prediction has"
                f" {kernel_settings}: leave one of them out"
            )
        raise UserError(
            f"{layers.asked}: the profile holds no regressors of kernels in {dtype}; measure some: paradl-bench"
            f" kernels --for {model} --dtype {dtype} -o DIR, then calibrate fit"
        )
    if layers.way == "roofline" and roofline_rates(profile.devices, dtype, 1) is None:
        raise UserError(
            f"--layers roofline: the profile holds no rates of its device in {dtype} except those that measured"
            f" layers reached; measure them: {_DOCTOR}, then calibrate fit"
        )


def sweep_command(model: str, kinds: Iterable[str], batch: int | None = None) -> str | None:
    """The command that measures kernels of a model's layers; None where all of the kinds are such that none runs."""
    known = layer_kinds()
    swept = [
        kind
        for kind in dict.fromkeys(kinds)
        if kind == _OPTIMIZER or (kind in known and known[kind].call is not None and known[kind].build is not None)
    ]
    at = f" --batch {batch}" if batch else ""
    return f"paradl-bench kernels --for {model} --kinds {','.join(swept)}{at} -o DIR" if swept else None


def roofline_cost(layers: LayersFrom, network: ModelGraph, layer: Layer, bound_s: float) -> Cost:
    """A layer's roofline as a cost; how far measured layers stay above theirs is not asked, so not known."""
    sweep = sweep_command(network.name, [layer.kind])
    if layers.way == "roofline":
        remarks: tuple[Remark, ...] = (Remark("--layers roofline: layers take their roofline", True),)
    else:
        how = f"; {sweep} measures such kernels" if sweep else ", and there is no sweep of such kernels"
        text = f"{layers.asked}: no regressor covers {layer.kind}: the roofline is used instead{how}"
        remarks = (Remark(text, True, layer.name),) if bound_s else ()
    sd_s = bound_s * UNKNOWN_RELATIVE_SD
    return Cost(bound_s, Source.ROOFLINE, method_sd_s=sd_s, remarks=remarks, method="roofline")


def roofline_of_kind(layer: Layer, bound_s: float, relative_sd: float, devices: Sequence[Device], dtype: str) -> Cost:
    """The roofline of a layer of whose kind nothing was measured, or published, where rates are a data sheet's.

    Args:
        relative_sd: how far measured layers are off theirs. dtype: that it is computed in.
    """
    by_sheet = rates_of_sheet(devices)
    if by_sheet:
        text, name = "no kernel of the kind was published, a roofline of the data sheet is used", layer.kind
    else:
        text, name = "no operation of the kind was measured, a roofline is used", layer.name
    remarks: tuple[Remark, ...] = (Remark(text, True, name),) if bound_s or not by_sheet else ()
    if by_sheet and not any(rate_of(device.rates, "compute", dtype, 1) for device in devices):
        stated = f"the data sheet of {devices[0].name} states no peak in {dtype}"
        remarks += (Remark(f"{stated}, which it may not compute in: that of fp32 is taken", True),)
    source = Source.DATA_SHEET if by_sheet else Source.ROOFLINE
    return Cost(bound_s, source, method_sd_s=bound_s * relative_sd, remarks=remarks, method="roofline")


def nothing_for(layers: LayersFrom, network: ModelGraph, kinds: Iterable[str], batch: int | None = None) -> UserError:
    """The error of kinds that no regressor answers for, in a profile without a roofline."""
    kinds = sorted(set(kinds))
    sweep = sweep_command(network.name, kinds, batch)
    at = f" at batch {batch}" if batch else ""
    measure = f"{sweep}, or for a roofline {_DOCTOR}" if sweep else f"for a roofline {_DOCTOR}"
    return UserError(
        f"{layers.asked}: no regressor covers {', '.join(kinds)} of {network.name}{at}, and no device rates are"
        f" known; measure: {measure}, then calibrate fit"
    )
