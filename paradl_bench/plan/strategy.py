"""Strategy strings: ``d4``, ``f8``, ``s2x2``, ``d4f4``, ``z3d8``, ``2M4P1D``, read from the outermost to the innermost.

Letters, prefixes and numbers of extents are what the kinds of axes declare.
"""

from __future__ import annotations

import math
import re
from functools import cache

import msgspec

from paradl_bench.core.bounds import Index, Ranks
from paradl_bench.core.errors import UserError
from paradl_bench.plan.axes.kind import AxisKind, Trait
from paradl_bench.plan.axes.registry import axis_kind, axis_kinds

MAX_DEGREE = 10**9 - 1
"""Of an axis, as strategies are written."""
_EXTENT = "[0-9]{1,9}"
_DISTSIM = re.compile(r"^([0-9]{1,9})M([0-9]{1,9})P([0-9]{1,9})D$", re.IGNORECASE)


class Axis(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One axis of the mesh: what is split, and into how many parts (per dim for spatial).

    Attributes:
        kind: by its name.
        extents: parts along each dim; one number where the kind cuts one.
        prefix: the number in front, as the stage of ZeRO in ``z3d8``; 0 for none.
    """

    kind: str
    extents: tuple[Ranks, ...]
    prefix: Index = 0

    def __post_init__(self) -> None:
        if not self.extents or any(extent < 1 for extent in self.extents):
            written = "x".join(map(str, self.extents)) or "none"
            raise ValueError(f"degrees of a {self.kind} axis have to be at least 1, not {written}")
        kind, known = self.declared, axis_kinds().values()
        if len(self.extents) > kind.dims:
            several = " and ".join(other.name for other in known if other.dims > 1)
            takes = "one degree" if kind.dims == 1 else f"at most {kind.dims}"
            raise ValueError(f"only {several} splits several dims; {self.kind} takes {takes}")
        if self.prefix and kind.prefix is None:
            other, prefix = next((other, other.prefix) for other in known if other.prefix)
            raise ValueError(
                f"{prefix.what}s belong to {other.name} parallelism: write {prefix.letter}{prefix.most}{other.letter}8"
            )
        if kind.prefix is not None and not 0 <= self.prefix <= kind.prefix.most:
            known_numbers = f"{', '.join(map(str, range(kind.prefix.most)))} or {kind.prefix.most}"
            raise ValueError(f"{kind.prefix.what} {self.prefix} is not {known_numbers}")

    @property
    def declared(self) -> AxisKind:
        """What the axis' kind declares."""
        return axis_kind(self.kind)

    def has(self, trait: Trait) -> bool:
        """Whether the axis' kind has a trait."""
        return trait in axis_kind(self.kind).traits

    @property
    def degree(self) -> int:
        """PEs along this axis."""
        return math.prod(self.extents)

    def __str__(self) -> str:
        kind = self.declared
        front = f"{kind.prefix.letter}{self.prefix}" if kind.prefix and self.prefix else ""
        return f"{front}{kind.letter}{'x'.join(map(str, self.extents))}"


class Strategy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nested axes from the outermost to the innermost; no axis is serial execution."""

    axes: tuple[Axis, ...] = ()

    def __post_init__(self) -> None:
        # Replicas may stand outside of ranks that share out what each of them holds: d2z3d8.
        kinds = [(axis.kind, axis.prefix > 0) for axis in self.axes]
        if len(set(kinds)) != len(kinds):
            raise ValueError(
                "a kind of axis occurs twice; nest different kinds, as d4f4, or replicas of shards, d2z3d4"
            )

    @property
    def ranks(self) -> int:
        """PEs in all (the papers' p)."""
        return math.prod(axis.degree for axis in self.axes)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Where a rank stands along each axis; neighbours along the innermost axis have neighbouring ranks."""
        coordinates = []
        for axis in reversed(self.axes):
            rank, coordinate = divmod(rank, axis.degree)
            coordinates.append(coordinate)
        return tuple(reversed(coordinates))

    @property
    def name(self) -> str:
        """``serial``, or the kinds joined from the outermost: ``data+filter``."""
        return "+".join(axis.kind for axis in self.axes) or "serial"

    def __str__(self) -> str:
        return "".join(map(str, self.axes)) or "serial"


@cache
def _grammar(most_dims: int | None = None) -> re.Pattern[str]:
    """One axis: a prefix, a letter, as many extents as its kind takes, or as many as ``most_dims``."""
    kinds = axis_kinds().values()
    fronts = "|".join(f"{kind.prefix.letter}[0-{kind.prefix.most}]" for kind in kinds if kind.prefix)
    axes = "|".join(f"{kind.letter}{_EXTENT}(?:x{_EXTENT}){{0,{(most_dims or kind.dims) - 1}}}" for kind in kinds)
    return re.compile(f"({fronts})?({axes})")


def _axes_of(text: str) -> list[tuple[str, str]]:
    """Prefixes and axes of a string; empty where it is none."""
    most = max(kind.dims for kind in axis_kinds().values())
    # The second finds several extents where a kind takes one, so that the axis can say so.
    for grammar in (_grammar(), _grammar(most)):
        matches = list(grammar.finditer(text))
        if "".join(match.group(0) for match in matches) == text:
            return [(match.group(1) or "", match.group(2)) for match in matches]
    return []


def axis_examples() -> str:
    """One axis of each kind, as it is written."""
    kinds = axis_kinds().values()
    fronts = {kind.name: f", {kind.prefix.letter}{kind.prefix.most}{kind.example}" for kind in kinds if kind.prefix}
    return ", ".join(kind.example + fronts.get(kind.name, "") for kind in kinds)


def _expected() -> str:
    prefixed = [(kind, kind.prefix) for kind in axis_kinds().values() if kind.prefix]
    fronts = "".join(
        f"{prefix.letter}{prefix.most}{kind.letter}8 for {prefix.what} {prefix.most}, " for kind, prefix in prefixed
    )
    return f"write {axis_examples()}, nested from the outermost as d4f4, {fronts}or serial"


@cache
def _kinds_by_letter() -> dict[str, AxisKind]:
    return {kind.letter: kind for kind in axis_kinds().values()}


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
        degrees = {"D": data, "P": pipeline, "M": tensor}
        known = {kind.distsim: kind.name for kind in axis_kinds().values()}
        return _build([(known[mark], (degree,), 0) for mark, degree in degrees.items() if degree != 1], text)
    axes = _axes_of(text)
    if not axes:
        raise UserError(f"strategy {text!r} does not parse: {_meant(text)}{_expected()}")
    parts = []
    for front, axis in axes:
        kind = _kinds_by_letter()[axis[0]]
        if front and kind.prefix and front[0] != kind.prefix.letter:
            raise UserError(f"strategy {text!r}: {front} has to stand directly before a {kind.name} axis")
        parts.append((kind.name, tuple(map(int, axis[1:].split("x"))), int(front[1:]) if front else 0))
    return _build(parts, text)


def _meant(text: str) -> str:
    """What is said of a kind's name, or of one that is mistyped."""
    from difflib import get_close_matches

    near = get_close_matches(text.lower(), axis_kinds(), n=1)
    if near and near[0] == text.lower():
        return f"{text} is a kind, without its degree; "
    return f"did you mean {near[0]}? else " if near else ""


def _build(parts: list[tuple[str, tuple[int, ...], int]], text: str) -> Strategy:
    try:
        return Strategy(axes=tuple(Axis(kind=kind, extents=extents, prefix=front) for kind, extents, front in parts))
    except ValueError as error:
        raise UserError(f"strategy {text!r}: {error}") from None


def parse_strategy_kinds(text: str) -> tuple[str, ...] | None:
    """Kinds of ``data``, ``d``, ``d+f`` or ``data+filter``, outermost first; ``()`` for serial.

    None where the text is something else: a strategy of fixed degrees, or no strategy at all.

    Raises:
        UserError: a kind occurs twice.
    """
    if text.strip().lower() == "serial":
        return ()
    kinds: list[str] = []
    for part in text.strip().lower().split("+"):
        if part in axis_kinds():
            kinds.append(part)
        elif part in _kinds_by_letter():
            kinds.append(_kinds_by_letter()[part].name)
        else:
            return None
    if len(set(kinds)) != len(kinds):
        raise UserError(f"strategy {text.strip()!r}: a kind of axis occurs twice; nest different kinds, as data+filter")
    return tuple(kinds)
