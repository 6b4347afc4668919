"""PyTorch's profiler traces (Kineto): layer times, collectives with bytes and group, overlap; one file a rank.

A layer is an outermost operator with a backward of its own: its forward is the kernels that were launched inside it,
its backward those launched by the autograd nodes of its sequence numbers (on a CPU the operators' own times).
Iterations are parted by ``ProfilerStep`` or, without it, by the optimizer's steps.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

from paradl_bench.importers.importer import Imported, Importer, ImportOptions, LogFile, NotOfFormat, times_in_situ
from paradl_bench.importers.kineto_traces.kineto_collectives import add_collectives, is_communication
from paradl_bench.importers.kineto_traces.kineto_events import (
    BACKWARD,
    Event,
    Kernel,
    Lane,
    Trace,
    busy,
    load_trace,
    running_at,
    shared,
    total,
)
from paradl_bench.records.samples import TraceTimes

_STEP = "ProfilerStep#"
_OPTIMIZER = "Optimizer.step#"
_LONGEST_NAME = 60
_COMPLETE = "arguments="


class TracedOperator(NamedTuple):
    """An operator of one iteration: name with shapes, seconds of forward and backward."""

    label: str
    name: str
    fw_s: float
    bw_s: float


def _read(log: LogFile, options: ImportOptions) -> Imported:
    """Of one rank: what its trace holds of layers, collectives and overlap."""
    trace = load_trace(log)
    if not trace.operators and not trace.kernels:
        raise NotOfFormat(f"{log.path} holds no operator and no kernel: was the profiler given activities?")
    result = Imported(device="cuda" if trace.kernels else "cpu")
    _describe(result, trace)
    spans = iterations_of(trace)
    times = _times(log, trace, spans)
    result.traces.append(times)
    per_iteration = [operators_of(trace, start, end) for start, end in spans]
    _add_layers(result, log, per_iteration, options, rank=times.rank or 0)
    add_collectives(result, trace, log, options)
    if trace.broken:
        result.notes.append(f"{log.path}: {trace.broken} events have no time and were skipped")
    if times.communication_s > 0:
        part = times.overlap_s / times.communication_s
        result.notes.append(
            f"{log.path}: communication ran {times.communication_s * 1e3:.4g} ms, {part:.0%} of it beside compute"
        )
    return result


def _describe(result: Imported, trace: Trace) -> None:
    devices = trace.properties.get("deviceProperties")
    for device in devices if isinstance(devices, list) else []:
        if isinstance(device, dict) and device.get("name"):
            result.device_names.add(str(device["name"])[:100])
    for key, name in (("cuda_runtime_version", "cuda"), ("cuda_driver_version", "driver")):
        if isinstance(trace.properties.get(key), (int, str)):
            result.versions[name] = str(trace.properties[key])
    info = trace.properties.get("distributedInfo")
    if isinstance(info, dict) and isinstance(info.get("nccl_version"), str):
        result.versions["nccl"] = info["nccl_version"]


def iterations_of(trace: Trace) -> list[tuple[float, float]]:
    """Start and end of each iteration on the host; the whole trace where nothing parts it."""
    steps = [(e.start_s, e.end_s) for e in trace.annotations if e.name.startswith(_STEP)]
    if steps:
        return sorted(set(steps))
    events = trace.operators or [kernel.event for kernel in trace.kernels]
    first, last = events[0].start_s, max(event.end_s for event in events)
    ends = sorted(e.end_s for e in trace.annotations if e.name.startswith(_OPTIMIZER))
    # What stands before the first step's end is a whole iteration only if the trace begins with one: it is kept, and
    # left out later where its operators are not those of the others.
    return list(zip([first, *ends[:-1]], ends, strict=True)) if ends else [(first, last)]


def operators_of(trace: Trace, start_s: float, end_s: float) -> list[TracedOperator]:
    """Operators of one iteration that have a backward, in the order of forward."""
    inside = [e for e in trace.operators if start_s <= e.start_s < end_s]
    # The operator that took a sequence number is the last one that began under it (so has torch's own linking).
    owners: dict[int, Event] = {}
    for event in inside:
        number = _sequence(event)
        if number is not None and not _is_backward(event):
            owners[number] = event
    forward: dict[Event, float] = {}
    backward: dict[Event, float] = {}
    launched = _Launched(trace, start_s, end_s)
    roots = {number: running_at(trace.roots, event.lane, event.start_s) for number, event in owners.items()}
    for event in inside:
        number = _sequence(event)
        if number is None or not event.name.startswith(BACKWARD):
            continue
        root = roots.get(number)
        if root is not None and not _is_backward(root):
            backward[root] = backward.get(root, 0.0) + launched.seconds(event)
            forward.setdefault(root, launched.seconds(root))
    ordered = sorted(forward, key=lambda event: event.start_s)
    return [
        TracedOperator(_label(e), e.name.removeprefix("aten::")[:_LONGEST_NAME], forward[e], backward[e])
        for e in ordered
    ]


class _Launched:
    """Seconds of the kernels that were launched inside an event; its own where nothing ran on a device."""

    def __init__(self, trace: Trace, start_s: float, end_s: float) -> None:
        self.on_device = bool(trace.kernels)
        self.lanes: dict[Lane, tuple[list[float], list[float]]] = {}
        launched = [
            (kernel.launch, kernel.event.seconds)
            for kernel in trace.kernels
            if kernel.launch is not None and start_s <= kernel.launch.start_s < end_s and not is_communication(kernel)
        ]
        for launch, seconds in sorted(launched, key=lambda item: item[0].start_s):
            starts, sums = self.lanes.setdefault(launch.lane, ([], [0.0]))
            starts.append(launch.start_s)
            sums.append(sums[-1] + seconds)

    def seconds(self, event: Event) -> float:
        if not self.on_device:
            return event.seconds
        starts, sums = self.lanes.get(event.lane, ([], [0.0]))
        low, high = bisect.bisect_left(starts, event.start_s), bisect.bisect_right(starts, event.end_s)
        return max(0.0, sums[high] - sums[low])


def _sequence(event: Event) -> int | None:
    value = event.arguments.get("Sequence number")
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _is_backward(event: Event) -> bool:
    thread = event.arguments.get("Fwd thread id")
    return event.name.startswith(BACKWARD) or (isinstance(thread, int) and thread > 0)


def _label(event: Event) -> str:
    """The operator with what the trace has of its arguments: shapes, batch included, and types."""
    shapes = event.arguments.get("Input Dims")
    concrete = event.arguments.get("Concrete Inputs")
    parts = [event.name]
    if isinstance(shapes, list):
        parts.append(f"dims={shapes}")
        if isinstance(concrete, list):
            parts.append(f"{_COMPLETE}{concrete}")
    return " ".join(parts)[:2000]


def _add_layers(
    result: Imported, log: LogFile, per_iteration: list[list[TracedOperator]], options: ImportOptions, *, rank: int
) -> None:
    signatures = Counter(tuple(operator.label for operator in operators) for operators in per_iteration if operators)
    if not signatures:
        result.notes.append(f"{log.path}: no operator has a backward with its sequence number: no layer times")
        return
    labels, count = signatures.most_common(1)[0]
    alike = [ops for ops in per_iteration if tuple(operator.label for operator in ops) == labels]
    if len(alike) < len(per_iteration):
        result.notes.append(
            f"{log.path}: {len(per_iteration) - count} of {len(per_iteration)} iterations are left out, because"
            " they ran other operators than most"
        )
    if options.batch is None:
        result.leave_out(
            f"{log.path}: {len(labels)} layers are left out: give --batch, the number of samples in a mini-batch"
        )
        return
    result.rows += len(labels)
    model = options.model or log.name.split(".")[0] or "trace"
    times_of = partial(times_in_situ, model=model, batch=options.batch, dtype=options.dtype, rank=rank)
    for place, label in enumerate(labels):
        layer = f"{place}.{alike[0][place].name}"
        # Without all arguments equal names and shapes may be unlike kernels: the place tells them apart.
        operation = label if _COMPLETE in label else f"{label} layer={place}"
        forward_s = tuple(operators[place].fw_s for operators in alike)
        backward_s = tuple(operators[place].bw_s for operators in alike)
        result.layers.append(times_of(layer=layer, operation=operation, phase="FW", samples_s=forward_s))
        result.layers.append(times_of(layer=layer, operation=operation, phase="BW", samples_s=backward_s))
    result.notes.append(
        f"{log.path}: the layers are torch's operators with their shapes in the trace; a traced network has other"
        " layers, so predict does not use these"
    )


def _times(log: LogFile, trace: Trace, spans: Sequence[tuple[float, float]]) -> TraceTimes:
    compute = busy(_spans(k for k in trace.kernels if k.sort == "kernel" and not is_communication(k)))
    communication = busy(_spans(k for k in trace.kernels if is_communication(k)))
    copies = busy(_spans(k for k in trace.kernels if k.sort == "copy"))
    anything = busy([*compute, *communication, *copies])
    span_s = anything[-1][1] - anything[0][0] if anything else 0.0
    info = trace.properties.get("distributedInfo")
    place = info if isinstance(info, dict) else {}
    rank, ranks = (_count(place.get(key)) for key in ("rank", "world_size"))
    steps = [e for e in trace.annotations if e.name.startswith(_OPTIMIZER)]
    launched = [(k, k.launch.start_s) for k in trace.kernels if k.launch is not None]
    return TraceTimes(
        source=log.path,
        rank=rank,
        ranks=ranks,
        iterations=len(spans),
        span_s=span_s,
        compute_s=total(compute),
        communication_s=total(communication),
        overlap_s=shared(compute, communication),
        copy_s=total(copies),
        idle_s=max(0.0, span_s - total(anything)),
        optimizer_s=sum(
            kernel.event.seconds
            for kernel, at_s in launched
            if not is_communication(kernel) and any(step.start_s <= at_s <= step.end_s for step in steps)
        ),
    )


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 10**7 else None


def _spans(kernels: Iterable[Kernel]) -> list[tuple[float, float]]:
    return [(kernel.event.start_s, kernel.event.end_s) for kernel in kernels]


IMPORTER = Importer(
    name="kineto", reads="PyTorch profiler traces (.json, .json.gz), one a rank", kind="layers", reader=_read
)
