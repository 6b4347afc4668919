"""The roofline of a layer: seconds that its FLOPs and its bytes need on a device (Williams et al. 2009).

A layer that was not measured is scaled by it from the measured call that is most like it (:class:`LikeCalls`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from calibrate.profile.device_roofline import roofline_rates
from calibrate.profile.profile import Profile
from paradl_bench.core.statistics import MAD_TO_SD
from paradl_bench.network.graph import Layer, ModelGraph
from paradl_bench.records.measurement import PhaseName
from predict.costs.sourced import Floats

SETTING_DISTANCE = math.log(2)
"""What a setting that differs counts in a distance: as much as twice the work. From half to four times as much, the
layers of the H200 and of the 2-core host come out alike (``benchmarks/accuracy/like_layers.py``)."""
UNKNOWN_ERROR = 0.3
"""Standard deviation of the logarithm of scaled times, over 1 plus the distance, where a kind has a single measured
operation: the median of kinds, of an H200 in fp32 0.26 and in bf16 0.30, of a 2-core host 0.29
(``benchmarks/accuracy/like_layers.py``)."""


class Roofline:
    """Lower bound of a layer's time from FLOPs and bytes (Williams et al. 2009; KernelMLP's what-if).

    Bytes of backward are taken as twice those of forward: it reads what forward read and the gradient of the output,
    and writes the gradients of its inputs. Parameters are read forward; backward reads them and writes their gradients.

    Attributes:
        layers: by operation, of the predicted network first, then of the profile's.
    """

    def __init__(self, profile: Profile, network: ModelGraph, dtype: str = "fp32") -> None:
        self.layers: dict[str, Layer] = {}
        self._parameter_bytes: dict[str, int] = {}
        for graph in (network, *profile.network.values()):
            sizes = {parameter.name: parameter.bytes for parameter in graph.parameters}
            for layer in graph.layers:
                if layer.operation not in self.layers:
                    self.layers[layer.operation] = layer
                    self._parameter_bytes[layer.operation] = sum(sizes.get(name, 0) for name in layer.parameters)
        self._rates = functools.cache(functools.partial(roofline_rates, profile.devices, dtype))
        # A profile's one peak beside the rates by dtype is of fp32, and bounds no other.
        rated = (rate for device in profile.devices for rate in device.rates if rate.resource == "compute")
        self._peak_is_known = dtype == "fp32" or any(rate.dtype == dtype for rate in rated)

    def learn(self, layer: Layer, parameter_bytes: int) -> None:
        """Know an operation that no network holds."""
        self.layers.setdefault(layer.operation, layer)
        self._parameter_bytes.setdefault(layer.operation, parameter_bytes)

    def seconds(self, layer: Layer, phase: PhaseName, batch: int, ranks_on_host: int = 1) -> float | None:
        """max(FLOPs / rate, bytes / bandwidth) on a local batch; None where the profile has neither."""
        rates = self._rates(ranks_on_host)
        if rates is None:
            return None
        flops, moved = self.demand(layer, phase, batch)
        peak, bandwidth = rates
        return max(flops / peak, moved / bandwidth)

    def work(self, layer: Layer, phase: PhaseName, batch: int, ranks_on_host: int) -> float:
        """What times of layers of a kind are scaled by: roofline seconds; FLOPs, else bytes, without rates."""
        seconds = self.seconds(layer, phase, batch, ranks_on_host)
        return next(filter(None, self.demand(layer, phase, batch)), 0.0) if seconds is None else seconds

    def bounds(self, layer: Layer, phase: PhaseName, batch: int, ranks_on_host: int) -> tuple[float, float]:
        """Seconds of the FLOPs and of the bytes by themselves; 0 where no rate of this dtype is known."""
        rates = self._rates(ranks_on_host) if self._peak_is_known else None
        flops, moved = self.demand(layer, phase, batch)
        return (flops / rates[0], moved / rates[1]) if rates else (0.0, 0.0)

    def demand(self, layer: Layer, phase: PhaseName, batch: int) -> tuple[float, float]:
        """FLOPs and bytes of a layer's phase on a local batch."""
        weights = self._parameter_bytes.get(layer.operation, 0)
        samples = 1 if layer.batchless else batch
        if phase == "FW":
            return float(layer.fw_flops * samples), float(layer.fw_bytes * samples + weights)
        flops = {"BW_input": layer.bw_input_flops, "BW_weight": layer.bw_weight_flops}.get(
            phase, layer.bw_input_flops + layer.bw_weight_flops
        )
        # Whole numbers beyond 64 bits are objects to numpy.
        return float(flops * samples), float(2 * layer.fw_bytes * samples + 2 * weights)


class Call(NamedTuple):
    """A layer's phase on a local batch."""

    layer: Layer
    batch: int


class LikeCalls:
    """Measured calls of one kind and phase, by which others are scaled.

    The call that is most like another has the least distance: the Euclidean one of the logarithms of FLOPs and of
    bytes, each on its own local batch, and :data:`SETTING_DISTANCE` for each setting that differs. A kernel's share of
    the roofline follows what one call of it computes and moves, whatever batch and shape that is made of.

    Args:
        measured: calls with their seconds; at least one.
    """

    def __init__(
        self, roofline: Roofline, phase: PhaseName, ranks_on_host: int, measured: Sequence[tuple[Call, float]]
    ) -> None:
        self._roofline, self._phase, self._ranks_on_host = roofline, phase, ranks_on_host
        self._calls = [call for call, _ in measured]
        self._seconds = np.array([seconds for _, seconds in measured])
        self._demand = np.array([self._log_demand(call) for call in self._calls])
        self._unlike: dict[str, Floats] = {}
        self._error: float | None = None
        # Bytes may stay in a cache or be counted too often: a rate that like calls exceed bounds nothing below theirs.
        bounds = np.array([roofline.bounds(*self._of(call)) for call in self._calls])[self._seconds > 0]
        took = self._seconds[self._seconds > 0, None]
        self._kept = np.min(took / np.maximum(bounds, took), axis=0, initial=1.0)

    def nearest(self, call: Call, whole: str = "") -> tuple[Call, float]:
        """The measured call that is most like one, and its distance.

        Args:
            whole: the operation that the call is a part of. Where it was measured it is the most like: the same
                kernel's time goes down with its part of the work, and that of another may be longer than the whole.
        """
        distances = self._distances(call)
        parted = np.array([other.layer.operation != whole for other in self._calls])
        index = int(np.argmin(distances if parted.all() else np.where(parted, np.inf, distances)))
        return self._calls[index], float(distances[index])

    def ratio(self, call: Call, other: Call) -> float:
        """How much longer one call should take than another."""
        mine, theirs = (self._roofline.work(*self._of(compared)) for compared in (call, other))
        return mine / theirs if mine and theirs else 1.0

    def floor_s(self, call: Call) -> float:
        """What the device's rates allow, as far as like calls keep to them."""
        return float(np.max(self._kept * self._roofline.bounds(*self._of(call))))

    def relative_sd(self, distance: float) -> float:
        """How far a time may be off that is scaled over a distance, from all measured calls scaled from each other.

        The median error of their logarithms grows as 1 plus the distance.
        """
        if self._error is None:
            self._error = self._measured_error()
        return self._error * (1 + distance)

    def _measured_error(self) -> float:
        work = np.array([self._roofline.work(*self._of(call)) for call in self._calls])
        takes_time = self._seconds > 0
        over_work = np.log(np.where(takes_time, self._seconds, 1) / np.where(work > 0, work, 1))
        operations = np.array([call.layer.operation for call in self._calls])
        errors = []
        for index, call in enumerate(self._calls):
            others = takes_time & takes_time[index] & (operations != operations[index])
            errors.append((np.abs(over_work - over_work[index]) / (1 + self._distances(call)))[others])
        all_errors = np.concatenate(errors)
        return MAD_TO_SD * float(np.median(all_errors)) if len(all_errors) else UNKNOWN_ERROR

    def _of(self, call: Call) -> tuple[Layer, PhaseName, int, int]:
        return call.layer, self._phase, call.batch, self._ranks_on_host

    def _log_demand(self, call: Call) -> Floats:
        return np.log1p(self._roofline.demand(call.layer, self._phase, call.batch))

    def _distances(self, call: Call) -> Floats:
        operation = call.layer.operation
        if operation not in self._unlike:
            unlike = {other.layer.operation: unlike_settings(call.layer, other.layer) for other in self._calls}
            self._unlike[operation] = SETTING_DISTANCE * np.array(
                [unlike[other.layer.operation] for other in self._calls]
            )
        apart = np.hypot(*(self._demand - self._log_demand(call)).T)
        return np.asarray(apart + self._unlike[operation])


def unlike_settings(layer: Layer, other: Layer) -> int:
    """In how many settings two operations of a kind differ."""
    missing = object()
    names = {*layer.attributes, *other.attributes}
    return sum(layer.attributes.get(name, missing) != other.attributes.get(name, missing) for name in names)


def nearest_count(measured: Mapping[int, object] | Sequence[int], wanted: int) -> int:
    """The number nearest to ``wanted`` by ratio; the smaller of two as near."""
    return min(sorted(measured), key=lambda count: abs(math.log(count / wanted)))


def kind_of(operation: str) -> str:
    """The kind of layer that an operation is of."""
    return operation.split("(", 1)[0]
