"""Names of the profiles that come with the tool, and the files behind them."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from paradl_bench.core.errors import unknown_choice

_FOLDER = "data"


@cache
def shipped_profiles() -> dict[str, Path]:
    """Files of the profiles that come with the tool, by name."""
    folder = Path(__file__).parent / _FOLDER
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def profile_file(given: str | os.PathLike[str]) -> Path:
    """The file of a profile: a path that is there, else the shipped profile of that name.

    Raises:
        UserError: a plain word that is neither; the message lists the names.
    """
    path = Path(given)
    if path.exists() or path.suffix or path.name != str(path):
        return path
    shipped = shipped_profiles()
    if path.name not in shipped:
        raise unknown_choice("file or shipped profile", path.name, shipped)
    return shipped[path.name]
