"""Files that survive: atomic replacement, and JSON lines that are valid up to the last whole line.

A process may be killed at any byte. A JSON document is written to a temporary file beside its target and renamed
over it; a JSON-lines file is only ever appended to, one whole line per write, and a torn last line is ignored by
readers and cut off before the next append.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Annotated, BinaryIO, TypeVar

import msgspec

from paradl_bench.core.errors import UserError, WorkError
from paradl_bench.core.files.documents import foreign_document, validation_text
from paradl_bench.core.files.repeated_keys import may_lose_keys, repeated_key
from paradl_bench.core.interruption import uninterrupted
from paradl_bench.core.units import format_bytes

T = TypeVar("T")

MOST_BYTES = 1 << 30
"""Of a file that is read whole, where its reader sets no limit of its own."""
MOST_DOCUMENT_BYTES = 1 << 28
"""Of one JSON document: decoded, it takes about ten times as much memory."""
_CHUNK_BYTES = 64 * 1024
PIECE_BYTES = 1 << 24
"""Of a file that is read in pieces."""
UNFINISHED = ".unfinished.json"
"""Beside files to which rows are being appended: where each ended before, and will end."""
_OWN_FILE = r"^([a-z]{1,20}/)?[A-Za-z0-9_-]{1,80}(\.jsonl?)?$"
_Position = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_REMEDIES = {
    errno.ENOSPC: "free some there, or give a place on another disk with -o",
    errno.EDQUOT: "free some of the quota, or give a place on another disk with -o",
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f)",
    errno.EROFS: "give a place that can be written with -o",
    errno.EACCES: "give a place that can be written with -o",
}
"""What would be right, by the system's error."""


def open_regular(path: Path, *, most_bytes: int | None = None) -> FileIO:
    """Open a file for reading, unbuffered. Every file that somebody may have put there is opened here.

    A pipe would make its reader wait for a writer, and a device such as ``/dev/zero`` has no end.

    Raises:
        OSError: it can't be opened, is no regular file, or holds more than ``most_bytes``.
    """
    # Not to wait: a pipe that nobody writes would otherwise block here.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    found = os.fstat(descriptor)
    why = None if stat.S_ISREG(found.st_mode) else f"{_sort_of_file(found.st_mode)}; give a regular file"
    if why is None and most_bytes is not None and found.st_size > most_bytes:
        why = _too_large(most_bytes)
    if why is not None:
        os.close(descriptor)
        raise OSError(errno.EINVAL, why, str(path))
    return open(descriptor, "rb", buffering=0)


def read_whole(path: Path, *, what: str = "", most_bytes: int = MOST_BYTES) -> bytes:
    """All bytes of a file.

    Args:
        what: the file is, in words, before its path in messages (``network``).

    Raises:
        UserError: it can't be read, is no regular file, or holds more than ``most_bytes``.
    """
    with _unreadable(path, what), open_regular(path, most_bytes=most_bytes) as stream:
        pieces, left = [], most_bytes + 1
        while left and (piece := stream.read(min(left, PIECE_BYTES))):
            pieces.append(piece)
            left -= len(piece)
        if not left:
            raise OSError(errno.EFBIG, _too_large(most_bytes))
        return b"".join(pieces)


def hash_of_file(path: Path, *, what: str = "") -> str:
    """SHA-256 of a file of any size.

    Raises:
        UserError: it can't be read, or is no regular file.
    """
    with _unreadable(path, what), open_regular(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextlib.contextmanager
def _unreadable(path: Path, what: str = "") -> Iterator[None]:
    """Say in one line which file can't be read."""
    try:
        yield
    except (OSError, ValueError) as error:  # a NUL byte in a path is a ValueError
        why = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read {f'{what} {path}'.lstrip()}: {why}") from error


def _sort_of_file(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "it is a folder"
    return "it is a pipe" if stat.S_ISFIFO(mode) else "it is a device"


def _too_large(most_bytes: int) -> str:
    return f"it holds more than {format_bytes(most_bytes)}"


def open_own(path: Path, flags: int) -> int:
    """Open a file of the user's own for writing; the only way in which this program opens one that may be there.

    No link is followed, and what has a second name, is no regular file or is somebody else's is left alone: whoever
    can write to a directory could have a file of the user's changed by putting a link to it there. A file counts as
    the user's own where who owns it owns the directory too, as in a folder that a group shares.

    Args:
        flags: as of ``os.open``; with ``O_TRUNC`` the file is emptied once it is seen to be the user's own.

    Raises:
        OSError: it can't be opened. UserError: it is not the user's own.
    """
    try:
        descriptor = os.open(path, (flags & ~os.O_TRUNC) | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP or path.is_symlink():
            raise UserError(f"{path} is a link, through which nothing is written: remove it") from error
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            what = "has a second name" if stat.S_ISREG(found.st_mode) else "is no regular file"
            raise UserError(f"{path} {what}, and nothing is written to it: remove it")
        if found.st_uid not in (os.geteuid(), os.stat(path.parent).st_uid):
            raise UserError(f"{path} belongs to another user, and nothing is written to it: give another place")
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def file_name(name: str) -> str:
    """A name that a file or an option gave, as part of a path: it can lead nowhere else.

    Everything but ASCII letters and digits, ``.``, ``_`` and ``-`` is replaced, and a ``.`` at the beginning.
    """
    kept = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "_" for letter in name)
    shown = kept[:100] or "unnamed"
    return f"_{shown[1:]}" if shown.startswith(".") else shown


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
        raise failed("write", path, error) from error
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


def encode_lines(records: Iterable[object]) -> bytes:
    """Each record as one line of JSON."""
    return b"".join(msgspec.json.encode(record) + b"\n" for record in records)


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
    """As :func:`append_lines`, for rows of one or several files that count together or not at all.

    Where the process is killed within, :func:`undo_unfinished` takes back what was written of them.

    Args:
        records: by the file's name in the directory.

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
    spans = read_json(path, dict[Annotated[str, msgspec.Meta(pattern=_OWN_FILE)], tuple[_Position, _Position]])
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
    with _unreadable(path), open_regular(path) as stream:
        return end_of_last_line(stream)


def _append(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(open_own(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), "r+b", buffering=0) as stream:
            end = end_of_last_line(stream)
            stream.truncate(end)
            try:
                _write_whole(stream, content)
                os.fsync(stream.fileno())
            except OSError:
                stream.truncate(end)
                raise
    except OSError as error:
        raise failed("append to", path, error) from error


def failed(what: str, path: Path, error: OSError) -> WorkError:
    """The error that says in one line what can't be done to which file, why, and what would be right."""
    remedy = _REMEDIES.get(error.errno or 0)
    why = f"{error.strerror or error}{f'; {remedy}' if remedy else ''}"
    return WorkError(f"cannot {what} {path}: {why}", resumable=True)


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
    with _unreadable(path), open_regular(path) as stream:
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
    twice = _may_lose_keys_of_lines(whole)
    for number, line in enumerate(whole.split(b"\n") if whole else [], start=1):
        if twice and (key := repeated_key(line)):
            raise UserError(f"{path} line {number}: {_twice(key)}")
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


def _twice(key: str) -> str:
    return f"{key} stands there twice: keep one of them"


def check_keys(content: bytes, decoded: object, where: str) -> None:
    """Refuse an object with a key twice, of which decoding took the last.

    Args:
        decoded: the content, as builtins.

    Raises:
        UserError: it names the path of the key.
    """
    if may_lose_keys(content, decoded) and (key := repeated_key(content)):
        raise UserError(f"{where}: {_twice(key)}")


def read_json(path: Path, of: type[T], *, what: str = "", remedy: str = "") -> T:
    """A whole JSON document.

    Args:
        what: the file is, in words, before its path in messages (``network``). remedy: behind what is wrong with it.

    Raises:
        UserError: unreadable, truncated, or a wrong field, named by its path.
    """
    named = f"{what} {path}".lstrip()
    content = read_whole(path, what=what, most_bytes=MOST_DOCUMENT_BYTES)
    return decode_json(content, of, where=named, remedy=remedy)


def decode_json(content: bytes, of: type[T], *, where: str, remedy: str = "") -> T:
    """A whole JSON document that was read already.

    Args:
        where: it was found, for the message.

    Raises:
        UserError: truncated, or a wrong field, named by its path.
    """
    try:
        found = msgspec.json.decode(content, type=of)
        check_keys(content, msgspec.json.decode(content), where)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise UserError(f"{where}: {_wrong(content, of, error)}{remedy}") from None
    return found


def _wrong(content: bytes, of: object, error: Exception) -> str:
    """What is wrong with JSON: a number that is none, another document, or a field."""
    if found := not_a_number(content):
        return found
    try:
        found = foreign_document(json.loads(content), getattr(of, "__name__", "").lower())
    except (ValueError, RecursionError):
        return str(error)
    return f"it is {found}" if found else validation_text(error, of)


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
