"""A profiler's trace as arrays of events: operators by thread, kernels with what launched them.

Chrome's trace format as Kineto writes it: complete events (``ph`` X) with ``ts`` and ``dur`` in microseconds; a kernel
and the call that launched it share a ``correlation``; an operator and its backward share a ``Sequence number``.
"""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from paradl_bench.importers.importer import LogFile, NotOfFormat
from paradl_bench.importers.plausible import LONGEST_CALL_S

_US = 1e-6
_LAUNCHES = {"cuda_runtime", "cuda_driver", "hip_runtime", "runtime", "Runtime"}
_DEVICE = {"kernel": "kernel", "Kernel": "kernel", "gpu_memcpy": "copy", "Memcpy": "copy", "gpu_memset": "copy"}
BACKWARD = "autograd::engine::evaluate_function: "
Lane = tuple[str, str]
"""A process and a thread."""


@dataclass(frozen=True, slots=True, eq=False)
class Event:
    """An operator, annotation or launch on the host, or a kernel on a device; seconds since the trace's first event.

    Two of equal contents are two events.
    """

    name: str
    start_s: float
    seconds: float
    lane: Lane
    arguments: dict[str, Any]

    @property
    def end_s(self) -> float:
        """When it ended."""
        return self.start_s + self.seconds


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel or copy on a device and the event that launched it (None where the trace lost it)."""

    event: Event
    sort: str
    launch: Event | None


Lanes = dict[Lane, tuple[list[float], list[Event]]]
"""By thread, starts of events and the events, in the order of time."""


@dataclass(slots=True)
class Trace:
    """Events by what they are, each list in the order of time.

    Attributes:
        roots: operators that no other operator holds.
        operators: all of them.
        properties: of the whole trace (``distributedInfo``, ``deviceProperties``).
    """

    operators: list[Event] = field(default_factory=list)
    annotations: list[Event] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    roots: Lanes = field(default_factory=dict)
    properties: dict[str, Any] = field(default_factory=dict)
    broken: int = 0


def load_trace(log: LogFile) -> Trace:
    """Events of a trace file.

    Raises:
        UserError: no JSON, or no trace.
    """
    text = log.json_text
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise NotOfFormat(f"{log.path} is no trace of PyTorch's profiler: no JSON (truncated?)") from None
    properties = document if isinstance(document, dict) else {}
    entries = properties.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(entries, list) or not any(isinstance(entry, dict) and "ph" in entry for entry in entries):
        raise NotOfFormat(f"{log.path} is no trace of PyTorch's profiler: it holds no traceEvents")
    trace = Trace(properties={key: value for key, value in properties.items() if key != "traceEvents"})
    timed = [start for entry in entries if isinstance(entry, dict) and (start := _number(entry.get("ts"))) is not None]
    # Microseconds since 1970 leave a double no digits for the rest: times count from the first event.
    zero = min(timed, default=0.0)
    launches: dict[object, Event] = {}
    on_device: list[tuple[Event, str]] = []
    for entry in entries:
        if not isinstance(entry, dict) or entry.get("ph") != "X":
            continue
        event = _event(entry, zero)
        if event is None:
            trace.broken += 1
            continue
        _sort_in(trace, str(entry.get("cat")), event, launches, on_device)
    on_device.sort(key=lambda item: item[0].start_s)
    trace.kernels = [Kernel(event, sort, launches.get(_correlation(event))) for event, sort in on_device]
    trace.operators.sort(key=lambda event: (event.start_s, -event.seconds))
    trace.annotations.sort(key=lambda event: (event.start_s, -event.seconds))
    trace.roots = by_lane(_outermost(trace.operators))
    return trace


def _sort_in(
    trace: Trace, category: str, event: Event, launches: dict[object, Event], on_device: list[tuple[Event, str]]
) -> None:
    if category in ("cpu_op", "Operator", "operator"):
        trace.operators.append(event)
    elif category == "user_annotation":
        trace.annotations.append(event)
    elif category in _LAUNCHES:
        if _correlation(event) is not None:
            launches[_correlation(event)] = event
    elif category in _DEVICE:
        on_device.append((event, _DEVICE[category]))


def _correlation(event: Event) -> str | int | None:
    value = event.arguments.get("correlation", event.arguments.get("External id"))
    return value if isinstance(value, (str, int)) else None


def _event(entry: dict[str, Any], zero_us: float) -> Event | None:
    start, length = _number(entry.get("ts")), _number(entry.get("dur"))
    # Sums over what a layer runs have to stay below what a layer may take.
    if start is None or length is None or not 0 <= length * _US <= LONGEST_CALL_S:
        return None
    arguments = entry.get("args")
    return Event(
        name=str(entry.get("name", "")),
        start_s=(start - zero_us) * _US,
        seconds=length * _US,
        lane=(str(entry.get("pid")), str(entry.get("tid"))),
        arguments=arguments if isinstance(arguments, dict) else {},
    )


def _number(value: object) -> float | None:
    # Some versions write times as text.
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e18:
        return None
    return float(value) if math.isfinite(value) else None


def _outermost(events: Iterable[Event]) -> Iterator[Event]:
    """Events, in order, that no other one of the same thread holds."""
    ends_s: dict[Lane, float] = {}
    for event in events:
        if event.start_s >= ends_s.get(event.lane, -math.inf):
            ends_s[event.lane] = event.end_s
            yield event


def by_lane(events: Iterable[Event]) -> Lanes:
    """Events by thread; they come in the order of time."""
    lanes: Lanes = {}
    for event in events:
        starts, held = lanes.setdefault(event.lane, ([], []))
        starts.append(event.start_s)
        held.append(event)
    return lanes


def running_at(lanes: Lanes, lane: Lane, moment_s: float) -> Event | None:
    """The event that ran on a thread at a moment."""
    starts, events = lanes.get(lane, ([], []))
    place = bisect.bisect_right(starts, moment_s) - 1
    return events[place] if place >= 0 and events[place].end_s >= moment_s else None


def busy(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of spans, as spans that don't touch, in order."""
    united: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if united and start <= united[-1][1]:
            united[-1] = united[-1][0], max(united[-1][1], end)
        else:
            united.append((start, end))
    return united


def total(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds that the spans cover; they have to be apart."""
    return math.fsum(end - start for start, end in spans)


def shared(one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> float:
    """Seconds that two sets of spans have in common; each set's have to be apart and in order."""
    seconds, i, j = 0.0, 0, 0
    while i < len(one) and j < len(other):
        low, high = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        seconds += max(0.0, high - low)
        if one[i][1] <= other[j][1]:
            i += 1
        else:
            j += 1
    return seconds
