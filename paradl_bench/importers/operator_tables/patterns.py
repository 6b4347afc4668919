"""Names of files as a mapping writes them, ``{device}_linear1_{dtype}.csv``, and texts with a row's columns in them.

A star stands for any text of a name, a word in braces for one that becomes a column. Each stands for the shortest text
that lets the next part of the pattern follow; a pattern of several folders is held against the end of a path.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from paradl_bench.core.errors import UserError
from paradl_bench.importers.operator_tables.expressions import Row

_HOLE = re.compile(r"\*|\{([^{}]{0,200})\}")
_COLUMN = re.compile(r"\{([^{}]{1,200})\}")
_LONGEST = 400


def check_pattern(pattern: str) -> None:
    """Hold a pattern of file names to what :func:`parts_of_path` reads.

    Raises:
        UserError: a brace without another, a part without a name, two that touch, or one that is named twice.
    """
    if not pattern or len(pattern) > _LONGEST:
        raise UserError(f"a pattern of file names has 1 to {_LONGEST} characters, as in *_linear1_fp16.csv")
    rest = _HOLE.sub("", pattern)
    if "{" in rest or "}" in rest:
        raise UserError(f"the pattern {pattern!r} has a brace without another")
    names = [name for name in (match.group(1) for match in _HOLE.finditer(pattern)) if name is not None]
    if any(not name.isidentifier() for name in names):
        raise UserError(f"the pattern {pattern!r} has braces without a word in them: write {{device}}")
    if len(set(names)) < len(names):
        raise UserError(f"the pattern {pattern!r} names a part twice")
    if re.search(r"[*}][*{]", pattern):
        raise UserError(f"the pattern {pattern!r} has two parts with nothing between them to tell where one ends")


def parts_of_path(pattern: str, path: str) -> dict[str, str] | None:
    """The texts of a pattern's named parts, where a path ends as the pattern says; None where it does not."""
    wanted, given = pattern.split("/"), path.replace("\\", "/").split("/")
    if len(wanted) > len(given):
        return None
    parts: dict[str, str] = {}
    for part, name in zip(reversed(wanted), reversed(given), strict=False):
        texts = _parts_of_name(part, name)
        if texts is None:
            return None
        parts |= texts
    return parts


def _parts_of_name(pattern: str, name: str) -> dict[str, str] | None:
    holes = list(_HOLE.finditer(pattern))
    if not holes:
        return {} if pattern == name else None
    starts, ends = [0, *(hole.end() for hole in holes)], [*(hole.start() for hole in holes), len(pattern)]
    literals = [pattern[start:end] for start, end in zip(starts, ends, strict=True)]
    if not name.startswith(literals[0]) or not name.endswith(literals[-1]):
        return None
    at, last = len(literals[0]), len(name) - len(literals[-1])
    parts = {}
    for hole, literal in zip(holes, [*literals[1:-1], ""], strict=True):
        end = name.find(literal, at, last) if literal else last
        # A named part has at least a character.
        if end < at or (hole.group(1) is not None and end == at):
            return None
        if hole.group(1) is not None:
            parts[hole.group(1)] = name[at:end]
        at = end + len(literal)
    return parts


def columns_of_template(text: str) -> tuple[str, ...]:
    """Columns that a text names in braces.

    Raises:
        UserError: a brace without another.
    """
    rest = _COLUMN.sub("", text)
    if "{" in rest or "}" in rest:
        raise UserError(f"{text!r} has a brace without another: columns stand in braces, as in {{Device}}")
    return tuple(_COLUMN.findall(text))


def filled(text: str, row: Row, names: Mapping[str, str]) -> str:
    """A text with the row's columns in the place of their names; what comes out is renamed where ``names`` has it."""
    told = _COLUMN.sub(lambda match: row[match.group(1)].strip(), text)
    return names.get(told, told)


def fits(pattern: str, text: str) -> bool:
    """Whether a text is as a pattern says, in which a star stands for anything."""
    first, *rest = pattern.split("*")
    if not rest:
        return pattern == text
    if not text.startswith(first) or not text[len(first) :].endswith(rest[-1]):
        return False
    at, last = len(first), len(text) - len(rest[-1])
    for literal in rest[:-1]:
        place = text.find(literal, at, last)
        if place < 0:
            return False
        at = place + len(literal)
    return True
