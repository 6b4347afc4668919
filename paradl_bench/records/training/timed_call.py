"""One collective or message of a training run, as one rank saw it iteration by iteration."""

from __future__ import annotations

import msgspec

from paradl_bench.core.bounds import Bytes, RankIndex, Samples
from paradl_bench.core.checks import check_aligned


class TimedCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call that a rank issues in every iteration, timed by itself.

    Attributes:
        operation, message_bytes, group: as of :class:`~paradl_bench.records.training.training_record.IssuedCollective`.
        sender, receiver: of a message between two ranks; None of a collective.
        begin_s: when it was issued. end_s: when it was complete on this rank, or the wait for it returned.
            Both from the start of the iteration on its rank, one value an iteration.
    """

    operation: str
    message_bytes: Bytes
    group: tuple[RankIndex, ...]
    sender: RankIndex | None = None
    receiver: RankIndex | None = None
    begin_s: Samples
    end_s: Samples

    def __post_init__(self) -> None:
        check_aligned(self, "begin_s", "end_s")
        if any(end < begin for begin, end in zip(self.begin_s, self.end_s, strict=True)):
            raise ValueError(f"a call ({self.operation}) cannot end before it begins")
        if (self.sender is None) != (self.receiver is None):
            raise ValueError("a message has a sender and a receiver, and a collective has neither")

    @property
    def ranks(self) -> tuple[int, ...]:
        """Who takes part: sender and receiver of a message, the group of a collective."""
        return self.group if self.sender is None or self.receiver is None else (self.sender, self.receiver)
