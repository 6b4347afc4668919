"""When each rank computes and communicates in one iteration.

Tasks of a rank's stream are bars. Where there are too many for a page, those that follow each other on a stream with
the same category, of one micro-batch, are one bar.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from paradl_bench.core.units import format_bytes, format_seconds
from paradl_bench.plan.tasks import Stream
from predict.simulation.simulator import BLOCKING
from predict.timeline.timeline import IterationTimeline, RoleTimeline
from predict.timeline.timeline_report import summarise
from predict.timeline.trace_works import WorkDescriptions, describe_works
from predict.validation.report.content import Content, Figure, Section
from predict.validation.shown.cells import Table

MOST_BARS = 8_000
"""Of a page: some 300 kB of JSON, which a browser draws while one zooms."""
MOST_LANES = 64
_TABLED = 40
_TOLD = ("layer", "bytes", "group", "source", "alone_us", "interval_us")
Bar = tuple[int, int, float, float, int, int]
"""Lane, index of what it is, start and length in microseconds, tasks in it, micro-batch (-1 for none)."""


def section(content: Content) -> Section:
    """Of the configuration that is looked into."""
    timeline = content.timeline
    summary = summarise(timeline, content.prediction, None)
    idle = "bubble" if timeline.is_pipeline else "idle"
    rows = [
        (
            role.role,
            str(role.ranks),
            format_seconds(role.finish_s),
            f"{role.utilisation:.1%}",
            format_seconds(role.exposed_communication_s),
            format_seconds(role.overlap_s),
            f"{role.bubble:.1%}",
        )
        for role in summary.roles
    ]
    data, left_out = bars_of_timeline(timeline)
    figure = Figure(
        name="timeline",
        title="Timeline of one iteration",
        shows="A row is a stream of one rank, which represents all ranks with the same tasks. A bar is a task. Point at"
        " a bar, or choose it by keys: it is described below.",
        table=_longest(data),
        data=data,
    )
    use = Table(("role", "ranks", "ends", "utilisation", "exposed", "overlap", idle), rows)
    lines = [f"The iteration of {format_seconds(timeline.iteration_s)} as it is simulated, task by task.", *left_out]
    return Section(
        name="timeline",
        title="One iteration",
        lines=lines,
        figures=(figure,),
        tables={"How ranks use it": use},
    )


def _longest(data: dict[str, Any]) -> Table:
    """The bars that last longest, in words."""
    rows = []
    for lane, kind, start_us, length_us, tasks, _ in sorted(data["bars"], key=lambda bar: -bar[3])[:_TABLED]:
        place, about = data["lanes"][lane], data["kinds"][kind]
        size = about.get("bytes")
        rows.append(
            (
                about["name"] + (f" and {tasks - 1} more" if tasks > 1 else ""),
                about["category"].replace("_", " "),
                f"{place['role']}: {place['stream']}",
                format_seconds(start_us / 1e6),
                format_seconds(length_us / 1e6),
                format_bytes(size) if isinstance(size, int) else "",
                str(about["source"]).replace("_", " "),
            )
        )
    return Table(("task (the longest first)", "kind", "of", "starts at", "takes", "size", "source"), rows)


def bars_of_timeline(timeline: IterationTimeline) -> tuple[dict[str, Any], list[str]]:
    """Lanes, what bars are of, and bars; and in words what is not drawn one by one."""
    described = describe_works(timeline.priced)
    lanes: list[dict[str, Any]] = []
    bars: list[Bar] = []
    kinds: dict[tuple[int, int], int] = {}
    roles = timeline.roles
    for role in roles:
        streams = sorted(set(role.threads.tolist()))
        if len(lanes) + len(streams) > MOST_LANES:
            break
        first = len(lanes)
        lanes += [{"role": role.name, "ranks": role.ranks, "stream": _stream(stream)} for stream in streams]
        bars += _bars(role, {stream: first + place for place, stream in enumerate(streams)}, kinds)
    shown = len(dict.fromkeys(lane["role"] for lane in lanes))
    left_out = [f"The first {shown} of {len(roles)} roles are drawn."] if shown < len(roles) else []
    told = [_told(described, *kind) for kind in kinds]
    tasks = len(bars)
    if tasks > MOST_BARS:
        bars = _joined(bars, [kind["category"] for kind in told])
        left_out.append(f"{tasks} tasks are drawn as {len(bars)} bars: neighbouring tasks of one kind share a bar.")
    if len(bars) > MOST_BARS:
        bars = sorted(bars, key=lambda bar: -bar[3])[:MOST_BARS]
        bars.sort()
        left_out.append(f"The longest {MOST_BARS} bars are drawn. predict timeline -o writes all of them.")
    used = {kind: place for place, kind in enumerate(sorted({bar[1] for bar in bars}))}
    bars = [(bar[0], used[bar[1]], *bar[2:]) for bar in bars]
    data = {"lanes": lanes, "kinds": [told[kind] for kind in used], "bars": bars}
    return {"iteration_s": timeline.iteration_s, **data}, left_out


def _stream(stream: int) -> str:
    return "blocking communication" if stream == BLOCKING else Stream(stream).name.lower().replace("_", " ")


def _bars(role: RoleTimeline, lanes: dict[int, int], kinds: dict[tuple[int, int], int]) -> list[Bar]:
    """Tasks that take time, in the order of lanes and time."""
    plan = role.of_plan
    batches = np.full(plan.tasks, -1)
    if role.actions is not None:
        of_action = np.array([action.micro_batch for action in role.actions.actions])
        placed = role.actions.of_task >= 0
        batches[placed] = of_action[role.actions.of_task[placed]]
    start_us = np.round(role.start_s * 1e6, 3)
    length_us = np.round((role.end_s - role.start_s) * 1e6, 3)
    columns = (column.tolist() for column in (role.threads, plan.work, plan.phase, start_us, length_us, batches))
    bars = [
        (lanes[thread], kinds.setdefault((work, phase), len(kinds)), start, length, 1, batch)
        for thread, work, phase, start, length, batch in zip(*columns, strict=True)
        if length > 0
    ]
    return sorted(bars, key=lambda bar: (bar[0], bar[2]))


def _told(described: WorkDescriptions, work: int, phase: int) -> dict[str, Any]:
    """What a bar says of its task."""
    name, category = described.named(work, phase)
    about: dict[str, Any] = msgspec.json.decode(described.arguments[work] + b"}")
    return {"name": name, "category": category} | {key: about[key] for key in _TOLD if key in about}


def _joined(bars: list[Bar], categories: list[str]) -> list[Bar]:
    """Neighbours of one lane, category and micro-batch as one bar; it is called by the longest of them."""
    joined: list[Bar] = []
    longest = 0.0
    for bar in bars:
        lane, kind, start, length, _, batch = bar
        last = joined[-1] if joined else None
        if last and (last[0], last[5]) == (lane, batch) and categories[last[1]] == categories[kind]:
            called = kind if length > longest else last[1]
            longest = max(longest, length)
            joined[-1] = (lane, called, last[2], round(start + length - last[2], 3), last[4] + 1, batch)
        else:
            joined.append(bar)
            longest = length
    return joined
