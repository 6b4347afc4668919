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


def unknown_choice(what: str, given: str, choices: Iterable[str], *, listed_by: str = "") -> UserError:
    """The error for a name that is not among ``choices``; ``what`` is the noun ("model", "strategy", "backend").

    Args:
        listed_by: a command that lists the choices, which are too many for a line.
    """
    # Loaded where something is wrong: nothing else needs it.
    from difflib import get_close_matches

    names = sorted(set(choices))
    near = get_close_matches(given, names, n=3, cutoff=0.6)
    further = len(names) - _MOST_CHOICES
    listed = ", ".join(names[:_MOST_CHOICES]) + (f" and {further} more" if further > 0 else "")
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    every = f"{listed_by} lists all" if listed_by else f"choices are {listed}"
    return UserError(f"unknown {what} {given!r}: {hint}{every}")


def uneven(what: str, count: int, parts: int, over: str) -> UserError:
    """The error for a count that is no multiple of ``parts``, with the nearest that are.

    Args:
        what: the count in words (``batch 10``). over: the parts in words (``4 ranks``).
    """
    why = "is smaller than" if count < parts else "does not split evenly over"
    return UserError(f"{what} {why} {over}; {nearest_multiples(count, parts)}")


def nearest_multiples(count: int, parts: int) -> str:
    """What to give in the place of a count that does not split evenly, in words."""
    lower = count - count % parts
    return f"the nearest that do are {lower} and {lower + parts}" if lower else f"give at least {parts}"
