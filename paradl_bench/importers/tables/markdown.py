"""Tables that somebody pasted or rewrote as Markdown, with a pipe between cells; every line of a log beside them.

    | size (B) | time (us) | busbw (GB/s) |        size | time
    |---------:|-----------|--------------|        ---|---
    | 1,024    | **12.3** | 0.15 |                 8 | 12.3

Pipes stand in plain logs too (``nvidia-smi``'s boxes, NCCL's own lines). A line belongs to a table only if it begins
with a pipe, or a line of dashes stands below the first one; a reader takes rows of tables whose header it knows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

_RULE = re.compile(r":?-+:?")
# A quotation's marks, and the sign of a comment that a header keeps from a log.
_BEFORE = re.compile(r"^(?:\s*>)*\s*(?:#\s*(?=\|))?")
_EMPHASIS = "*`_ \t"
_UNIT = re.compile(r"[\[(]([^\[\]()]{0,60})[\])]")
_GROUPED = re.compile(r"[0-9]{1,3}(?:,[0-9]{3}){1,6}")
_GROUPED_FRACTION = re.compile(rf"{_GROUPED.pattern}\.[0-9]+")
_BYTES = re.compile(r"([0-9]{1,19}) ?(?:([KMG]i)?B|bytes)")
_BINARY = {None: 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
_LONGEST_SHOWN = 40


class PipeRow(NamedTuple):
    """A line of a table: its cells; ``first`` where a table begins, ``rule`` for the dashes below a header."""

    cells: tuple[str, ...]
    first: bool
    rule: bool


def lines_and_cells(text: str) -> Iterator[tuple[int, str, PipeRow | None]]:
    """Every line with its number, from 1, and its cells where it is one of a table with pipes."""
    # Not splitlines: a form feed or a line separator inside a line would shift the numbers that an editor shows.
    lines = text.split("\n")
    inside = leading = False
    for index, line in enumerate(lines):
        cells = _cells(line)
        if not cells:
            inside = False
            yield index + 1, line, None
            continue
        begins = line.startswith("|", _start_of(line))
        goes_on = inside and begins >= leading
        if not goes_on:
            below = _cells(lines[index + 1]) if index + 1 < len(lines) else ()
            inside = begins or (len(below) == len(cells) and _is_rule(below))
            leading = begins
        row = PipeRow(cells, first=not goes_on, rule=_is_rule(cells))
        yield index + 1, line, row if inside else None


def _start_of(line: str) -> int:
    before = _BEFORE.match(line)
    return before.end() if before else 0


def _cells(line: str) -> tuple[str, ...]:
    """What stands between pipes, without emphasis; empty where there are fewer than two cells."""
    if "|" not in line:
        return ()
    inner = line[_start_of(line) :].strip().removeprefix("|").removesuffix("|")
    cells = tuple(cell.strip(_EMPHASIS) for cell in inner.split("|"))
    return cells if len(cells) > 1 else ()


def _is_rule(cells: Sequence[str]) -> bool:
    return all(map(_RULE.fullmatch, cells))


def heading_of(cell: str) -> tuple[str, str]:
    """A header's cell as name and unit, in small letters without spaces: ``Time (µs)`` is ``time``, ``us``."""
    text = cell.strip("#" + _EMPHASIS).lower().replace("µ", "u").replace("μ", "u")
    unit = _UNIT.search(text)
    name = _UNIT.sub("", text)
    return "".join(name.split()).replace("_", "").strip("*`"), unit.group(1).strip() if unit else ""


def shown(cell: str) -> str:
    """A cell as a message quotes it."""
    return repr(cell[:_LONGEST_SHOWN])


def number_in(cell: str) -> str:
    """A cell's number without commas between thousands, where they can be nothing else; else the cell."""
    # 1,096 may be 1.096 as some countries write it; 1,096.79 may not.
    return cell.replace(",", "") if _GROUPED_FRACTION.fullmatch(cell) else cell


def count_in(cell: str) -> str:
    """A cell's whole number without commas between thousands; the cell where it is none."""
    return cell.replace(",", "") if _GROUPED.fullmatch(cell) else cell


def bytes_in(cell: str) -> str:
    """A cell's whole number of bytes (``1,024``, ``8 B``, ``4 KiB``); the cell where it is none.

    ``4 KB`` is none: whether that is 1000 or 1024 is not said.
    """
    match = _BYTES.fullmatch(cell)
    return str(int(match.group(1)) * _BINARY[match.group(2)]) if match else count_in(cell)


class Columns(NamedTuple):
    """Which columns a header names, in the tool's own spelling, and in words why its rows can't be read."""

    names: tuple[str, ...]
    refusal: str | None = None

    def entries(self, cells: Sequence[str], *, size: str, count: str) -> list[str]:
        """A row's cells as the tool would print them; ``size`` and ``count`` are the columns of whole numbers."""
        reading = {size: bytes_in, count: count_in}
        names = [*self.names, *[""] * (len(cells) - len(self.names))]
        return [reading.get(name, number_in)(cell) for name, cell in zip(names, cells, strict=False)]


def columns_of(
    cells: Sequence[str], known: Mapping[tuple[str, str], str], *, size: str, times: Sequence[str], tool: str
) -> Columns | None:
    """A tool's columns as a table's header names them; None where the header is another table's.

    Args:
        known: the tool's spelling of what :func:`heading_of` gives.
        size: the column without which the header is another table's; times: of these one has to be there.
    """
    headings = [heading_of(cell) for cell in cells]
    names = tuple(known.get(heading, "") for heading in headings)
    if size not in names:
        return None
    unknown = next((cell for cell, name in zip(cells, names, strict=True) if not name), None)
    if unknown is not None:
        return Columns(names, f"its header names {shown(unknown)}, which is no column of {tool} or lacks its unit")
    if len(set(names)) < len(names):
        return Columns(names, "its header names a column twice")
    if names[0] != size:
        return Columns(names, f"its header does not begin with {shown(cells[names.index(size)])}")
    if not set(times) & set(names):
        return Columns(names, f"its header names none of {', '.join(times)}")
    return Columns(names)
