"""Other hardware: factors on links and device and clusters of another device, against arithmetic of the tests' own."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from profile_factory import (
    free_copies,
    layer_times,
    linear_seconds,
    make_network,
    make_profile,
    model_times,
    noisy_profile,
    ring_fit,
    with_doctor,
)

from calibrate.profile.collectives.communication import InnerLevel
from calibrate.profile.profile import Profile
from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import Layer
from paradl_bench.plan.settings import PlanSettings, plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Collective
from paradl_bench.records.cluster import Cluster, ClusterFile, Level
from paradl_bench.strategies.memory.of_plan import memory_of_plan
from paradl_bench.strategies.memory.peak import MemoryUse
from predict.costs import memory_estimate
from predict.costs.cost_model import CostModel
from predict.costs.hardware.what_if_hardware import Hardware, LinkFactors, changed_fit
from predict.costs.sourced import Source
from predict.prediction.prediction import Prediction, Predictor
from predict.workload import Configuration, evaluator_named

CHAIN = make_network()
NOISY = noisy_profile(CHAIN)
GRADIENT_BYTES = CHAIN.parameter_bytes
ALPHA_S, BETA_S = 50e-6, 1e-9


def point(strategy: str, batch: int) -> Configuration:
    return Configuration(strategy=parse_strategy(strategy), settings=settings_at(batch))


def settings_at(batch: int) -> PlanSettings:
    return plan_settings(batch=batch, first_bucket_bytes=1 << 12, bucket_cap_bytes=1 << 16)


def predicted(
    profile: Profile, at: Configuration, hardware: Hardware, evaluator: str = "csf", cluster: Cluster | None = None
) -> Prediction:
    model = CostModel(profile=profile, network=CHAIN, hardware=hardware, cluster=cluster)
    return Predictor(model, evaluator_named(evaluator)).predict(at)


@pytest.mark.parametrize("factor", [0.25, 3.0])
def test_bandwidth_divides_beta_and_latency_multiplies_alpha(factor: float) -> None:
    def ring_s(alpha_s: float, beta_s: float) -> float:
        return 2 * (alpha_s + GRADIENT_BYTES / 2 * beta_s)

    plain, wide, slow = (
        predicted(make_profile(), point("d2", 8), hardware)
        for hardware in (Hardware(), Hardware(bandwidth=factor), Hardware(latency=factor))
    )
    assert plain.time.communication_s == pytest.approx(ring_s(ALPHA_S, BETA_S))
    assert wide.iteration_s - plain.iteration_s == pytest.approx(
        ring_s(ALPHA_S, BETA_S / factor) - ring_s(ALPHA_S, BETA_S)
    )
    assert slow.iteration_s - plain.iteration_s == pytest.approx(
        ring_s(ALPHA_S * factor, BETA_S) - ring_s(ALPHA_S, BETA_S)
    )
    assert wide.provenance.sources["scaled"] > 0 == plain.provenance.sources["scaled"]
    assert any("links of level 'node'" in line for line in wide.provenance.extrapolated)


def test_links_that_a_cluster_states_change_as_well() -> None:
    stated = Cluster(name="x", levels=(Level(name="node", ranks=2, alpha_s=1e-3, beta_s_per_byte=1e-8),))
    hardware = Hardware(bandwidth=2.0, latency=0.5)
    found = predicted(make_profile(), point("d2", 8), hardware, cluster=stated)
    assert found.time.communication_s == pytest.approx(2 * (0.5e-3 + GRADIENT_BYTES / 2 * 0.5e-8))


def test_one_level_changes_and_another_stays() -> None:
    levels = (Level(name="node", ranks=2), Level(name="rack", ranks=8))
    cluster = Cluster(name="x", levels=levels)
    hardware = Hardware(bandwidth_at={"rack": 0.5}, latency_at={"rack": 2.0})

    def times(strategy: str) -> float:
        plain, changed = (
            predicted(make_profile(), point(strategy, 16), each, cluster=cluster) for each in (Hardware(), hardware)
        )
        return changed.time.communication_s / plain.time.communication_s

    assert times("d2") == 1
    assert times("d4") == pytest.approx(2)


def test_a_level_that_the_cluster_lacks_is_refused() -> None:
    with pytest.raises(UserError, match=r"'rack'.*node"):
        CostModel(profile=make_profile(), network=CHAIN, hardware=Hardware(latency_at={"rack": 2.0}))


def test_a_fit_changes_with_its_spread_and_separate_inner_factors() -> None:
    inner = InnerLevel(ranks=2, alpha_s=1e-6, beta_s_per_byte=1e-10, covariance=((4.0, 2.0), (2.0, 9.0)))
    fit = ring_fit(covariance=((1.0, 0.5), (0.5, 4.0)), inner=inner, doubling_s=8e-6)
    found = changed_fit(fit, LinkFactors(2.0, 0.5), LinkFactors(3.0, 0.25))
    assert (found.alpha_s, found.beta_s_per_byte, found.doubling_s) == pytest.approx((100e-6, 0.5e-9, 4e-6))
    assert found.covariance == ((4.0, 0.5), (0.5, 1.0))
    assert found.inner is not None
    assert (found.inner.alpha_s, found.inner.beta_s_per_byte) == pytest.approx((3e-6, 0.25e-10))
    assert found.inner.covariance == ((36.0, 1.5), (1.5, 0.5625))
    assert found.gamma_s_per_byte == fit.gamma_s_per_byte


def roofline_s(layer: Layer, phase: str, batch: int, flops: float, bandwidth: float) -> tuple[float, float]:
    """FLOPs and bytes of a layer over rates, with the bytes of backward twice forward's."""
    weights = 4 * sum(p.elements for p in CHAIN.parameters if p.name in layer.parameters)
    work = layer.fw_flops if phase == "FW" else layer.bw_input_flops + layer.bw_weight_flops
    moved = (1 if phase == "FW" else 2) * (layer.fw_bytes * batch + weights)
    return work * batch / flops, moved / bandwidth


@pytest.mark.parametrize(("peak", "memory"), [(4.0, 1.0), (1.0, 4.0), (4.0, 2.0), (0.25, 0.5)])
def test_layers_scale_with_the_roofline_and_overhead_stays(peak: float, memory: float) -> None:
    batch, between_s = 8, 1e-3
    profile = make_profile(model_times=model_times(CHAIN, between_s=between_s))
    hardware = Hardware(peak_flops=peak, memory_bandwidth=memory)
    found = predicted(profile, point("serial", batch), hardware)
    expected = 3 * between_s + 1e-4 / memory
    for layer in CHAIN.layers:
        for phase in ("FW", "BW"):
            before = max(roofline_s(layer, phase, batch, 1e11, 1e10))
            after = max(roofline_s(layer, phase, batch, 1e11 * peak, 1e10 * memory))
            expected += linear_seconds(layer, phase, batch) * after / before
    assert found.iteration_s == pytest.approx(expected)
    assert found.provenance.sources["scaled_by_roofline"] == pytest.approx(1 - 3 * between_s / expected)
    assert any("by roofline" in line for line in found.provenance.extrapolated)


def test_what_memory_bounds_gains_nothing_from_more_flops() -> None:
    profile = make_profile()
    profile = msgspec.structs.replace(
        profile, devices=tuple(msgspec.structs.replace(d, peak_flops=1e15) for d in profile.devices)
    )
    plain, faster = (
        predicted(profile, point("serial", 8), Hardware(peak_flops=factor)).iteration_s for factor in (1.0, 8.0)
    )
    assert faster == pytest.approx(plain)


def test_what_the_roofline_leaves_open_widens_the_interval() -> None:
    base, twice, ten = (
        predicted(NOISY, point("serial", 8), Hardware(peak_flops=factor)) for factor in (1.0, 2.0, 10.0)
    )
    assert "scaling" not in base.provenance.spread_s
    assert base.provenance.spread_s.keys() < twice.provenance.spread_s.keys()
    assert twice.provenance.spread_s["scaling"] < ten.provenance.spread_s["scaling"]


def test_a_layer_at_its_roofline_leaves_nothing_open() -> None:
    def at_bound(layer: Layer, phase: str, batch: int) -> float:
        return max(roofline_s(layer, phase, batch, 1e11, 1e10))

    profile = make_profile(
        layer_times=layer_times(CHAIN, seconds=at_bound), model_times=model_times(CHAIN, seconds=at_bound, wu_s=1e-9)
    )
    found = predicted(profile, point("serial", 8), Hardware(peak_flops=3.0, memory_bandwidth=2.0))
    assert found.provenance.spread_s.get("scaling", 0.0) < 1e-9


def test_closure_is_that_of_the_device_that_was_measured() -> None:
    def remainders(hardware: Hardware) -> tuple[float, ...]:
        model = CostModel(profile=NOISY, network=CHAIN, hardware=hardware)
        return model.sums(model.place(parse_strategy("serial"), 8)).spread.remainders

    assert remainders(Hardware(peak_flops=4.0, memory_bandwidth=4.0)) == remainders(Hardware())


def test_another_device_shares_the_costs_of_the_same_links() -> None:
    model = CostModel(profile=NOISY, network=CHAIN)
    limited = msgspec.structs.replace(model.communication.cluster, memory_bytes_per_rank=1.0)
    stated, model.communication.cluster = model.communication.cluster, limited
    device, links = (model.on(Hardware(**{name: 2.0})).communication for name in ("peak_flops", "bandwidth"))
    assert device.found is model.communication.found
    assert links.found is not model.communication.found
    # A limit that was asked for is of the model that it was asked of.
    assert device.cluster == links.cluster == stated
    work = Collective(operation="all_reduce", message_bytes=1 << 22, ranks=2)
    of_base, of_device, of_links = (
        costs.cost(work, parse_strategy("d2")).cost.seconds for costs in (model.communication, device, links)
    )
    assert of_device == of_base > of_links


def test_a_walk_beyond_its_limit_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    walked: list[float] = []

    def walk(*asked: Any, within: float, **rest: Any) -> MemoryUse:
        walked.append(within)
        return memory_of_plan(*asked, within=within, **rest)

    monkeypatch.setattr(memory_estimate, "memory_of_plan", walk)
    model, settings = CostModel(profile=NOISY, network=CHAIN), PlanSettings(batch=8)
    strategy = parse_strategy("d2")
    for within in (1.0, 1.0, 2.0, math.inf, 1.0):
        model.memory(strategy, settings, within)
    assert walked == [1.0, 2.0, math.inf]


def test_bucket_copies_follow_memory_but_for_their_fixed_part() -> None:
    copies = tuple(msgspec.structs.replace(copy, alpha_s=1e-6) for copy in free_copies(beta_s_per_byte=1e-9))
    profile = make_profile(copies=copies)
    halves = {}
    for memory in (1.0, 2.0):
        model = CostModel(profile=profile, network=CHAIN, hardware=Hardware(memory_bandwidth=memory))
        plan = _plan(model)
        priced = model.price(plan)
        halves[memory] = [
            (work, cost, Source(int(source)))
            for work, cost, source in zip(
                plan.works, priced.costs.seconds, priced.costs.source.argmax(axis=1), strict=True
            )
            if type(work).__name__ == "BucketCopy"
        ]
    assert halves[1.0]
    for (work, before, _), (_, after, source) in zip(halves[1.0], halves[2.0], strict=True):
        assert before == pytest.approx(1e-6 * work.tensors + 1e-9 * work.bytes)
        assert after == pytest.approx(1e-6 * work.tensors + 0.5e-9 * work.bytes)
        assert source is Source.SCALED_BY_ROOFLINE


def _plan(model: CostModel):  # type: ignore[no-untyped-def]
    from paradl_bench.strategies.nesting.catalog import planner_for

    at = point("d2", 8)
    return planner_for(at.strategy).plan(model.network, at.strategy, at.settings)


def test_a_device_without_rates_is_refused_and_links_need_none() -> None:
    profile = make_profile()
    bare = msgspec.structs.replace(
        profile, devices=tuple(msgspec.structs.replace(d, peak_flops=None) for d in profile.devices)
    )
    assert predicted(bare, point("d2", 8), Hardware(bandwidth=2.0)).iteration_s > 0
    with pytest.raises(UserError, match="doctor --measure"):
        predicted(bare, point("d2", 8), Hardware(peak_flops=2.0))


def of_device(name: str | None, **rates: float) -> ClusterFile:
    return ClusterFile(name="x", levels=(Level(name="node", ranks=2),), device_name=name, **rates)


def test_a_cluster_of_the_device_that_was_measured_changes_nothing() -> None:
    plain, named = (
        predicted(NOISY, point("d2", 8), Hardware(), "simulate", cluster=of_device(name))
        for name in (None, "test processor")
    )
    assert named == plain


def test_a_cluster_of_another_device_is_refused_without_its_rates() -> None:
    for rates in ({}, {"peak_flops": 1e12}, {"memory_bandwidth_bytes_per_s": 1e12}):
        with pytest.raises(UserError, match="the profile is of test processor, and cluster 'x' has V100") as caught:
            predicted(NOISY, point("d2", 8), Hardware(), cluster=of_device("V100", **rates))
        assert "\n" not in str(caught.value)


def test_another_clusters_device_scales_compute_by_roofline_with_notice() -> None:
    other = of_device("V100", peak_flops=3e11, memory_bandwidth_bytes_per_s=5e10)
    found = predicted(with_doctor(NOISY), point("d2", 8), Hardware(), cluster=other)
    same = predicted(NOISY, point("d2", 8), Hardware(peak_flops=3.0, memory_bandwidth=5.0))
    assert found.iteration_s == pytest.approx(same.iteration_s)
    assert found.time.interval_s == pytest.approx(same.time.interval_s)
    assert found.provenance.sources == pytest.approx(same.provenance.sources)
    assert found.provenance.sources["scaled_by_roofline"] > 0
    assert (found.use.peak_flops_per_rank, found.use.peak_flops_basis) == (3e11, "stated by the cluster file")
    assert any("by roofline" in line for line in found.provenance.extrapolated)


def test_stated_rates_are_not_held_against_what_layers_reached() -> None:
    other = of_device("V100", peak_flops=3e11, memory_bandwidth_bytes_per_s=5e10)
    with pytest.raises(UserError, match=r"what layers reached.*doctor --measure") as caught:
        predicted(NOISY, point("d2", 8), Hardware(), cluster=other)
    assert "\n" not in str(caught.value)
    assert predicted(NOISY, point("d2", 8), Hardware(peak_flops=3.0)).iteration_s > 0


def test_a_device_without_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match="device_name is empty"):
        of_device("")


def test_rates_need_the_name_of_their_device() -> None:
    with pytest.raises(ValueError, match="device_name"):
        of_device(None, peak_flops=1e12)
