"""Calls of more or fewer ranks, or of larger or smaller messages, than a fit was made of."""

from __future__ import annotations

from collections.abc import Sequence

from calibrate.profile.collectives.communication import CommunicationFit
from paradl_bench.core.units import format_bytes
from paradl_bench.plan.tasks import Collective
from predict.costs.sourced import Remark


def beyond_remarks(work: Collective, fits: Sequence[CommunicationFit]) -> tuple[Remark, ...]:
    """What is extrapolated where a call lies beyond the ranks or the bytes that its fits were made of."""
    remarks = []
    low, high = min(fit.ranks_range[0] for fit in fits), max(fit.ranks_range[1] for fit in fits)
    if any(fit.by_ranks for fit in fits) and work.ranks not in {fit.ranks_range[0] for fit in fits}:
        off = max(fit.held_out_ranks_relative_error or 0.0 for fit in fits)
        text = f"{work.operation} follows no algorithm over ranks: a count left out was predicted {off:.0%} wrong"
        remarks.append(Remark(text, True))
    if not low <= work.ranks <= high:
        side = f"beyond {high}" if work.ranks > high else f"below {low}"
        remarks.append(Remark(f"{work.operation} {side} ranks", True))
    smallest, largest = min(fit.bytes_range[0] for fit in fits), max(fit.bytes_range[1] for fit in fits)
    if not smallest <= work.message_bytes <= largest:
        above = work.message_bytes > largest
        side = f"beyond {format_bytes(largest)}" if above else f"below {format_bytes(smallest)}"
        remarks.append(Remark(f"{work.operation} {side}", True, format_bytes(work.message_bytes)))
    return tuple(remarks)
