"""A mistake on the command line in words: what click says, and what would be right."""

from __future__ import annotations

import click

_NUMBERS = (
    (" is not a valid integer range.", " is no whole number"),
    (" is not a valid integer.", " is no whole number"),
    (" is not a valid float range.", " is no number"),
    (" is not a valid float.", " is no number"),
)


def usage_text(error: click.ClickException) -> str:
    """The message, and behind it how the option, argument or command is written."""
    text = error.format_message()
    if isinstance(error, click.exceptions.NoSuchCommand):
        return _of_command(error, text)
    if isinstance(error, click.exceptions.NoSuchOption):
        return _of_option(error, text)
    for said, meant in _NUMBERS:
        text = text.replace(said, meant)
    parameter = getattr(error, "param", None)
    right = _spelled(parameter) if isinstance(parameter, click.Parameter) else ""
    # Of a choice click names all there are.
    if not right or isinstance(getattr(parameter, "type", None), click.Choice):
        return text
    return f"{text.rstrip('.')}: write {right}"


def given_flags(context: click.Context, *names: str) -> list[str]:
    """Of these parameters of a command, the options that its command line gave, as they are written."""
    flags = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    typed = click.core.ParameterSource.COMMANDLINE
    return [flags[name] for name in names if context.get_parameter_source(name) is typed]


def _spelled(parameter: click.Parameter) -> str:
    """An option as it is written, with the beginning of its help: ``--batch N (Local batches to measure)``."""
    if not isinstance(parameter, click.Option):
        return ""
    form = parameter.metavar or parameter.type.name.upper().removesuffix(" RANGE")
    first = (parameter.help or "").partition(". ")[0].rstrip(".")
    return f"{parameter.opts[-1]} {form}" + (f" ({first})" if first else "")


def _of_option(error: click.exceptions.NoSuchOption, text: str) -> str:
    """What is no option, and the commands beside this one that have it."""
    if error.ctx is None or not isinstance(group := error.ctx.find_root().command, click.Group):
        return text
    root = error.ctx.find_root()
    commands = {f"{root.info_name} {name}": group.get_command(root, name) for name in group.list_commands(root)}
    having = [
        name
        for name, command in {str(root.info_name): group, **commands}.items()
        if command is not None and any(error.option_name in parameter.opts for parameter in command.params)
    ]
    return f"No such option {error.option_name!r} here; it belongs to {', '.join(having)}" if having else text


def _of_command(error: click.exceptions.NoSuchCommand, text: str) -> str:
    """What is no command, the one that was meant, or all there are."""
    from difflib import get_close_matches

    group = error.ctx.command if error.ctx is not None else None
    if "Did you mean" in text or not isinstance(group, click.Group) or error.ctx is None:
        return text
    names = group.list_commands(error.ctx)
    near = get_close_matches(text.partition("'")[2].partition("'")[0], names, n=1)
    return f"{text} Did you mean {near[0]!r}?" if near else f"{text} Commands are {', '.join(names)}"
