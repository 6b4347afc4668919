"""Rows of CSV and JSON files, each a mapping of columns to their texts.

A CSV file's first line names its columns. Of a JSON file the rows lie at an entry: a list of objects, or an object
whose keys tell its rows apart. Such a key is the column ``key``; ``b=1, m=4096`` gives the columns ``b`` and ``m`` as
well; a number behind it is the column ``value``, an object gives its fields.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from paradl_bench.core.errors import unknown_choice
from paradl_bench.importers.importer import LogFile, NotOfFormat

MOST_ROWS = 1 << 20
_DEEPEST_ENTRY = 32


class SourceRow(NamedTuple):
    """A row: its line (of JSON its place among the rows), its text, and its cells; why it has none, else."""

    line: int
    text: str
    cells: Mapping[str, str]
    wrong: str = ""


def csv_rows(log: LogFile, separator: str) -> Iterator[SourceRow]:
    """Rows of a table with a header.

    Raises:
        NotOfFormat: no header, a column named twice, no CSV, or too many rows.
    """
    reader = csv.reader(io.StringIO(log.text, newline=""), delimiter=separator)
    lines = _lines(log, reader)
    header = next(lines, None)
    if header is None:
        raise NotOfFormat(f"{log.path} is empty")
    columns = [cell.strip() for cell in header[1]]
    if len(set(columns)) < len(columns):
        twice = next(name for name in columns if columns.count(name) > 1)
        raise NotOfFormat(f"{log.path}: its header names the column {twice!r} twice")
    for count, (line, cells) in enumerate(lines):
        if count >= MOST_ROWS:
            raise NotOfFormat(f"{log.path} holds more than {MOST_ROWS} rows; cut it into smaller ones")
        text = separator.join(cells)
        if len(cells) != len(columns):
            yield SourceRow(line, text, {}, f"it has {len(cells)} cells, its header {len(columns)}")
        else:
            yield SourceRow(line, text, dict(zip(columns, cells, strict=True)))


def columns_of_csv(log: LogFile, separator: str) -> list[str]:
    """The columns that a header names; none of an empty file."""
    header = next(_lines(log, csv.reader(io.StringIO(log.text, newline=""), delimiter=separator)), None)
    return [] if header is None else [cell.strip() for cell in header[1]]


def _lines(log: LogFile, reader: Iterator[list[str]]) -> Iterator[tuple[int, list[str]]]:
    """First line and cells of every row that is not empty."""
    line = 1
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise NotOfFormat(f"{log.path} line {line} is no CSV: {error}") from None
        if cells is None:
            return
        if any(cell.strip() for cell in cells):
            yield line, cells
        line = getattr(reader, "line_num", line) + 1


def json_document(log: LogFile) -> object:
    """A decoded JSON file.

    Raises:
        NotOfFormat: it is none.
    """
    try:
        return msgspec.json.decode(log.json_text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError, ValueError) as error:
        raise NotOfFormat(f"{log.path} is no valid JSON: {error}") from None


def entry_of(document: object, entry: str, path: str) -> object:
    """What stands at ``a.b.c`` of a document; the document itself for an empty entry.

    Raises:
        NotOfFormat: nothing does.
    """
    value, where = document, ""
    for name in entry.split(".")[:_DEEPEST_ENTRY] if entry else ():
        if not isinstance(value, dict) or name not in value:
            choices = [str(key) for key in value] if isinstance(value, dict) else []
            error = unknown_choice(f"entry of {where or 'the file'}", name, choices)
            raise NotOfFormat(f"{path}: {error}")
        value, where = value[name], f"{where}.{name}".lstrip(".")
    return value


def json_rows(document: object, entry: str, path: str) -> Iterator[SourceRow]:
    """Rows at an entry.

    Raises:
        NotOfFormat: no rows stand there, or too many.
    """
    listed = entry_of(document, entry, path)
    if not isinstance(listed, (dict, list)):
        raise NotOfFormat(f"{path}: {entry or 'it'} holds neither a list nor an object of rows")
    if len(listed) > MOST_ROWS:
        raise NotOfFormat(f"{path} holds more than {MOST_ROWS} rows; cut it into smaller ones")
    rows = listed.items() if isinstance(listed, dict) else ((None, value) for value in listed)
    for number, (key, value) in enumerate(rows, start=1):
        cells = {} if key is None else _cells_of_key(key)
        if isinstance(value, dict):
            cells |= {str(name): _text(cell) for name, cell in value.items()}
        elif key is None:
            yield SourceRow(number, _text(value), {}, "it is no object")
            continue
        else:
            cells["value"] = _text(value)
        # What says most of a row: its key, or its first cells.
        text = f"{key}: {_text(value)}" if key is not None else _text(value)
        yield SourceRow(number, text, cells)


def _cells_of_key(key: str) -> dict[str, str]:
    parts = [part.partition("=") for part in key.split(",")]
    named = {name.strip(): text.strip() for name, sign, text in parts if sign}
    return {**named, "key": key}


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
