"""``paradl-bench models``: the names that the other commands take."""

from __future__ import annotations

import json

import click

from paradl_bench.core.terminal.command_line import say, tell
from paradl_bench.core.terminal.forms import json_format


@click.command("models")
@json_format("json is a list.")
def COMMAND(as_json: bool) -> None:  # noqa: N802
    """List the models known by name; others are a Hugging Face config.json, or package.module:factory."""
    from paradl_bench.network.models.catalog import model_names

    names = model_names()
    if as_json:
        click.echo(json.dumps(names))
        return
    tell("\n".join(names), lines=True)
    say("or path/config.json, a Hugging Face configuration, or package.module:factory, which returns an nn.Module")
