"""Logs that tests import: small ones of our own, and public ones that lie beside the repository on some machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from paradl_bench.importers.catalog import importers
from paradl_bench.importers.importer import Imported, ImportOptions, load_file

DATA = Path(__file__).parents[2] / "data" / "imports"


def public_data() -> Path:
    """The folder of public measurements; skips the test where it is absent.

    Beside the repository, or beside the main working tree of a linked one.
    """
    root = Path(__file__).parents[3]
    pointer = root / ".git"
    if pointer.is_file():
        # "gitdir: MAIN/.git/worktrees/NAME"
        root = Path(pointer.read_text().removeprefix("gitdir:").strip()).parents[2]
    folder = root.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the public measurements (../shared/data) are not here")
    return folder


def read_log(name: str, path: Path, options: ImportOptions | None = None) -> Imported:
    """A file as one importer reads it."""
    return importers()[name].read(load_file(path), options or ImportOptions())
