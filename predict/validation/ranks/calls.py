"""What ranks spent in calls that a run timed one by one, beside what was predicted of them.

A rank *waits* in a call until the last rank of its group has issued it. From then on the call *transfers*, be it beside
compute or not. The prediction's transfers are its communication, exposed and hidden; its waiting is what ranks wait for
the slowest one and for stages.
"""

from __future__ import annotations

import msgspec

from paradl_bench.core.units import format_seconds
from paradl_bench.records.hosts.host_clocks import HostClocks
from paradl_bench.records.hosts.host_record import read_host_records
from paradl_bench.records.measurement import read_records
from paradl_bench.records.training.call_times import RankSpent, spent_by_rank
from paradl_bench.records.training.training_record import TRAINING_FILE, CallTiming, TrainingIterations
from predict.ledger.ledger import SLOW_RANK, SLOWEST_RANK, WAIT_FOR_RANKS, WAIT_FOR_STAGES, Ledger, LedgerEntry
from predict.validation.runs import Run

_LATENESS = (SLOWEST_RANK, SLOW_RANK)
_WAITS = (WAIT_FOR_RANKS, WAIT_FOR_STAGES)


class InCalls(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of an iteration, the mean over ranks."""

    waiting_s: float
    transferring_s: float


class Calls(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of a run, timed one by one.

    Attributes:
        timing: in how many iterations, and what it cost.
        ranks: what each rank spent those iterations with.
    """

    measured: InCalls
    predicted: InCalls
    timing: CallTiming
    ranks: tuple[RankSpent, ...]

    def lines(self) -> list[str]:
        """What to know of the calls, in lines."""
        measured, predicted = self.measured, self.predicted
        return [
            f"in calls a rank waits {format_seconds(measured.waiting_s)} for the last rank (predicted"
            f" {format_seconds(predicted.waiting_s)}) and transfers for {format_seconds(measured.transferring_s)}"
            f" (predicted {format_seconds(predicted.transferring_s)})",
            self.timing.line(),
        ]


def calls_of(run: Run, ledger: Ledger) -> Calls | None:
    """The calls of a run beside its predicted ledger; None where they were not timed, or on no one clock."""
    timing = run.description.call_timing
    records = read_records(run.path, TRAINING_FILE, TrainingIterations)
    ranks = spent_by_rank(records, HostClocks(read_host_records(run.path)))
    if timing is None or not ranks:
        return None
    return Calls(
        measured=InCalls(
            waiting_s=sum(rank.waiting_s for rank in ranks) / len(ranks),
            transferring_s=sum(rank.transferring_s for rank in ranks) / len(ranks),
        ),
        predicted=predicted_in_calls(ledger),
        timing=timing,
        ranks=ranks,
    )


def predicted_in_calls(ledger: Ledger) -> InCalls:
    """What a ledger has of waiting and of transfers; the mean over ranks."""
    waiting_s = transferring_s = 0.0
    for role in ledger.roles:
        for entry in role.entries:
            share = role.ranks / ledger.ranks
            waiting_s += share * _waiting_s(entry)
            if entry.details.get("group"):
                transferring_s += share * (entry.total_s - _late_s(entry))
    return InCalls(waiting_s=waiting_s, transferring_s=transferring_s)


def _waiting_s(entry: LedgerEntry) -> float:
    return entry.exposed_s if entry.name in _WAITS else _late_s(entry)


def _late_s(entry: LedgerEntry) -> float:
    return sum(change.added_s for change in entry.adjustments if change.effect in _LATENESS)
