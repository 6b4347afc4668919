"""A predicted iteration as text: a row a stage, or two a role, and time from left to right.

A column shows what took most of its time. In a pipeline a row is what a stage computes, with the number of the
micro-batch where there is room for it (an apostrophe for each stage of the rank before it), and collectives that it
waits for. Elsewhere compute and communication have a row each, and communication shows from a twentieth of a column on,
in capitals where it is most of it: collectives for layers are many and short.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paradl_bench.core.units import format_seconds
from paradl_bench.plan.tasks import Phase, Stream
from predict.costs.sourced import Floats
from predict.simulation.exposure import StreamTimes
from predict.timeline.timeline import IterationTimeline, RoleTimeline
from predict.timeline.timeline_use import exposed_until
from predict.timeline.trace_works import task_category

_IDLE = "."
_WAITING = "~"
_COMPUTED = {"f": ("forward", Phase.FW), "b": ("backward", Phase.BW), "k": ("bucket copies", Phase.GE)}
_COMPUTED |= {"u": ("weight update", Phase.WU)}
_COMPUTED_NAMES = {letter: name for letter, (name, _) in _COMPUTED.items()}
_BACKWARD = "b"
_OF_BACKWARD = {_BACKWARD: ("backward", "BW"), "i": ("backward of the input", "BW_input")}
_OF_BACKWARD |= {"w": ("backward of the weights", "BW_weight")}
_PARTED = {"BW_input", "BW_weight"}
_MARKS = {"FW": "F", "BW": "B", "BW_input": "I", "BW_weight": "W"}
"""By direction of an action, what its micro-batch's number stands behind."""
_COMMUNICATED = {
    "g": "GE",
    "a": "all_gather",
    "r": "all_reduce",
    "s": "reduce_scatter",
    "h": "halo",
    "c": "broadcast",
    "x": "",
}
"""Letters of communication by category; the last for all others."""
_FETCHED = {"r": ("reading a mini-batch", Phase.IO), "h": ("copying the mini-batch to the device", Phase.H2D)}
_SEEN = 0.05
"""Share of a column from which on communication shows."""
_MOST_ROWS = 64
_NARROWEST = 10


class Picture(NamedTuple):
    """Lines to print, and what the letters in them mean."""

    rows: tuple[str, ...]
    legend: str


class _Drawn(NamedTuple):
    """Letters of one row, and what each stands for."""

    label: str
    letters: str
    meanings: Mapping[str, str]


def draw(timeline: IterationTimeline, width: int) -> Picture:
    """The picture of a timeline in lines of so many characters; at least ten columns of time are drawn."""
    pipeline = timeline.is_pipeline
    rows_a_role = 1 if pipeline else 2 + any(map(_fetches, timeline.roles))
    shown = timeline.roles[: _MOST_ROWS // rows_a_role]
    label = max(len(text) for role in shown for text in _labels(role, pipeline=pipeline))
    columns = max(width - label - 3, _NARROWEST)
    edges = np.linspace(0.0, timeline.iteration_s, columns + 1)
    drawn: list[_Drawn] = []
    for role in shown:
        labels = _labels(role, pipeline=pipeline)
        drawn += [_row_of_stage(role, labels[0], edges)] if pipeline else _rows_of_work(role, labels, edges)
        if _fetches(role):
            drawn.append(_input_row(role, labels[-1], edges))
    rows = [f"{row.label:<{label}} |{row.letters}|" for row in drawn]
    if len(shown) < len(timeline.roles):
        rows.append(f"{len(timeline.roles) - len(shown)} more are in the trace")
    end = format_seconds(timeline.iteration_s)
    rows.append(f"{'':<{label}}  0{end:>{columns - 1}}")
    # A letter may stand for one thing in a row of compute and for another in one of communication.
    meanings = dict.fromkeys(f"{letter} {name}" for row in drawn for letter, name in row.meanings.items())
    return Picture(tuple(rows), ", ".join(meanings))


def _labels(role: RoleTimeline, *, pipeline: bool) -> tuple[str, ...]:
    name = role.name
    of_work = (name,) if pipeline else (f"{name} compute", f"{name} communication")
    return (*of_work, f"{name} input") if _fetches(role) else of_work


def _fetches(role: RoleTimeline) -> bool:
    return bool(np.isin(role.of_plan.stream, (Stream.INPUT, Stream.COPY_ENGINE)).any())


def _rows_of_work(role: RoleTimeline, labels: Sequence[str], edges: Floats) -> list[_Drawn]:
    """Compute, and communication where there is any."""
    rows = [_drawn(labels[0], _computing(role, edges), edges, _COMPUTED_NAMES)]
    if (role.of_plan.stream == Stream.COMMUNICATION).any():
        rows.append(_communication_row(role, labels[1], edges))
    return rows


def _computing(role: RoleTimeline, edges: Floats) -> dict[str, Floats]:
    """Seconds of each column in which a phase computes, by its letter."""
    return {
        letter: np.diff(role.on(Stream.COMPUTE, phase).busy_until(edges)) for letter, (_, phase) in _COMPUTED.items()
    }


def _row_of_stage(role: RoleTimeline, label: str, edges: Floats) -> _Drawn:
    directions = [action.direction for action in role.actions.actions] if role.actions else ["FW", "BW"]
    names, amounts = dict(_COMPUTED_NAMES), _computing(role, edges)
    if role.actions is not None and not _PARTED.isdisjoint(directions):
        # The two parts of backward, beside it or in its place, where they are actions.
        del names[_BACKWARD], amounts[_BACKWARD]
        of_task = np.array([*directions, ""])[role.actions.of_task]
        computing = (role.of_plan.stream == Stream.COMPUTE) & (role.of_plan.phase == Phase.BW)
        for letter, (name, direction) in _OF_BACKWARD.items():
            names[letter] = name
            amounts[letter] = np.diff(_chosen(role, computing & (of_task == direction)).busy_until(edges))
    amounts[_WAITING] = np.diff(exposed_until(role.on(Stream.COMPUTE), _collectives(role), edges))
    row = _drawn(label, amounts, edges, {**names, _WAITING: "waits for a collective"}, "idle")
    marks = " ".join(f"{mark}1" for direction, mark in _MARKS.items() if direction in directions)
    return row._replace(
        letters=_numbered(role, row.letters, edges), meanings={**row.meanings, marks: "of micro-batch 1"}
    )


def _drawn(
    label: str,
    amounts: Mapping[str, Floats],
    edges: Floats,
    names: Mapping[str, str],
    nothing: str = "nothing in this row",
) -> _Drawn:
    """The letter of what took most of each column, ``nothing`` included: where others have rows, they may be busy."""
    letters = [_IDLE, *amounts]
    idle = np.diff(edges) - sum(amounts.values(), start=np.zeros(len(edges) - 1))
    most = np.argmax(np.stack([idle, *amounts.values()]), axis=0)
    row = "".join(letters[index] for index in most.tolist())
    meanings = {letter: names.get(letter, nothing) for letter in (*names, _IDLE) if letter in row}
    return _Drawn(label, row, meanings)


def _communication_row(role: RoleTimeline, label: str, edges: Floats) -> _Drawn:
    plan = role.of_plan
    by_category = task_category(role.plan.works)
    categories = np.array([by_category[work][phase] for work, phase in zip(plan.work, plan.phase, strict=True)])
    known = [category for category in _COMMUNICATED.values() if category]
    amounts, names = {}, {}
    for letter, category in _COMMUNICATED.items():
        in_category = categories == category if category else ~np.isin(categories, known)
        amounts[letter] = np.diff(_chosen(role, in_category & (plan.stream == Stream.COMMUNICATION)).busy_until(edges))
        names[letter] = {"GE": "gradient exchange", "": "other communication"}.get(category, category)
    letters, shares = list(amounts), np.stack(list(amounts.values())) / max(float(edges[1] - edges[0]), np.spacing(0.0))
    most, share = np.argmax(shares, axis=0).tolist(), shares.sum(axis=0).tolist()
    row = "".join(_shown(letters[index], part) for index, part in zip(most, share, strict=True))
    return _Drawn(label, row, {letter: names[letter] for letter in letters if letter in row.lower()})


def _input_row(role: RoleTimeline, label: str, edges: Floats) -> _Drawn:
    """Reading and copying, in the letter of whichever is under way for longer; they may be side by side."""
    amounts, names = {}, {}
    for letter, (name, phase) in _FETCHED.items():
        amounts[letter] = np.diff(_chosen(role, role.of_plan.phase == phase).busy_until(edges))
        names[letter] = name
    return _drawn(label, amounts, edges, names)


def _shown(letter: str, share: float) -> str:
    if share < _SEEN:
        return _IDLE
    return letter.upper() if share > 0.5 else letter


def _collectives(role: RoleTimeline) -> StreamTimes:
    """Communication but for messages between stages."""
    plan = role.of_plan
    by_category = task_category(role.plan.works)
    transfer = np.array([row[Phase.FW] == "transfer" for row in by_category], bool)
    return _chosen(role, (plan.stream == Stream.COMMUNICATION) & ~transfer[plan.work])


def _chosen(role: RoleTimeline, chosen: NDArray[np.bool_]) -> StreamTimes:
    return StreamTimes.union(role.start_s[chosen], role.end_s[chosen])


def _numbered(role: RoleTimeline, letters: str, edges: Floats) -> str:
    """Letters with a mark and the number of the micro-batch at the start of each action that is wide enough."""
    if role.actions is None:
        return letters
    marked, column_s = list(letters), float(edges[1] - edges[0])
    computing = (role.actions.of_task >= 0) & (role.of_plan.stream == Stream.COMPUTE) & (role.end_s > role.start_s)
    of_task = role.actions.of_task[computing]
    count = len(role.actions.actions)
    first, last = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(first, of_task, role.start_s[computing])
    np.maximum.at(last, of_task, role.end_s[computing])
    own_stages = sorted({action.stage for action in role.actions.actions})
    for action, start, end in zip(role.actions.actions, first.tolist(), last.tolist(), strict=True):
        if not end > start or not column_s:
            continue
        text = f"{_MARKS[action.direction]}{action.micro_batch}" + "'" * own_stages.index(action.stage)
        column, behind = round(start / column_s), round(end / column_s)
        if behind - column >= len(text):
            marked[column : column + len(text)] = text
    return "".join(marked)
