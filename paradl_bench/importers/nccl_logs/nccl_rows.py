"""Rows of nccl-tests' tables, of every generation of its layout.

    bytes N type op time algbw busbw res                     2017: times in milliseconds
    size count type redop root time algbw busbw error        2.4 to 2.12: error is the largest difference from the sum
    size count type redop root time algbw busbw #wrong       from 2.13: how many elements are wrong

each with the last four columns twice, out of place and in place (NVIDIA/nccl-tests, ``src/common.cu``); options add
columns (``i_min``, ``timestamp``, the bandwidth of copies beside). Columns are told by their header, not by position:
a table that somebody rewrote may lack all but size and time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from paradl_bench.importers.tables.numbers_read import decimal, half_unit, whole

Buffers = Literal["", "in_place", "out_of_place"]

DTYPES: dict[str, tuple[str, int]] = {
    "int8": ("int8", 1),
    "uint8": ("uint8", 1),
    "char": ("int8", 1),
    "f8e4m3": ("fp8_e4m3", 1),
    "f8e5m2": ("fp8_e5m2", 1),
    "fp8_e4m3": ("fp8_e4m3", 1),
    "fp8_e5m2": ("fp8_e5m2", 1),
    "half": ("fp16", 2),
    "bfloat16": ("bf16", 2),
    "int32": ("int32", 4),
    "int": ("int32", 4),
    "uint32": ("uint32", 4),
    "float": ("fp32", 4),
    "int64": ("int64", 8),
    "uint64": ("uint64", 8),
    "double": ("fp64", 8),
}
"""By nccl-tests' name: ours, and bytes of an element."""

_LARGEST_DELTA = {"fp16": 1e-2, "fp32": 1e-5, "fp64": 1e-12}
"""By dtype: what nccl-tests 2.4 to 2.12 allows of difference, a rank but the first."""
_SAME_NAME = {"bytes": "size", "N": "count", "op": "redop", "res": "error", "cputime": "cpu_time", "#wrong": "wrong"}
_TIMES = ("time", "cpu_time")
_OTHER_ENTRIES = {"N/A", "sum", "prod", "max", "min", "avg", "mulsum", "none", "nan", "-nan", "inf"}
_NUMBER_LIKE = re.compile(r"[+-]?[0-9]\w*(?:\.\w*)?(?:[+-][0-9]+)?", re.ASCII)
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


class Bandwidth(NamedTuple):
    """GB/s (1e9 bytes a second) as printed, and how far rounding may have moved it."""

    value: float
    rounding: float


_ANY = Bandwidth(0.0, 1e300)
"""Where a table has no such column. Finite: no bus factor of 0 makes it no number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """One measurement of a row: in place or out of place.

    Attributes:
        seconds, rounding_s: mean over the iterations, and how far rounding may have moved it.
        cpu_time: whether it is what the host took to issue the calls (``-C``), no time of the collective.
        wrong: elements that are wrong; None where results were not checked.
        largest_delta: largest difference from the expected sum, of the generations that print that.
        samples_s: times of single calls, a list a process, where the tool kept them (JSON with ``-I``).
    """

    buffers: Buffers
    seconds: float
    rounding_s: float
    algbw: Bandwidth
    busbw: Bandwidth
    cpu_time: bool = False
    wrong: float | None = None
    largest_delta: float | None = None
    samples_s: tuple[tuple[float, ...], ...] = ()

    def is_wrong(self, dtype: str, ranks: int) -> bool:
        """Whether nccl-tests itself counts the result as out of bounds."""
        if self.largest_delta is not None:
            return self.largest_delta > _LARGEST_DELTA.get(dtype, 1e-200) * max(ranks - 1, 1)
        return bool(self.wrong)

    @property
    def checked(self) -> bool:
        """Whether results were compared with expected ones."""
        return self.wrong is not None or self.largest_delta is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One size of one run.

    Attributes:
        line, text: where it stands. size_bytes: nccl-tests' size, its largest buffer.
        count: elements; None where the table does not say.
        dtype, element_bytes: as ours; empty where the table does not say.
        redop, root: as printed; empty where the layout has no such column.
    """

    line: int
    text: str
    size_bytes: int
    count: int | None
    dtype: str
    element_bytes: int
    halves: tuple[Half, ...]
    redop: str = ""
    root: str = ""

    @property
    def moves_nothing(self) -> bool:
        """Whether no byte was sent, so that the row says nothing of its collective."""
        return self.size_bytes <= 0 or self.count == 0


@dataclass(frozen=True, slots=True)
class Layout:
    """Columns of a table by name, as its header gives them.

    Attributes:
        time_unit_s: seconds that 1 in the time column is.
        halves: index of the first column of each measurement.
        single: what the only measurement is, where a layout has one.
        chosen: whether somebody chose among the tool's columns, so that one which is not there says nothing.
    """

    columns: tuple[str, ...]
    time_unit_s: float
    halves: tuple[int, ...] = field(default=())
    single: Buffers = ""
    chosen: bool = False


def layout_of(header: str, *, single: Buffers = "") -> Layout | None:
    """The layout of ``#  size  count  type  redop  root  time ...``; None where the line is no header.

    ``single`` is what a lone measurement is, as the line above the header says.
    """
    names = tuple(_SAME_NAME.get(name, name) for name in header.replace("#", " ", 1).split())
    if names[:3] != ("size", "count", "type") or header.lstrip()[:1] != "#":
        return None
    halves = tuple(index for index, name in enumerate(names) if name in _TIMES)
    known = all(names[index + 1 : index + 3] == ("algbw", "busbw") for index in halves)
    if not known or not 1 <= len(halves) <= 2:
        return None
    # The generation that calls the columns bytes and N prints milliseconds, and says so nowhere.
    milliseconds = header.replace("#", " ", 1).split()[0] == "bytes"
    return Layout(names, 1e-3 if milliseconds else 1e-6, halves, single if len(halves) == 1 else "")


def parse_row(layout: Layout, tokens: list[str], *, line: int, text: str) -> Row | str:
    """A row, or in words why the tokens are none."""
    columns = len(layout.columns)
    tokens = _with_blank_reduction(layout, tokens)
    # A timestamp is two words under one heading.
    if len(tokens) != columns + (layout.columns[-1] == "timestamp"):
        return f"{len(tokens)} of {columns} columns"
    first_time = layout.halves[0]
    lead = dict(zip(layout.columns[:first_time], tokens[:first_time], strict=True))
    size, count = whole(lead["size"]), whole(lead.get("count", "0"))
    if size is None or count is None or size < 0 or count < 0:
        return "size or count is no number"
    if "type" in lead and lead["type"] not in DTYPES:
        return f"unknown type {lead['type']!r}"
    halves = [_half(layout, tokens, index) for index in range(len(layout.halves))]
    for half in halves:
        if isinstance(half, str):
            return half
    if lead.get("root", "").isdigit() and whole(lead["root"]) is None:
        return "its root is no rank"
    dtype, element_bytes = DTYPES[lead["type"]] if "type" in lead else ("", 0)
    return Row(
        line=line,
        text=text,
        size_bytes=size,
        count=count if "count" in lead and "type" in lead else None,
        dtype=dtype,
        element_bytes=element_bytes,
        halves=tuple(half for half in halves if isinstance(half, Half)),
        redop=lead.get("redop", ""),
        root=lead.get("root", ""),
    )


def _with_blank_reduction(layout: Layout, tokens: list[str]) -> list[str]:
    # An all-to-all of the older generations prints nothing in the column of the reduction.
    place = layout.columns.index("redop") if "redop" in layout.columns else len(tokens)
    blank = place < len(tokens) < len(layout.columns) and not is_word(tokens[place])
    return [*tokens[:place], "", *tokens[place:]] if blank else tokens


def _half(layout: Layout, tokens: list[str], index: int) -> Half | str:
    start = layout.halves[index]
    end = layout.halves[index + 1] if index + 1 < len(layout.halves) else len(layout.columns)
    values = dict(zip(layout.columns[start:end], tokens[start:end], strict=False))
    time = tokens[start]
    seconds = decimal(time)
    algbw, busbw = (_bandwidth(values.get(name)) for name in ("algbw", "busbw"))
    if seconds is None or seconds < 0 or algbw is None or busbw is None:
        return "a time or bandwidth is no number"
    check = values.get("wrong", values.get("error", "N/A"))
    # rccl-tests marks sums beyond its threshold by an asterisk.
    checked = decimal(check.rstrip("*"))
    if checked is None and check != "N/A":
        return f"the check's result {check!r} is no number"
    exact = "wrong" in values
    return Half(
        buffers=layout.single if len(layout.halves) == 1 else ("out_of_place", "in_place")[index],
        seconds=seconds * layout.time_unit_s,
        rounding_s=half_unit(time) * layout.time_unit_s,
        algbw=algbw,
        busbw=busbw,
        cpu_time=layout.columns[start] == "cpu_time",
        wrong=checked if exact else None,
        largest_delta=None if exact else checked,
    )


def _bandwidth(text: str | None) -> Bandwidth | None:
    if text is None:
        return _ANY
    value = decimal(text)
    return Bandwidth(value, half_unit(text)) if value is not None and value >= 0 else None


def looks_like_a_row(tokens: list[str]) -> bool:
    """Whether a line begins as a row does: two whole numbers and a type."""
    return len(tokens) >= 3 and whole(tokens[0]) is not None and whole(tokens[1]) is not None and is_word(tokens[2])


def begins_as_a_row(tokens: list[str]) -> bool:
    """Whether a line inside a table begins as a row does, torn or damaged as it is: a number, then entries."""
    if not tokens or not _NUMBER_LIKE.fullmatch(tokens[0]):
        return False
    entries = sum(map(is_entry, tokens))
    # Of a damaged row most entries are whole; prose has words.
    return entries == len(tokens) or (2 * entries >= len(tokens) >= 4 and is_entry(tokens[1]))


def is_entry(text: str) -> bool:
    """Whether the text may stand in a row: a number, a type, a reduction, N/A."""
    number = text.rstrip("*")
    return decimal(number) is not None or number.isdigit() or text in DTYPES or text in _OTHER_ENTRIES


def is_word(text: str) -> bool:
    """Whether the text is a name, as types and reductions are."""
    return _WORD.fullmatch(text) is not None
