"""Ranks, nodes and spells that are slow, in records whose times are known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from paradl_bench.core.errors import UserError
from paradl_bench.measure.collectives.summary import sweep_rows
from paradl_bench.measure.stragglers.pace import sweep_pace, training_pace
from paradl_bench.records.hosts.host_record import RankHost
from paradl_bench.records.samples import CollectiveSamples
from paradl_bench.records.training.training_record import TrainingIterations, TrainingRun

CHUNK = 10


def run(strategy: str, ranks: int) -> TrainingRun:
    return TrainingRun(
        model="toy",
        input_shape=(3,),
        strategy=strategy,
        ranks=ranks,
        batch=ranks,
        dtype="fp32",
        optimizer="sgd",
        backend="gloo",
        launcher="own",
        iterations=40,
        warmup=5,
        bucket_cap_bytes=1,
        first_bucket_bytes=1,
        batch_norm="local",
        network_digest="0",
    )


def iterations(ranks: int, times: Callable[[int, int], float], count: int = 40) -> list[TrainingIterations]:
    """Iterations that compute ``times(rank, index)`` seconds, a quarter forward, and wait for the slowest."""
    records = []
    for first in range(0, count, CHUNK):
        for rank in range(ranks):
            own = [times(rank, index) for index in range(first, first + CHUNK)]
            slowest = [max(times(other, index) for other in range(ranks)) for index in range(first, first + CHUNK)]
            records.append(
                TrainingIterations(
                    rank=rank,
                    first_iteration=first,
                    iteration_s=tuple(slowest),
                    fw_s=tuple(each / 4 for each in own),
                    bw_s=tuple(each / 2 for each in own),
                    exposed_ge_s=tuple(whole - each for whole, each in zip(slowest, own, strict=True)),
                    wu_s=tuple(each / 4 for each in own),
                )
            )
    return records


def hosts(ranks: int, per_node: int) -> dict[int, RankHost]:
    return {rank: RankHost(rank=rank, host=f"node{rank // per_node + 1}") for rank in range(ranks)}


def test_ranks_that_keep_pace_are_not_spoken_of() -> None:
    drawn = np.random.default_rng(0)
    noise = drawn.normal(1.0, 0.02, (4, 40))
    pace = training_pace(run("d4", 4), iterations(4, lambda r, i: float(noise[r, i])), list(hosts(4, 2).values()))
    assert pace.lines() == []
    assert [own.rank for own in pace.ranks] == [0, 1, 2, 3]


def test_a_slow_rank_is_named_with_its_share() -> None:
    pace = training_pace(run("d4", 4), iterations(4, lambda r, i: 1.5 if r == 2 and i % 4 else 1.0), ())
    assert [own.slow_share for own in pace.ranks] == [0.0, 0.0, 0.75, 0.0]
    assert pace.ranks[2].ratio == 1.5
    assert pace.affected_share == 0.75
    assert pace.lines() == [
        "rank 2 computes 1.50 times as long as its peers (median), over 1.1 times as long in 75% of iterations",
        "75% of iterations had a rank that its peers waited for",
    ]


def test_only_a_rank_slow_beyond_chance_is_reported() -> None:
    in_turn = training_pace(run("d2", 2), iterations(2, lambda r, i: 1.3 if i % 4 == 2 * r else 1.0), ())
    assert [own.slow_share for own in in_turn.ranks] == [0.25, 0.25]
    assert in_turn.lines() == []
    alone = training_pace(run("d2", 2), iterations(2, lambda r, i: 1.3 if r and i % 4 == 2 else 1.0), ())
    assert [(own.slow_share, own.beyond_chance) for own in alone.ranks] == [(0.0, False), (0.25, True)]
    assert alone.lines()[0].startswith("rank 1 computes 1.00 times as long as its peers (median), over 1.1 times")
    # Two of ten may be chance.
    few = training_pace(run("d2", 2), iterations(2, lambda r, i: 1.3 if r and i < 2 else 1.0, count=10), ())
    assert few.ranks[1].slow_share == 0.2
    assert few.lines() == []


def test_a_node_whose_ranks_are_all_slow_is_named_once() -> None:
    pace = training_pace(run("d8", 8), iterations(8, lambda r, _: 1.3 if r >= 4 else 1.0), list(hosts(8, 4).values()))
    assert pace.slow_nodes == ("node2",)
    assert pace.lines()[0] == (
        "node node2 is slow: its 4 ranks compute 1.30 times as long as their peers, in 100% of iterations"
    )
    assert len(pace.lines()) == 2


def test_stages_of_a_pipeline_are_no_peers() -> None:
    by_stage = iterations(4, lambda r, _: 2.0 if r % 2 else 1.0)
    assert training_pace(run("d2p2", 4), by_stage, ()).lines() == []
    alone = training_pace(run("p4", 4), by_stage, ())
    assert (alone.ranks, alone.affected_share) == ((), 0.0)


def test_a_slow_spell_of_all_ranks_is_no_ranks_fault() -> None:
    pace = training_pace(run("d2", 2), iterations(2, lambda _, i: 1.6 if 20 <= i < 30 else 1.0), ())
    assert [own.slow_share for own in pace.ranks] == [0.0, 0.0]
    assert pace.slow_spells == ((20, 10, 1.6),)
    assert pace.lines() == [
        "25% of iterations fell into slow spells; the worst, iterations 20 to 29, took 1.60 times the run's median"
    ]


def sweep(
    late_s: Callable[[int, int], float], *, ranks: int = 4, blocks: int = 4, slow_block: int | None = None
) -> list[CollectiveSamples]:
    """All-reduces of 100 us a KiB, to which ranks come late by ``late_s(rank, repetition)``."""
    records = []
    for block in range(blocks):
        for size in (1024, 4096, 16384):
            call_s = 1e-4 * size / 1024 * (1.5 if block == slow_block else 1.0)
            arrivals = np.array([[late_s(rank, index) for index in range(8)] for rank in range(ranks)])
            times = call_s + arrivals.max(axis=0) - arrivals
            records.append(
                CollectiveSamples(
                    library="gloo",
                    tool="torch",
                    operation="all_reduce",
                    level="node",
                    ranks=ranks,
                    message_bytes=size,
                    dtype="fp32",
                    block=block,
                    samples_s=tuple(map(tuple, times.tolist())),
                    verified=True,
                )
            )
    return records


def test_the_rank_that_others_wait_for_is_named() -> None:
    pace = sweep_pace(sweep(lambda rank, index: 1e-3 if rank == 3 and index % 4 else 0.0), list(hosts(4, 2).values()))
    assert [rank.late for rank in pace.ranks] == [False, False, False, True]
    assert pace.ranks[3].late_share == 0.75
    assert pace.ranks[3].lag_s == pytest.approx(1e-3)
    assert pace.slow_nodes == ()
    assert pace.lines() == [
        "the others wait for rank 3 on node2: 1.00 ms a call (median), over a tenth of the call in 75% of calls"
    ]


def test_what_delays_short_calls_alone_is_no_lateness() -> None:
    """Ranks leave a barrier one after another, by less than a tenth of all but the shortest calls."""
    assert sweep_pace(sweep(lambda rank, _: 3e-5 if rank == 3 else 0.0), ()).lines() == []


def test_a_late_node_and_a_slow_block_are_named() -> None:
    late = sweep_pace(sweep(lambda rank, _: 1e-3 if rank >= 4 else 0.0, ranks=6), list(hosts(6, 4).values()))
    assert late.slow_nodes == ("node2",)
    assert late.lines() == [
        "node node2 is late: the ranks of other nodes wait for its 2 ranks, 1.00 ms a call (median)"
    ]
    pace = sweep_pace(sweep(lambda *_: 0.0, slow_block=2), list(hosts(4, 2).values()))
    assert pace.slow_blocks == ((2, pytest.approx(1.5)),)
    assert pace.lines() == ["1 of 4 blocks were slow; the worst, block 2, took 1.50 times the median of all"]


def test_means_of_calls_and_groups_at_once_are_left_out() -> None:
    import msgspec

    records = sweep(lambda rank, _: 1e-3 if rank == 3 else 0.0)
    means = [msgspec.structs.replace(record, calls_per_sample=5) for record in records]
    groups = [msgspec.structs.replace(record, concurrent=2) for record in records]
    assert sweep_pace([*means, *groups], ()).lines() == []


def test_ranks_of_concurrent_groups_are_named_by_global_rank() -> None:
    import msgspec

    calls = sweep(lambda rank, _: 1e-3 if rank == 1 else 0.0, ranks=2)
    level = sweep(lambda *_: 0.0, ranks=2)
    second = [msgspec.structs.replace(record, first_rank=2) for record in calls]
    pace = sweep_pace([*level, *second], list(hosts(4, 2).values()))
    assert [(rank.rank, rank.late) for rank in pace.ranks] == [(0, False), (1, False), (2, False), (3, True)]
    # A group without records, as of a file that was cut off, is nobody's.
    assert [rank.rank for rank in sweep_pace(second, ()).ranks] == [2, 3]


@pytest.mark.parametrize("read", [lambda sweeps: sweep_pace(sweeps, []), sweep_rows])
def test_a_sweep_of_an_unknown_collective_is_refused_by_name(
    read: Callable[[list[CollectiveSamples]], object],
) -> None:
    times = {"samples_s": ((1e-5, 2e-5), (1e-5, 2e-5)), "verified": True, "dtype": "fp32", "block": 0, "ranks": 2}
    about = {"library": "gloo", "tool": "torch", "level": "node", "message_bytes": 4096}
    with pytest.raises(UserError, match=r"unknown collective 'all_recude'.*all_reduce"):
        read([CollectiveSamples(operation="all_recude", **about, **times)])
