"""How each of the three programs starts and ends, as a command and by ``python -m``."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable

from paradl_bench.core.working_directory import leave_out_working_directory


def entry_point(load: Callable[[], Callable[[], None]], *, frees: bool = True) -> Callable[[], None]:
    """The program's entry point; from this call on nothing is imported from the working directory.

    Args:
        load: imports the program's command line and gives what runs it; it is called once an interrupt is one line.
        frees: false ends the process without freeing object by object what it holds.
    """
    leave_out_working_directory()

    def main() -> None:
        """Entry point: from its first moment on an interrupt ends it in one line."""
        # Only now: the working directory has to be off the path before anything else is imported.
        from paradl_bench.core.interruption import end_at_once_until_started

        end_at_once_until_started()
        if frees:
            load()()
        else:
            _run_and_free_nothing(load)

    return main


def _run_and_free_nothing(load: Callable[[], Callable[[], None]]) -> None:
    codes: list[int] = []

    def end() -> None:
        if codes:
            os._exit(codes[0])

    # Handlers are called in reverse: threads have ended then, and what was registered behind this has cleaned up.
    atexit.register(end)
    try:
        load()()
    except SystemExit as ended:
        # The standard streams were flushed before it was raised.
        if isinstance(ended.code, int):
            codes.append(ended.code)
        raise
