"""Offsets of hosts' clocks as they change: what lies between two, beyond them, and what no round trip explains."""

from __future__ import annotations

import numpy as np
import pytest

from paradl_bench.measure.machine.node_findings import Node, calendar_lines
from paradl_bench.measure.stragglers.arrivals import arrivals_in_training
from paradl_bench.records.hosts.host_clocks import UNKNOWN_PACE, HostClocks, drift_lines
from paradl_bench.records.hosts.host_record import RankHost
from paradl_bench.records.training.training_record import TrainingIterations


def noted(offsets: dict[float, float], *, error_s: float = 1e-5, attempt: int = 1) -> list[RankHost]:
    """Rank 0 on one host, rank 1 on another whose offset is known at some moments of rank 0's clock."""
    records = []
    for at_s, offset_s in offsets.items():
        records.append(RankHost(rank=0, host="a", clock_at_s=at_s, attempt=attempt))
        records.append(
            RankHost(rank=1, host="b", clock_at_s=at_s, clock_offset_s=offset_s, clock_error_s=error_s, attempt=attempt)
        )
    return records


def test_a_steady_clock_is_mapped_exactly_to_the_first_one() -> None:
    moments = np.linspace(100, 200, 7)
    ahead_s, pace = 3600.0, 1 + 5e-5
    own = moments * pace + ahead_s
    clocks = HostClocks(noted({at: ahead_s + at * (pace - 1) for at in (100.0, 200.0)}))
    found = clocks.on_one_clock(1, 1, own)
    assert found is not None
    np.testing.assert_allclose(found.stamps_s, moments, rtol=0, atol=1e-9)
    assert set(found.error_s.tolist()) == {1e-5}
    # Beyond the last one it goes on at its pace, known as well as two offsets over a hundred seconds tell.
    later = clocks.on_one_clock(1, 1, [300 * pace + ahead_s])
    assert later is not None
    assert later.stamps_s[0] == pytest.approx(300, abs=1e-9)
    assert later.error_s[0] == pytest.approx(1e-5 + 100 * 2e-5 / 100, rel=1e-3)
    alone = clocks.on_one_clock(1, 0, moments)
    assert alone is not None
    assert alone.stamps_s.tolist() == moments.tolist()
    assert not alone.error_s.any()


def test_offsets_at_one_moment_give_no_pace_and_lose_accuracy() -> None:
    for offsets in ({100.0: 7.0}, {100.0: 7.0, 100.1: 7.00001}):
        found = HostClocks(noted(offsets)).on_one_clock(1, 1, [1107.0])
        assert found is not None
        assert found.stamps_s[0] == pytest.approx(1100, abs=1e-4)
        assert found.error_s[0] == pytest.approx(1e-5 + 1000 * UNKNOWN_PACE, rel=1e-3)


def test_attempts_have_their_own_clocks_and_files_of_before_none() -> None:
    clocks = HostClocks([*noted({100.0: 7.0}), *noted({5.0: -2.0}, attempt=2)])
    first, second = clocks.on_one_clock(1, 1, [107.0]), clocks.on_one_clock(2, 1, [3.0])
    assert first is not None
    assert second is not None
    assert (first.stamps_s[0], second.stamps_s[0]) == (100.0, 5.0)
    assert clocks.on_one_clock(3, 1, [1.0]) is None
    assert HostClocks([RankHost(rank=1, host="b", clock_offset_s=7.0)]).on_one_clock(0, 1, [1.0]) is None


def test_drift_is_reported_where_round_trips_do_not_explain_it() -> None:
    assert drift_lines(HostClocks(noted({0.0: 7.0, 60.0: 7.00001})).drifts()) == []
    (line,) = drift_lines(HostClocks(noted({0.0: 7.0, 60.0: 7.0012})).drifts())
    assert line.startswith(
        "the clock of b gained 1.20 ms on that of a in 60.0 s (20.0 millionths, known within 20.0 us)"
    )
    straight, jumped = {0.0: 7.0, 30.0: 7.0006, 60.0: 7.0012}, {0.0: 7.0, 30.0: 7.001, 60.0: 7.0012}
    assert len(drift_lines(HostClocks(noted(straight)).drifts())) == 1
    bent = drift_lines(HostClocks(noted(jumped)).drifts())[-1]
    # 0.4 ms off the line, of which the round trips explain 0.02.
    assert "did not keep a constant pace" in bent
    assert "380 us more than round trips explain" in bent
    # One attempt each tells of no drift: nothing was measured twice.
    assert HostClocks([*noted({0.0: 7.0}), *noted({60.0: 9.0}, attempt=2)]).drifts() == ()


@pytest.mark.parametrize(("error_s", "late"), [(1e-4, [1]), (2e-2, [])])
def test_a_rank_is_late_only_beyond_the_clock_error(error_s: float, late: list[int]) -> None:
    """Rank 1 begins 10 ms after rank 0, on a clock that is an hour ahead."""
    records = [
        TrainingIterations(
            rank=rank,
            first_iteration=0,
            iteration_s=(0.06,) * 5,
            fw_s=(0.02,) * 5,
            bw_s=(0.03,) * 5,
            exposed_ge_s=(0.0,) * 5,
            wu_s=(0.01,) * 5,
            host_begin_s=tuple(100 + index + rank * (3600 + 0.01) for index in range(5)),
            attempt=1,
        )
        for rank in range(2)
    ]
    clocks = HostClocks(noted({100.0: 3600.0, 106.0: 3600.0}, error_s=error_s))
    found = arrivals_in_training(records, {0: [1], 1: [0]}, clocks, {})
    assert [each.rank for each in found if each.late] == late
    assert found[1].late_s == pytest.approx(0.01)
    assert found[1].error_s == pytest.approx(error_s)
    assert arrivals_in_training(records, {0: [1], 1: [0]}, HostClocks(()), {}) == ()


def test_a_calendar_that_is_seconds_off_is_named() -> None:
    def node(host: str, wall_offset_s: float) -> Node:
        clock = RankHost(rank=1, host=host, clock_offset_s=9e4, clock_error_s=1e-4, wall_offset_s=wall_offset_s)
        return Node(host=host, ranks=(1,), clock=clock, findings=())

    (line,) = calendar_lines([node("a", 0.0), node("b", 0.3), node("c", -2.5)])
    assert line.startswith("the calendar of c is 2.50 s behind rank 0's (within 100 us)")
