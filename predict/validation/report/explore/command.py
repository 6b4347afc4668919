"""``predict explore``. Imports click alone."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import click

from paradl_bench.core.terminal.help import GroupedCommand


@click.command("explore", cls=GroupedCommand, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("profiles", nargs=-1, required=True, metavar="PROFILE...")
@click.option("--model", metavar="MODEL", help="To begin with; of the profile, or a language model with a known name.")
@click.option("--ranks", type=click.IntRange(1), default=64, show_default=True, help="To begin with.")
@click.option("--batch", type=click.IntRange(1), default=1024, show_default=True, help="To begin with: global.")
@click.option("--memory", metavar="SIZE", help="Of a device, to begin with, as 80GiB. Default: of the profile's.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="On this machine. Default: a free one.")
@click.option("--browser/--no-browser", default=True, show_default=True, help="Open the page; never over ssh.")
def explore(**options: Any) -> None:
    """Open a page on this machine: strategies, memory and timeline follow sliders for links and devices.

    PROFILE is a file, or the name of one that comes with the tool (predict profiles). Only this machine can reach the
    page, by its address alone. It runs until it is interrupted.

    \b
    predict explore profile.json
    predict explore h100-sxm b200 --model gpt2-medium --ranks 512 --batch 4096
    """
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        from paradl_bench.core.errors import UserError

        raise UserError(
            f"{error.name} is not installed, which serves the page: pip install 'paradl[explore]'"
        ) from None
    import webbrowser

    from paradl_bench.core.terminal.command_line import tell
    from predict.validation.report.explore.explorer import Explorer
    from predict.validation.report.explore.server import LOOPBACK, application, listening, new_token, serve

    model = options["model"]
    explorer = Explorer(list(map(Path, options["profiles"])), [model] if model else [])
    start = {name: options[name] for name in ("ranks", "batch")} | {
        "model": model or explorer.choices()["profiles"][0]["models"][0],
        "memory": options["memory"] or "",
    }
    at, token = listening(options["port"]), new_token()
    port = at.getsockname()[1]
    address = f"http://{LOOPBACK}:{port}/{token}/"
    tell(f"Open {address}")
    far = "SSH_CONNECTION" in os.environ
    if far:
        tell(f"From your own machine: ssh -N -L {port}:{LOOPBACK}:{port} {socket.getfqdn()}, then open it there.")
    tell("Ctrl-C ends it.")
    if options["browser"] and not far:
        webbrowser.open(address)
    serve(application(explorer, token, port, start), at)
