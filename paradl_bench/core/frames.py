"""Results as pandas DataFrames and as HTML in a notebook. Loads pandas only when a frame is asked for.

A frame has a row a record. Its columns follow from the type of the record alone, so that two frames of one kind always
fit together. Names carry units, as the fields of records do.
"""

from __future__ import annotations

import abc
import functools
import io
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from paradl_bench.core.terminal.printed import in_html, plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

_SHOWN_ROWS = 30
_SHOWN_NOTES = 12
_DOTS_PER_INCH = 100
_BOUNDS = ("low", "high")
_UNITS = ("_s_per_byte", "_bytes_per_s", "_bytes", "_s")
"""Ends of names, the longest first: ``interval_s`` has the columns ``interval_low_s`` and ``interval_high_s``."""


class _Column(NamedTuple):
    name: str
    dtype: str
    value: Callable[[Any], Any]


def frame_of(kind: type[msgspec.Struct], records: Iterable[msgspec.Struct]) -> DataFrame:
    """Records of one type as a DataFrame.

    A text, flag or number is a column of its own, and missing where the record has None. An interval is two columns,
    ``low`` and ``high``. Fields of a record inside the record have its name before theirs. A list, such as one of
    samples, stays a list in its cell: ``frame.explode("samples_s")`` gives a row a sample.

    Args:
        kind: which gives the columns; also those of no records at all.
    """
    from pandas import DataFrame, Series

    rows = list(records)
    columns = _columns(kind)
    return DataFrame({name: Series(map(value, rows), dtype=dtype) for name, dtype, value in columns})


def print_rows(kind: type[msgspec.Struct], records: Iterable[msgspec.Struct]) -> bool:
    """Print records as CSV or Parquet if the command that runs was asked for one of them; whether it was."""
    from paradl_bench.core.terminal.forms import CSV, PARQUET, asked_form, frame_bytes

    form = asked_form()
    if form not in (CSV, PARQUET):
        return False
    sys.stdout.buffer.write(frame_bytes(frame_of(kind, records), form))
    sys.stdout.flush()
    return True


@functools.cache
def _columns(kind: type[msgspec.Struct]) -> tuple[_Column, ...]:
    described = msgspec.inspect.type_info(kind)
    assert isinstance(described, msgspec.inspect.StructType)
    return tuple(
        column
        for field in described.fields
        for column in _columns_of(
            field.name,
            field.type,
            functools.partial(_field, field.name),
            # What msgspec says of a field whose default is UNSET.
            absent=not field.required and field.default is field.default_factory is msgspec.NODEFAULT,
        )
    )


def _field(name: str, record: Any) -> Any:
    value = getattr(record, name)
    return None if value is msgspec.UNSET else value


def _columns_of(
    name: str, kind: msgspec.inspect.Type, value: Callable[[Any], Any], *, absent: bool
) -> Iterator[_Column]:
    """The columns of one field, which records may lack; those of a record inside it in their place."""
    types = [member for member in _alternatives(kind) if not isinstance(member, msgspec.inspect.NoneType)]
    if len(types) == 1 and isinstance(types[0], msgspec.inspect.StructType):
        for inner in _columns(types[0].cls):
            yield _Column(f"{name}_{inner.name}", _nullable(inner.dtype), functools.partial(_inner, value, inner.value))
    elif len(types) == 1 and _is_interval(name, types[0]):
        stem, unit = _parted(name)
        for index, bound in enumerate(_BOUNDS):
            yield _Column(f"{stem}_{bound}{unit}", "float64", functools.partial(_inner, value, _place(index)))
    else:
        yield _Column(name, _dtype(types, optional=absent or len(types) < len(_alternatives(kind))), value)


def _inner(outer: Callable[[Any], Any], inner: Callable[[Any], Any], record: Any) -> Any:
    value = outer(record)
    return None if value is None else inner(value)


def _place(index: int) -> Callable[[Sequence[float]], float]:
    return lambda pair: pair[index]


def _alternatives(kind: msgspec.inspect.Type) -> tuple[msgspec.inspect.Type, ...]:
    members = kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)
    return tuple(member.type if isinstance(member, msgspec.inspect.Metadata) else member for member in members)


def _is_interval(name: str, kind: msgspec.inspect.Type) -> bool:
    named = _parted(name)[0].endswith(("interval", "range"))
    return named and isinstance(kind, msgspec.inspect.TupleType) and len(kind.item_types) == len(_BOUNDS)


def _parted(name: str) -> tuple[str, str]:
    """A name without its unit, and the unit."""
    unit = next((unit for unit in _UNITS if name.endswith(unit)), "")
    return name.removesuffix(unit), unit


def _dtype(types: Sequence[msgspec.inspect.Type], *, optional: bool) -> str:
    texts = msgspec.inspect.StrType, msgspec.inspect.LiteralType
    if all(isinstance(member, texts) for member in types):
        return "string"
    known = {msgspec.inspect.BoolType: "bool", msgspec.inspect.IntType: "int64", msgspec.inspect.FloatType: "float64"}
    dtype = known.get(type(types[0]), "object") if len(types) == 1 else "object"
    return _nullable(dtype) if optional else dtype


def _nullable(dtype: str) -> str:
    """The dtype that can miss values; a missing float is NaN."""
    return {"bool": "boolean", "int64": "Int64"}.get(dtype, dtype)


class Shown(abc.ABC):
    """What a notebook shows: a table with a title above it and notes below it."""

    _columns: tuple[str, ...] = ()
    """Those that a notebook shows; all of the frame where there are none."""

    @abc.abstractmethod
    def to_frame(self) -> DataFrame:
        """The table as a DataFrame, whose columns are always the same."""

    @property
    @abc.abstractmethod
    def title(self) -> str:
        """What the table is of, in a line."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What has to be said of the numbers: assumptions, what was left out."""
        return ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {plain(self.title)}>"

    def _repr_html_(self) -> str:
        """HTML in which every foreign text shows as it is written."""
        frame = self.to_frame()
        shown = frame[list(self._columns or frame.columns)].astype(object)
        shown = shown.map(lambda cell: plain(cell) if isinstance(cell, str) else cell)
        shown = shown.where(shown.notna(), "")
        table = shown.to_html(escape=True, index=False, max_rows=_SHOWN_ROWS, float_format="{:.5g}".format)
        lines = self.notes[:_SHOWN_NOTES]
        more = [f"and {len(self.notes) - len(lines)} more: see notes"] if len(lines) < len(self.notes) else []
        notes = "".join(f"<li>{in_html(line)}</li>" for line in (*lines, *more))
        return f"<p>{in_html(self.title)}</p>{table}" + (f"<ul>{notes}</ul>" if notes else "")


class Drawn(Shown):
    """What can be drawn as well."""

    def plot(self) -> Figure:
        """A matplotlib figure, which a notebook shows; ``.savefig(FILE)`` keeps it.

        Raises:
            UserError: matplotlib is missing.
        """
        from paradl_bench.core.terminal.pictures import refuse_without_matplotlib

        refuse_without_matplotlib()
        figure = self._figure()
        # A notebook knows figures of pyplot alone. These need no display, and nothing that stays open.
        figure.__dict__["_repr_png_"] = functools.partial(_png, figure)
        return figure

    @abc.abstractmethod
    def _figure(self) -> Figure: ...


def _png(figure: Figure) -> bytes:
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=_DOTS_PER_INCH, format="png")
    return drawn.getvalue()
