"""The roofline of a layer: seconds that its FLOPs and its bytes need on a device (Williams et al. 2009)."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

from calibrate.profile.device_roofline import roofline_rates
from calibrate.profile.profile import Profile
from paradl_bench.network.graph import Layer, ModelGraph
from paradl_bench.records.measurement import PhaseName


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
        for each in (network, *profile.network.values()):
            sizes = {parameter.name: parameter.bytes for parameter in each.parameters}
            for layer in each.layers:
                if layer.operation not in self.layers:
                    self.layers[layer.operation] = layer
                    self._parameter_bytes[layer.operation] = sum(sizes.get(name, 0) for name in layer.parameters)
        self._rates = functools.cache(functools.partial(roofline_rates, profile.devices, dtype))

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

    def ratio(self, layer: Layer, other: Layer, phase: PhaseName) -> float:
        """How much longer one layer should take than another; by FLOPs, else bytes, where no device rates are known."""
        mine, theirs = self.seconds(layer, phase, 1), self.seconds(other, phase, 1)
        if mine is not None and theirs is not None:
            return mine / theirs if mine and theirs else 1.0
        pairs = zip(self.demand(layer, phase, 1), self.demand(other, phase, 1), strict=True)
        return next((mine / theirs for mine, theirs in pairs if mine and theirs), 1.0)

    def demand(self, layer: Layer, phase: PhaseName, batch: int) -> tuple[float, float]:
        """FLOPs and bytes of a layer's phase on a local batch."""
        weights = self._parameter_bytes.get(layer.operation, 0)
        samples = 1 if layer.batchless else batch
        if phase == "FW":
            return layer.fw_flops * samples, layer.fw_bytes * samples + weights
        flops = {"BW_input": layer.bw_input_flops, "BW_weight": layer.bw_weight_flops}.get(
            phase, layer.bw_input_flops + layer.bw_weight_flops
        )
        return flops * samples, 2 * layer.fw_bytes * samples + 2 * weights


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
