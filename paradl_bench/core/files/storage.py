"""Files that survive a process that is killed at any byte: each is written beside its target and renamed over it."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import stat
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from paradl_bench.core.errors import UserError, WorkError
from paradl_bench.core.files.documents import foreign_document, places, validation_text
from paradl_bench.core.files.repeated_keys import may_lose_keys, repeated_key
from paradl_bench.core.units import format_bytes

T = TypeVar("T")

MOST_BYTES = 1 << 30
"""Of a file that is read whole, where its reader sets no limit of its own."""
MOST_DOCUMENT_BYTES = 1 << 28
"""Of one JSON document: decoded, it takes about ten times as much memory."""
PIECE_BYTES = 1 << 24
"""Of a file that is read in pieces."""
OWN_FILE = r"^([a-z]{1,20}/)?[A-Za-z0-9_-]{1,80}(\.jsonl?)?$"
Position = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]

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
    status = os.fstat(descriptor)
    why = None if stat.S_ISREG(status.st_mode) else f"{_sort_of_file(status.st_mode)}; give a regular file"
    if why is None and most_bytes is not None and status.st_size > most_bytes:
        why = _too_large(most_bytes)
    if why is not None:
        os.close(descriptor)
        raise OSError(errno.EINVAL, why, str(path))
    return open(descriptor, "rb", buffering=0)


def read_whole(path: Path, *, what: str = "", most_bytes: int = MOST_BYTES) -> bytes:
    """All bytes of a file; ``what`` stands before its path in messages (``network``).

    Raises:
        UserError: it can't be read, is no regular file, or holds more than ``most_bytes``.
    """
    with unreadable(path, what), open_regular(path, most_bytes=most_bytes) as stream:
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
    with unreadable(path, what), open_regular(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextlib.contextmanager
def unreadable(path: Path, what: str = "") -> Iterator[None]:
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
    """Open a file of the user's own; the only way in which this program opens one for writing that may be there.

    No link is followed, and what is no regular file or is somebody else's is left alone, as is for writing what has
    a second name: whoever can write to a directory could have a file of the user's changed by putting a link to it
    there. A file counts as the user's own where who owns it owns the directory too, as in a folder that a group
    shares.

    Args:
        flags: as of ``os.open``; with ``O_TRUNC`` the file is emptied once it is seen to be the user's own.

    Raises:
        OSError: it can't be opened. UserError: it is not the user's own.
    """
    try:
        descriptor = os.open(path, (flags & ~os.O_TRUNC) | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP or path.is_symlink():
            raise UserError(f"{path} is a link, and nothing is written through links: remove it") from error
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path} is not a regular file: remove it")
        if status.st_nlink > 1 and flags & (os.O_WRONLY | os.O_RDWR):
            raise UserError(f"{path} has a second hard link, and nothing is written to it: remove it")
        if status.st_uid not in (os.geteuid(), os.stat(path.parent).st_uid):
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
    temporary = path.with_name(f".{os.urandom(8).hex()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "xb", buffering=0) as stream:
            for piece in pieces:
                write_whole(stream, piece)
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise failed("write", path, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_whole(stream: FileIO, content: bytes) -> None:
    """Write all of it, in as many calls as that takes."""
    # An unbuffered write may take a part only; what a buffer still held after an error could not be taken back.
    rest = memoryview(content)
    while rest:
        rest = rest[stream.write(rest) :]


def encode_pretty(value: object) -> bytes:
    """JSON that a person can read and diff: indented, keys in the order of the schema."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def failed(what: str, path: Path, error: OSError) -> WorkError:
    """The error that says in one line what can't be done to which file, why, and what would be right."""
    remedy = _REMEDIES.get(error.errno or 0)
    why = f"{error.strerror or error}{f'; {remedy}' if remedy else ''}"
    return WorkError(f"cannot {what} {path}: {why}", resumable=True)


def twice(key: str) -> str:
    """What is said of a key that one object holds twice."""
    return f"{key} occurs twice: keep one of them"


def check_keys(content: bytes, decoded: object, where: str) -> None:
    """Refuse an object with a key twice, of which decoding the content to builtins took the last.

    Raises:
        UserError: it names the path of the key.
    """
    if may_lose_keys(content, decoded) and (key := repeated_key(content)):
        raise UserError(f"{where}: {twice(key)}")


def read_json(path: Path, of: type[T], *, what: str = "", remedy: str = "") -> T:
    """A whole JSON document; ``what`` stands before its path in messages, ``remedy`` behind what is wrong with it.

    Raises:
        UserError: unreadable, truncated, or a wrong field, named by its path.
    """
    named = f"{what} {path}".lstrip()
    content = read_whole(path, what=what, most_bytes=MOST_DOCUMENT_BYTES)
    return decode_json(content, of, where=named, remedy=remedy)


def decode_json(content: bytes, of: type[T], *, where: str, remedy: str = "", shipped: bool = False) -> T:
    """A whole JSON document that was read already; the message begins with ``where``.

    Args:
        shipped: it comes with the tool, so that no key of it stands twice.

    Raises:
        UserError: truncated, or a wrong field, named by its path.
    """
    try:
        value = msgspec.json.decode(content, type=of)
        if not shipped:
            check_keys(content, msgspec.json.decode(content), where)
    except UserError:
        # It names the place already.
        raise
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise UserError(f"{where}: {_wrong(content, of, error)}{remedy}") from None
    return value


def _wrong(content: bytes, of: object, error: Exception) -> str:
    """What is wrong with JSON: a number that is none, another document, or a field."""
    if mistake := not_a_number(content):
        return mistake
    try:
        mistake = foreign_document(json.loads(content), getattr(of, "__name__", "").lower())
    except (ValueError, RecursionError):
        return str(error)
    return f"it is {mistake}" if mistake else validation_text(error, of)


def not_a_number(content: bytes) -> str | None:
    """Where JSON holds a NaN or an infinity, as ``$.time.median_s is NaN, ...``; None where it is broken otherwise.

    JSON has neither, but programs write them (Python's own json does), and a parser's complaint about a character
    helps nobody.
    """
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    wrong = ((where, item) for where, item in places(value) if isinstance(item, float) and not math.isfinite(item))
    return next((f"{where} is {json.dumps(item)}, which is no number" for where, item in wrong), None)
