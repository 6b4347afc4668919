"""The one family of errors that a user sees.

Every command prints the message of a :class:`ParadlError` as a single line on standard error and exits with
``exit_code``; a traceback is shown only with ``--debug``.
"""

from __future__ import annotations

from collections.abc import Iterable

_LONGEST_LINE = 1000
_MOST_CHOICES = 24


class ParadlError(Exception):
    """Base of all errors raised on purpose. The message says what, where, and what would be right."""

    exit_code = 3


class UserError(ParadlError, ValueError):
    """The user asked for something that can't be: exit code 2."""

    exit_code = 2


class WorkError(ParadlError, RuntimeError):
    """The work itself failed (a rank died, a tool was missing): exit code 3; what was measured is kept.

    Attributes:
        resumable: whether the same command would go on, nothing being wrong with what was asked for: a rank that was
            killed, a full disk.
    """

    exit_code = 3

    def __init__(self, message: str = "", *, resumable: bool = False) -> None:
        super().__init__(message)
        self.resumable = resumable


def shown(message: str) -> str:
    """An error's text as one line that a terminal can show: what is quoted from a file may be of any length."""
    line = " ".join(message.encode("utf-8", "backslashreplace").decode().split())
    return line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE - 320]} ... {line[-300:]}"


def unknown_choice(what: str, given: str, choices: Iterable[str]) -> UserError:
    """The error for a name that is not among ``choices``; ``what`` is the noun ("model", "strategy", "backend")."""
    # Loaded where something is wrong: nothing else needs it.
    from difflib import get_close_matches

    names = sorted(set(choices))
    near = get_close_matches(given, names, n=3, cutoff=0.6)
    further = len(names) - _MOST_CHOICES
    listed = ", ".join(names[:_MOST_CHOICES]) + (f" and {further} more" if further > 0 else "")
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return UserError(f"unknown {what} {given!r}: {hint}choices are {listed}")
