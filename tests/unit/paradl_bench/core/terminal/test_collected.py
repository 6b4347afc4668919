"""Options that belong together reach a command as one argument; who reads the parameters still sees each option."""

from __future__ import annotations

from typing import NamedTuple

import click
from click.testing import CliRunner

from paradl_bench.core.terminal.collected import collected


class Size(NamedTuple):
    width: int
    height: int


@click.command()
@click.option("--width", type=int, default=3)
@click.option("--height", type=int, default=4)
@click.option("--name", default="box")
@click.pass_context
@collected(size=Size)
def box(context: click.Context, /, size: Size, name: str) -> None:
    """Say a size."""
    source = context.get_parameter_source("height")
    click.echo(f"{name} {size.width}x{size.height} {source.name if source else None}")


def test_fields_of_a_type_make_one_argument() -> None:
    result = CliRunner().invoke(box, ["--height", "5", "--name", "crate"])
    assert result.output == "crate 3x5 COMMANDLINE\n"


def test_help_shows_every_option() -> None:
    shown = CliRunner().invoke(box, ["--help"]).output
    assert all(option in shown for option in ("--width", "--height", "--name", "Say a size."))
