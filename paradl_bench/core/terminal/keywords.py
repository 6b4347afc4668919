"""From Python's keywords to the options of a command: one set of names, defaults and checks for both."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import click

from paradl_bench.core.errors import UserError, unknown_choice
from paradl_bench.core.terminal.usage import usage_text

_OF_FILES = {
    *("output", "form", "as_json", "as_csv", "force", "wide", "explain", "fusion_out", "plot", "ranks_shown"),
    *("profile", "help", "version"),
}
"""Options that say where a command writes what; Python has arguments and methods for that."""


class Asked(NamedTuple):
    """Options by their names, all of the command, and the words of the command line that means the same."""

    options: dict[str, Any]
    words: tuple[str, ...]

    @property
    def command(self) -> str:
        """The command line, as it is typed."""
        return shlex.join(self.words)


def ask(command: click.Command, name: str, first: Sequence[str], given: Mapping[str, object]) -> Asked:
    """The options of a command as keywords give them, else their defaults.

    Args:
        name: of the command, as it is typed. first: words that stand before the keywords'.
        given: by the names of options, with underscores. A list stands for values between commas, and a flag is true
            or false; None is as if it were not given.

    Raises:
        UserError: a keyword that is no option, or a value that the option does not take.
    """
    known = {option.name: option for option in command.params if isinstance(option, click.Option) and option.name}
    for keyword in given:
        if keyword not in known or keyword in _OF_FILES:
            raise unknown_choice("option", keyword, known.keys() - _OF_FILES)
    words = list(first)
    for keyword, value in given.items():
        words += _words(known[keyword], value)
    try:
        with command.make_context(name, list(words)) as context:
            options = dict(context.params)
    except click.ClickException as error:
        raise UserError(usage_text(error)) from None
    return Asked(options, (*name.split(), *words))


def _words(option: click.Option, value: object) -> Iterator[str]:
    """An option and its value, as they are typed."""
    if value is None:
        return
    flag = option.opts[0]
    if option.is_flag:
        if not isinstance(value, bool):
            raise UserError(f"{option.name}={value!r}: this is True or False")
        if value or option.secondary_opts:
            yield flag if value else option.secondary_opts[0]
        return
    listed = [value] if isinstance(value, str) or not isinstance(value, Sequence) else list(value)
    for text in map(str, listed) if option.multiple else [",".join(map(str, listed))]:
        # Joined by =, so that a value may begin with a dash.
        yield from [f"{flag}={text}"] if text.startswith("-") else [flag, text]
