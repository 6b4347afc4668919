"""``paradl-bench models``: the names that the other commands take."""

from __future__ import annotations

import json

import click
import msgspec

from paradl_bench.core.frames import print_rows
from paradl_bench.core.terminal.command_line import say, tell
from paradl_bench.core.terminal.forms import summary_format


class KnownModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is known by name."""

    model: str


@click.command("models")
@summary_format("json is a list; csv and parquet have one model in each row.")
def COMMAND(as_json: bool) -> None:  # noqa: N802
    """List the models known by name; others are a Hugging Face config.json, or package.module:factory."""
    from paradl_bench.network.models.catalog import model_names

    names = model_names()
    if print_rows(KnownModel, (KnownModel(model=name) for name in names)):
        return
    if as_json:
        click.echo(json.dumps(names))
        return
    tell("\n".join(names), lines=True)
    say("or path/config.json, a Hugging Face configuration, or package.module:factory, which returns an nn.Module")
