"""Files that survive: atomic replacement, and JSON lines that are valid up to the last whole line.

A process may be killed at any byte. A JSON document is written to a temporary file beside its target and renamed
over it; a JSON-lines file is only ever appended to, one whole line per write, and a torn last line is ignored by
readers and cut off before the next append.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import secrets
from collections.abc import Iterable
from io import FileIO
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from paradl_bench.spec.errors import UserError, WorkError
from paradl_bench.spec.interruption import uninterrupted

T = TypeVar("T")

_CHUNK_BYTES = 64 * 1024
_REMEDIES = {
    errno.ENOSPC: "free some there, or give a place on another disk with -o",
    errno.EDQUOT: "free some of the quota, or give a place on another disk with -o",
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f)",
    errno.EROFS: "give a place that can be written with -o",
    errno.EACCES: "give a place that can be written with -o",
}
"""What would be right, by the system's error."""


def write_text_atomically(path: Path, text: str) -> None:
    """Replace ``path`` by ``text``, or leave it as it was.

    Raises:
        WorkError: the disk is full or the folder can't be written.
    """
    write_bytes_atomically(path, text.encode())


def write_bytes_atomically(path: Path, content: bytes) -> None:
    """As :func:`write_text_atomically`, for bytes."""
    write_pieces_atomically(path, (content,))


def write_pieces_atomically(path: Path, pieces: Iterable[bytes]) -> None:
    """As :func:`write_bytes_atomically`, for what is too long to be held as a whole; ``pieces`` is read once."""
    # Not tempfile: its files are private to the user, and results are shared as the user's umask says.
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "xb", buffering=0) as stream:
            for piece in pieces:
                _write_whole(stream, piece)
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise _failed("write", path, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _write_whole(stream: FileIO, content: bytes) -> None:
    # An unbuffered write may take a part only; what a buffer still held after an error could not be taken back.
    rest = memoryview(content)
    while rest:
        rest = rest[stream.write(rest) :]


def encode_pretty(value: object) -> bytes:
    """JSON that a person can read and diff: indented, keys in the order of the schema."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def append_lines(path: Path, records: Iterable[object]) -> None:
    """Append each record as one JSON line, synchronised to disk; a torn last line is cut off first.

    SIGINT and SIGTERM wait until it is done, where :func:`~paradl_bench.spec.interruption.signals_raise` handles them.

    Raises:
        WorkError: the disk is full or the file can't be written; the file then ends where its last whole line ended.
    """
    content = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
    with uninterrupted():
        _append(path, content)


def _append(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab", buffering=0) as stream:
            with open(path, "rb") as reader:
                end = end_of_last_line(reader)
            stream.truncate(end)
            try:
                _write_whole(stream, content)
                os.fsync(stream.fileno())
            except OSError:
                stream.truncate(end)
                raise
    except OSError as error:
        raise _failed("append to", path, error) from error


def _failed(what: str, path: Path, error: OSError) -> WorkError:
    """One line: what can't be done to which file, why, and what would be right."""
    remedy = _REMEDIES.get(error.errno or 0)
    why = f"{error.strerror or error}{f'; {remedy}' if remedy else ''}"
    return WorkError(f"cannot {what} {path}: {why}", resumable=True)


def cut_torn_line(path: Path) -> int:
    """Cut off what stands behind the last newline of a JSON-lines file; how many bytes that were.

    Raises:
        WorkError: the file can't be changed.
    """
    try:
        with open(path, "r+b", buffering=0) as stream:
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
    try:
        with open(path, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            return size - end_of_last_line(stream)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


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
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    whole, _, torn = content.rpartition(b"\n")
    decoder = msgspec.json.Decoder(of)
    records = []
    for number, line in enumerate(whole.split(b"\n") if whole else [], start=1):
        try:
            records.append(decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UserError(f"{path} line {number}: {not_a_number(line) or error}") from None
    return records, len(torn)


def read_json(path: Path, of: type[T], *, what: str = "", remedy: str = "") -> T:
    """A whole JSON document.

    Args:
        what: the file is, in words, before its path in messages (``network``). remedy: behind what is wrong with it.

    Raises:
        UserError: unreadable, truncated, or a wrong field, named by its path.
    """
    named = f"{what} {path}".lstrip()
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {named}: {error.strerror or error}") from error
    return decode_json(content, of, where=named, remedy=remedy)


def decode_json(content: bytes, of: type[T], *, where: str, remedy: str = "") -> T:
    """A whole JSON document that was read already.

    Args:
        where: it was found, for the message.

    Raises:
        UserError: truncated, or a wrong field, named by its path.
    """
    try:
        return msgspec.json.decode(content, type=of)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise UserError(f"{where}: {not_a_number(content) or error}{remedy}") from None


def not_a_number(content: bytes) -> str | None:
    """Where JSON holds a NaN or an infinity, as ``$.time.median_s is NaN, ...``; None where it is broken otherwise.

    JSON has neither, but programs write them (Python's own json does), and a parser's complaint about a character
    helps nobody.
    """
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    pending: list[tuple[str, object]] = [("$", value)]
    while pending:
        where, item = pending.pop()
        if isinstance(item, float) and not math.isfinite(item):
            return f"{where} is {json.dumps(item)}, which is no number"
        if isinstance(item, dict):
            pending += [(f"{where}.{key}", part) for key, part in reversed(item.items())]
        elif isinstance(item, list):
            pending += [(f"{where}[{index}]", part) for index, part in reversed(list(enumerate(item)))]
    return None
