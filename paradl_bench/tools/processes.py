"""Programs found, started without a shell, watched and ended, with what they print in a file."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paradl_bench.core.errors import UserError, WorkError
from paradl_bench.core.files.storage import open_own, open_regular
from paradl_bench.core.terminal.printed import plain_lines
from paradl_bench.tools.tool import Launcher, SweepTool

_HELP_SECONDS = 30.0
_GRACE_SECONDS = 5.0
# What a program left behind when it ended well has no ranks to take down.
_GRACE_SECONDS_LEFT_BEHIND = 1.0
_POLL_SECONDS = 0.02
_LAST_LINES = 12
_LAST_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a program ended: its code is None where its time was up, negative where a signal ended it."""

    exit_code: int | None
    last_lines: tuple[str, ...]

    @property
    def well(self) -> bool:
        """Whether it ended by itself, without an error."""
        return self.exit_code == 0


def find_program(tool: SweepTool, operation: str, tool_path: Path | None) -> Path:
    """The program that sweeps an operation: below ``tool_path`` where given, else on PATH.

    Raises:
        UserError: the tool has no program for the operation, or the path is none.
        WorkError: the program is not there.
    """
    names = tool.programs.get(operation)
    if names is None:
        raise UserError(f"--ops {operation}: {tool.name} sweeps {', '.join(sorted(tool.programs))}")
    if tool_path is None:
        for path in filter(None, map(shutil.which, names)):
            return Path(path)
        raise WorkError(f"{names[0]} of {tool.name} is not on PATH; say where it is with --tool-path DIR")
    if tool_path.is_file():
        if tool_path.name not in names:
            raise UserError(f"--tool-path {tool_path}: {operation} is swept by {' or '.join(names)}; give their folder")
        return _runnable(tool_path)
    if not tool_path.is_dir():
        raise UserError(f"--tool-path {tool_path} does not exist; give the folder with {names[0]}")
    for place, name in itertools.product(tool.places, names):
        if (tool_path / place / name).is_file():
            return _runnable(tool_path / place / name)
    raise WorkError(f"--tool-path {tool_path} holds no {names[0]} of {tool.name}")


def _runnable(path: Path) -> Path:
    if not os.access(path, os.X_OK):
        raise WorkError(f"{path} is no program that may be run; chmod +x it")
    return path.resolve()


def launch_prefix(tool: SweepTool, launcher: Launcher, ranks: int, extra: Sequence[str]) -> list[str]:
    """What stands before the program: nothing, ``mpirun -np R`` or ``srun -n R``.

    Raises:
        UserError: the tool needs a launcher, or arguments for one were given without it.
        WorkError: the launcher is not there.
    """
    if launcher == "own":
        if not tool.alone:
            raise UserError(f"--tool {tool.name}: a launcher has to start its ranks: --launcher mpirun or srun")
        if extra:
            raise UserError("--launcher-arg goes with --launcher mpirun or srun")
        return []
    program = shutil.which(launcher)
    if program is None:
        raise WorkError(f"{launcher} is not on PATH; load the MPI module, or choose another --launcher")
    return [program, "-np" if launcher == "mpirun" else "-n", str(ranks), *extra]


def can_report(program: Path, tool: SweepTool) -> bool:
    """Whether the program's help names the option that writes a JSON report."""
    if not tool.report_flag:
        return False
    try:
        done = subprocess.run(
            [str(program), "--help"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_HELP_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return tool.report_flag.encode() in done.stdout


def run_program(command: Sequence[str], log: Path, *, timeout_s: float, variables: Mapping[str, str]) -> Ended:
    """Run a program to its end or to the limit; what it prints goes to ``log``. Its whole process group is ended.

    Args:
        variables: of the environment, beside this process's own.

    Raises:
        WorkError: it can't be started.
    """
    with open(open_own(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as output:
        words = [*(f"{name}='{value}'" for name, value in variables.items()), *command]
        output.write((" ".join(words) + "\n").encode())
        output.flush()
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **variables},
            )
        except OSError as error:
            raise WorkError(f"{command[0]} does not start: {error.strerror or error}") from error
        try:
            code: int | None = process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            # Also behind an interrupt, and for what the program left behind.
            _end(process)
    return Ended(exit_code=code, last_lines=_last_lines(log))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a program's whole group: politely, then for good. Where it ended well and left nothing, this does nothing."""
    if not _signalled(process.pid, signal.SIGTERM):
        process.wait()
        return
    until = time.monotonic() + (_GRACE_SECONDS if process.poll() is None else _GRACE_SECONDS_LEFT_BEHIND)
    while time.monotonic() < until and (process.poll() is None or _signalled(process.pid, 0)):
        time.sleep(_POLL_SECONDS)
    _signalled(process.pid, signal.SIGKILL)
    process.wait()


def _signalled(group: int, number: int) -> bool:
    """Send a signal to a process group; whether it has members still."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _last_lines(log: Path) -> tuple[str, ...]:
    """The last lines that were printed, without escapes and control characters."""
    with open_regular(log) as stream:
        stream.seek(max(0, log.stat().st_size - _LAST_BYTES))
        text = stream.read().decode("utf-8", errors="replace")
    return tuple(line for line in plain_lines(text) if line.strip())[-_LAST_LINES:]
