"""Cost terms, bandwidths and buffer contents of the collectives, against what papers and nccl-tests print."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paradl_bench.plan.collectives import contents
from paradl_bench.plan.collectives.catalog import operations, routines
from paradl_bench.plan.collectives.routine import Buffers, Routine
from paradl_bench.plan.cost_terms.pipelining import PIECE_BYTES

ALPHA, BETA, GAMMA = 30e-6, 1e-9, 0.2e-9


def seconds(operation: str, algorithm: str, ranks: int, message_bytes: float, *, gamma: float = GAMMA) -> float:
    found = operations()[operation].algorithms[algorithm]
    value = found.seconds(ranks, message_bytes, alpha_s=ALPHA, beta_s_per_byte=BETA, gamma_s_per_byte=gamma)
    return float(value)


def test_the_five_operations_are_found() -> None:
    assert set(operations()) >= {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "send_recv"}


def test_the_catalog_loads_no_torch() -> None:
    code = (
        "import sys; from paradl_bench.plan.collectives.catalog import operations, routines; operations(), routines();"
        "raise SystemExit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@given(ranks=st.integers(2, 1024), size=st.integers(4, 2**30))
def test_ring_forms_of_the_models(ranks: int, size: int) -> None:
    p, m = ranks, size
    ring = 2 * (p - 1) * (ALPHA + m / p * BETA) + (p - 1) * m / p * GAMMA
    assert seconds("all_reduce", "ring", p, m) == pytest.approx(ring)
    assert seconds("all_gather", "ring", p, m) == pytest.approx((p - 1) * (ALPHA + m * BETA))
    scatter = (p - 1) * (ALPHA + m * BETA) + (p - 1) * m * GAMMA
    assert seconds("reduce_scatter", "ring", p, m) == pytest.approx(scatter)
    assert seconds("send_recv", "direct", p, m) == pytest.approx(ALPHA + m * BETA)


@given(ranks=st.integers(2, 1024), size=st.integers(4, 2**26))
def test_an_all_reduce_equals_reduce_scatter_plus_all_gather(ranks: int, size: int) -> None:
    part = size / ranks
    parts = seconds("reduce_scatter", "ring", ranks, part) + seconds("all_gather", "ring", ranks, part)
    assert seconds("all_reduce", "ring", ranks, size) == pytest.approx(parts)


@given(ranks=st.integers(2, 1024), size=st.integers(4, 2**26))
def test_a_reduce_scatter_by_all_reduce_costs_the_whole(ranks: int, size: int) -> None:
    whole = seconds("all_reduce", "ring", ranks, size * ranks)
    assert seconds("reduce_scatter", "all_reduce", ranks, size) == pytest.approx(whole)


@given(ranks=st.integers(2, 1024), pieces=st.integers(1, 64))
def test_two_tree_form_of_the_models_at_whole_pieces(ranks: int, pieces: int) -> None:
    message = 2.0 * pieces * PIECE_BYTES
    row = 2 * (np.ceil(np.log2(ranks)) + pieces) * (ALPHA + message / (2 * pieces) * BETA)
    assert seconds("broadcast", "tree", ranks, message) == pytest.approx(row)
    assert seconds("all_reduce", "tree", ranks, message, gamma=0) == pytest.approx(2 * row)


def test_a_broadcast_to_one_other_rank_is_one_message() -> None:
    assert seconds("broadcast", "binomial", 2, 1e6) == pytest.approx(ALPHA + 1e6 * BETA)
    assert seconds("broadcast", "chain", 2, PIECE_BYTES) == pytest.approx(ALPHA + PIECE_BYTES * BETA)


def test_large_broadcasts_reach_bandwidth_in_pipelines_not_in_binomial_trees() -> None:
    large = 2.0**36
    for algorithm in ("chain", "tree"):
        terms = operations()["broadcast"].algorithms[algorithm].terms(64, large)
        assert float(terms.beta_bytes) == pytest.approx(large, rel=1e-3)
    assert float(operations()["broadcast"].algorithms["binomial"].terms(64, large).beta_bytes) == 6 * large


def test_bandwidths_as_nccl_tests_prints_them() -> None:
    """PERFORMANCE.md: algbw = S/t; S is the total array for all-gather and reduce-scatter; factors per operation."""
    found = operations()
    assert found["all_reduce"].algorithm_bandwidth(8, 1000, 2.0) == 500
    assert found["all_reduce"].bus_bandwidth(8, 1000, 2.0) == 500 * 14 / 8
    for name in ("all_gather", "reduce_scatter"):
        assert found[name].algorithm_bandwidth(8, 1000, 2.0) == 4000
        assert found[name].bus_bandwidth(8, 1000, 2.0) == 3500
    for name in ("broadcast", "send_recv"):
        assert found[name].bus_bandwidth(8, 1000, 2.0) == found[name].algorithm_bandwidth(8, 1000, 2.0) == 500


def test_an_algorithm_known_of_a_library_precedes_the_default() -> None:
    found = operations()
    assert found["reduce_scatter"].algorithm_of("gloo") == "all_reduce"
    assert found["reduce_scatter"].algorithm_of("nccl") == "ring"
    assert found["broadcast"].algorithm_of("gloo") == "binomial"
    assert found["broadcast"].algorithm_of("nccl") == "chain"


def test_a_call_lasts_as_its_slowest_rank_or_its_receiver() -> None:
    samples = ((1.0, 5.0), (2.0, 3.0))
    assert operations()["all_reduce"].call_seconds(samples).tolist() == [2.0, 5.0]
    assert operations()["send_recv"].call_seconds(samples).tolist() == [2.0, 3.0]


@given(length=st.integers(0, 3 * contents.PERIOD), rank=st.integers(0, 40), wrong=st.integers(0, 10**6))
def test_contents_are_recognised_and_one_wrong_element_is_seen(length: int, rank: int, wrong: int) -> None:
    tensor = torch.full((length,), -1.0)
    contents.write_period(tensor, contents.rank_period(rank))
    assert tensor.tolist() == [(i + 7 * rank) % contents.PERIOD for i in range(length)]
    assert contents.holds_period(tensor, contents.rank_period(rank))
    if length:
        tensor[wrong % length] += 1
        assert not contents.holds_period(tensor, contents.rank_period(rank))


def test_sums_are_exact_whatever_their_order_with_a_thousand_ranks() -> None:
    ranks = range(1024)
    exact = sum(contents.rank_period(rank, start=11).to(torch.float64) for rank in ranks)
    assert torch.equal(contents.sum_period(ranks, start=11).to(torch.float64), exact)
    assert torch.equal(contents.sum_period(reversed(ranks), start=11).to(torch.float64), exact)


def run_by_hand(routine: Routine, ranks: int, count: int) -> list[Buffers]:
    """Fill every rank's buffers and do by definition what the operation does."""
    every = []
    for rank in range(ranks):
        inputs, outputs = routine.elements(count, ranks)
        buffers = Buffers(torch.full((inputs,), -1.0), torch.full((outputs,), -1.0))
        routine.fill(buffers, rank)
        every.append(buffers)
    outputs_of = {
        "all_reduce": lambda rank: sum(buffers.output for buffers in every),
        "all_gather": lambda rank: torch.cat([other.input for other in every]),
        "reduce_scatter": lambda rank: sum(own.input for own in every)[rank * count : (rank + 1) * count],
        "all_to_all": lambda rank: torch.cat([other.input.view(ranks, -1)[rank] for other in every]),
        "exchange": lambda rank: every[rank - 1].input,
        "reduce": lambda rank: every[rank].output if rank else sum(buffers.output for buffers in every),
        "broadcast": lambda rank: every[0].output,
        "send_recv": lambda rank: every[0 if rank == ranks - 1 else rank].output,
    }
    found = [outputs_of[routine.name](rank).clone() for rank in range(ranks)]
    for buffers, output in zip(every, found, strict=True):
        buffers.output.copy_(output)
    return every


@pytest.mark.parametrize("name", operations())
@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("count", [1, 256, 512, 1021])
def test_a_correct_result_is_accepted_and_a_wrong_one_refused(name: str, ranks: int, count: int) -> None:
    routine = routines()[name]
    every = run_by_hand(routine, ranks, count)
    for rank, buffers in enumerate(every):
        assert routine.correct(buffers, rank, ranks)
        buffers.output[-1] += 1
        # Of a reduce, what other ranks hold than the root is not defined.
        assert routine.correct(buffers, rank, ranks) == (name == "reduce" and rank > 0)


@pytest.mark.parametrize("name", operations())
def test_a_call_that_did_nothing_is_seen(name: str) -> None:
    routine, ranks, count = routines()[name], 3, 700
    seen = []
    for rank in routine.sides(ranks):
        inputs, outputs = routine.elements(count, ranks)
        buffers = Buffers(torch.zeros(inputs), torch.zeros(outputs))
        routine.fill(buffers, rank)
        seen.append(routine.correct(buffers, rank, ranks))
    assert not all(seen)
