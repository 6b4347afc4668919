"""A command in the process of the tests, which has loaded torch already: for what is over before any rank starts."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import IO
from unittest import mock

from paradl_bench.cli import main as paradl_bench


def run_in_process(
    where: Path, *arguments: str, main: Callable[[], None] = paradl_bench, program: str = "paradl-bench"
) -> CompletedProcess[str]:
    """What ``python -m paradl_bench ARGUMENTS`` gives in a directory; ranks that it starts are processes."""
    code = 0
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as out,
        tempfile.TemporaryFile("w+", encoding="utf-8") as err,
        _in_directory(where),
        mock.patch.object(sys, "argv", [program, *arguments]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        return CompletedProcess(arguments, code, _text(out), _text(err))


def _text(stream: IO[str]) -> str:
    stream.seek(0)
    return stream.read()


@contextlib.contextmanager
def _in_directory(where: Path) -> Iterator[None]:
    """Modules of that directory are found, as ``python -m`` finds them, and forgotten afterwards."""
    before, known = Path.cwd(), set(sys.modules)
    os.chdir(where)
    try:
        with mock.patch.object(sys, "path", [str(where), *sys.path]):
            yield
    finally:
        os.chdir(before)
        # The directory of the tests holds the program itself: forgotten, its modules would be loaded a second time.
        for name in set(sys.modules) - known if where != before else ():
            path = getattr(sys.modules[name], "__file__", None)
            if path and Path(path).is_relative_to(where):
                del sys.modules[name]
