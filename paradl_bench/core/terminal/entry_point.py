"""How each of the three programs starts, as a command and by ``python -m``."""

from __future__ import annotations

from collections.abc import Callable

from paradl_bench.core.working_directory import leave_out_working_directory


def entry_point(load: Callable[[], Callable[[], None]]) -> Callable[[], None]:
    """The program's entry point; from this call on nothing is imported from the working directory.

    ``load`` imports the program's command line and gives what runs it; it is called once an interrupt is one line.
    """
    leave_out_working_directory()

    def main() -> None:
        """Entry point: from its first moment on an interrupt ends it in one line."""
        # Only now: the working directory has to be off the path before anything else is imported.
        from paradl_bench.core.interruption import end_at_once_until_started

        end_at_once_until_started()
        load()()

    return main
