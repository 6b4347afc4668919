"""What the three commands share at the terminal: exit codes, one-line errors, progress on stderr, output files.

Imports nothing heavy: rich is loaded when something is drawn.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paradl_bench.core.errors import ParadlError, UserError, WorkError, shown
from paradl_bench.core.files.storage import write_pieces_atomically
from paradl_bench.core.interruption import Terminated, signals_raise
from paradl_bench.core.terminal.forms import MARKDOWN, asked_form
from paradl_bench.core.terminal.printed import plain
from paradl_bench.core.terminal.streams import Streams
from paradl_bench.core.terminal.usage import usage_text

if TYPE_CHECKING:
    from rich.console import Console


def run_command(command: click.Command, program: str) -> None:
    """Run a click command as a process: parse ``sys.argv``, and exit 0, 2 (user's mistake) or 3 (the work failed).

    ``--debug`` anywhere in the arguments shows tracebacks. SIGTERM unwinds the command as SIGINT does.
    """
    streams = Streams()
    with streams.replaced(), signals_raise():
        code = _code_of(command, program)
        failure = streams.failure
        if failure is not None:
            lost = _fail(program, f"cannot write standard output: {failure.strerror or failure}", 3, False)
            code = code or lost
    sys.exit(code)


def _code_of(command: click.Command, program: str) -> int:
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    debug = len(arguments) != len(sys.argv) - 1
    code = 0
    try:
        result = command.main(args=arguments, prog_name=program, standalone_mode=False)
        code = result if isinstance(result, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else error.format_message(), err=True)
        code = 2
    except click.ClickException as error:
        code = _fail(program, usage_text(error), 2, debug)
    except ParadlError as error:
        to_go_on = f"; to go on: {_same_command(program)}" if _goes_on(error) else ""
        code = _fail(program, str(error), error.exit_code, debug, to_go_on)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "torchvision"):
            raise
        wanted = f"{error.name} is not installed, and this command needs it: pip install 'paradl[bench]'"
        code = _fail(program, wanted, WorkError.exit_code, debug)
    except (KeyboardInterrupt, click.Abort) as error:
        how = "ended by SIGTERM (time limit?)" if _terminated(error) else "interrupted"
        kept = "what was measured is kept" if program == "paradl-bench" else "no file is left half written"
        again = f": run the same command again to go on: {_same_command(program)}"
        code = _fail(program, f"{how}; {kept}", 3, debug, again)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        code = _fail(program, f"{error.strerror or error}{where}", WorkError.exit_code, debug)
    return code


def _terminated(error: BaseException) -> bool:
    """Whether SIGTERM is behind it; click makes an Abort of every KeyboardInterrupt."""
    return isinstance(error, Terminated) or isinstance(error.__cause__, Terminated)


def _goes_on(error: ParadlError) -> bool:
    """Whether to say how to go on: of a rank that our launcher started, the launcher says it."""
    return isinstance(error, WorkError) and error.resumable and os.environ.get("PARADL_LAUNCHER") != "own"


def _same_command(program: str) -> str:
    return shlex.join([program, *sys.argv[1:]])


def _fail(program: str, message: str, code: int, debug: bool, behind: str = "") -> int:
    """Print the one line; what stands behind the message is not shortened with it."""
    if debug:
        traceback.print_exc()
    click.echo(plain(f"{program}: error: {shown(message)}{' '.join(behind.splitlines())}"), err=True)
    return code


class Progress:
    """A progress display, which shows nothing unless it is a bar."""

    def advance(self, units: float = 1) -> None:
        """Count ``units`` more as done."""

    def describe(self, text: str) -> None:
        """Say what runs now."""


class _Bar(Progress):
    def __init__(self, bar: Any, task: Any) -> None:
        self._bar, self._task = bar, task

    def advance(self, units: float = 1) -> None:
        self._bar.advance(self._task, units)
        if not self._bar.live.auto_refresh:
            self._bar.refresh()

    def describe(self, text: str) -> None:
        self._bar.update(self._task, description=text)


@contextlib.contextmanager
def progress(title: str, total: float) -> Iterator[Progress]:
    """A progress bar on stderr, or nothing where stderr is no terminal.

    ``PARADL_PROGRESS`` 1 or 0 decides instead: a rank's stderr is a file that its launcher passes on to the terminal.
    A rank draws its bar only when it advances: a thread that redraws it would run beside what is measured.
    """
    wanted = os.environ.get("PARADL_PROGRESS")
    if wanted == "0" or (wanted != "1" and not sys.stderr.isatty()):
        yield Progress()
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    from paradl_bench.core.terminal.plain_console import PlainConsole

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = PlainConsole(stderr=True, force_terminal=True)
    with RichProgress(*columns, console=console, auto_refresh=wanted != "1") as bar:
        yield _Bar(bar, bar.add_task(title, total=total))


def open_console(width: int = 100) -> Console:
    """A console on standard output; where that is no terminal, of this width unless ``COLUMNS`` says another."""
    from paradl_bench.core.terminal.plain_console import MarkdownConsole, PlainConsole

    if asked_form() == MARKDOWN:
        return MarkdownConsole()
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return PlainConsole() if known else PlainConsole(width=width)


def say(text: str, *, lines: bool = False) -> None:
    """A line for a person, on stderr, so that standard output stays clean for ``--json`` and ``-o -``.

    Args:
        lines: it has several. Otherwise a line break came with a name, which could forge a message: it is a space.
    """
    click.echo(_shown(text, lines), err=True)


def tell(text: str, *, lines: bool = False) -> None:
    """As :func:`say`, on standard output."""
    click.echo(_shown(text, lines))


def _shown(text: str, lines: bool) -> str:
    return plain(text) if lines else " ".join(plain(text).splitlines())


def write_output(target: str, content: bytes, *, force: bool = False) -> None:
    """Write to a file atomically, or to standard output for ``-``; an existing file is replaced only with ``force``.

    Raises:
        UserError: the file exists and ``force`` is not given.
    """
    write_pieces(target, (content,), force=force)


def write_pieces(target: str, pieces: Iterable[bytes], *, force: bool = False) -> None:
    """As :func:`write_output`, for what is too long to be held as a whole."""
    if target == "-":
        for piece in pieces:  # not writelines, which click's test runner does not see
            sys.stdout.buffer.write(piece)
        sys.stdout.flush()
        return
    refuse_overwrite(target, force=force)
    write_pieces_atomically(Path(target), pieces)


def refuse_overwrite(target: str, *, force: bool) -> None:
    """Raise before any work is done when ``target`` is no file's name, cannot be made, or may not be replaced."""
    if not Path(target).name:
        raise UserError(f"--output {target!r} is no file: give a path, or - for standard output")
    if target == "-":
        return
    if os.path.isdir(target):
        raise UserError(f"{target} is a folder; give a file name, or - for standard output")
    if os.path.exists(target) and not os.path.isfile(target):
        raise UserError(f"{target} is a device or a pipe; give a file name, or - for standard output")
    if os.path.exists(target) and not force:
        raise UserError(f"{target} exists; give --force to replace it, or another name")
    folder = next(folder for folder in Path(target).absolute().parents if os.path.exists(folder))
    if not folder.is_dir():
        raise UserError(f"cannot write {target}: {folder} is a file, not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"cannot write {target}: you may not write in {folder}; give another place")
