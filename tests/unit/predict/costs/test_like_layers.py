"""A layer that was not measured is scaled from the call most like it, no faster than the device, with its error."""

from __future__ import annotations

import math

import msgspec
import pytest
from profile_factory import layer_times, make_network, make_profile

from calibrate.kernels.model import Estimate
from calibrate.profile.profile import LayerTime, Profile
from paradl_bench.network.graph import Layer, ModelGraph
from predict.costs.compute.kernel_costs import KernelCosts
from predict.costs.compute.layer_costs import LayerCosts
from predict.costs.compute.layer_roofline import UNKNOWN_ERROR
from predict.costs.sourced import Cost, Source

PEAK, BANDWIDTH, CALL_S = 1e13, 1e12, 20e-6
"""Of a device whose kernels take a call and half of the roofline."""
ASKED = make_network((1024, 4096), name="asked")


def device_seconds(layer: Layer, phase: str, batch: int) -> float:
    flops = (layer.fw_flops if phase == "FW" else layer.bw_input_flops + layer.bw_weight_flops) * batch
    return CALL_S + 2 * flops / PEAK


def only(network: ModelGraph, **changes: object) -> ModelGraph:
    """A network of its first layer alone."""
    layer = msgspec.structs.replace(network.layers[0], **changes)
    return msgspec.structs.replace(network, layers=(layer,))


def times_of(network: ModelGraph, batch: int) -> tuple[LayerTime, ...]:
    return layer_times(network, batches=(batch,), seconds=device_seconds)


def profile_of(*measured: tuple[ModelGraph, int], times: tuple[LayerTime, ...] = ()) -> Profile:
    device = msgspec.structs.replace(
        make_profile().devices[0], peak_flops=PEAK, memory_bandwidth_bytes_per_s=BANDWIDTH, rates=()
    )
    return make_profile(
        devices=(device,),
        network={network.name: network for network, _ in measured},
        layer_times=times or tuple(time for network, batch in measured for time in times_of(network, batch)),
    )


def cost(profile: Profile, network: ModelGraph = ASKED, *, batch: int = 1024, dtype: str = "fp32") -> Cost:
    return LayerCosts(profile, network, dtype).cost(network.layers[0].operation, "FW", "", batch, 1)


def small(name: str = "small") -> ModelGraph:
    """Of the settings that are asked for, and little work: its call takes most of its time."""
    return only(make_network((256, 100), name=name))


def large(name: str = "large", kind: str = "linear") -> ModelGraph:
    """Of other settings, and about as much work a call as is asked for, on a fourth of the batch."""
    return only(make_network((4096, 5000), name=name), kind=kind, attributes={"out_features": 5000, "bias": False})


@pytest.mark.parametrize(("relative_sd", "source"), [(0.01, Source.REGRESSED), (5.0, Source.SCALED)])
def test_the_estimate_with_the_smaller_error_is_taken(
    monkeypatch: pytest.MonkeyPatch, relative_sd: float, source: Source
) -> None:
    monkeypatch.setattr(KernelCosts, "estimate", lambda *_: Estimate(1.0, relative_sd, ()))
    found = cost(profile_of((small(), 4096), (large(), 256)))
    assert found.source is source


def test_a_scaled_time_of_nothing_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelCosts, "estimate", lambda *_: Estimate(1.0, 5.0, ()))
    free = tuple(
        msgspec.structs.replace(time, time=msgspec.structs.replace(time.time, typical_s=0.0))
        for time in times_of(large(), 256)
    )
    profile = profile_of((small(), 4096), (large(), 256), times=(*times_of(small(), 4096), *free))
    # Without rates nothing bounds a scaled time from below.
    device = msgspec.structs.replace(profile.devices[0], peak_flops=None, memory_bandwidth_bytes_per_s=None)
    assert cost(msgspec.structs.replace(profile, devices=(device,))).source is Source.REGRESSED


@pytest.mark.parametrize("kind", ["linear", "addmm"])
def test_work_a_call_decides_before_settings_and_batch(kind: str) -> None:
    found = cost(profile_of((small(), 4096), (large(kind=kind), 256)))
    assert found.seconds == pytest.approx(device_seconds(ASKED.layers[0], "FW", 1024), rel=0.05)
    assert found.source is Source.SCALED
    assert any(remark.extrapolated for remark in found.remarks)


def test_settings_decide_among_calls_of_equal_work() -> None:
    like, unlike = (
        only(make_network((4096, 1024), name=name), attributes={"out_features": 1024, "bias": bias}, name=name)
        for name, bias in (("like", True), ("unlike", False))
    )
    slow = tuple(
        msgspec.structs.replace(time, time=msgspec.structs.replace(time.time, typical_s=1.0))
        for time in times_of(unlike, 1024)
    )
    assert cost(profile_of((like, 1024), (unlike, 1024), times=(*times_of(like, 1024), *slow))).seconds < 1.0


def cached() -> tuple[ModelGraph, tuple[LayerTime, ...]]:
    """A layer that little is computed of, in a tenth of what its bytes take from memory."""
    network = only(make_network((4096, 1), name="cached"))
    times = layer_times(network, batches=(64,), seconds=lambda layer, *_: 0.1 * 64 * layer.fw_bytes / BANDWIDTH)
    return network, times


def test_a_scaled_time_is_never_below_the_peak() -> None:
    network, times = cached()
    found = cost(profile_of((network, 64), times=times))
    assert found.seconds == pytest.approx(1024 * ASKED.layers[0].fw_flops / PEAK)


def test_a_peak_of_fp32_bounds_no_other_dtype() -> None:
    network, times = cached()
    lower = tuple(msgspec.structs.replace(time, dtype="bf16") for time in times)
    assert cost(profile_of((network, 64), times=lower), dtype="bf16").seconds < 1024 * ASKED.layers[0].fw_flops / PEAK


def test_the_interval_widens_with_distance_by_measured_errors() -> None:
    """Calls that take a power of their work are off by as much as they are apart."""
    networks = [only(make_network((width, width), name=f"of-{width}")) for width in (256, 512, 2048)]
    times = tuple(
        time
        for network in networks
        for time in layer_times(
            network, batches=(1024,), seconds=lambda layer, phase, batch: 1e-9 * (layer.fw_flops * batch) ** 0.5
        )
    )
    profile = profile_of(*((network, 1024) for network in networks), times=times)
    near, far = cost(profile), cost(profile, only(make_network((8192, 8192), name="far")))
    assert near.method_sd_s / near.seconds < far.method_sd_s / far.seconds
    for found, layer in ((near, ASKED.layers[0]), (far, make_network((8192, 8192)).layers[0])):
        assert abs(1e-9 * math.sqrt(layer.fw_flops * 1024) - found.seconds) < 1.645 * found.method_sd_s


def test_a_single_measured_operation_has_the_stated_error() -> None:
    found = cost(profile_of((only(make_network((1024, 4000), name="lone")), 1024)))
    assert found.method_sd_s / found.seconds > UNKNOWN_ERROR


def test_a_shard_is_scaled_from_its_whole_layer() -> None:
    """Another network has a layer of the shard's own work, in a kernel that takes a second."""
    (half,) = only(make_network((1024, 2048), name="half"), name=ASKED.layers[0].name).layers
    alike = only(make_network((1024, 2049), name="alike"))
    slow = tuple(
        msgspec.structs.replace(time, time=msgspec.structs.replace(time.time, typical_s=1.0))
        for time in times_of(alike, 1024)
    )
    whole = only(ASKED)
    profile = profile_of((whole, 1024), (alike, 1024), times=(*times_of(whole, 1024), *slow))
    costs = LayerCosts(profile, whole, "fp32")
    costs.learn([(half, 4 * 1024 * 2048)])
    found = costs.cost(half.operation, "FW", "", 1024, 1)
    assert found.seconds == pytest.approx(device_seconds(half, "FW", 1024), rel=0.1)


def test_work_beyond_64_bits_is_compared_too() -> None:
    huge = only(make_network((300, 100), name="huge"), fw_flops=1 << 62)
    found = cost(profile_of((small(), 8), (large(), 8)), huge, batch=64)
    assert found.seconds == pytest.approx(64 * (1 << 62) / PEAK, rel=1)
