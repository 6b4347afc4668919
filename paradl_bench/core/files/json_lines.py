"""JSON lines: appended in one piece, cut behind the last whole line, and undone where a kill left half of them.

A torn last line is ignored by readers and cut off before the next append.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from io import FileIO
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec

from paradl_bench.core.errors import UserError, WorkError
from paradl_bench.core.files.repeated_keys import may_lose_keys, repeated_key
from paradl_bench.core.files.storage import (
    OWN_FILE,
    Position,
    T,
    failed,
    not_a_number,
    open_own,
    open_regular,
    read_json,
    read_whole,
    twice,
    unreadable,
    write_bytes_atomically,
    write_whole,
)
from paradl_bench.core.interruption import uninterrupted

_CHUNK_BYTES = 64 * 1024

UNFINISHED = ".unfinished.json"
"""Beside files to which rows are being appended: where each ended before, and will end."""


def encode_lines(records: Iterable[object]) -> bytes:
    """Each record as one line of JSON, which its own type reads again.

    Raises:
        ValueError: a field holds what its type does not allow, as a time that is no number.
    """
    return b"".join(_line(record) for record in records)


def _line(record: object) -> bytes:
    # Types hold what is read to their bounds, and nothing that is built; a NaN would be written as null.
    line = msgspec.json.encode(record)
    msgspec.json.decode(line, type=type(record))
    return line + b"\n"


def append_lines(path: Path, records: Iterable[object]) -> None:
    """Append each record as one JSON line, synchronised to disk; a torn last line is cut off first.

    SIGINT and SIGTERM wait until it is done, where :func:`~paradl_bench.core.interruption.signals_raise` handles them.

    Raises:
        WorkError: the disk is full or the file can't be written; the file then ends where its last whole line ended.
    """
    content = encode_lines(records)
    with uninterrupted():
        _append(path, content)


def append_together(directory: Path, records: Mapping[str, Iterable[object]]) -> None:
    """As :func:`append_lines`, for rows of files, by their names, that count together or not at all.

    Where the process is killed within, :func:`undo_unfinished` takes back what was written of them.

    Raises:
        WorkError: as :func:`append_lines`.
    """
    contents = {name: encode_lines(rows) for name, rows in records.items()}
    contents = {name: content for name, content in contents.items() if content}
    if not contents:
        return
    with uninterrupted():
        starts = {name: _end_of_lines(directory / name) for name in contents}
        spans = {name: (start, start + len(contents[name])) for name, start in starts.items()}
        write_bytes_atomically(directory / UNFINISHED, msgspec.json.encode(spans))
        for name, content in contents.items():
            _append(directory / name, content)
        (directory / UNFINISHED).unlink()


def unfinished(directory: Path) -> dict[str, int]:
    """Where each file ended before the rows of which a killed process wrote only a part.

    Empty where none did, or where all rows were written and only the note of them was left.

    Raises:
        UserError: the note of it can't be read.
    """
    path = directory / UNFINISHED
    if not path.exists():
        return {}
    spans = read_json(path, dict[Annotated[str, msgspec.Meta(pattern=OWN_FILE)], tuple[Position, Position]])
    sizes = {name: (directory / name).stat().st_size if (directory / name).exists() else 0 for name in spans}
    if all(sizes[name] >= end for name, (_, end) in spans.items()):
        return {}
    return {name: start for name, (start, _) in spans.items()}


def undo_unfinished(directory: Path) -> int:
    """Cut off rows of which a killed process wrote only a part; how many bytes those were.

    Raises:
        UserError: as :func:`unfinished`. WorkError: a file can't be changed.
    """
    cut = 0
    for name, end in unfinished(directory).items():
        path = directory / name
        if path.exists() and path.stat().st_size > end:
            cut += path.stat().st_size - end
            try:
                with open(open_own(path, os.O_RDWR), "r+b", buffering=0) as stream:
                    stream.truncate(end)
            except UserError:
                raise
            except (OSError, ValueError) as error:
                raise WorkError(f"cannot cut {path}: {error}") from error
    (directory / UNFINISHED).unlink(missing_ok=True)
    return cut


def _end_of_lines(path: Path) -> int:
    if not path.exists():
        return 0
    with unreadable(path), open_regular(path) as stream:
        return end_of_last_line(stream)


def _append(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(open_own(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), "r+b", buffering=0) as stream:
            end = end_of_last_line(stream)
            stream.truncate(end)
            try:
                write_whole(stream, content)
                os.fsync(stream.fileno())
            except OSError:
                stream.truncate(end)
                raise
    except OSError as error:
        raise failed("append to", path, error) from error


def cut_torn_line(path: Path) -> int:
    """Cut off what stands behind the last newline of a JSON-lines file; how many bytes that were.

    Raises:
        WorkError: the file can't be changed.
    """
    try:
        with open(open_own(path, os.O_RDWR), "r+b", buffering=0) as stream:
            size = os.fstat(stream.fileno()).st_size
            end = end_of_last_line(stream)
            stream.truncate(end)
    except OSError as error:
        raise WorkError(f"cannot cut {path}: {error.strerror or error}") from error
    return size - end


def torn_bytes(path: Path) -> int:
    """How many bytes stand behind the last newline of a JSON-lines file: a row that was not written whole.

    Raises:
        UserError: the file can't be read.
    """
    with unreadable(path), open_regular(path) as stream:
        return os.fstat(stream.fileno()).st_size - end_of_last_line(stream)


def end_of_last_line(stream: BinaryIO | FileIO) -> int:
    """Offset behind the last newline of a file, 0 if it has none; reads backwards, and no more than the torn line."""
    end = stream.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - _CHUNK_BYTES)
        stream.seek(start)
        newline = stream.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def read_lines(path: Path, of: type[T]) -> tuple[list[T], int]:
    """Records of a JSON-lines file, and how many bytes of a torn last line were left out.

    Raises:
        UserError: a whole line is no valid record; the message names file, line and field.
    """
    whole, _, torn = read_whole(path).rpartition(b"\n")
    decoder = msgspec.json.Decoder(of)
    records = []
    may_lose = _may_lose_keys_of_lines(whole)
    for number, line in enumerate(whole.split(b"\n") if whole else [], start=1):
        if may_lose and (key := repeated_key(line)):
            raise UserError(f"{path} line {number}: {twice(key)}")
        try:
            records.append(decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UserError(f"{path} line {number}: {not_a_number(line) or error}") from None
    return records, len(torn)


def _may_lose_keys_of_lines(whole: bytes) -> bool:
    try:
        return may_lose_keys(whole, msgspec.json.Decoder().decode_lines(whole))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # Some line is none, which its decoder says better.
        return True
