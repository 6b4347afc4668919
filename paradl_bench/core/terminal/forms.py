"""``--format``: one option of all commands that print tables. ``--json`` and ``--csv`` stay as other words for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paradl_bench.core.errors import UserError

if TYPE_CHECKING:
    from pandas import DataFrame

TABLE, JSON, CSV, PARQUET, MARKDOWN = _FORMS = "table", "json", "csv", "parquet", "markdown"
_ALIAS: dict[str, Any] = {"is_flag": True, "hidden": True, "is_eager": True, "expose_value": False}
_ASKED = "paradl.format"
_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def asked_form() -> str:
    """What the command that runs is to print; a table where it has no such option, or none runs."""
    context = click.get_current_context(silent=True)
    form, _ = context.meta.get(_ASKED, (TABLE, "")) if context else (TABLE, "")
    return str(form)


def _ask(ctx: click.Context, form: str, typed: str) -> None:
    earlier, by = ctx.meta.setdefault(_ASKED, (form, typed))
    if earlier != form:
        raise UserError(f"{by} and {typed} exclude each other: give one")


def _ask_alias(ctx: click.Context, parameter: click.Parameter, given: bool) -> None:
    if given:
        _ask(ctx, parameter.opts[0].removeprefix("--"), parameter.opts[0])


def _ask_form(ctx: click.Context, parameter: click.Parameter, form: str | None) -> str:
    if form is not None:
        _ask(ctx, form, f"--format {form}")
    asked, _ = ctx.meta.get(_ASKED, (TABLE, ""))
    if asked != TABLE and parameter.name:
        # An alias was typed, which has no value of its own.
        ctx.set_parameter_source(parameter.name, click.core.ParameterSource.COMMANDLINE)
    return str(asked)


def _ask_printed(ctx: click.Context, parameter: click.Parameter, form: str | None) -> None:
    """Of a command that prints, but writes no file: what can't be printed is refused before any work is done."""
    check_form(_ask_form(ctx, parameter, form))


def _is_json(ctx: click.Context, _: click.Parameter, given: bool) -> bool:
    if given:
        _ask(ctx, JSON, "--json")
    asked, _typed = ctx.meta.get(_ASKED, (TABLE, ""))
    return bool(asked == JSON)


def table_format(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--format`` of a command whose tables are DataFrames in Python too; its argument is ``form``."""
    for alias in (JSON, CSV):
        command = click.option(f"--{alias}", f"as_{alias}", callback=_ask_alias, **_ALIAS)(command)
    return click.option(
        "--format",
        "form",
        type=click.Choice(_FORMS),
        callback=_ask_form,
        help="Form of what is printed or written to -o. csv and parquet have fixed columns, as in Python. Default:"
        " table; with -o: by the file's ending, else json.",
    )(command)


def summary_format(text: str) -> _Decorator:
    """``--format`` of a command that says more than a table holds; its argument is the flag ``as_json``.

    The command prints CSV and Parquet by :func:`~paradl_bench.core.frames.print_rows`.

    Args:
        text: what JSON, CSV and Parquet hold, in a sentence.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        command = click.option("--json", "as_json", is_flag=True, hidden=True, callback=_is_json)(command)
        command = click.option(f"--{CSV}", f"as_{CSV}", callback=_ask_alias, **_ALIAS)(command)
        return click.option(
            "--format",
            "form",
            type=click.Choice(_FORMS),
            is_eager=True,
            expose_value=False,
            callback=_ask_printed,
            help=f"Form of what is printed. {text} Default: table.",
        )(command)

    return decorate


def form_of(target: str | None, form: str) -> str:
    """What a file holds: as asked for; where that is a table for a person, what its name ends in says it."""
    ending = "" if target is None else target.rpartition(".")[2].lower()
    return form if form != TABLE else ending if ending in (CSV, PARQUET) else JSON


def check_form(form: str, output: str | None = None) -> None:
    """Refuse, by a UserError before any work is done, what cannot be written as asked for."""
    if form == MARKDOWN and output:
        raise UserError("--format markdown prints tables for a person: leave -o out, and redirect standard output")
    if form_of(output, form) != PARQUET:
        return
    if output in (None, "-") and sys.stdout.isatty():
        raise UserError("--format parquet is binary: give -o FILE.parquet, or redirect standard output")
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise UserError("Parquet needs pyarrow: pip install 'paradl[parquet]'") from None


def check_page(target: str) -> None:
    """Refuse, by a UserError before any work is done, a page whose name says that it is something else."""
    if target != "-" and Path(target).suffix.lower() not in ("", ".html", ".htm"):
        raise UserError(f"{target}: the page is HTML; give a name that ends in .html")


def frame_bytes(frame: DataFrame, form: str) -> bytes:
    """A DataFrame as CSV or Parquet. A list or record in a cell is JSON text; a text steers no terminal."""
    import msgspec
    from pandas import Series

    from paradl_bench.core.terminal.printed import plain

    shown = frame.copy()
    for name, dtype in shown.dtypes.items():
        if dtype == "object":
            texts = [None if cell is None else msgspec.json.encode(cell).decode() for cell in shown[name]]
            shown[name] = Series(texts, dtype="string", index=shown.index)
        elif dtype == "string":
            shown[name] = shown[name].map(plain, na_action="ignore").astype("string")
    if form == PARQUET:
        return bytes(shown.to_parquet(None, engine="pyarrow", index=False))
    return shown.to_csv(index=False, lineterminator="\n").encode()
