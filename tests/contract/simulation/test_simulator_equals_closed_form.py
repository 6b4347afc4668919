"""Where a closed form's assumptions hold, the simulation gives its number; elsewhere it differs as it should."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profile_factory import (
    affine_seconds,
    free_copies,
    layer_times,
    make_network,
    make_profile,
    model_times,
    ring_fit,
    with_compute,
)

from calibrate.profile.profile import Profile
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import parse_strategy
from predict.costs.cost_model import CostModel
from predict.prediction.prediction import Prediction, Predictor
from predict.workload import Configuration, evaluator_named

ONE_BUCKET = 1 << 40

widths = st.lists(st.integers(1, 300), min_size=2, max_size=6)
local_batches = st.integers(1, 64)
rank_counts = st.integers(1, 64)


def predict(
    profile: Profile, network: ModelGraph, strategy: str, batch: int, evaluator: str, *, bucket_bytes: int = ONE_BUCKET
) -> Prediction:
    settings = plan_settings(batch=batch, first_bucket_bytes=bucket_bytes, bucket_cap_bytes=bucket_bytes)
    point = Configuration(strategy=parse_strategy(strategy), settings=settings)
    return Predictor(CostModel(profile=profile, network=network), evaluator_named(evaluator)).predict(point)


def profile_of(network: ModelGraph, **model: object) -> Profile:
    return make_profile(
        network,
        layer_times=layer_times(network, seconds=affine_seconds),
        model_times=model_times(network, seconds=affine_seconds, **model),  # type: ignore[arg-type]
    )


@given(widths, local_batches, rank_counts)
def test_one_bucket_without_interference_is_paradl(sizes: Sequence[int], local: int, ranks: int) -> None:
    network = make_network(sizes)
    profile = profile_of(network)
    simulated, paradl, csf = (
        predict(profile, network, f"d{ranks}", local * ranks, name) for name in ("simulate", "paradl", "csf")
    )
    assert simulated.iteration_s == pytest.approx(paradl.iteration_s, rel=1e-9)
    assert csf.iteration_s == pytest.approx(paradl.iteration_s, rel=1e-9)
    for phase in ("FW", "BW", "GE", "WU"):
        assert simulated.time.breakdown_s[phase] == pytest.approx(paradl.time.breakdown_s[phase], rel=1e-9, abs=1e-15)
    if 4 <= local <= 8:  # far from the measured batches single layers are cut off at no time, which sums are not
        assert simulated.time.interval_s == pytest.approx(paradl.time.interval_s, rel=1e-9)
    assert simulated.provenance.sources == pytest.approx(paradl.provenance.sources)


@given(widths, local_batches, st.integers(2, 64))
def test_paradl_is_layers_update_and_a_ring(sizes: Sequence[int], local: int, ranks: int) -> None:
    """The formula computed here, by itself: FB(b) + WU + 2 (p - 1) (alpha + W e / p beta)."""
    network = make_network(sizes)
    profile = make_profile(network)
    layers = sum(3e-6 * (1 + layer.output_elements) * local for layer in network.layers)
    gradients = 4 * sum(rows * columns + columns for rows, columns in itertools.pairwise(sizes))
    ring = 2 * (ranks - 1) * (50e-6 + gradients / ranks * 1e-9)
    paradl = predict(profile, network, f"d{ranks}", local * ranks, "paradl")
    assert paradl.iteration_s == pytest.approx(layers + 1e-4 + ring, rel=1e-9)
    assert paradl.time.communication_s == pytest.approx(ring, rel=1e-9)


@given(widths, local_batches)
def test_serial_is_the_sum_of_its_parts(sizes: Sequence[int], batch: int) -> None:
    network = make_network(sizes)
    profile = profile_of(network, between_s=1e-4, common_sd=0.03, remainder=0.02)
    simulated, csf, paradl = (
        predict(profile, network, "serial", batch, name) for name in ("simulate", "csf", "paradl")
    )
    assert simulated.iteration_s == pytest.approx(csf.iteration_s, rel=1e-9)
    if 4 <= batch <= 8:
        assert simulated.time.interval_s == pytest.approx(csf.time.interval_s, rel=1e-9)
    assert simulated.iteration_s - paradl.iteration_s == pytest.approx(3e-4, rel=1e-6)
    assert simulated.time.breakdown_s["GE"] == 0.0


@given(widths, local_batches, rank_counts)
def test_data_parallel_on_one_rank_is_serial(sizes: Sequence[int], batch: int, ranks: int) -> None:
    network = make_network(sizes)
    profile = profile_of(network, between_s=1e-4, quantiles=(0.5, 1.0, 2.0))
    serial, data = (predict(profile, network, strategy, batch, "simulate") for strategy in ("serial", "d1"))
    assert data.iteration_s == pytest.approx(serial.iteration_s, rel=1e-9)


@given(widths, local_batches, st.integers(2, 16), st.integers(1, 100_000))
def test_free_overlap_only_helps_and_hides_at_most_backward(
    sizes: Sequence[int], local: int, ranks: int, bucket_bytes: int
) -> None:
    network = make_network(sizes)
    profile = profile_of(network)
    batch = local * ranks
    simulated = predict(profile, network, f"d{ranks}", batch, "simulate", bucket_bytes=bucket_bytes)
    in_series = simulated.time.compute_s + simulated.time.communication_s
    assert simulated.iteration_s <= in_series * (1 + 1e-9)
    assert simulated.iteration_s >= max(simulated.time.compute_s, simulated.time.communication_s) * (1 - 1e-9)
    assert simulated.time.overlap_s == pytest.approx(in_series - simulated.iteration_s, rel=1e-6, abs=1e-12)


@given(widths, local_batches, st.floats(1.0, 3.0), st.floats(1.0, 3.0))
def test_interference_and_copies_never_help(sizes: Sequence[int], local: int, compute: float, exchange: float) -> None:
    network = make_network(sizes)
    free = profile_of(network)
    hindered = make_profile(
        network,
        layer_times=free.layer_times,
        model_times=free.model_times,
        contexts=(with_compute(compute, exchange),),
        copies=free_copies(beta_s_per_byte=1e-10),
    )
    times = [
        predict(profile, network, "d2", 2 * local, "simulate", bucket_bytes=4096).iteration_s
        for profile in (free, hindered)
    ]
    assert times[0] <= times[1] * (1 + 1e-9)


@pytest.mark.parametrize("evaluator", ["simulate", "paradl", "csf"])
def test_time_grows_with_ranks_messages_and_latency(evaluator: str) -> None:
    network = make_network()
    base = profile_of(network)
    slower = [
        make_profile(network, layer_times=base.layer_times, model_times=base.model_times, communication=(fit,))
        for fit in (ring_fit(), ring_fit(alpha_s=1e-4), ring_fit(alpha_s=1e-4, beta_s_per_byte=2e-9))
    ]
    times = [predict(profile, network, "d4", 32, evaluator).iteration_s for profile in slower]
    assert times == sorted(times)
    assert len(set(times)) == 3
    by_ranks = [predict(base, network, f"d{ranks}", 8 * ranks, evaluator).iteration_s for ranks in (1, 2, 4, 8, 1024)]
    assert by_ranks == sorted(by_ranks)
