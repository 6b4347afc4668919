"""``doctor --measure``: rates from raw times to the roofline that stands for a layer that nobody measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from profile_factory import layer_times, make_network, make_profile, model_times

from calibrate.fitting.fit import fit_profile
from calibrate.fitting.merging.merge import merge_profiles
from calibrate.profile.device_roofline import roofline_rates
from calibrate.profile.profile import Device, Profile, read_profile, write_profile
from calibrate.profile.roofline_rates import DeviceRate, fit_rates, rate_of
from calibrate.report.sections.roofline_show import device_lines
from paradl_bench.commands.doctor import COMMAND
from paradl_bench.core.errors import UserError
from paradl_bench.measure.machine import roofline
from paradl_bench.measure.machine.roofline import RooflineRequest, measure_roofline
from paradl_bench.measure.machine.roofline_kernels import RateKernel, cache_bytes, rate_kernels
from paradl_bench.measure.machine.roofline_summary import kernel_rates
from paradl_bench.ranks.clocks import CpuClock
from paradl_bench.ranks.groups.process_groups import RankContext
from paradl_bench.records.measurement import read_manifest, read_records
from paradl_bench.records.roofline_record import RATES_FILE, RateSamples, Resource
from predict.costs.compute.layer_costs import LayerCosts
from predict.costs.sourced import Source

ALONE = RankContext(
    rank=0, ranks=1, local_rank=0, device=torch.device("cpu"), backend="none", launcher="own", core=None
)


def samples(
    per_s: float,
    *,
    resource: Resource = "compute",
    dtype: str = "fp32",
    ranks: int = 1,
    size: int = 1024,
    kernel: str = "matmul",
    blocks: int = 4,
    seed: int = 0,
) -> list[RateSamples]:
    """Records of a kernel with a known rate and 2% of noise, one slow spell in the first block."""
    work, generator = 1e9, np.random.default_rng(seed)
    records = []
    for block in range(blocks):
        for rank in range(ranks):
            seconds = work / per_s * generator.normal(1, 0.02, size=25)
            seconds[: 8 if block == 0 else 0] *= 5
            records.append(
                RateSamples(
                    resource=resource,
                    kernel=kernel,
                    sizes={"n": size},
                    dtype=dtype,
                    work=work,
                    working_set_bytes=size,
                    ranks_on_host=ranks,
                    rank=rank,
                    block=block,
                    samples_s=tuple(seconds.tolist()),
                )
            )
    return records


def test_the_rate_is_the_best_kernels_median_not_best_call() -> None:
    (rate,) = fit_rates([*samples(8e10), *samples(5e10, size=2048, seed=1)])
    assert rate.per_s == pytest.approx(8e10, rel=0.01)
    assert rate.kernel == "matmul, n 1024"
    assert rate.spread_over_kernels[0] == pytest.approx(5e10, rel=0.01)
    assert 0 < rate.relative_sd < 0.02


def test_memory_bandwidth_is_taken_from_the_largest_working_set() -> None:
    records = [*samples(3e10, resource="memory", size=1 << 20), *samples(1e10, resource="memory", size=1 << 28)]
    (rate,) = fit_rates(records)
    assert (rate.working_set_bytes, rate.per_s) == (1 << 28, pytest.approx(1e10, rel=0.01))


def test_rates_are_apart_by_dtype_ranks_and_cache() -> None:
    records = [
        *samples(8e10),
        *samples(1.6e11, dtype="bf16"),
        *samples(6e10, ranks=2),
        *samples(6e10, resource="cache", size=1 << 18),
        *samples(5e10, resource="cache", size=1 << 22),
        *samples(1e10, resource="memory", size=1 << 28),
        *samples(6e9, resource="memory", size=1 << 28, ranks=2),
    ]
    rates = fit_rates(records)
    assert len(rates) == 7
    assert rate_of(rates, "compute", "bf16", 1) == pytest.approx(1.6e11, rel=0.01)
    assert rate_of(rates, "compute", "fp32", 2) == pytest.approx(6e10, rel=0.01)
    assert rate_of(rates, "memory", "fp32", 8) == pytest.approx(6e9, rel=0.01)
    assert rate_of(rates, "compute", "tf32", 1) is None


def rates(peak: float, bandwidth: float, ranks: int = 1, dtype: str = "fp32") -> tuple[DeviceRate, DeviceRate]:
    return tuple(  # type: ignore[return-value]
        DeviceRate(
            resource=resource,
            dtype=dtype,
            ranks_on_host=ranks,
            per_s=value,
            relative_sd=0.01,
            kernel="k",
            working_set_bytes=1,
            spread_over_kernels=(value, value),
        )
        for resource, value in (("compute", peak), ("memory", bandwidth))
    )


def device(**changes: object) -> Device:
    found = Device(
        name="cpu",
        kind="cpu",
        memory_bytes=1 << 30,
        devices_per_host=2,
        peak_flops=1e9,
        memory_bandwidth_bytes_per_s=1e8,
    )
    return msgspec.structs.replace(found, **changes)


def test_the_roofline_uses_doctors_rates_of_its_dtype_and_ranks() -> None:
    measured = device(rates=(*rates(4e10, 1e10), *rates(3e10, 6e9, ranks=2), rates(9e10, 1.0, dtype="bf16")[0]))
    assert roofline_rates([measured], "fp32", 1) == (4e10, 1e10)
    assert roofline_rates([measured], "fp32", 2) == (3e10, 6e9)
    assert roofline_rates([measured], "bf16", 1) == (9e10, 1e10)
    assert roofline_rates([device()], "fp32", 2) == (1e9, 1e8)
    assert roofline_rates([device(peak_flops=None)], "fp32", 1) is None


def unmeasured(profile: Profile, ranks_on_host: int) -> tuple[float, Source]:
    """Seconds of a convolution, a kind that the profile has none of."""
    chain = make_network()
    conv = msgspec.structs.replace(
        chain.layers[0], kind="conv", fw_flops=4e9, fw_bytes=0, attributes={"kernel_size": [3, 3]}, parameters=()
    )
    network = msgspec.structs.replace(chain, layers=(conv, *chain.layers[1:]))
    cost = LayerCosts(profile, network, "fp32").cost(conv.operation, "FW", "", 1, ranks_on_host)
    return cost.seconds, cost.source


def test_an_unmeasured_layer_kind_is_timed_by_doctors_peak() -> None:
    network = make_network()
    base = make_profile(network)
    profile = msgspec.structs.replace(base, devices=(device(rates=(*rates(4e10, 1e10), *rates(2e10, 1e10, ranks=2))),))
    assert unmeasured(profile, 1) == (pytest.approx(0.1), Source.ROOFLINE)
    assert unmeasured(profile, 2) == (pytest.approx(0.2), Source.ROOFLINE)


def tiny_kernels(device: torch.device, dtypes: tuple[str, ...], ranks: int) -> list[RateKernel]:
    """Kernels of microseconds, one a resource."""

    def prepare() -> Callable[[], object]:
        tensor = torch.ones(64)
        return lambda: torch.add(tensor, tensor)

    resources: tuple[Resource, ...] = ("compute", "memory", "cache")
    return [
        RateKernel(
            resource=resource,
            name=f"add of {resource}",
            dtype="fp32",
            sizes=(("n", 64),),
            work=768.0,
            working_set_bytes=768,
            prepare=prepare,
        )
        for resource in resources[: 1 + len(dtypes)]
    ]


def test_what_is_measured_is_kept_resumed_and_fitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "rate_kernels", tiny_kernels)
    request = RooflineRequest(device="cpu", dtypes=("fp32", "bf16"), blocks=3, point_s=1e-4)
    directory = tmp_path / "rates"
    measure_roofline(request, ALONE, directory, ("paradl-bench", "doctor"))
    manifest = read_manifest(directory)
    assert (manifest.kind, manifest.complete) == ("roofline", True)
    records = read_records(directory, RATES_FILE, RateSamples)
    assert len(records) == 3 * 3
    measure_roofline(request, ALONE, directory, ("paradl-bench", "doctor"))
    assert read_records(directory, RATES_FILE, RateSamples) == records
    assert {rate.resource for rate in kernel_rates(directory)} == {record.resource for record in records}
    with pytest.raises(UserError, match="blocks 3, not 4"):
        measure_roofline(msgspec.structs.replace(request, blocks=4), ALONE, directory, ("paradl-bench", "doctor"))


def test_doctors_directory_gives_the_devices_rates_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "rate_kernels", tiny_kernels)
    directory = tmp_path / "rates"
    request = RooflineRequest(device="cpu", dtypes=("fp32", "bf16"), blocks=2, point_s=1e-4)
    measure_roofline(request, ALONE, directory, ("paradl-bench", "doctor"))
    profile = fit_profile([directory], command_line=("calibrate", "fit"), force=False)
    (found,) = profile.devices
    assert found.rates_from == "measured by doctor"
    assert {rate.resource for rate in found.rates} == {"compute", "memory", "cache"}
    assert found.peak_flops == rate_of(found.rates, "compute", "fp32", 1)
    assert any("GFLOP/s in fp32, one rank" in line for line in device_lines(profile.devices))
    write_profile(tmp_path / "p.json", profile)
    assert read_profile(tmp_path / "p.json") == profile


def test_kernels_that_would_take_seconds_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(work: float, dtype: str) -> RateKernel:
        return dataclasses.replace(tiny_kernels(ALONE.device, (), 1)[0], work=work, dtype=dtype, name=f"{work:g}")

    seconds = {"fp32": 1e-9, "bf16": 1e-6}
    timed = iter([seconds["bf16"] * 1e5, seconds["fp32"] * 1e5])
    monkeypatch.setattr(roofline, "_seconds_a_call", lambda *_: next(timed))
    kernels = [kernel(work, dtype) for dtype in seconds for work in (1e5, 9e5, 1e8)]
    kept = roofline._quick_enough(kernels, CpuClock(), ALONE)
    assert [(each.dtype, each.work) for each in kept] == [
        ("fp32", 1e5),
        ("fp32", 9e5),
        ("fp32", 1e8),
        ("bf16", 1e5),
        ("bf16", 9e5),
    ]


def test_profiles_without_doctor_keep_what_layers_reached() -> None:
    lines = list(device_lines([device(rates_from="reached by layers")]))
    assert lines == ["Layers reached 1 GFLOP/s and 0.1 GB/s of memory on cpu: at least so much"]
    lines = list(device_lines([device(rates_from="measured by doctor", layers_reached=(5e8, None))]))
    assert lines == ["Layers reached 0.5 GFLOP/s (50% of doctor's) on cpu"]


def test_merging_keeps_the_device_that_doctor_measured() -> None:
    network = make_network()
    base = make_profile(network, layer_times=layer_times(network), model_times=model_times(network))
    plain = msgspec.structs.replace(base, devices=(device(),))
    only_rates = msgspec.structs.replace(
        base,
        devices=(device(rates=rates(4e10, 1e10), rates_from="measured by doctor"),),
        network={},
        layer_times=(),
        model_times=(),
        copies=(),
        communication=(),
        contexts=(),
    )
    merged = merge_profiles([plain, only_rates], ["a", "b"], command_line=("calibrate", "merge"), force=True)
    assert merged.devices == only_rates.devices


def test_kernels_go_beyond_the_caches_and_fit_into_them() -> None:
    kernels = rate_kernels(torch.device("cpu"), ("fp32",), 2)
    inner, last = cache_bytes(torch.device("cpu"))
    beyond = [kernel.working_set_bytes for kernel in kernels if kernel.resource == "memory"]
    cached = [kernel.working_set_bytes for kernel in kernels if kernel.resource == "cache"]
    assert max(cached) <= last / 2
    assert min(cached) <= inner
    assert min(beyond) > 2 * last or min(beyond) > (1 << 27)
    assert {kernel.name for kernel in kernels} == {"matmul", "conv", "copy", "triad"}
    small = next(kernel for kernel in kernels if kernel.name == "matmul")
    out = small.prepare()()
    assert isinstance(out, torch.Tensor)
    assert small.work == 2 * out.shape[0] ** 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "2"], "--ranks needs --measure"),
        (["--measure"], "--measure needs -o DIR"),
        (["--measure", "--dtype", "tf32", "-o", "x"], "TensorFloat-32 is a mode of GPUs"),
        (["--measure", "--dtype", "fp64", "-o", "x"], "bf16, fp32, tf32"),
    ],
)
def test_mistakes_are_told_before_anything_runs(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(COMMAND, arguments)
    assert isinstance(result.exception, UserError)
    assert message in str(result.exception)
