"""Headers of nccl-tests' tables that somebody wrote as Markdown: all of the tool's columns, or some of them.

    | Size (B) | Count | Type | Redop | Root | Time(us) oop | Algbw oop | Busbw oop | Err oop | Time(us) ip | ...
    | size | time (µs) | algbw (GB/s) | busbw (GB/s) |

A header is taken only if every column is one of nccl-tests' and its unit is known: a column of somebody's own may say
that rows are of different runs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paradl_bench.importers.nccl_logs.nccl_rows import Buffers, Layout
from paradl_bench.importers.tables.markdown import bytes_in, count_in, heading_of, number_in, shown
from paradl_bench.importers.tables.numbers_read import whole

_NAMES = {
    "size": "size",
    "bytes": "size",
    "messagesize": "size",
    "msgsize": "size",
    "count": "count",
    "elements": "count",
    "n": "count",
    "type": "type",
    "dtype": "type",
    "datatype": "type",
    "redop": "redop",
    "op": "redop",
    "root": "root",
    "time": "time",
    "latency": "time",
    "cputime": "cpu_time",
    "algbw": "algbw",
    "busbw": "busbw",
    "error": "error",
    "err": "error",
    "res": "error",
    "wrong": "wrong",
}
_TIMES = ("time", "cpu_time")
_MEASURED = (*_TIMES, "algbw", "busbw", "error", "wrong")
_LEAD = ("size", "count", "type", "redop", "root")
_UNITS = {
    "size": ("", "b", "bytes"),
    "count": ("", "elements"),
    "algbw": ("", "gb/s"),
    "busbw": ("", "gb/s"),
}
_SECONDS = {"us": 1e-6, "usec": 1e-6, "microseconds": 1e-6, "ms": 1e-3, "msec": 1e-3, "milliseconds": 1e-3, "s": 1.0}
# Out of place first: its words hold those of the other.
_BUFFERS: tuple[tuple[re.Pattern[str], Buffers], ...] = (
    (re.compile(r"out-?of-?place|\boop\b|(?<=[a-z)\]])oop$"), "out_of_place"),
    (re.compile(r"in-?place|\bip\b|(?<=\))ip$"), "in_place"),
)
_REDUCTIONS = ("", "none", "sum", "prod", "max", "min", "avg", "mulsum")


class _Column(NamedTuple):
    place: int
    name: str
    unit: str
    buffers: Buffers


@dataclass(frozen=True, slots=True)
class PipeLayout:
    """A table's layout in the tool's own order, and which cell each column is.

    Attributes:
        width: cells of a row.
    """

    layout: Layout
    cells: tuple[int, ...]
    width: int

    def tokens(self, cells: Sequence[str]) -> list[str] | str:
        """A row as nccl-tests would print it, or in words why it is none."""
        if len(cells) != self.width:
            return f"{len(cells)} of {self.width} columns"
        reading = {"size": bytes_in, "count": count_in}
        named = zip(self.layout.columns, self.cells, strict=True)
        entries = [reading.get(name, number_in)(cells[index]) for name, index in named]
        if whole(entries[0]) is None:
            return f"{shown(entries[0])} is no whole number of bytes"
        redop = entries[self.layout.columns.index("redop")] if "redop" in self.layout.columns else ""
        return f"{shown(redop)} is no reduction" if redop not in _REDUCTIONS else entries


def pipe_layout(cells: Sequence[str], *, single: Buffers = "") -> PipeLayout | str | None:
    """What a header gives: a layout, in words why its rows can't be read, or None where it is another table's."""
    columns = [_column(index, cell) for index, cell in enumerate(cells)]
    names = [column.name for column in columns]
    if "size" not in names or not set(names) & {*_TIMES, "algbw", "busbw"}:
        return None
    for column, cell in zip(columns, cells, strict=True):
        if not column.name:
            return f"its header names {shown(cell)}, which is no column of nccl-tests"
        # Bandwidths are in GB/s of 1e9, sizes in bytes; KB would be 1000 or 1024.
        units = ("", *_SECONDS) if column.name in _TIMES else _UNITS.get(column.name, ("",))
        if column.unit not in units:
            return f"its header's {shown(cell)} is in a unit that nccl-tests does not print"
    lead = [column for name in _LEAD for column in columns if column.name == name]
    if len({column.name for column in lead}) < len(lead):
        return "its header names a column twice"
    halves = _halves([column for column in columns if column.name in _MEASURED])
    if isinstance(halves, str):
        return halves
    unit_s = _time_unit_s(cells, [half[0] for half in halves], all("algbw" in _names(half) for half in halves))
    if isinstance(unit_s, str):
        return unit_s
    ordered = [*lead, *(column for half in halves for column in half)]
    starts = tuple(len(lead) + sum(map(len, halves[:number])) for number in range(len(halves)))
    layout = Layout(
        columns=tuple(column.name for column in ordered),
        time_unit_s=unit_s,
        halves=starts,
        single=(halves[0][0].buffers or single) if len(halves) == 1 else "",
        chosen=_names(lead)[:3] != _LEAD[:3] or not all({"algbw", "busbw"} <= set(_names(half)) for half in halves),
    )
    return PipeLayout(layout, tuple(column.place for column in ordered), len(cells))


def _names(columns: Sequence[_Column]) -> tuple[str, ...]:
    return tuple(column.name for column in columns)


def _column(index: int, cell: str) -> _Column:
    text = cell.lower().replace("out of place", "out-of-place").replace("in place", "in-place")
    for pattern, buffers in _BUFFERS:
        if pattern.search(text):
            name, unit = heading_of(pattern.sub("", text).replace("()", ""))
            return _Column(index, _NAMES.get(name, ""), unit, buffers)
    name, unit = heading_of(text)
    return _Column(index, _NAMES.get(name, ""), unit, "")


def _halves(measured: Sequence[_Column]) -> list[list[_Column]] | str:
    """The columns of each measurement, out of place first and each time before its bandwidths."""
    times = [column for column in measured if column.name in _TIMES]
    if not 1 <= len(times) <= 2:
        return f"its header names {len(times) or 'no'} times"
    places = {column.buffers for column in measured}
    if len(places) > 1:
        if places != {"out_of_place", "in_place"}:
            return "its header does not say which columns are in place"
        groups = [[c for c in measured if c.buffers == place] for place in ("out_of_place", "in_place")]
    elif len(times) == 2:
        second = measured.index(times[1])
        groups = [list(measured[:second]), list(measured[second:])]
    else:
        groups = [list(measured)]
    for group in groups:
        names = _names(group)
        if len(set(names)) < len(names) or len(set(names) & set(_TIMES)) != 1:
            return "its header does not say which columns belong to which time"
        group.sort(key=lambda column: _MEASURED.index(column.name))
    return groups


def _time_unit_s(cells: Sequence[str], times: Sequence[_Column], checked: bool) -> float | str:
    """Seconds that 1 in the time columns is; without a unit that of nccl-tests, if bandwidths will contradict."""
    units = {column.unit for column in times}
    if len(units) > 1:
        return "its header gives times in two units"
    unit = units.pop()
    if unit:
        return _SECONDS[unit]
    if not checked:
        return "its header does not say the unit of time, and has no algbw that tells"
    # The generation that calls the columns bytes and N prints milliseconds, and says so nowhere.
    return 1e-3 if [heading_of(cell)[0] for cell in cells[:2]] == ["bytes", "n"] else 1e-6
