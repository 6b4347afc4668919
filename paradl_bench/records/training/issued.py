"""What a run issued, beside what its plan holds: which side of an all-to-all counts, and how uneven the others are."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from paradl_bench.records.training.training_record import IssuedCollective

_Key = tuple[str, str, int, tuple[int, ...]]


def key_of(item: IssuedCollective) -> _Key:
    """What equal calls share: when, operation, bytes and group."""
    return item.when, item.operation, item.message_bytes, item.group


def as_planned(issued: Sequence[IssuedCollective], planned: Sequence[IssuedCollective]) -> list[IssuedCollective]:
    """What was issued, each all-to-all with the bytes of the side that is planned.

    Of an all-to-all a rank plans what it sends or what it receives, whichever does not depend on other ranks' data.
    """
    known = {key_of(item) for item in planned}

    def of_side(item: IssuedCollective) -> IssuedCollective:
        if item.received_bytes is None or key_of(item) in known:
            return item
        other = msgspec.structs.replace(item, message_bytes=item.received_bytes, received_bytes=item.message_bytes)
        return other if key_of(other) in known else item

    return [of_side(item) for item in issued]


def unevenness(issued: Sequence[IssuedCollective], planned: Sequence[IssuedCollective]) -> tuple[float, float] | None:
    """The least and the most that the rank got in an all-to-all of an iteration, over what it has of its own.

    None without all-to-alls. What it got is the side that other ranks' data decide.
    """
    shares = [
        item.received_bytes / item.message_bytes
        for item in as_planned(issued, planned)
        if item.when == "iteration" and item.received_bytes is not None and item.message_bytes
    ]
    return (min(shares), max(shares)) if shares else None
