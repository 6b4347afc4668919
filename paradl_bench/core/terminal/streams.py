"""Standard output and standard error that never end the work: what can't be written there is noted and dropped.

A reader may go away (``| head``), a disk may be full, a terminal may know ASCII alone. Files that the command still has
to write are written all the same.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator
from typing import Any


class _Stream(io.FileIO):
    """A file descriptor; behind the first failure nothing more is written."""

    failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Write, or note why that fails; returns how many bytes were taken."""
        if self.failure is None:
            try:
                return super().write(data)
            except OSError as error:
                self.failure = error
        return memoryview(data).nbytes


class _Closed(_Stream):
    """What was closed before the command began: the first thing that is written fails."""

    def write(self, data: Any) -> int:
        """Note that there is nothing to write to."""
        self.failure = self.failure or OSError(errno.EBADF, os.strerror(errno.EBADF))
        return memoryview(data).nbytes


class Streams:
    """The standard streams of a command.

    Attributes:
        failure: why standard output could not be written; None where it could, or where its reader went away.
    """

    def __init__(self) -> None:
        self._output: _Stream | None = None

    @property
    def failure(self) -> OSError | None:
        """See above; what is not yet written is written first."""
        if sys.stdout is not None:
            sys.stdout.flush()
        failure = None if self._output is None else self._output.failure
        return None if isinstance(failure, BrokenPipeError) else failure

    @contextlib.contextmanager
    def replaced(self) -> Iterator[None]:
        """Replace ``sys.stdout`` and ``sys.stderr`` until the body ends, where they have file descriptors."""
        before = sys.stdout, sys.stderr
        self._output, sys.stdout = _replacement(sys.stdout)
        _, sys.stderr = _replacement(sys.stderr)
        try:
            yield
        finally:
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:
                    stream.flush()
            sys.stdout, sys.stderr = before


def _replacement(stream: Any) -> tuple[_Stream | None, Any]:
    if stream is None:
        closed = _Closed(os.devnull, "wb")
        return closed, io.TextIOWrapper(io.BufferedWriter(closed), "utf-8")
    try:
        number = stream.fileno()
        stream.flush()
    except (AttributeError, OSError, ValueError):  # closed, or not there, or a test's
        return None, stream
    raw = _Stream(number, "wb", closefd=False)
    by_lines = stream is sys.stderr or stream.isatty()
    # What the encoding lacks is shown by its number.
    text = io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, "backslashreplace", line_buffering=by_lines)
    return raw, text
