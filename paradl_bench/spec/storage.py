"""Files that survive: atomic replacement, and JSON lines that are valid up to the last whole line.

A process may be killed at any byte. A JSON document is written to a temporary file beside its target and renamed
over it; a JSON-lines file is only ever appended to, one whole line per write, and a torn last line is ignored by
readers and cut off before the next append.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from paradl_bench.spec.errors import UserError, WorkError

T = TypeVar("T")


def write_text_atomically(path: Path, text: str) -> None:
    """Replace ``path`` by ``text``, or leave it as it was.

    Raises:
        WorkError: the disk is full or the folder can't be written.
    """
    write_bytes_atomically(path, text.encode())


def write_bytes_atomically(path: Path, content: bytes) -> None:
    """As :func:`write_text_atomically`, for bytes."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        raise WorkError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def encode_pretty(value: object) -> bytes:
    """JSON that a person can read and diff: indented, keys in the order of the schema."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def append_lines(path: Path, records: Iterable[object]) -> None:
    """Append each record as one JSON line, synchronised to disk; a torn last line is cut off first.

    Raises:
        WorkError: the disk is full or the file can't be written; whole lines written before stay valid.
    """
    content = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab+") as stream:
            cut_torn_line(stream)
            start = stream.seek(0, os.SEEK_END)
            try:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            except OSError:
                stream.truncate(start)
                raise
    except OSError as error:
        raise WorkError(f"cannot append to {path}: {error.strerror or error}") from error


def cut_torn_line(stream: object) -> None:
    """Cut what stands behind the last newline of an open binary file."""
    file = stream
    size = file.seek(0, os.SEEK_END)  # type: ignore[attr-defined]
    if size == 0:
        return
    file.seek(0)  # type: ignore[attr-defined]
    content: bytes = file.read()  # type: ignore[attr-defined]
    whole = content.rfind(b"\n") + 1
    if whole != size:
        file.truncate(whole)  # type: ignore[attr-defined]


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
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{path} line {number}: {error}") from None
    return records, len(torn)
