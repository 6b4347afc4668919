"""What was measured goes before what was fitted: a prediction inside of a sweep is what the sweep found there."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from network_factory import two_convolutions
from profile_factory import make_profile, ring_fit
from search_cases import group_along

from calibrate.profile.collectives.communication import CommunicationFit, CommunicationPoint
from calibrate.profile.collectives.communication_residuals import residuals_of
from calibrate.profile.collectives.communication_time import communication_seconds
from calibrate.profile.profile import Profile
from paradl_bench.plan.collectives.catalog import operations
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Collective
from paradl_bench.records.cluster import Cluster, Level
from predict.costs.communication.communication_costs import CommunicationCosts
from predict.search.pricing.groups import GroupCosts

RING = operations()["all_reduce"]
KIB, MIB = 1 << 10, 1 << 20


def swept(ratios: Mapping[tuple[int, int], float]) -> CommunicationFit:
    """A fit of a ring whose measured times were so many times as long, by ranks and bytes."""
    plain = ring_fit()
    points = []
    for (ranks, size), ratio in ratios.items():
        fitted = float(communication_seconds(RING, [plain], ranks, size))
        points.append(
            CommunicationPoint(
                ranks=ranks, message_bytes=size, measured_s=ratio * fitted, fitted_s=fitted, held_out_s=fitted
            )
        )
    counts = sorted({ranks for ranks, _ in ratios})
    return ring_fit(measured=tuple(points), ranks_range=(counts[0], counts[-1]))


def ratio(profile: Profile, ranks: int, size: int, cluster: Cluster | None = None) -> float:
    """What a collective is predicted to take of what the fit alone says."""
    work = Collective(operation="all_reduce", message_bytes=size, ranks=ranks)
    costs = CommunicationCosts(profile, cluster, "gloo")
    found = costs.cost(work, parse_strategy(f"d{ranks}")).cost.seconds
    return found / float(communication_seconds(RING, [ring_fit()], ranks, size))


def profile_of(*fits: CommunicationFit) -> Profile:
    return make_profile(two_convolutions(), communication=fits)


@given(
    st.dictionaries(
        st.tuples(st.sampled_from([2, 4, 16]), st.sampled_from([4, KIB, 3 * KIB, MIB, 50 * MIB])),
        st.floats(0.1, 10.0),
        min_size=1,
    )
)
def test_at_what_was_measured_it_is_what_was_measured(ratios: dict[tuple[int, int], float]) -> None:
    profile = profile_of(swept(ratios))
    for (ranks, size), wanted in ratios.items():
        assert ratio(profile, ranks, size) == pytest.approx(wanted)


def test_between_two_sizes_and_counts_it_runs_straight_over_logarithms() -> None:
    profile = profile_of(swept({(4, KIB): 2.0, (4, MIB): 8.0, (16, KIB): 1.0, (16, MIB): 1.0}))
    assert ratio(profile, 4, 32 * KIB) == pytest.approx(4.0)
    assert ratio(profile, 8, KIB) == pytest.approx(math.sqrt(2.0))
    assert ratio(profile, 8, 32 * KIB) == pytest.approx(2.0)


def test_residuals_extend_beyond_measured_sizes_but_not_rank_counts() -> None:
    profile = profile_of(swept({(4, KIB): 2.0, (4, MIB): 8.0, (8, KIB): 3.0}))
    assert ratio(profile, 4, 4) == pytest.approx(2.0)
    assert ratio(profile, 4, 64 * MIB) == pytest.approx(8.0)
    assert ratio(profile, 8, MIB) == pytest.approx(3.0)
    for ranks in (2, 16):
        assert ratio(profile, ranks, KIB) == 1.0
    assert ratio(profile_of(ring_fit()), 2, KIB) == 1.0


def test_points_without_a_time_say_nothing() -> None:
    silent = CommunicationPoint(ranks=2, message_bytes=KIB, measured_s=0.0, fitted_s=1e-6, held_out_s=1e-6)
    empty = CommunicationPoint(ranks=2, message_bytes=0, measured_s=1e-6, fitted_s=2e-6, held_out_s=1e-6)
    assert residuals_of([ring_fit(measured=(silent, empty))]).counts == ()


@pytest.mark.parametrize(
    "stated", [{"alpha_s": 1e-3}, {"beta_s_per_byte": 2e-9}, {"alpha_s": 1e-3, "beta_s_per_byte": 0.0}]
)
def test_what_a_cluster_file_states_is_taken_as_it_stands(stated: dict[str, float]) -> None:
    cluster = Cluster(name="stated", levels=(Level(name="node", ranks=4, **stated),))
    plain, known = (
        ratio(profile_of(fit), 2, MIB, cluster) for fit in (ring_fit(), swept({(2, KIB): 5.0, (2, MIB): 5.0}))
    )
    assert known == plain


def test_search_prices_points_as_one_by_one() -> None:
    profile = profile_of(swept({(2, KIB): 2.0, (2, MIB): 0.5, (8, KIB): 3.0, (8, 8 * MIB): 1.5}))
    communication = CommunicationCosts(profile, None, "gloo")
    ranks, sizes = np.array([2, 4, 8, 8, 2, 16]), np.array([KIB, 7 * KIB, MIB, 64 * MIB, MIB, MIB], float)
    wanted = [
        communication.cost(
            Collective(operation="all_reduce", message_bytes=int(size), ranks=int(count)), parse_strategy(f"d{count}")
        ).cost.seconds
        for count, size in zip(ranks, sizes, strict=True)
    ]
    groups = GroupCosts(communication)
    searched = [
        float(groups.seconds("all_reduce", group_along(parse_strategy(f"d{count}"), 0), np.array([size]))[0])
        for count, size in zip(ranks, sizes, strict=True)
    ]
    np.testing.assert_allclose(searched, wanted, rtol=1e-12)
