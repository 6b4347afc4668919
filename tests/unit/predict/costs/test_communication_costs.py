"""Seconds, sources and spread of messages: fits and what lies beyond them, levels of a cluster, and interference."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from profile_factory import make_network, make_profile, ring_fit, with_compute

from calibrate.profile.collectives.communication_residuals import Residuals, SizeRatios
from calibrate.profile.collectives.communication_time import Piece, piecewise_seconds, seconds_of_one
from calibrate.profile.emulated_profile import emulated
from calibrate.profile.profile import Profile
from paradl_bench.core.errors import UserError
from paradl_bench.plan.collectives.catalog import operations
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Collective
from paradl_bench.records.cluster import Cluster, Level
from paradl_bench.strategies.nesting.catalog import planner_for
from predict.costs.communication.collective_times import CollectiveTimes, fitted_seconds
from predict.costs.communication.communication_costs import CommunicationCost, CommunicationCosts
from predict.costs.cost_model import CostModel, PricedPlan
from predict.costs.sourced import Cost, Source

CHAIN = make_network()


def price(profile: Profile, strategy: str, batch: int) -> PricedPlan:
    network = next(iter(profile.network.values()))
    costs = CostModel(profile=profile, network=network)
    chosen = parse_strategy(strategy)
    return costs.price(planner_for(chosen).plan(network, chosen, PlanSettings(batch=batch)))


def exchange(
    profile: Profile, *, ranks: int = 2, size: int = 1 << 20, cluster: Cluster | None = None
) -> CommunicationCost:
    costs = CommunicationCosts(profile, cluster, None)
    return costs.cost(Collective(operation="all_reduce", message_bytes=size, ranks=ranks), parse_strategy(f"d{ranks}"))


def lines(found: Cost) -> str:
    return " | ".join(remark.text for remark in found.remarks)


def test_a_collective_inside_the_fit_comes_from_the_regression() -> None:
    found = exchange(make_profile())
    assert found.cost.seconds == pytest.approx(2 * (50e-6 + (1 << 19) * 1e-9))
    assert found.cost.source is Source.REGRESSED
    assert found.cost.remarks == ()


@pytest.mark.parametrize("doubling_s", [0.0, 3e-6])
@pytest.mark.parametrize("algorithm", ["ring", "tree", "ring_of_nodes", "tree_of_nodes"])
def test_one_message_takes_what_it_takes_among_others(algorithm: str, doubling_s: float) -> None:
    """In each piece, between pieces, and where they meet; but for rounding."""
    chosen = operations()["all_reduce"].algorithms[algorithm]
    for of_step in (False, True):
        pieces = [
            Piece(chosen, low, high, alpha, beta, 1e-11, grows, 7e-6, 3e-11, of_step=of_step)
            for low, high, alpha, beta, grows in (
                (4, 4096, 11e-6, 3e-9, 0.0),
                (16384, 1 << 20, 13e-6, 1e-10 / 3, doubling_s),
                (1 << 22, 1 << 28, 19e-6, 7e-11, 0.0),
            )
        ]
        for ranks, per_node in ((2, 1), (6, 3), (16, 8)):
            sizes = np.array([0, 1, 4, 4096, 4097, 9999, 16384, 16385, 77777, 1 << 20, 3 << 20, 1 << 22, 1 << 29])
            sizes = np.concatenate([sizes, sizes * ranks])
            at_once = fitted_seconds(pieces, ranks, sizes, per_node)
            alone = [seconds_of_one(pieces, ranks, size, per_node) for size in sizes.tolist()]
            np.testing.assert_allclose(alone, at_once, rtol=1e-13)
            np.testing.assert_allclose(piecewise_seconds(pieces, ranks, sizes, per_node), at_once, rtol=1e-13)


def test_one_message_of_counts_fitted_apart_takes_the_same() -> None:
    """At each rank count that was fitted by itself, between two of them, and beyond; residuals included."""
    chosen = operations()["all_reduce"].algorithms["ring"]
    pieces = tuple(
        Piece(chosen, low, high, alpha * count, beta, 0.0, at_ranks=count)
        for count in (2.0, 4.0, 16.0)
        for low, high, alpha, beta in ((4, 4096, 11e-6, 3e-9), (16384, 1 << 28, 13e-6, 1e-10))
    )
    of_size = SizeRatios((math.log(64), math.log(1 << 20)), (0.1, -0.2)), SizeRatios((math.log(4096),), (0.3,))
    times = CollectiveTimes(pieces, Residuals(tuple(zip((2, 8), of_size, strict=True))))
    ranks, sizes = np.array([[1], [2], [3], [4], [8], [11], [16], [64]]), np.array([0, 1, 4096, 9999, 16384, 1 << 29])
    alone = [[times.seconds_of_one(count, size, 1) for size in sizes.tolist()] for count in ranks[:, 0].tolist()]
    np.testing.assert_allclose(alone, times.seconds(ranks, sizes, 1), rtol=1e-13)


def test_one_rank_count_leaves_open_which_algorithm_goes_on() -> None:
    """Ring and tree agree on 2 ranks, where one was fitted, and are apart on 8: so far does the interval reach."""
    plain = make_profile()
    costs = CommunicationCosts(plain, Cluster(name="big", levels=(Level(name="node", ranks=64),)), None)
    (fit,) = plain.communication
    work = Collective(operation="all_reduce", message_bytes=4096, ranks=8)
    modes = dict(costs.cost(work, parse_strategy("d8")).modes)
    times = []
    for algorithm in operations()["all_reduce"].algorithms.values():
        if not algorithm.hierarchical:
            (a2, b2, _), (a8, b8, _) = algorithm.terms(2, 4096), algorithm.terms(8, 4096)
            times.append(2 * fit.alpha_s * a8 / a2 + 4096 * fit.beta_s_per_byte * b8 / b2)
    assert modes["communication at other ranks"] == pytest.approx((max(times) - min(times)) / 2)
    few = Collective(operation="all_reduce", message_bytes=4096, ranks=2)
    assert "communication at other ranks" not in dict(costs.cost(few, parse_strategy("d2")).modes)


@pytest.mark.parametrize(
    ("ranks", "size", "said"),
    [
        (8, 1 << 20, "all_reduce beyond 2 ranks"),
        (2, 1 << 31, "all_reduce beyond 1.00 GiB"),
        (1024, 1 << 20, "more ranks than the measured cluster's 2: its level 'node' is taken to hold them"),
    ],
)
def test_beyond_ranks_or_bytes_is_flagged(ranks: int, size: int, said: str) -> None:
    found = exchange(make_profile(), ranks=ranks, size=size).cost
    assert said in lines(found)
    assert all(remark.extrapolated for remark in found.remarks)
    assert found.source is Source.SCALED


def test_the_regime_of_the_message_is_taken() -> None:
    small = ring_fit(bytes_range=(1, 1024), regime="<=1024", alpha_s=1e-5)
    large = ring_fit(bytes_range=(2048, 1 << 30), regime=">=2048", alpha_s=1e-3)
    profile = make_profile(communication=(large, small))
    assert exchange(profile, size=1000).cost.seconds == pytest.approx(2 * (1e-5 + 500e-9))
    assert exchange(profile, size=1 << 20).cost.seconds == pytest.approx(2 * (1e-3 + (1 << 19) * 1e-9))


def test_an_unmeasured_operation_names_the_command_to_measure_it() -> None:
    network = make_network(buffers=True)
    with pytest.raises(UserError, match=r"no fit of broadcast through gloo.*--backend gloo --ops broadcast"):
        price(make_profile(network), "d2", 8)


RACKS = Cluster(
    name="racks",
    levels=(
        Level(name="node", ranks=2),
        Level(name="rack", ranks=8, alpha_s=1e-4, beta_s_per_byte=4e-9, contention=2.0),
        Level(name="system", ranks=64),
    ),
)


def test_a_ring_runs_at_the_slowest_level_that_it_crosses() -> None:
    found = exchange(make_profile(), ranks=8, cluster=RACKS).cost
    assert found.seconds == pytest.approx(14 * (1e-4 + (1 << 17) * 2 * 4e-9))
    assert found.source is Source.STATED


def test_an_unknown_level_uses_the_outermost_measured_one_with_notice() -> None:
    found = exchange(make_profile(), ranks=64, cluster=RACKS).cost
    assert "all_reduce at level 'system' was not measured: its times at level 'node' are used" in lines(found)


def test_a_given_cluster_that_is_too_small_is_refused() -> None:
    with pytest.raises(UserError, match="128 ranks do not fit cluster 'racks', which holds 64"):
        exchange(make_profile(), ranks=128, cluster=RACKS)


def test_a_backend_that_was_not_measured_names_the_choices() -> None:
    with pytest.raises(UserError, match=r"unknown backend 'nccl'.*gloo"):
        CommunicationCosts(make_profile(), None, "nccl")


def test_the_spread_of_a_fit_is_that_of_its_covariance() -> None:
    covariance = ((4e-12, -3e-17), (-3e-17, 9e-22))
    found = exchange(make_profile(communication=(ring_fit(covariance=covariance, block_relative_sd=0.1),)))
    shifts = dict(found.modes)
    drift = shifts.pop("drift of communication")
    terms = np.array([2.0, 2.0 * (1 << 19)])
    assert drift == pytest.approx(0.1 * found.cost.seconds)
    assert sum(shift**2 for shift in shifts.values()) == pytest.approx(terms @ np.array(covariance) @ terms)


def test_interference_is_that_of_the_operation_level_and_size() -> None:
    entries = (
        with_compute(1.2, 1.4, bytes_range=(1, 1024)),
        with_compute(1.6, 1.8, sd=0.2, bytes_range=(1 << 20, 1 << 20), added_s=1e-4),
    )
    costs = CommunicationCosts(make_profile(contexts=entries), None, None)
    work = Collective(operation="all_reduce", message_bytes=1 << 19, ranks=2)
    found, remarks = costs.with_compute(work, parse_strategy("d2"), 1e-3)
    assert found == pytest.approx((1.6, 1.9, 0.2, 0.2))
    assert remarks == ()


def on_gpu(profile: Profile) -> Profile:
    return msgspec.structs.replace(profile, devices=(msgspec.structs.replace(profile.devices[0], kind="cuda"),))


def test_unmeasured_interference_on_cpus_is_assumed_free_with_notice() -> None:
    priced = price(make_profile(contexts=()), "d2", 8)
    assert any("overlap is taken as free" in line for line in priced.remarks.extrapolated())
    assert np.all(priced.costs.compute_slowdown == 1)


def test_unmeasured_interference_on_gpus_is_a_flagged_published_mean() -> None:
    priced = price(on_gpu(make_profile(contexts=())), "d2", 8)
    (line,) = (line for line in priced.remarks.extrapolated() if "interference" in line)
    assert "1.189 times" in line
    assert "arXiv:2507.03114" in line
    assert "--contexts with-compute" in line
    communicates = priced.costs.is_communication
    assert communicates.any()
    assert np.all(priced.costs.compute_slowdown[communicates] == 1.189)
    assert np.all(priced.costs.communication_slowdown == 1)


def test_what_was_measured_on_gpus_goes_before_what_was_published() -> None:
    priced = price(on_gpu(make_profile(contexts=(with_compute(1.05, 1.3),))), "d2", 8)
    communicates = priced.costs.is_communication
    assert np.all(priced.costs.compute_slowdown[communicates] == 1.05)
    assert not any("published" in line for line in priced.remarks.extrapolated())


def test_ghosts_of_gpus_sleep_as_long_beside_collectives() -> None:
    costs = CostModel(profile=emulated(on_gpu(make_profile(contexts=())), 2.0), network=CHAIN)
    work = Collective(operation="all_reduce", message_bytes=1 << 19, ranks=2)
    assert costs.communication.with_compute(work, parse_strategy("d2"), 1.0)[0][:2] == (1.0, 1.0)
