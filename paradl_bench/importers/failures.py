"""Runs in which a rank died: what launchers, MPI and NCCL print then, and rows of such a run refused."""

from __future__ import annotations

import re

from paradl_bench.importers.importer import Imported, ImportOptions

FAILURE = re.compile(
    r"Test (?:NCCL|CUDA|HIP) failure|Segmentation fault|unhandled (?:cuda|system) error"
    r"|exited on signal|task \d+: (?:Exited|Killed|Aborted)|DUE TO TIME LIMIT|oom[-_]kill"
    r"|process returned a non-zero exit|MPI_ABORT was invoked|BAD TERMINATION OF ONE OF YOUR"
    r"|application called MPI_Abort"
)
"""A line that says so."""


def refusal(failure: str) -> str:
    """Why rows of a failed run are not taken."""
    return f"the run failed ({failure.strip()[:80]}); --keep failed takes it anyway"


class Watched:
    """A table as it is read: where its run turns out to have failed, its rows are taken back."""

    def __init__(self, result: Imported, options: ImportOptions) -> None:
        self._result = result
        self._options = options
        self._first = len(result.collectives)
        self._lines: list[tuple[int, str]] = []
        self._failure: str | None = None

    def row(self, number: int, line: str) -> None:
        """Remember a row's line, once it is among the records."""
        if len(self._result.collectives) > self._first + len(self._lines):
            self._lines.append((number, line))

    def look(self, line: str) -> None:
        """Look for words of a failure."""
        if self._failure is None and FAILURE.search(line):
            self._failure = line

    def close(self) -> None:
        """Take the rows back if the run failed and nobody asked for them."""
        if self._failure is None or "failed" in self._options.keep:
            return
        del self._result.collectives[self._first :]
        self._result.rows -= len(self._lines)
        for number, line in self._lines:
            self._result.drop(number, line, refusal(self._failure))
