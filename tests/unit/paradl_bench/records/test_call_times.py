"""Calls that were timed one by one: waits and transfers against sums by hand, on one clock of two hosts."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from paradl_bench.records.hosts.host_clocks import HostClocks
from paradl_bench.records.hosts.host_record import RankHost
from paradl_bench.records.training.call_times import call_times, spent_by_rank
from paradl_bench.records.training.timed_call import TimedCall
from paradl_bench.records.training.training_record import (
    CallTiming,
    TrainingIterations,
    without_timed_calls,
)

AHEAD_S = 100.0
"""How far the clock of rank 1's host is ahead."""
CLOCKS = HostClocks(
    RankHost(
        rank=rank,
        host=f"node{rank}",
        attempt=1,
        clock_at_s=1.0,
        clock_offset_s=AHEAD_S * rank,
        clock_error_s=1e-6 * rank,
    )
    for rank in range(2)
)


def call(*spans: tuple[float, float], size: int = 8, message: bool = False) -> TimedCall:
    begin_s, end_s = zip(*spans, strict=True)
    ends = {"operation": "send_recv", "sender": 0, "receiver": 1} if message else {"operation": "all_reduce"}
    return TimedCall(message_bytes=size, group=(0, 1), begin_s=begin_s, end_s=end_s, **ends)  # type: ignore[arg-type]


def iterations(rank: int, *calls: TimedCall, count: int = 1, **changes: object) -> TrainingIterations:
    """Iterations of ten seconds: forward 2, backward 5, exchange 2, update 1; all ranks begin together."""
    fields: dict[str, object] = {
        "rank": rank,
        "first_iteration": 0,
        "iteration_s": (10.0,) * count,
        "fw_s": (2.0,) * count,
        "bw_s": (5.0,) * count,
        "exposed_ge_s": (2.0,) * count,
        "wu_s": (1.0,) * count,
        "host_begin_s": tuple(2.0 + 10 * index + AHEAD_S * rank for index in range(count)),
        "attempt": 1,
        "calls": calls,
    }
    return TrainingIterations(**(fields | changes))  # type: ignore[arg-type]


def test_waits_end_when_the_last_rank_came() -> None:
    records = [
        iterations(0, call((3.0, 6.0), (3.0, 5.0)), count=2),
        iterations(1, call((4.5, 6.5), (2.0, 5.0)), count=2),
    ]
    (times,) = call_times(records, CLOCKS)
    assert times.ranks == (0, 1)
    assert times.waits_s == pytest.approx(np.array([[1.5, 0.0], [0.0, 1.0]]))
    assert times.transfers_s == pytest.approx([2.0, 2.0])


def test_a_sender_that_is_done_early_waits_for_nobody_later() -> None:
    records = [iterations(0, call((1.0, 1.5), message=True)), iterations(1, call((3.0, 4.0), message=True))]
    (times,) = call_times(records, CLOCKS)
    assert times.waits_s == pytest.approx(np.array([[0.5], [0.0]]))
    assert times.transfers_s == pytest.approx([1.0])


def test_a_message_ends_when_it_was_received() -> None:
    # Its sender waits for it much later, as in a pipeline.
    records = [iterations(0, call((1.0, 9.0), message=True)), iterations(1, call((3.0, 4.0), message=True))]
    (times,) = call_times(records, CLOCKS)
    assert times.waits_s == pytest.approx(np.array([[2.0], [0.0]]))
    assert times.transfers_s == pytest.approx([1.0])


def test_calls_that_are_alike_are_paired_in_order() -> None:
    early, late = call((3.0, 4.0)), call((5.0, 6.0))
    times = call_times([iterations(rank, early, late) for rank in range(2)], CLOCKS)
    assert [float(one.begin_s[0, 0]) for one in times] == pytest.approx([5.0, 7.0])
    assert [one.key.place for one in times] == [0, 1]


def test_what_ranks_spend_adds_up_to_the_iteration() -> None:
    # Rank 0 issues at 3 and 6, rank 1 at 4 and 6; both are done with the first at 5, with the second at 8.
    records = [
        iterations(0, call((3.0, 5.0)), call((6.0, 8.0), size=4)),
        iterations(1, call((4.0, 5.0)), call((6.0, 8.0), size=4)),
    ]
    first, second = spent_by_rank(records, CLOCKS)
    assert (first.waiting_s, second.waiting_s) == pytest.approx((1.0, 0.0))
    assert (first.transferring_s, second.transferring_s) == pytest.approx((3.0, 3.0))
    # Nothing is under way from 5 to 6; the last call ends at 8, backward at 9.
    assert (first.filling_s, first.copying_s) == pytest.approx((1.0, 1.0))
    assert (first.rest_s, second.rest_s) == pytest.approx((4.0, 5.0))


def test_calls_beside_each_other_count_once() -> None:
    records = [iterations(rank, call((3.0, 6.0)), call((4.0, 7.0), size=4)) for rank in range(2)]
    assert [one.transferring_s for one in spent_by_rank(records, CLOCKS)] == pytest.approx([4.0, 4.0])


def test_calls_for_layers_fill_no_buckets() -> None:
    own = {"fw_communication_s": {"all_reduce": (1.0,)}}
    records = [iterations(rank, call((3.0, 4.0)), call((5.0, 6.0)), **own) for rank in range(2)]
    assert [(one.filling_s, one.copying_s) for one in spent_by_rank(records, CLOCKS)] == [(0.0, 0.0)] * 2


def test_without_calls_or_a_clock_nothing_is_said() -> None:
    timed = [iterations(rank, call((3.0, 4.0))) for rank in range(2)]
    assert call_times([iterations(0), iterations(1)], CLOCKS) == ()
    assert call_times(timed, HostClocks([])) == ()
    assert spent_by_rank(timed, HostClocks([])) == ()


def test_chunks_that_do_not_match_are_left_out() -> None:
    spans = (3.0, 4.0)
    unlike = [iterations(0, call(spans, spans), count=2), iterations(1, call(spans))]
    assert call_times(unlike, CLOCKS) == ()
    # A rank that takes part in no call spends everything with the rest.
    alone, unmet = (
        TimedCall(operation="all_reduce", message_bytes=8, group=group, begin_s=(3.0,), end_s=(4.0,))
        for group in ((0,), (1, 2))
    )
    spent = spent_by_rank([iterations(0, alone), iterations(1, unmet)], CLOCKS)
    assert [(one.transferring_s, one.copying_s, one.rest_s) for one in spent] == [(1.0, 5.0, 4.0), (0.0, 0.0, 10.0)]


def test_times_are_taken_where_no_call_was_timed() -> None:
    timed, other = iterations(0, call((3.0, 4.0))), iterations(0, first_iteration=1)
    assert without_timed_calls([timed, other]) == [other]
    assert without_timed_calls([timed]) == [timed]


def test_the_line_says_what_timing_cost() -> None:
    assert "3.0% longer than the others" in CallTiming(timed=5, others=5, disturbance=0.03, spread=0.01).line()
    assert "by an unknown amount" in CallTiming(timed=5, others=0).line()


@pytest.mark.parametrize("others_s", [(), (1.0,)])
def test_fewer_than_two_others_tell_no_disturbance(others_s: tuple[float, ...]) -> None:
    found = CallTiming.of_iterations([1.0] * 5, others_s)
    assert found == CallTiming(timed=5, others=len(others_s))
    assert f"5 of {5 + len(others_s)} iterations" in found.line()


def test_the_disturbance_is_of_medians_and_the_spread_of_quartiles() -> None:
    found = CallTiming.of_iterations([1.5, 1.0, 9.0], [1.0, 0.5, 1.5])
    assert (found.disturbance, found.spread) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ('"begin_s":[2.0],"end_s":[1.0]', "cannot end before it begins"),
        ('"begin_s":[1.0],"end_s":[2.0,3.0]', "end_s"),
        ('"sender":0,"begin_s":[1.0],"end_s":[2.0]', "a message has a sender and a receiver"),
    ],
)
def test_calls_that_cannot_be_are_refused(changes: str, said: str) -> None:
    content = f'{{"operation":"all_reduce","message_bytes":8,"group":[0,1],{changes}}}'.encode()
    with pytest.raises(msgspec.ValidationError, match=said):
        msgspec.json.decode(content, type=TimedCall)
