"""A GPU behind its host: what an iteration waits where kernels are shorter than their dispatch."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from profile_factory import layer_times, make_network, make_profile, ring_fit

from calibrate.profile.profile import Dispatch, Profile
from paradl_bench.core.errors import UserError
from paradl_bench.core.statistics import Z90
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Compute, FrameworkOverhead, Plan
from paradl_bench.strategies.nesting.catalog import planner_for
from predict.costs.compute.host_dispatch import ALONE_RELATIVE_SD, HOST_BOUND, UNMEASURED, dispatch_of
from predict.costs.cost_model import CostModel, PricedPlan
from predict.costs.sourced import HOST_DISPATCH, Source

KERNEL_S = 20e-6
NETWORK = make_network()


def of_gpu(dispatch: Dispatch | None, kind: str = "cuda") -> Profile:
    """Layers of equal times, without an iteration, on a GPU."""
    made = make_profile(NETWORK, layer_times=layer_times(NETWORK, seconds=lambda *_: KERNEL_S))
    device = msgspec.structs.replace(made.devices[0], kind=kind, dispatch=dispatch or msgspec.UNSET)
    alone = tuple(msgspec.structs.replace(time, mode="isolated") for time in made.layer_times)
    changes = {"model_times": (), "shard_times": (), "copies": (), "devices": (device,), "layer_times": alone}
    return msgspec.structs.replace(made, **changes)


def price(profile: Profile, accumulate: int = 1, strategy: str = "serial") -> PricedPlan:
    chosen = parse_strategy(strategy)
    plan = planner_for(chosen).plan(NETWORK, chosen, PlanSettings(batch=8, accumulate=accumulate))
    return CostModel(profile=profile, network=NETWORK).price(plan)


def seconds_of(found: PricedPlan, kind: type[Compute] | type[FrameworkOverhead], way: str) -> float:
    plan: Plan = found.plan
    works = [index for index, work in plan.of_kind(kind).items() if work.way == way]
    return float(found.costs.total_s[works].sum())


def kernels(found: PricedPlan, way: str) -> int:
    return round(seconds_of(found, Compute, way) / KERNEL_S)


def dispatch(seconds: float, relative_sd: float = 0.0) -> Dispatch:
    return Dispatch(forward_s=seconds, backward_s=2 * seconds, relative_sd=relative_sd, runs=("a run",))


def phases_s(found: PricedPlan) -> tuple[float, ...]:
    """Forward and backward, with what they wait."""
    return tuple(seconds_of(found, Compute, way) + seconds_of(found, FrameworkOverhead, way) for way in ("FW", "BW"))


def test_an_unknown_dtype_is_refused_without_iterations_too() -> None:
    with pytest.raises(UserError, match="unknown dtype 'bf61': did you mean bf16"):
        CostModel(profile=of_gpu(None), network=NETWORK, dtype="bf61")


def test_short_kernels_take_their_dispatch_and_the_last_kernel() -> None:
    found = price(of_gpu(dispatch(50e-6)))
    forward_s, backward_s = phases_s(found)
    assert forward_s == pytest.approx(kernels(found, "FW") * 50e-6 + KERNEL_S)
    # Backward is dispatched while the last kernel of forward runs.
    assert backward_s == pytest.approx(kernels(found, "BW") * 100e-6)
    assert HOST_BOUND in found.remarks.notes()


def test_waits_for_the_host_are_an_effect_on_nothing() -> None:
    found = price(of_gpu(dispatch(50e-6)))
    for work in found.plan.of_kind(FrameworkOverhead):
        cost = found.parts[work].cost
        assert [change.effect for change in cost.adjustments] == [HOST_DISPATCH]
        assert cost.base_s == 0
        assert cost.origin == Source.REGRESSED


def test_long_kernels_wait_for_the_first_dispatch_alone() -> None:
    found = price(of_gpu(dispatch(5e-6)))
    waits_s = [seconds_of(found, FrameworkOverhead, way) for way in ("FW", "BW")]
    assert waits_s == pytest.approx([5e-6, 0], abs=1e-12)
    assert HOST_BOUND not in price(of_gpu(dispatch(1e-6))).remarks.notes()


def test_a_host_ahead_after_forward_hides_slow_dispatch_of_backward() -> None:
    """Twice 18 us of dispatch bind backward's kernels of 20 us once what forward gained is used up."""
    found = price(of_gpu(dispatch(18e-6)))
    count = {way: kernels(found, way) for way in ("FW", "BW")}
    host_s = count["FW"] * 18e-6 + count["BW"] * 36e-6
    assert sum(phases_s(found)) == pytest.approx(host_s + KERNEL_S)
    alone_s = count["BW"] * 36e-6 + KERNEL_S
    assert phases_s(found)[1] < alone_s


def test_micro_batches_wait_one_behind_the_other() -> None:
    whole, parts = (price(of_gpu(dispatch(50e-6)), accumulate=count) for count in (1, 4))
    dispatched_s = sum(phases_s(whole)) - KERNEL_S
    assert sum(phases_s(parts)) == pytest.approx(4 * dispatched_s + KERNEL_S)


@pytest.mark.parametrize("strategy", ["z2d2", "z3d2"])
def test_what_is_gathered_ahead_leaves_the_device_waiting(strategy: str) -> None:
    slow = tuple(ring_fit(name, alpha_s=1.0) for name in ("all_gather", "reduce_scatter"))
    profile = msgspec.structs.replace(of_gpu(dispatch(50e-6)), communication=slow)
    found, alone = price(profile, strategy=strategy), price(profile)
    assert kernels(found, "FW") == kernels(alone, "FW")
    for of_units, of_layers in zip(phases_s(found), phases_s(alone), strict=True):
        assert of_units >= of_layers


def test_an_unmeasured_host_is_flagged_and_widens_the_interval() -> None:
    found, known = price(of_gpu(None)), price(of_gpu(dispatch(UNMEASURED.forward_s)))
    assert any("dispatch on this host was not timed" in text for text in found.remarks.extrapolated())
    assert HOST_BOUND in found.remarks.extrapolated()
    works = list(found.plan.of_kind(FrameworkOverhead))
    assert np.all(found.costs.sd_s[works] > known.costs.sd_s[works])


def test_the_interval_reaches_where_the_host_just_starts_to_bind() -> None:
    """Kernels hide the dispatch that is likely; three times as much they would not hide."""
    found = price(of_gpu(dispatch(10e-6, relative_sd=2 / Z90)))
    (work,) = (index for index, each in found.plan.of_kind(FrameworkOverhead).items() if each.way == "FW")
    count = kernels(found, "FW")
    slow_s = count * 30e-6 + KERNEL_S - count * KERNEL_S
    by_host_s = np.sqrt(found.costs.sd_s[work] ** 2 - (ALONE_RELATIVE_SD * found.costs.seconds[work]) ** 2)
    assert by_host_s * found.costs.counts[work] == pytest.approx(slow_s / (2 * Z90))


def test_a_host_timed_beside_iterations_tells_of_all_models() -> None:
    made = make_profile(NETWORK, layer_times=layer_times(NETWORK, seconds=lambda *_: KERNEL_S))
    (device,) = made.devices
    timed = tuple(
        msgspec.structs.replace(time, dispatch=msgspec.structs.replace(dispatch(50e-6), runs=(), timed=True))
        for time in made.model_times
    )
    gpu = (msgspec.structs.replace(device, kind="cuda"),)
    profile = msgspec.structs.replace(made, devices=gpu, model_times=timed)
    waiting, free = price(profile), price(msgspec.structs.replace(profile, model_times=made.model_times))
    waits_s = seconds_of(waiting, FrameworkOverhead, "FW") - seconds_of(free, FrameworkOverhead, "FW")
    # What was measured between operations stays, and the wait is added.
    assert waits_s == pytest.approx(kernels(waiting, "FW") * 30e-6 + KERNEL_S)
    assert any("timed on its host" in text for text in waiting.remarks.notes())
    renamed = tuple(msgspec.structs.replace(time, model="another") for time in timed)
    found = dispatch_of(msgspec.structs.replace(profile, model_times=renamed), None, timed[0].dtype)
    assert found is not None
    assert found.forward_s == 50e-6
    assert found.relative_sd >= UNMEASURED.relative_sd
    assert dispatch_of(msgspec.structs.replace(profile, model_times=renamed), None, "bf16") is None


def test_a_cpu_and_measured_iterations_have_no_such_wait() -> None:
    of_cpu = price(of_gpu(dispatch(1.0), kind="cpu"))
    assert seconds_of(of_cpu, FrameworkOverhead, "FW") == 0
    measured = msgspec.structs.replace(of_gpu(dispatch(1.0)), model_times=make_profile(NETWORK).model_times)
    assert price(measured).costs.total_s.sum() < 1.0


def test_kernels_alone_are_off_together_until_an_iteration_is_timed() -> None:
    def shared_s(profile: Profile) -> float:
        found = price(profile).costs
        mode = next((each for each in found.modes if each.name == "compute, all layers"), None)
        return 0.0 if mode is None else float(mode.seconds @ found.counts)

    alone = of_gpu(dispatch(1e-6))
    assert shared_s(alone) == pytest.approx(ALONE_RELATIVE_SD * price(alone).costs.compute_s)
    inside = tuple(msgspec.structs.replace(time, mode="in_situ") for time in alone.layer_times)
    assert shared_s(msgspec.structs.replace(alone, layer_times=inside)) == 0
    assert shared_s(of_gpu(dispatch(1e-6), kind="cpu")) == 0


def test_a_dispatch_without_runs_is_one_that_nobody_measured() -> None:
    stated = msgspec.structs.replace(dispatch(50e-6), runs=())
    assert any("dispatch on this host was not timed" in text for text in price(of_gpu(stated)).remarks.extrapolated())
