"""A page of ``predict explore`` that is ready to be served: its socket, its address, and how to reach it by ssh."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paradl_bench.core.errors import UserError, unknown_choice

if TYPE_CHECKING:
    from starlette.applications import Starlette


class Opening(NamedTuple):
    """What is to be served where.

    Attributes:
        tunnel: the command that brings the page to one's own machine; empty where this is it.
    """

    application: Starlette
    at: socket.socket
    address: str
    tunnel: str


def begin(options: Mapping[str, Any]) -> Opening:
    """Read the profiles, and take a port.

    Args:
        options: of the command.

    Raises:
        UserError: a profile is unreadable, the model is unknown, the port is in use, or what serves pages is not
            installed.
    """
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} serves the page and is not installed: pip install 'paradl[explore]'") from None
    from predict.validation.report.explore.explorer import Explorer
    from predict.validation.report.explore.server import LOOPBACK, application, listening, new_token

    model, paths = options["model"], list(map(Path, options["profiles"]))
    explorer = Explorer(paths)
    known = [name for profile in explorer.choices()["profiles"] for name in profile["models"]]
    if model and model not in known:
        if not Path(model).is_file():
            raise unknown_choice("model", model, sorted(set(known)), listed_by="paradl-bench models")
        explorer = Explorer(paths, [model])
    start = {name: options[name] for name in ("ranks", "batch")} | {
        "model": model or explorer.choices()["profiles"][0]["models"][0],
        "memory": options["memory"] or "",
    }
    at, token = listening(options["port"]), new_token()
    port = at.getsockname()[1]
    far = f"ssh -N -L {port}:{LOOPBACK}:{port} {socket.getfqdn()}" if "SSH_CONNECTION" in os.environ else ""
    return Opening(application(explorer, token, port, start), at, f"http://{LOOPBACK}:{port}/{token}/", far)
