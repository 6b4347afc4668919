"""Cost terms of an algorithm: one function that a regression and a prediction both call."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paradl_bench.plan.cost_terms.terms import Algorithm, CollectiveOperation, CostTerms, Floats


def _ring(ranks: Floats, message_bytes: Floats) -> CostTerms:
    share = (ranks - 1) / ranks * message_bytes
    return CostTerms(2 * (ranks - 1), 2 * share, share)


def _constant(ranks: Floats, message_bytes: Floats) -> CostTerms:
    return CostTerms(np.ones(()), message_bytes, np.zeros(()))


RING = Algorithm(name="ring", source="ring all-reduce", terms=_ring)
CONSTANT = Algorithm(name="constant", source="one message", terms=_constant, libraries=("gloo",))
OPERATION = CollectiveOperation(
    name="all_reduce",
    message_bytes_is="the whole buffer",
    bus_factor=lambda ranks: 2 * (ranks - 1) / ranks,
    algorithms=(RING, CONSTANT),
)


@given(st.lists(st.integers(1, 1024), min_size=1, max_size=5), st.lists(st.integers(0, 2**30), min_size=1, max_size=5))
def test_many_points_at_once_are_the_points_one_by_one(ranks: list[int], sizes: list[int]) -> None:
    grid = RING.terms(np.array(ranks)[:, None], np.array(sizes)[None, :])
    for i, count in enumerate(ranks):
        for j, size in enumerate(sizes):
            single = RING.terms(count, size)
            assert [part[i, j] for part in grid] == [float(part) for part in single]


@pytest.mark.parametrize("algorithm", [RING, CONSTANT])
def test_cost_coefficients_match_their_points_and_one_rank_costs_nothing(algorithm: Algorithm) -> None:
    terms = algorithm.terms([1, 2, 4], 1000)
    assert [part.shape for part in terms] == [(3,)] * 3
    assert [part[0] for part in terms] == [0.0] * 3
    assert (terms.beta_bytes[1:] > 0).all()


@given(st.integers(2, 64), st.integers(1, 2**30), st.floats(0, 1e-3), st.floats(0, 1e-6), st.floats(0, 1e-6))
def test_seconds_are_the_coefficients_times_the_parameters(
    ranks: int, message_bytes: int, alpha_s: float, beta: float, gamma: float
) -> None:
    seconds = RING.seconds(ranks, message_bytes, alpha_s=alpha_s, beta_s_per_byte=beta, gamma_s_per_byte=gamma)
    share = (ranks - 1) / ranks * message_bytes
    assert float(seconds) == pytest.approx(2 * (ranks - 1) * alpha_s + 2 * share * beta + share * gamma)


def test_the_first_algorithm_is_the_default_unless_a_library_differs() -> None:
    assert OPERATION.default_algorithm == "ring"
    assert OPERATION.algorithm_of("nccl") == "ring"
    assert OPERATION.algorithm_of("gloo") == "constant"


def test_the_slowest_rank_ends_a_call_unless_its_operation_differs() -> None:
    samples_s = ((1.0, 5.0), (2.0, 4.0))
    pair = CollectiveOperation(
        name="send_recv",
        message_bytes_is="the message",
        bus_factor=lambda _ranks: 1.0,
        algorithms=(CONSTANT,),
        ends_with="receiver",
    )
    assert OPERATION.call_seconds(samples_s).tolist() == [2.0, 5.0]
    # A send of a library that buffers ends early; a receive does not.
    assert pair.call_seconds(samples_s).tolist() == [2.0, 4.0]


def test_bandwidths_as_nccl_tests_defines_them() -> None:
    assert OPERATION.algorithm_bandwidth(4, 3 * 10**9, 2.0) == 1.5e9
    assert OPERATION.bus_bandwidth(4, 3 * 10**9, 2.0) == pytest.approx(2.25e9)
