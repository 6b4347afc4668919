"""Signals that end a command: what they raise, and stretches that they wait for.

Slurm ends a job whose time is up, or that is cancelled, by SIGTERM and half a minute later by SIGKILL. Left to itself,
SIGTERM ends a process where it stands; here both it and SIGINT unwind it, so that what was measured and not yet written
is written.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Terminated(KeyboardInterrupt):
    """SIGTERM came: a time limit, a cancelled job, a machine that shuts down."""


class _State:
    """How many stretches wait for their end, and the signal that came meanwhile."""

    depth = 0
    pending: int | None = None


def _raise_for(number: int) -> None:
    if number == signal.SIGTERM:
        # Slurm signals every process of a job step, and a launcher passes its own on: what the first began, a second
        # must not break off.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated
    raise KeyboardInterrupt


def _handle(number: int, _: FrameType | None) -> None:
    if _State.depth:
        _State.pending = number
    else:
        _raise_for(number)


def end_at_once_until_started() -> None:
    """Have SIGINT end the process in one line while its command is still being imported.

    A process calls it first of all; :func:`signals_raise` takes over.
    """
    signal.signal(signal.SIGINT, _end_at_once)


def _end_at_once(_: int, __: FrameType | None) -> None:
    # Nothing is there yet to unwind, and half-imported modules would fill the screen with where they were.
    os.write(2, b"interrupted before it began; nothing was written\n")
    os._exit(3)


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """Have SIGTERM raise :class:`Terminated`, and SIGINT KeyboardInterrupt, until the body ends.

    A signal that is ignored, or that somebody else handles, stays as it is; so do all of them off the main thread.
    """
    ours = (signal.SIGTERM, signal.SIGINT)
    before = {}
    if threading.current_thread() is threading.main_thread():
        defaults = (signal.SIG_DFL, signal.default_int_handler, _end_at_once)
        before = {number: signal.getsignal(number) for number in ours if signal.getsignal(number) in defaults}
    try:
        for number in before:
            signal.signal(number, _handle)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class uninterrupted:  # noqa: N801
    """A stretch at whose end a signal is raised that came inside of it: a write is whole or has not begun.

    A class, since a generator could be interrupted between its count and its ``try``.
    """

    def __enter__(self) -> None:
        _State.depth += 1

    def __exit__(self, *_: object) -> None:
        _State.depth -= 1
        if not _State.depth and _State.pending is not None:
            number, _State.pending = _State.pending, None
            _raise_for(number)
