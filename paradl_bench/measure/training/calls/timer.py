"""Every collective and message of an iteration timed by itself, from its issue to its end.

torch's collectives are operators. While the timer is active, a kernel in front of them stamps when each is issued,
wherever from: Python, DDP's reducer in C++, a thread. All other operators run as ever. A call ends when its future
completes, which the communication thread stamps, or when the wait for it returns, whichever comes first. Messages
between two ranks have no future in gloo.

What a call computes stays the same. Its issue takes a few Python calls longer, and so does its end.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist

from paradl_bench.core.errors import WorkError
from paradl_bench.measure.training.calls.recorder import OPERATORS, OperatorReader
from paradl_bench.records.training.timed_call import TimedCall

_IN_FRONT = "AutogradCPU"
"""The dispatch key whose kernels run before those that communicate on a CPU."""
_DIGITS = 7
"""Of seconds that are kept: a tenth of a microsecond."""
_SETTLED_WITHIN_S, _LOOK_EVERY_S = 5.0, 1e-3


class _What(NamedTuple):
    """What calls of unlike iterations share; ``place`` counts those that are otherwise alike."""

    operation: str
    message_bytes: int
    group: tuple[int, ...]
    sender: int | None = None
    receiver: int | None = None
    place: int = 0


@dataclass(slots=True, eq=False)
class _Call:
    what: _What
    begin: float
    end: float | None = None


class CallTimer:
    """Times calls between entering and leaving it.

    Args:
        stamp: of the clock that iterations are timed by.
    """

    def __init__(self, stamp: Callable[[], float]) -> None:
        self._stamp = stamp
        self._iterations: list[list[_Call]] = []
        self._now: list[_Call] = []
        # Whoever waits for a call holds another object of Python's, unless this one lives.
        self._under_way: dict[int, tuple[Any, _Call]] = {}
        self._library: Any = None
        self._untimed_wait: Any = None

    def __enter__(self) -> Self:
        self._library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
        for name in OPERATORS:
            if hasattr(torch.ops.c10d, name):
                self._library.impl(name, self._timed(getattr(torch.ops.c10d, name).default), _IN_FRONT)
        untimed, ended = dist.Work.wait, self._ended

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            result = untimed(work, *args, **kwargs)
            ended(id(work))
            return result

        self._untimed_wait = untimed
        dist.Work.wait = wait  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        dist.Work.wait = self._untimed_wait  # type: ignore[method-assign]
        self._library._destroy()

    def begin_iteration(self) -> None:
        """What is issued from now on belongs to the next iteration."""
        self._now = []
        self._iterations.append(self._now)

    def _timed(self, operator: Any) -> Callable[..., Any]:
        reader = OperatorReader(operator)

        def issue(*args: Any, **kwargs: Any) -> Any:
            begin = self._stamp()
            with torch._C._AutoDispatchBelowAutograd():
                result = operator(*args, **kwargs)
            # All else, once it is under way.
            call = _Call(_what(reader, args, kwargs), begin)
            self._now.append(call)
            self._follow(result[-1] if isinstance(result, (tuple, list)) else result, call)
            return result

        return issue

    def _follow(self, boxed: Any, call: _Call) -> None:
        """Stamp the end of a call that is under way: when its future completes or the wait for it returns."""
        work = dist.Work.unbox(boxed)
        key, ended = id(work), self._ended
        self._under_way[key] = (work, call)
        # Messages have no future in gloo, nor have some collectives.
        with contextlib.suppress(RuntimeError):
            work.get_future().add_done_callback(lambda _: ended(key, call))

    def _ended(self, key: int, of: _Call | None = None) -> None:
        """Says the thread that communicates, or the one that waited; the later one finds another call, or none."""
        _, call = self._under_way.get(key, (None, None))
        if call is not None and of in (None, call):
            call.end = self._stamp()
            self._under_way.pop(key, None)

    def calls(self, begins: Sequence[float]) -> tuple[TimedCall, ...]:
        """The calls of all iterations, in the order of issue; none where iterations issued unlike ones.

        Args:
            begins: when each iteration began.

        Raises:
            WorkError: a call that did not end.
        """
        self._settle()
        iterations = [_placed(calls) for calls in self._iterations]
        if any(calls.keys() != iterations[0].keys() for calls in iterations):
            return ()
        return tuple(
            TimedCall(
                **{name: value for name, value in what._asdict().items() if name != "place"},
                begin_s=_since(begins, [calls[what].begin for calls in iterations]),
                end_s=_since(begins, [calls[what].end or 0.0 for calls in iterations]),
            )
            for what in (iterations[0] if iterations else ())
        )

    def _settle(self) -> None:
        """Communication threads stamp an end a moment after it lets go whoever waits."""
        limit = time.monotonic() + _SETTLED_WITHIN_S
        for call in (call for calls in self._iterations for call in calls):
            while call.end is None:
                if time.monotonic() > limit:
                    raise WorkError(f"{call.what.operation} of {call.what.message_bytes} bytes was issued and not done")
                time.sleep(_LOOK_EVERY_S)


def _what(reader: OperatorReader, args: Sequence[Any], kwargs: dict[str, Any]) -> _What:
    issued = reader.read(args, kwargs)
    what = _What(issued.operation, issued.message_bytes, issued.group)
    if issued.peer is None or issued.operation != "send_recv":
        return what
    rank, peer = dist.get_rank(), issued.group[issued.peer]
    return what._replace(sender=rank, receiver=peer) if reader.sends else what._replace(sender=peer, receiver=rank)


def _placed(calls: Sequence[_Call]) -> dict[_What, _Call]:
    """Calls of an iteration by what they are; threads may issue them in another order in the next one."""
    seen: Counter[_What] = Counter()
    placed = {}
    for call in calls:
        placed[call.what._replace(place=seen[call.what])] = call
        seen[call.what] += 1
    return placed


def _since(begins: Sequence[float], stamps: Sequence[float]) -> tuple[float, ...]:
    return tuple(round(max(stamp - begin, 0.0), _DIGITS) for begin, stamp in zip(begins, stamps, strict=True))
