"""What is no layer's, where the profile holds layers alone: imported traces, sweeps of kernels.

The weight update is regressed from sweeps of the optimizer, else drawn from memory's bandwidth, as copies are. What
nothing tells is taken as none, and said to be.
"""

from __future__ import annotations

from calibrate.profile.device_roofline import memory_bandwidth, rates_of_sheet
from calibrate.profile.profile import Profile
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.kernel import KernelShape
from paradl_bench.network.kinds.autocast import kept_dtype
from paradl_bench.network.kinds.kernel_shape import copy_shape, optimizer_shape, update_bytes_beside
from paradl_bench.records.measurement import networks_not_whole
from predict.costs.compute.host_dispatch import alone_relative_sd, dispatch_of
from predict.costs.compute.kernel_costs import KernelCosts, source_of
from predict.costs.compute.layer_source import MEASURED_FIRST, LayersFrom, nothing_for
from predict.costs.sourced import UNKNOWN_RELATIVE_SD, Cost, Remark, Source

TAKEN_AS_NONE = "it is taken as none"
"""Stands in what is said of a prediction that lacks a part, whose interval therefore is not known."""


def none_known(what: str) -> Cost:
    """A cost of nothing, flagged."""
    text = f"{what}: the profile holds only layers (imported?): {TAKEN_AS_NONE}, and the interval does not cover it"
    return Cost(0.0, Source.STATED, remarks=(Remark(text, True),))


def of_missing_layers(profile: Profile, network: ModelGraph) -> tuple[Remark, ...]:
    """What is to be said of a network that was imported in part; of another one by its name, from a file, nothing."""
    notes = [note for note in profile.notes if network.name in networks_not_whole(note)]
    held = profile.network.get(network.name) if notes else None
    if held is None or held.digest != network.digest:
        return ()
    return tuple(Remark(note, True) for note in notes)


class UnmeasuredCosts:
    """Costs of weight updates and copies that no iteration was measured of, in one dtype.

    Args:
        layers_from: where that is not measured times, those of a weight update whatever was measured of it.
    """

    def __init__(
        self, profile: Profile, network: ModelGraph, dtype: str, layers_from: LayersFrom = MEASURED_FIRST
    ) -> None:
        self._from = layers_from
        self._profile = profile
        self._network = network
        # Neither reads activations.
        self._dtype, self._trained = kept_dtype(dtype), dtype
        self._kernels = KernelCosts(profile.kernel_models, self._dtype)

    @property
    def common_relative_sd(self) -> float:
        """What all that computes shares."""
        return alone_relative_sd(self._profile)

    def between(self) -> Cost:
        """Seconds between operations: none where the profile holds imported layers.

        On a GPU the host adds what it takes longer than the kernels (:mod:`predict.costs.compute.host_dispatch`).
        """
        if dispatch_of(self._profile) is None:
            return none_known("time between operations")
        return Cost(0.0, Source.STATED)

    def weight_update(self, optimizer: str, ranks_on_host: int) -> Cost:
        """Seconds of the optimizer step over the whole model; a UserError of an optimizer that is not known."""
        shape = self._update_shape(optimizer)
        cost = self._cost(shape, "weight update", ranks_on_host)
        return cost.over(1 / self.times_with_copies(optimizer))

    def times_with_copies(self, optimizer: str) -> float:
        """How many times as long fp32 copies of parameters make an optimizer's step, by the bytes that it moves."""
        shape = self._update_shape(optimizer)
        return 1 + update_bytes_beside(self._trained) * shape.sizes["elements"] / shape.bytes

    def _update_shape(self, optimizer: str) -> KernelShape:
        parameters = self._network.parameters
        elements = sum(parameter.elements for parameter in parameters)
        return optimizer_shape(optimizer, elements, len(parameters), self._dtype)

    def copy(self, size_bytes: int, tensors: int, ranks_on_host: int) -> Cost:
        """Seconds of copying tensors of ``size_bytes`` together inside the device's memory."""
        return self._cost(copy_shape("D2D", size_bytes, tensors), "copies of gradients", ranks_on_host)

    def _cost(self, shape: KernelShape, what: str, ranks_on_host: int) -> Cost:
        why = self._from.asked or "not measured"
        regressed = self._kernels.of_shape(shape)
        if regressed is not None:
            beyond = f", beyond those swept ({', '.join(regressed.extrapolated)})" if regressed.extrapolated else ""
            whose = f" of {regressed.published}" if regressed.published else ""
            remark = Remark(f"{what}: {why}, regressed from kernels{whose}{beyond}", bool(regressed.extrapolated))
            sd_s = regressed.seconds * regressed.relative_sd
            return Cost(regressed.seconds, source_of(regressed), method_sd_s=sd_s, remarks=(remark,), method=what)
        bandwidth = memory_bandwidth(self._profile.devices, ranks_on_host)
        if bandwidth is None and not self._from.measured:
            raise nothing_for(self._from, self._network, [shape.kind])
        if bandwidth is None:
            return none_known(what)
        seconds = shape.bytes / bandwidth
        by_sheet = rates_of_sheet(self._profile.devices)
        of_sheet = " by the data sheet" if by_sheet else ""
        remark = Remark(f"{what}: {why}, at the bandwidth of memory{of_sheet}", True)
        source = Source.DATA_SHEET if by_sheet else Source.ROOFLINE
        sd_s = seconds * UNKNOWN_RELATIVE_SD
        return Cost(seconds, source, method_sd_s=sd_s, remarks=(remark,), method="roofline")
