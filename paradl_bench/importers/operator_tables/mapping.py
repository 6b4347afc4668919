"""The mapping file: which files hold which kernels or collectives, and what their columns are.

    tool: my-benchmark
    device: "{gpu}"                        # a text; columns stand in braces
    dtype: fp16
    names: {A100: NVIDIA A100-SXM4-80GB}   # texts of the files, and what they are here
    tables:
      - files: "{gpu}_gemm.csv"            # a word in braces becomes a column
        when: {op: linear}                 # rows of which this holds; others go to the next table
        kind: linear                       # a layer kind of this project, or optimizer
        sizes: {batch: B * M, in_features: K, out_features: N, bias: 0}
        times: {FW: fw_us, BW: bw_us}
        unit: us                           # or: share of peak, TFLOP/s, ...
      - files: "*_allreduce.csv"
        collective: all_reduce
        sizes: {message_bytes: 2 * elements, ranks: nodes * gpus, ranks_per_node: gpus}
        times: {call: us}
        unit: us

Three of them come with the program (:func:`shipped_mappings`).
"""

from __future__ import annotations

from collections.abc import Mapping as MappingType
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from paradl_bench.core.bounds import PositiveCount
from paradl_bench.core.errors import UserError, shown, unknown_choice
from paradl_bench.core.files.documents import foreign_document, validation_text
from paradl_bench.core.files.yaml_file import read_yaml
from paradl_bench.importers.operator_tables.expressions import Expression, parse_expression
from paradl_bench.importers.operator_tables.patterns import check_pattern, columns_of_template
from paradl_bench.importers.tables.numbers_read import decimal
from paradl_bench.network.kinds.kind import layer_kinds
from paradl_bench.plan.collectives.catalog import operations

TIME_UNITS = {"s": Fraction(1), "ms": Fraction(1, 10**3), "us": Fraction(1, 10**6), "ns": Fraction(1, 10**9)}
RATE_UNITS = {"FLOP/s": 1, "GFLOP/s": 10**9, "TFLOP/s": 10**12}
SHARES = {"share of peak": Fraction(1), "percent of peak": Fraction(1, 100)}
Unit = Literal["s", "ms", "us", "ns", "FLOP/s", "GFLOP/s", "TFLOP/s", "share of peak", "percent of peak"]
OPTIMIZER = "optimizer"
STAGES = ("FW", "BW", "BW_input", "BW_weight", "WU")
CALL = "call"
_OF_COLLECTIVE = ("message_bytes", "ranks", "ranks_per_node")
_MOST_TABLES = 200
_FOLDER = "mappings"


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rows of one sort.

    Attributes:
        files: of which files (``*_linear1_{dtype}.csv``). separator: between a line's cells, of text files.
        entry: of JSON files, where rows lie: a list of objects, or an object whose keys tell rows apart.
        when: by column, the texts of which a row has one (a star stands for anything). All of them have to hold.
        skip: why such rows are not taken.
        kind, sizes, settings: the layer kind (or ``optimizer``), its operands as its file names them, and what else
            picks a kernel (``{function: gelu}``); a text with columns in braces, or behind ``=`` an expression.
        collective: an operation; ``sizes`` are then its message's bytes, its ranks, and those that share a node.
        times: by stage, or by ``call`` of a collective. A time of 0 was not measured.
        unit: of ``times``, which may be rates, or shares of ``peak``.
        peak: a number of FLOP/s with its unit, or an entry of the JSON file with the unit of what stands there.
        flops: that rates and shares count; this project's count without it.
        dtype, device: as in :class:`OperatorMapping`, of these rows.
    """

    files: str = "*"
    separator: str = ","
    entry: str = ""
    when: dict[str, tuple[str, ...] | str] = {}
    skip: str = ""
    kind: str = ""
    collective: str = ""
    sizes: dict[str, str] = {}
    settings: dict[str, str] = {}
    times: dict[str, str] = {}
    unit: Unit = "ms"
    peak: str = ""
    flops: str = ""
    dtype: str = ""
    device: str = ""

    @property
    def title(self) -> str:
        """What the table is of, for messages."""
        return self.kind or self.collective or "skipped rows"


class OperatorMapping(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the files of one tool hold.

    Attributes:
        tool: that wrote them. about: where such files are from.
        tables: of each row the first that fits takes it.
        device, dtype: of kernels; texts, with columns in braces. names: of what stands in the files, what it is here.
        versions: of software, by its name, as texts of the same sort.
        calls: behind each time, where it is a mean.
    """

    tool: str
    about: str = ""
    tables: Annotated[tuple[Table, ...], msgspec.Meta(min_length=1, max_length=_MOST_TABLES)]
    device: str = ""
    dtype: str = ""
    names: dict[str, str] = {}
    versions: dict[str, str] = {}
    calls: PositiveCount | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """FLOP/s: ``scale`` times a number, or times what stands at an entry of the file."""

    scale: int
    value: Fraction | None = None
    entry: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A table with its expressions parsed; ``computed`` are settings, ``reads`` the columns that its rows need."""

    number: int
    table: Table
    sizes: dict[str, Expression]
    computed: dict[str, Expression]
    times: dict[str, Expression]
    flops: Expression | None
    peak: Peak | None
    reads: tuple[str, ...]

    @property
    def title(self) -> str:
        """``table 3 (linear)``."""
        return f"table {self.number} ({self.table.title})"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedMapping:
    """A mapping that was held to what can be read."""

    path: str
    mapping: OperatorMapping
    tables: tuple[Prepared, ...]


def shipped_mappings() -> dict[str, Path]:
    """Files of the mappings that come with the program, by name."""
    folder = Path(str(files(__package__))) / _FOLDER
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load_mapping(name: str) -> PreparedMapping:
    """A mapping of a path, or one that comes with the program.

    Raises:
        UserError: unreadable, no YAML, or wrong in a field, which is named.
    """
    shipped = shipped_mappings()
    if name in shipped:
        return _prepared_file(str(shipped[name]))
    if not Path(name).exists() and "/" not in name and not name.endswith((".yaml", ".yml")):
        raise unknown_choice("mapping", name, shipped)
    return read_mapping(Path(name))


@lru_cache(maxsize=8)
def _prepared_file(path: str) -> PreparedMapping:
    return read_mapping(Path(path))


def read_mapping(path: Path) -> PreparedMapping:
    """Read and check a mapping file.

    Raises:
        UserError: as of :func:`load_mapping`.
    """
    raw = read_yaml(path, "mapping")
    try:
        mapping = msgspec.convert(raw, OperatorMapping, strict=False)
        # Half a surrogate pair is text to YAML, and no file can hold it.
        msgspec.json.encode(mapping)
    except (msgspec.ValidationError, UnicodeEncodeError, RecursionError) as error:
        kind = foreign_document(raw, "mapping")
        text = f"it is {kind}" if kind else validation_text(error, OperatorMapping)
        raise UserError(f"mapping {path}: {text}") from None
    try:
        for text in (mapping.device, mapping.dtype, *mapping.versions.values()):
            columns_of_template(text)
        tables = tuple(_prepared(number, mapping, table) for number, table in enumerate(mapping.tables, start=1))
    except UserError as error:
        raise UserError(f"mapping {path}: {shown(str(error))}") from None
    return PreparedMapping(path=str(path), mapping=mapping, tables=tables)


def _prepared(number: int, mapping: OperatorMapping, table: Table) -> Prepared:
    try:
        check_pattern(table.files)
        _check_sort(table)
        sizes = {name: parse_expression(text) for name, text in table.sizes.items()}
        times = {name: parse_expression(text) for name, text in table.times.items()}
        computed = {name: parse_expression(text[1:]) for name, text in table.settings.items() if text.startswith("=")}
        flops = parse_expression(table.flops) if table.flops else None
        peak = _peak(table)
        told = [text for name, text in table.settings.items() if name not in computed]
        texts = [table.device or mapping.device, table.dtype or mapping.dtype, *told]
        columns = [column for text in texts for column in columns_of_template(text)]
        expressions = [*sizes.values(), *computed.values(), *times.values(), *([flops] if flops else [])]
        columns += [column for expression in expressions for column in expression.columns]
    except UserError as error:
        raise UserError(f"table {number} ({table.title}): {error}") from None
    reads = () if table.skip else tuple(dict.fromkeys(columns))
    return Prepared(
        number=number, table=table, sizes=sizes, computed=computed, times=times, flops=flops, peak=peak, reads=reads
    )


def _check_sort(table: Table) -> None:
    given = [name for name in ("skip", "kind", "collective") if getattr(table, name)]
    if len(given) != 1:
        raise UserError(
            f"it has {' and '.join(given) or 'none of kind, collective and skip'}; a table has one of kind, collective"
            " and skip"
        )
    if (
        len(table.separator) != 1
        or not table.separator.isascii()
        or table.separator.isalnum()
        or table.separator == '"'
    ):
        raise UserError(f"separator {table.separator!r}: give one sign, such as , or ; or a tab")
    if table.skip:
        return
    choices: tuple[str, ...] = (CALL,) if table.collective else STAGES
    if not table.times:
        raise UserError(f"it has no times: name the column of one of {', '.join(choices)}")
    for name in table.times:
        if name not in choices:
            raise unknown_choice("stage", name, choices)
    if table.collective:
        _check_collective(table)
    else:
        _check_kind(table)


def _check_collective(table: Table) -> None:
    if table.collective not in operations():
        raise unknown_choice("collective", table.collective, operations())
    for name in table.sizes:
        if name not in _OF_COLLECTIVE:
            raise unknown_choice("size of a collective", name, _OF_COLLECTIVE)
    lacking = [name for name in _OF_COLLECTIVE[:2] if name not in table.sizes]
    if lacking:
        raise UserError(f"its sizes lack {' and '.join(lacking)}")
    if table.unit not in TIME_UNITS:
        raise UserError(f"a collective takes a time; unit {table.unit!r} is none: choices are {', '.join(TIME_UNITS)}")


def _check_kind(table: Table) -> None:
    known = sorted([OPTIMIZER, *(name for name, kind in layer_kinds().items() if kind.call is not None)])
    if table.kind not in known:
        raise unknown_choice("kind", table.kind, known)
    if not table.sizes:
        raise UserError("it has no sizes")
    if ("WU" in table.times) != (table.kind == OPTIMIZER) or (table.kind == OPTIMIZER and len(table.times) > 1):
        raise UserError(f"the stage WU is of {OPTIMIZER}, which has no other")


def _peak(table: Table) -> Peak | None:
    if table.unit not in SHARES:
        if table.peak:
            raise UserError(f"it has a peak, and its times are in {table.unit!r}, which no peak belongs to")
        return None
    text, _, unit = table.peak.rpartition(" ")
    if unit not in RATE_UNITS:
        raise UserError(
            f"peak {table.peak!r}: shares are of a peak with its unit, as in 989 TFLOP/s; units are"
            f" {', '.join(RATE_UNITS)}"
        )
    value = decimal(text)
    if value is None:
        return Peak(scale=RATE_UNITS[unit], entry=text)
    if value <= 0:
        raise UserError(f"peak {table.peak!r} has to be above 0")
    return Peak(scale=RATE_UNITS[unit], value=Fraction(text))


def patterns_of(when: MappingType[str, tuple[str, ...] | str]) -> dict[str, tuple[str, ...]]:
    """By column, the patterns of which a row's text has to fit one."""
    return {column: (patterns,) if isinstance(patterns, str) else patterns for column, patterns in when.items()}
