"""The working directory as a place of modules: of a user's ``package.module:factory``, and of nothing else.

Libraries look for modules that need not be there, so that a file of such a name in a directory that somebody else
filled would run.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator


def leave_out_working_directory() -> None:
    """Import nothing from the working directory from now on; ``python -m`` puts it first.

    Where ``PYTHONPATH`` names it, it stays, behind all else: a user's predict.py cannot shadow ours.
    """
    here = _here()
    named = [os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    kept = [entry for entry in sys.path if os.path.abspath(entry) != here]
    sys.path[:] = [*kept, here] if here in named else kept


@contextlib.contextmanager
def importing_from_working_directory() -> Iterator[None]:
    """Import from the working directory as well, behind all else, while the body runs."""
    here = _here()
    if here in sys.path:
        yield
        return
    sys.path.append(here)
    try:
        yield
    finally:
        sys.path.remove(here)


def _here() -> str:
    # A directory that was removed has no name, and no modules.
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""
