"""Tables of kernels' and collectives' times, CSV or JSON of anybody's, by a mapping that says what the columns are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from paradl_bench.core.errors import UserError, unknown_choice
from paradl_bench.core.statistics import grouped
from paradl_bench.importers.importer import Imported, Importer, ImportOptions, LogFile, NotOfFormat
from paradl_bench.importers.operator_tables.mapping import (
    Prepared,
    PreparedMapping,
    load_mapping,
    patterns_of,
    shipped_mappings,
)
from paradl_bench.importers.operator_tables.patterns import columns_of_template, filled, fits, parts_of_path
from paradl_bench.importers.operator_tables.records import NotTaken, Reading, call_of_row, kernels_of_row, mistimed
from paradl_bench.importers.operator_tables.sources import (
    SourceRow,
    columns_of_csv,
    csv_rows,
    entry_of,
    json_document,
    json_rows,
)
from paradl_bench.importers.tables.numbers_read import decimal
from paradl_bench.records.devices.sheet import sheet_of_measured

_JSON_BEGINS = ("{", "[")


class _Fitting(NamedTuple):
    """A table that takes files of this name, and the columns that the name gives to its rows."""

    prepared: Prepared
    parts: dict[str, str]
    when: Mapping[str, tuple[str, ...]]


@dataclass(slots=True, kw_only=True)
class _File:
    """A file that is read: what it gave so far.

    Attributes:
        document: decoded, of JSON. columns: of a CSV's header.
        devices: that its rows name. passed: how many rows were of another device than the one asked for.
    """

    log: LogFile
    options: ImportOptions
    mapping: PreparedMapping
    document: object = None
    columns: Sequence[str] = ()
    result: Imported = field(default_factory=lambda: Imported(device="cuda"))
    devices: dict[str, int] = field(default_factory=dict)
    passed: int = 0
    versions: dict[str, set[str]] = field(default_factory=dict)
    readings: dict[tuple[int, str], Reading] = field(default_factory=dict)


def _read(log: LogFile, options: ImportOptions) -> Imported:
    """Rows of all tables that take files of this name."""
    if options.mapping is None:
        raise UserError(
            f"tables of operators need a mapping: give --mapping FILE, or one of {', '.join(shipped_mappings())}"
        )
    mapping = load_mapping(options.mapping)
    fitting = [
        _Fitting(table, parts, patterns_of(table.table.when))
        for table in mapping.tables
        if (parts := parts_of_path(table.table.files, log.path)) is not None
    ]
    if not fitting:
        taken = ", ".join(dict.fromkeys(table.table.files for table in mapping.tables))
        raise NotOfFormat(f"mapping {mapping.path} does not read a file of the name {log.path}; it reads {taken}")
    file = _File(log=log, options=options, mapping=mapping)
    is_json, rows = log.text.lstrip()[:1] in _JSON_BEGINS, 0
    if is_json:
        file.document = json_document(log)
    for (entry, separator), tables in grouped(fitting, _source_of).items():
        if entry and not is_json:
            raise NotOfFormat(f"{log.path} is no JSON, and the mapping reads its entry {entry}")
        if not is_json:
            file.columns = columns_of_csv(log, separator)
            for table in tables:
                _check_columns(file, table, table.when)
        for row in json_rows(file.document, entry, log.path) if is_json else csv_rows(log, separator):
            _take(file, tables, row)
            rows += 1
    if not rows:
        below = "" if is_json else f" below its header: {', '.join(file.columns)[:80]}"
        raise NotOfFormat(f"{log.path} holds no rows{below}")
    return _finished(file)


def _source_of(fitting: _Fitting) -> tuple[str, str]:
    table = fitting.prepared.table
    return table.entry, "" if table.entry else table.separator


def _check_columns(file: _File, fitting: _Fitting, reads: Iterable[str]) -> None:
    """Hold the columns that a table reads to a CSV's header."""
    there = [*file.columns, *fitting.parts]
    for column in reads:
        if file.columns and column not in there:
            error = unknown_choice("column", column, there)
            raise NotOfFormat(f"{file.log.path} lacks what {fitting.prepared.title} of the mapping reads: {error}")


def _take(file: _File, tables: Sequence[_Fitting], row: SourceRow) -> None:
    drop = partial(file.result.drop, row.line, row.text)
    if row.wrong:
        drop(row.wrong)
        return
    table = next((fitting for fitting in tables if _is_of(fitting, {**row.cells, **fitting.parts})), None)
    if table is None:
        drop("no table of the mapping takes such a row")
        return
    prepared, cells = table.prepared, {**row.cells, **table.parts}
    if prepared.table.skip:
        drop(prepared.table.skip)
        return
    _check_columns(file, table, prepared.reads)
    missing = next((column for column in prepared.reads if column not in cells), None)
    if missing is not None:
        drop(f"it has no {missing!r}, which {prepared.title} of the mapping reads")
        return
    device = _device(file, prepared, cells)
    file.devices[device] = file.devices.get(device, 0) + 1
    if device and file.options.device_name not in (None, device):
        file.passed += 1
        drop(f"of {device}")
        return
    try:
        _add(file, prepared, row, cells, device)
    except NotTaken as error:
        drop(str(error))
    except UserError as error:
        where = f"mapping {file.mapping.path}: {prepared.title}"
        raise UserError(f"{where}: {error} ({file.log.path} line {row.line})") from None


def _is_of(fitting: _Fitting, cells: Mapping[str, str]) -> bool:
    return all(
        column in cells and any(fits(pattern, cells[column].strip()) for pattern in patterns)
        for column, patterns in fitting.when.items()
    )


def _device(file: _File, prepared: Prepared, cells: Mapping[str, str]) -> str:
    text = prepared.table.device or file.mapping.mapping.device
    return filled(text, cells, file.mapping.mapping.names) if text else file.options.device_name or ""


def _add(file: _File, prepared: Prepared, row: SourceRow, cells: Mapping[str, str], device: str) -> None:
    reading = _reading(file, prepared, device)
    if prepared.table.collective:
        file.result.collectives.append(call_of_row(reading, cells, f"{file.log.path}:{row.line}"))
    else:
        file.result.kernels += kernels_of_row(reading, cells)
    file.result.rows += 1
    for name, text in file.mapping.mapping.versions.items():
        if all(column in cells for column in columns_of_template(text)):
            file.versions.setdefault(name, set()).add(filled(text, cells, file.mapping.mapping.names))


def _reading(file: _File, prepared: Prepared, device: str) -> Reading:
    """What holds for rows of a table and device; the peak is read where shares of it are first met."""
    key = prepared.number, device
    if key not in file.readings:
        reading = Reading(
            mapping=file.mapping.mapping, prepared=prepared, options=file.options, sheet=sheet_of_measured(device)
        )
        file.readings[key] = replace(reading, peak_flops=_peak(file, prepared))
    return file.readings[key]


def _peak(file: _File, prepared: Prepared) -> float | None:
    peak = prepared.peak
    if peak is None:
        return None
    if peak.value is not None:
        return float(peak.value) * peak.scale
    if file.document is None:
        raise NotOfFormat(f"{file.log.path} is no JSON, and {prepared.title} reads its entry {peak.entry}")
    stated = entry_of(file.document, peak.entry, file.log.path)
    value = decimal(str(stated)) if isinstance(stated, (int, float, str)) and not isinstance(stated, bool) else None
    if value is None or value <= 0:
        raise NotOfFormat(f"{file.log.path}: {peak.entry}, the peak of {prepared.title}, is no number above 0")
    return value * peak.scale


def _finished(file: _File) -> Imported:
    """What the file gave, of one device.

    Raises:
        UserError: its rows are of several, and none was asked for. NotOfFormat: none is of the one asked for.
    """
    asked, devices = file.options.device_name, sorted(filter(None, file.devices))
    if asked is None and len(devices) > 1:
        raise UserError(
            f"{file.log.path} holds times of several devices: give --device-name with one of {', '.join(devices)}"
        )
    if asked is not None and file.passed and file.passed == sum(file.devices.values()):
        raise NotOfFormat(f"{file.log.path} holds no times of {asked!r}, only of {', '.join(devices)}")
    result, mapping = file.result, file.mapping.mapping
    # A device with rows that were all dropped otherwise would name the environment.
    result.device_names = {asked} if asked else set(devices)
    result.versions = {name: " and ".join(sorted(texts)) for name, texts in sorted(file.versions.items())}
    _leave_out_mistimed(file)
    if mapping.about:
        result.note(mapping.about)
    if result.rows and mapping.calls is None and file.options.iterations is None:
        result.note(f"{mapping.tool}: the file does not say how many calls each time is the mean of; 1 is taken")
    return result


def _leave_out_mistimed(file: _File) -> None:
    for reading in file.readings.values():
        for said, kernels in mistimed(reading):
            wrong = {id(kernel) for kernel in kernels}
            file.result.kernels = [kernel for kernel in file.result.kernels if id(kernel) not in wrong]
            file.result.leave_out(said)


IMPORTER = Importer(
    name="operators",
    reads="tables of kernels' and collectives' times (CSV, JSON), by --mapping",
    kind="kernels",
    reader=_read,
)
