"""What compute of layers waits for where ranks share them, of many candidates at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from predict.costs.sourced import Floats, Ints
from predict.search.candidates.mesh import alike
from predict.search.pricing.groups import Group, GroupCosts
from predict.search.pricing.shared_work import SharedWork


class _Known(NamedTuple):
    """Messages of a part over its links: arrays with an entry each.

    Attributes:
        work: kept, because parts are told apart by what object they are; None of a rank that waits for nothing.
        layer: index of the one that waits. forward: whether that is in its forward. beside: whether it computes on.
        times: how often each is sent.
        kind: which of the distinct messages it waits for, whose ``bytes_per_sample`` and ``link``, by number, follow:
            blocks repeat theirs.
    """

    work: SharedWork | None
    layer: Ints
    forward: NDArray[np.bool_]
    beside: NDArray[np.bool_]
    times: Floats
    kind: Ints
    bytes_per_sample: Floats
    link: Ints


class Sent(NamedTuple):
    """Seconds of messages by the layers that they name, each of shape (numbers, layers).

    Attributes:
        forward, backward: that compute waits for. beside_forward, beside_backward: that compute goes on beside.
    """

    forward: Floats
    backward: Floats
    beside_forward: Floats
    beside_backward: Floats


_NONE, _NEVER, _FREE = np.zeros(0, np.int64), np.zeros(0, bool), np.zeros(0)
_NOTHING = _Known(None, _NONE, _NEVER, _NEVER, _FREE, _NONE, _FREE, _NONE)


class Waits:
    """Messages of parts of a network over links; each pair of a part and its links has a number, nothing has 0."""

    def __init__(self, groups: GroupCosts) -> None:
        self._groups = groups
        self._numbers: dict[tuple[int, tuple[int, ...]], int] = {}
        self._known = [_NOTHING]

    def number(self, work: SharedWork, groups: Sequence[Group]) -> int:
        """Of a part whose ranks stand so along each axis; a part that is equal to another one is another part."""
        messages = work.messages
        if not messages:
            return 0
        links = {
            (name, axis): self._groups.link(name, groups[axis])
            for name, axis in dict.fromkeys((message.operation, message.axis) for message in messages)
        }
        key = id(work), tuple(links.values())
        if key not in self._numbers:
            self._numbers[key] = len(self._known)
            each_bytes = np.array([message.bytes_per_sample for message in messages], float)
            each_link = np.array([links[message.operation, message.axis] for message in messages], np.int64)
            first, kind = alike(np.unique(each_bytes, return_inverse=True)[1], each_link)
            known = _Known(
                work,
                np.array([message.layer for message in messages], np.int64),
                np.array([message.phase == "FW" for message in messages], bool),
                np.array([message.beside for message in messages], bool),
                np.array([message.times for message in messages], float),
                kind,
                each_bytes[first],
                each_link[first],
            )
            self._known.append(known)
        return self._numbers[key]

    def seconds(self, numbers: Ints, samples: Ints, layers: int) -> Sent:
        """Of so many samples each, by so many layers."""
        known = [self._known[number] for number in numbers.tolist()]
        counts = samples.tolist()
        place = np.concatenate([at * layers + part.layer for at, part in enumerate(known)])
        sizes = np.concatenate([part.bytes_per_sample * count for part, count in zip(known, counts, strict=True)])
        forward = np.concatenate([part.forward for part in known])
        beside = np.concatenate([part.beside for part in known])
        starts = np.cumsum([0, *(len(part.link) for part in known)]).tolist()
        kind = np.concatenate([part.kind + start for part, start in zip(known, starts, strict=False)])
        distinct = self._groups.seconds_over(np.concatenate([part.link for part in known]), np.rint(sizes))
        seconds = distinct[kind] * np.concatenate([part.times for part in known])
        return Sent(
            *(
                np.bincount(place[chosen], seconds[chosen], len(known) * layers).astype(float).reshape(-1, layers)
                for chosen in (forward & ~beside, ~forward & ~beside, forward & beside, ~forward & beside)
            )
        )
