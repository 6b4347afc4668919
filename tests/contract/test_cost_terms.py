"""What holds for the cost terms of every algorithm of every collective, without naming one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paradl_bench.plan.collectives.catalog import operations, routines
from paradl_bench.plan.cost_terms.terms import Algorithm, CollectiveOperation

CASES = [(operation, algorithm) for operation in operations().values() for algorithm in operation.algorithms.values()]
every_algorithm = pytest.mark.parametrize(
    ("operation", "algorithm"), CASES, ids=[f"{operation.name}-{algorithm.name}" for operation, algorithm in CASES]
)
every_operation = pytest.mark.parametrize("operation", operations().values(), ids=lambda operation: operation.name)

some_ranks = st.integers(2, 4096)
some_bytes = st.integers(4, 2**34)


@every_algorithm
@given(message_bytes=some_bytes)
def test_one_rank_costs_nothing(operation: CollectiveOperation, algorithm: Algorithm, message_bytes: int) -> None:
    assert [float(part) for part in algorithm.terms(1, message_bytes)] == [0.0, 0.0, 0.0]


@every_algorithm
@given(ranks=some_ranks, message_bytes=some_bytes, more=some_bytes)
def test_terms_grow_with_bytes(
    operation: CollectiveOperation, algorithm: Algorithm, ranks: int, message_bytes: int, more: int
) -> None:
    small, large = algorithm.terms(ranks, message_bytes), algorithm.terms(ranks, message_bytes + more)
    assert small.alpha_count >= 1
    assert large.alpha_count >= small.alpha_count
    assert large.beta_bytes > small.beta_bytes > 0
    assert large.gamma_bytes >= small.gamma_bytes >= 0


@every_algorithm
@given(ranks=some_ranks, more=st.integers(1, 4096), message_bytes=some_bytes)
def test_terms_do_not_shrink_with_ranks(
    operation: CollectiveOperation, algorithm: Algorithm, ranks: int, more: int, message_bytes: int
) -> None:
    few, many = algorithm.terms(ranks, message_bytes), algorithm.terms(ranks + more, message_bytes)
    for before, after in zip(few, many, strict=True):
        assert after >= before * (1 - 1e-12)


@every_algorithm
@given(ranks=some_ranks, message_bytes=some_bytes)
def test_no_algorithm_beats_the_bus(
    operation: CollectiveOperation, algorithm: Algorithm, ranks: int, message_bytes: int
) -> None:
    """With start-up and reduction free, the bus bandwidth is at most that of a link, 1/beta."""
    beta = 1e-9
    seconds = algorithm.seconds(ranks, message_bytes, alpha_s=0, beta_s_per_byte=beta, gamma_s_per_byte=0)
    assert operation.bus_bandwidth(ranks, message_bytes, float(seconds)) <= (1 + 1e-12) / beta


@every_algorithm
def test_terms_of_arrays_are_those_of_their_elements(operation: CollectiveOperation, algorithm: Algorithm) -> None:
    ranks, sizes = np.array([[1], [2], [3], [64]]), np.array([4, 1000, 2**20, 2**26])
    together = algorithm.terms(ranks, sizes)
    for label, part in together._asdict().items():
        alone = [[float(getattr(algorithm.terms(p, m), label)) for m in sizes] for p in ranks[:, 0]]
        np.testing.assert_array_equal(part, alone)


@every_algorithm
def test_alpha_and_beta_are_told_apart_by_a_sweep(operation: CollectiveOperation, algorithm: Algorithm) -> None:
    """Exact times of known parameters give them back: the terms are linear and not collinear over the default sizes."""
    sizes = 2.0 ** np.arange(10, 27)
    terms = algorithm.terms(4, sizes)
    seconds = algorithm.seconds(4, sizes, alpha_s=30e-6, beta_s_per_byte=0.5e-9, gamma_s_per_byte=0)
    design = np.stack([terms.alpha_count, terms.beta_bytes], axis=1) / seconds[:, None]
    found, *_ = np.linalg.lstsq(design, np.ones(len(sizes)), rcond=None)
    np.testing.assert_allclose(found, [30e-6, 0.5e-9], rtol=1e-6)


@every_operation
def test_an_operation_is_declared_whole(operation: CollectiveOperation) -> None:
    assert routines()[operation.name].name == operation.name
    assert operation.message_bytes_is
    assert operation.default_algorithm in operation.algorithms
    for library in ("gloo", "nccl", "mpi"):
        assert operation.algorithm_of(library) in operation.algorithms
    for algorithm in operation.algorithms.values():
        assert algorithm.source


@every_operation
def test_a_routine_moves_whole_messages(operation: CollectiveOperation) -> None:
    """The largest buffer of a rank is nccl-tests' size."""
    routine = routines()[operation.name]
    for ranks in (2, 3, 8):
        assert max(routine.elements(1000, ranks)) == 1000 * operation.size_factor(ranks)
        assert set(routine.sides(ranks)) <= set(range(ranks))
