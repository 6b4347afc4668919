"""One writer a measurement directory: two tasks of a job array that are given the same one must not mix their rows.

The lock is the kernel's (flock), so that it ends with the process that holds it, however that ends. Its file says who
holds it, is hidden, and goes when a measurement is complete; one that an interruption left is taken over.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
import re
import stat
from pathlib import Path
from typing import IO

from paradl_bench.core.errors import UserError, WorkError
from paradl_bench.core.files.storage import failed, open_own

LOCK_NAME = ".lock"
_MOST_BYTES = 512

# File systems that have no locks, or whose lock server does not answer: a warning would be all that could be done.
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
# By directory: what this process holds until it ends, or lets go of.
_held: dict[Path, IO[str]] = {}


def _leave_to_parent() -> None:
    """A forked process, as a data loader's worker is, would hold the lock beyond the end of its writer."""
    for stream in _held.values():
        stream.close()
    _held.clear()


os.register_at_fork(after_in_child=_leave_to_parent)

# What a lock holds, or nothing where its writer was killed before it wrote.
_CONTENT = re.compile(r"(process \d{1,20} on [\w.-]{1,255})?\n?", re.ASCII)


def is_lock(path: Path) -> bool:
    """Whether a file is a lock of this program's, which may be taken over."""
    return path.name == LOCK_NAME and _content(path) is not None


def lock_for_writing(directory: Path) -> None:
    """Make this process the directory's one writer until it ends; nothing where it is that already.

    Raises:
        UserError: another process writes there, which the message names; or the file is no lock of this program's.
        WorkError: the lock's file can't be made.
    """
    key = directory.resolve()
    if key in _held:
        return
    taken = _take(directory)
    if taken is None:
        raise UserError(f"{directory} is being written by {_holder(directory)}: wait for it, or give another directory")
    # A name that a host can't have is left out.
    host = re.sub(r"[^\w.-]", "", platform.node(), flags=re.ASCII)[:255] or "localhost"
    try:
        taken.truncate(0)
        taken.write(f"process {os.getpid()} on {host}\n")
        taken.flush()
    except OSError as error:
        # What the buffer still holds can't be written either.
        with contextlib.suppress(OSError):
            taken.close()
        raise failed("write", directory / LOCK_NAME, error) from error
    _held[key] = taken


def release(directory: Path) -> None:
    """Let others write there; leaves no trace of the lock."""
    stream = _held.pop(directory.resolve(), None)
    if stream is not None:
        with contextlib.suppress(OSError):
            (directory / LOCK_NAME).unlink()
        stream.close()


def refuse_locked(directory: Path) -> None:
    """Refuse a directory that another process writes, as a command does before it starts ranks.

    Raises:
        UserError: as :func:`lock_for_writing`.
    """
    if directory.resolve() in _held or not (directory / LOCK_NAME).exists():
        return
    with contextlib.suppress(OSError), open(_open(directory / LOCK_NAME), encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{directory} is being written by {_holder(directory)}: wait for it, or give another directory"
            ) from None


def _take(directory: Path) -> IO[str] | None:
    """The lock's file, locked; None where another process holds it."""
    path = directory / LOCK_NAME
    while True:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            stream = open(open_own(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), "r+", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise WorkError(f"cannot write {path}: {error.strerror or error}", resumable=True) from error
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.close()
            return None
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                stream.close()
                raise WorkError(f"cannot lock {path}: {error.strerror or error}") from error
        # Whoever held it may have removed the file since it was opened: then the lock is on a file that is no more.
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(stream.fileno()).st_ino == path.stat().st_ino:
                if not is_lock(path):
                    stream.close()
                    raise UserError(f"{path} is not a lock of this program: remove it, or give another directory")
                return stream
        stream.close()


def _holder(directory: Path) -> str:
    return (_content(directory / LOCK_NAME) or "").strip() or "another process"


def _content(path: Path) -> str | None:
    """What a lock's file says; None where it is none, or can't be read."""
    try:
        with open(_open(path), "rb") as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                return None
            text = stream.read(_MOST_BYTES).decode("ascii", errors="replace")
    except OSError:
        return None
    return text if _CONTENT.fullmatch(text) else None


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
