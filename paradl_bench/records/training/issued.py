"""What a run issued, beside what its plan holds: which side of an all-to-all counts, and how uneven the others are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from paradl_bench.records.training.training_record import IssuedCollective

_Key = tuple[str, str, int, tuple[int, ...]]


def key_of(item: IssuedCollective) -> _Key:
    """What equal calls share: when, operation, bytes and group."""
    return item.when, item.operation, item.message_bytes, item.group


def as_planned(issued: Sequence[IssuedCollective], planned: Sequence[IssuedCollective]) -> list[IssuedCollective]:
    """What was issued, each all-to-all with the bytes of the side that is planned.

    Of an all-to-all a rank plans what it sends or what it receives, whichever does not depend on other ranks' data. The
    other side may by chance have the bytes of another planned call. Then the side counts of which more are planned than
    were issued; such calls come last.
    """
    left: Counter[_Key] = Counter()
    for item in planned:
        left[key_of(item)] += item.count
    matched, either = [], []
    for item in issued:
        known = {key_of(side): side for side in (item, _other_side(item)) if key_of(side) in left}
        if len(known) > 1:
            either += [known] * item.count
            continue
        key, side = next(iter(known.items()), (key_of(item), item))
        left[key] -= item.count
        matched.append(side)
    while either:
        # First what has one side left that is planned and not issued yet.
        known = min(either, key=lambda sides: sum(left[key] > 0 for key in sides))
        either.remove(known)
        key = max(known, key=lambda key: left[key])
        left[key] -= 1
        matched.append(msgspec.structs.replace(known[key], count=1))
    return matched


def _other_side(item: IssuedCollective) -> IssuedCollective:
    if item.received_bytes is None:
        return item
    return msgspec.structs.replace(item, message_bytes=item.received_bytes, received_bytes=item.message_bytes)


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
