"""``predict explore``. Imports click alone."""

from __future__ import annotations

from typing import Any

import click

from paradl_bench.core.terminal.help import GroupedCommand


@click.command("explore", cls=GroupedCommand, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("profiles", nargs=-1, required=True, metavar="PROFILE...")
@click.option(
    "--model", metavar="MODEL", help="Model to begin with: one of the profile, or a language model with a known name."
)
@click.option("--ranks", type=click.IntRange(1), default=64, show_default=True, help="Number of ranks to begin with.")
@click.option(
    "--batch", type=click.IntRange(1), default=1024, show_default=True, help="Global mini-batch to begin with."
)
@click.option(
    "--memory", metavar="SIZE", help="Memory of a device to begin with, such as 80GiB. Default: the profile's."
)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port on this machine. Default: a free one.")
@click.option(
    "--browser/--no-browser", default=True, show_default=True, help="Open the page in a browser (never over ssh)."
)
def explore(**options: Any) -> None:
    """Open a page on this machine: strategies, memory and timeline follow sliders for links and devices.

    PROFILE is a file, or the name of one that comes with the tool (predict profiles). Only this machine can reach the
    page, by its address alone. It runs until it is interrupted.

    \b
    predict explore profile.json
    predict explore h100-sxm b200 --model gpt2-medium --ranks 512 --batch 4096
    """
    import webbrowser

    from paradl_bench.core.terminal.command_line import tell
    from predict.validation.report.explore.opening import begin
    from predict.validation.report.explore.server import serve

    page = begin(options)
    tell(f"Open {page.address}")
    if page.tunnel:
        tell(f"From your own machine: {page.tunnel}, then open it there.")
    tell("Ctrl-C ends it.")
    if options["browser"] and not page.tunnel:
        webbrowser.open(page.address)
    serve(page.application, page.at)
