"""Notebooks of docs/ run in a kernel of their own, as a reader runs them."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from unittest import mock

import nbformat
from nbclient import NotebookClient
from traitlets.config import Config

NOTEBOOKS = Path(__file__).parents[2] / "docs" / "notebooks"
_LIMIT_S = 1500


def executed(name: str, folder: Path, *, more: str = "") -> nbformat.NotebookNode:
    """A notebook with the outputs that it gives now; an error in a cell is raised.

    Args:
        folder: where it runs. more: code of another cell at its end.
    """
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    if more:
        notebook.cells.append(nbformat.v4.new_code_cell(more))
    # Its cells type the commands, which lie beside this Python.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    with tempfile.TemporaryDirectory() as sockets, mock.patch.dict(os.environ, PATH=path, TMPDIR=str(folder)):
        # A TCP port is picked before the kernel binds it, and another test's ranks may take it between the two.
        connection = {"transport": "ipc", "ip": f"{sockets}/kernel"}
        client = NotebookClient(
            notebook,
            timeout=_LIMIT_S,
            kernel_name="python3",
            coalesce_streams=True,
            resources={"metadata": {"path": str(folder)}},
            config=Config({"KernelManager": connection}),
        )
        client.execute()
    return notebook


def texts(notebook: nbformat.NotebookNode) -> list[str]:
    """What its cells print and show, without pictures."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    shown = (output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs)
    return [text for text in shown if not text.startswith("<Figure")]
