"""Strategy strings: ``d4``, ``f8``, ``s2x2``, ``d4f4``, ``z3d8``, ``2M4P1D``, read from the outermost to the innermost.

The grammar is the whole vocabulary of the project; which kinds can be planned or run is for the registry of
strategies to say, not for the parser.
"""

from __future__ import annotations

import math
import re
from typing import Literal

import msgspec

from paradl_bench.core.bounds import Index, Ranks
from paradl_bench.core.errors import UserError

AxisKind = Literal["data", "spatial", "filter", "channel", "pipeline", "tensor"]

LETTER_OF_KIND: dict[AxisKind, str] = {
    "data": "d",
    "spatial": "s",
    "filter": "f",
    "channel": "c",
    "pipeline": "p",
    "tensor": "t",
}
KIND_OF_LETTER: dict[str, AxisKind] = {letter: kind for kind, letter in LETTER_OF_KIND.items()}

MAX_DEGREE = 10**9 - 1
"""Of an axis, as strategies are written."""
_AXIS = re.compile(r"(?:z([0-3]))?([dsfcpt])([0-9]{1,9}(?:x[0-9]{1,9}){0,2})")
_DISTSIM = re.compile(r"^([0-9]{1,9})M([0-9]{1,9})P([0-9]{1,9})D$", re.IGNORECASE)
_EXPECTED = "write d4, f8, c4, s2x2, p4, t4, nested from the outermost as d4f4, z3d8 for ZeRO stage 3, or serial"


class Axis(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One axis of the mesh: what is split, and into how many parts (per dim for spatial).

    Attributes:
        kind: what the axis splits.
        extents: parts along each dim; one number but for spatial.
        zero_stage: ZeRO stage of a data axis, 0 to 3.
    """

    kind: AxisKind
    extents: tuple[Ranks, ...]
    zero_stage: Index = 0

    def __post_init__(self) -> None:
        if not self.extents or any(extent < 1 for extent in self.extents):
            written = "x".join(map(str, self.extents)) or "none"
            raise ValueError(f"degrees of a {self.kind} axis have to be at least 1, not {written}")
        if len(self.extents) > 1 and self.kind != "spatial":
            raise ValueError(f"only spatial splits several dims; {self.kind} takes one degree")
        if self.zero_stage and self.kind != "data":
            raise ValueError("ZeRO stages belong to data parallelism: write z3d8")
        if self.zero_stage not in (0, 1, 2, 3):
            raise ValueError(f"ZeRO stage {self.zero_stage} is not 0, 1, 2 or 3")

    @property
    def degree(self) -> int:
        """PEs along this axis."""
        return math.prod(self.extents)

    def __str__(self) -> str:
        zero = f"z{self.zero_stage}" if self.zero_stage else ""
        return f"{zero}{LETTER_OF_KIND[self.kind]}{'x'.join(map(str, self.extents))}"


class Strategy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nested axes from the outermost to the innermost; no axis is serial execution."""

    axes: tuple[Axis, ...] = ()

    def __post_init__(self) -> None:
        kinds = [axis.kind for axis in self.axes]
        if len(set(kinds)) != len(kinds):
            raise ValueError("a kind of axis occurs twice; nest different kinds, as d4f4")

    @property
    def ranks(self) -> int:
        """PEs in all (the papers' p)."""
        return math.prod(axis.degree for axis in self.axes)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Where a rank stands along each axis; neighbours along the innermost axis have neighbouring ranks."""
        found = []
        for axis in reversed(self.axes):
            rank, coordinate = divmod(rank, axis.degree)
            found.append(coordinate)
        return tuple(reversed(found))

    @property
    def name(self) -> str:
        """``serial``, or the kinds joined from the outermost: ``data+filter``."""
        return "+".join(axis.kind for axis in self.axes) or "serial"

    def __str__(self) -> str:
        return "".join(map(str, self.axes)) or "serial"


def parse_strategy(text: str) -> Strategy:
    """Parse a strategy string.

    Raises:
        UserError: the text is no strategy; the message says how one is written.
    """
    text = text.strip()
    if text.lower() == "serial":
        return Strategy()
    distsim = _DISTSIM.match(text)
    if distsim:
        tensor, pipeline, data = map(int, distsim.groups())
        degrees: list[tuple[AxisKind, int]] = [("data", data), ("pipeline", pipeline), ("tensor", tensor)]
        return _build([(kind, (degree,), 0) for kind, degree in degrees if degree != 1], text)
    matches = list(_AXIS.finditer(text))
    if not matches or "".join(match.group(0) for match in matches) != text:
        raise UserError(f"strategy {text!r} does not parse: {_EXPECTED}")
    return _build(
        [
            (KIND_OF_LETTER[match.group(2)], tuple(map(int, match.group(3).split("x"))), int(match.group(1) or 0))
            for match in matches
        ],
        text,
    )


def _build(parts: list[tuple[AxisKind, tuple[int, ...], int]], text: str) -> Strategy:
    try:
        axes = tuple(Axis(kind=kind, extents=extents, zero_stage=zero) for kind, extents, zero in parts)
        return Strategy(axes=axes)
    except ValueError as error:
        raise UserError(f"strategy {text!r}: {error}") from None


def parse_strategy_kinds(text: str) -> tuple[AxisKind, ...] | None:
    """Kinds of ``data``, ``d``, ``d+f`` or ``data+filter``, outermost first; ``()`` for serial.

    None where the text is something else: a strategy of fixed degrees, or no strategy at all.

    Raises:
        UserError: a kind occurs twice.
    """
    if text.strip().lower() == "serial":
        return ()
    kinds: list[AxisKind] = []
    for part in text.strip().lower().split("+"):
        if part in LETTER_OF_KIND:
            kinds.append(part)
        elif part in KIND_OF_LETTER:
            kinds.append(KIND_OF_LETTER[part])
        else:
            return None
    if len(set(kinds)) != len(kinds):
        raise UserError(f"strategy {text.strip()!r}: a kind of axis occurs twice; nest different kinds, as data+filter")
    return tuple(kinds)
