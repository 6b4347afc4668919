"""Help of all commands: options in named groups, of which ``--help`` lists some by their flags alone; completion."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import click

from paradl_bench.core.terminal.command_line import tell

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

_FEW = 20
"""So many options ``--help`` explains all."""
_SHELLS = ("bash", "zsh", "fish")
_ALL = "paradl.help_all"


class _Group(NamedTuple):
    title: str
    folded: bool


_OTHER = _Group("Other options", False)
_group_of: WeakKeyDictionary[click.Parameter, _Group] = WeakKeyDictionary()


def together(*options: Decorator) -> Decorator:
    """One decorator for several options, which help shows in this order."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def option_group(title: str, *options: Decorator, folded: bool = True) -> Decorator:
    """As :func:`together`, under a title; a group inside of it keeps its own.

    Args:
        folded: where a command has many options, ``--help`` names these alone and ``--help-all`` explains them.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        before = len(getattr(command, "__click_params__", ()))
        command = together(*options)(command)
        parameters: list[click.Parameter] = vars(command).get("__click_params__", [])
        for parameter in parameters[before:]:
            _group_of.setdefault(parameter, _Group(title, folded))
        return command

    return decorate


def options_by_group(command: click.Command, ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
    """Flags and help of all options that are shown, by the title of their group; what has no group comes last."""
    options: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is not None and isinstance(parameter, click.Option):
            options.setdefault(_group_of.get(parameter, _OTHER).title, []).append(record)
    others = options.pop(_OTHER.title, [])
    return {**options, (_OTHER.title if options else "Options"): others}


class GroupedCommand(click.Command):
    """A command whose help shows options in groups."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Its own, ``--help-all``, and of a program ``--show-completion``."""
        parameters = super().get_params(ctx)
        parameters.insert(-1, _HELP_ALL)
        if ctx.parent is None and isinstance(self, click.Group):
            parameters.insert(-1, _SHOW_COMPLETION)
        return parameters

    def _folds(self, parameters: list[click.Parameter]) -> bool:
        shown = [parameter for parameter in parameters if isinstance(parameter, click.Option) and not parameter.hidden]
        return len(shown) > _FEW and any(_group_of.get(option, _OTHER).folded for option in shown)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Groups with their options; behind them the flags of groups that are folded; the commands of a group."""
        parameters = self.get_params(ctx)
        folds = self._folds(parameters) and not ctx.meta.get(_ALL)
        parameters = [option for option in parameters if option is not _HELP_ALL or folds]
        explained: dict[_Group, list[tuple[str, str]]] = {}
        named: dict[str, list[str]] = {}
        for parameter in parameters:
            group, record = _group_of.get(parameter, _OTHER), parameter.get_help_record(ctx)
            if record is None or isinstance(parameter, click.Argument):
                continue
            if folds and group.folded:
                named.setdefault(group.title, []).append(parameter.opts[-1])
            else:
                explained.setdefault(group, []).append(record)
        others = explained.pop(_OTHER, [])
        for group, records in explained.items():
            with formatter.section(group.title):
                formatter.write_dl(records)
        if named:
            with formatter.section("More options (explained by --help-all)"):
                _write_flags(named, formatter)
        with formatter.section(_OTHER.title if explained else "Options"):
            formatter.write_dl(others)
        if isinstance(self, click.Group):
            self.format_commands(ctx, formatter)


def _write_flags(named: Mapping[str, list[str]], formatter: click.HelpFormatter) -> None:
    """Titles, and beside each its flags, none of which is broken at its hyphens."""
    indent = formatter.current_indent + max(map(len, named)) + 2
    for title, flags in named.items():
        text = ", ".join(flags)
        lines = textwrap.wrap(text, formatter.width - indent, break_long_words=False, break_on_hyphens=False)
        first = f"{'':{formatter.current_indent}}{title}"
        for line in lines:
            formatter.write(f"{first:{indent}}{line}\n")
            first = ""


class GroupedGroup(GroupedCommand, click.Group):
    """A program: a group of such commands. It prints what completes its words in a shell."""

    command_class = GroupedCommand


def _print_all(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        tell(ctx.get_help(), lines=True)
        ctx.exit()


def _print_completion(ctx: click.Context, _: click.Parameter, shell: str | None) -> None:
    if shell is None or ctx.resilient_parsing:
        return
    from click.shell_completion import get_completion_class

    program = ctx.info_name or ""
    variable = f"_{program.replace('-', '_')}_COMPLETE".upper()
    completion = get_completion_class(shell)
    if completion is not None:
        tell(completion(ctx.command, {}, program, variable).source(), lines=True)
    ctx.exit()


_HELP_ALL = click.Option(
    ["--help-all"],
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_all,
    help="Explain all options and exit.",
)
_SHOW_COMPLETION = click.Option(
    ["--show-completion"],
    type=click.Choice(_SHELLS),
    is_eager=True,
    expose_value=False,
    callback=_print_completion,
    help="Print the code that completes commands and options in this shell: eval it in ~/.bashrc or ~/.zshrc.",
)
