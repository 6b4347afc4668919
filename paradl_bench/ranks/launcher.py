"""Ranks started on this host by this program: their variables, what they print, and who is to blame when one fails.

No torch is imported here. Every rank gets torchrun's variables, glibc's allocator thresholds and one OpenMP thread.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from paradl_bench.core.errors import ParadlError, UserError, WorkError
from paradl_bench.core.interruption import Terminated, uninterrupted
from paradl_bench.core.terminal.command_line import say
from paradl_bench.core.terminal.printed import ending, plain_lines
from paradl_bench.ranks.emulated_nodes.cluster import NODE_NAME, RECORD, EmulatedCluster
from paradl_bench.ranks.environment import ALLOCATOR_VARIABLES
from paradl_bench.ranks.hang import HangWatch
from paradl_bench.ranks.launch_secret import SECRET, new_secret
from paradl_bench.ranks.rank_place import LAUNCHER_PID, MARK, PEER_FAILURES, PEER_LOST, SAYS_ALL, STORE

_POLL_S = 0.05
# Beyond this, ranks that share cores say nothing about ranks that do not, and may exhaust the host's memory.
_RANKS_PER_CORE = 8
# A rank whose peer failed by an exception often exits before that peer does: wait for the one to blame.
_BLAME_S = 2.0
# Where all that have failed say that they lost another one, that one is about to end: what it says is the cause.
_LOST_BLAME_S = 20.0
_TERMINATE_S = 5.0
_ERROR_LINE = re.compile(r"^[\w-]+: error: (.*)$")
# How torch begins every line of a rank's traceback.
_RANK_MARK = re.compile(r"^\[rank\d+\]:[ ]?")
_TRACEBACK = "Traceback (most recent call last)"
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
_OF_FILES = re.compile(r"cannot (append to|write|cut) ")


def check_ranks_fit(ranks: int, device: str) -> None:
    """Refuse to start on this host many more ranks than it has cores; say so where ranks share cores.

    Raises:
        UserError: more than 8 ranks a core.
    """
    cores = len(os.sched_getaffinity(0))
    if device != "cpu" or ranks <= cores:
        return
    if ranks > _RANKS_PER_CORE * cores:
        raise UserError(
            f"{ranks} ranks on the {cores} cores of this host: at most {_RANKS_PER_CORE} a core are started here;"
            " start them on several hosts through srun or torchrun"
        )
    say(f"{ranks} ranks share {cores} cores: times are not those of ranks with a core each")


@dataclass(slots=True)
class _Started:
    """A rank that was started, and the files that hold what it printed."""

    rank: int
    process: subprocess.Popen[bytes]
    stderr: IO[bytes]
    forwarded: int = 0
    muted: bool = False

    def ended_with(self) -> int | None:
        """Its exit code, None while it runs.

        A signal waits: one that is raised inside of poll() can leave its lock held, and then wait() never returns.
        """
        with uninterrupted():
            return self.process.poll()

    def stderr_from(self, start: int) -> bytes:
        """What was printed from byte ``start`` on; read without seeking, since the rank writes at the same offset."""
        size = os.fstat(self.stderr.fileno()).st_size
        return os.pread(self.stderr.fileno(), max(0, size - start), start)

    def stderr_lines(self) -> list[str]:
        """Lines that are not empty, without terminal escapes and torch's mark of the rank."""
        lines = plain_lines(self.stderr_from(0).decode(errors="replace"))
        unmarked = (_RANK_MARK.sub("", line) for line in lines)
        return [line for line in unmarked if line.strip()]

    def error_message(self) -> str | None:
        """The message of the one-line error that the rank ended with, if it did."""
        for line in reversed(self.stderr_lines()):
            match = _ERROR_LINE.match(line.strip())
            if match:
                return match.group(1)
        return None

    def last_words(self) -> str:
        """The exception that ended the rank, or the last three lines that it printed."""
        lines = self.stderr_lines()
        starts = [place for place, line in enumerate(lines) if _TRACEBACK in line]
        # Frames are indented; what is printed while Python shuts down comes behind the exception.
        behind = range(starts[-1] + 1, len(lines)) if starts else range(0)
        said = next((place for place in behind if not lines[place].startswith(" ")), None)
        if said is not None:
            more = lines[said].rstrip().endswith(":")
            return " ".join(line.strip() for line in lines[said : said + 1 + more])
        return " | ".join(line.strip() for line in lines[-3:])

    def lost_a_peer(self) -> bool:
        """Whether it failed since another rank had."""
        said = self.error_message() or self.last_words()
        return any(mark in said for mark in (PEER_LOST, *PEER_FAILURES))


def same_command() -> list[str]:
    """The command that runs ``paradl-bench`` on a rank with the arguments of this process."""
    # -P: "-m" would put the working directory first, and import modules of it unasked.
    return [sys.executable, "-P", "-m", "paradl_bench", *sys.argv[1:]]


def launch_ranks(
    command: Sequence[str],
    *,
    ranks: int,
    device: str,
    timeout_s: float | None,
    hang_timeout_s: float | None = None,
    environment: Mapping[str, str] | None = None,
    cluster: EmulatedCluster | None = None,
) -> None:
    """Start ``ranks`` processes of ``command`` on this host and wait for all of them.

    Rank 0's output is passed through; the others' is kept for errors. When one fails the rest is killed.

    Args:
        command: program and arguments, as of :func:`same_command`.
        timeout_s: how long all may take; None for no limit.
        hang_timeout_s: how long a rank may give no sign of life (:func:`~paradl_bench.ranks.pulse.beat`); then every
            rank's stack is printed and all are ended. None for no limit.

    Raises:
        UserError: a rank ended with a user's mistake (exit code 2).
        WorkError: a rank failed (names it, its exit code or signal, its last lines), hung, or the time was up.
        KeyboardInterrupt: passed on, as its subclass Terminated is, after the ranks got the same signal and have ended.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    kills_before = _kills_for_memory()
    with contextlib.ExitStack() as stack:
        # Ranks inherit it, and nobody else can open it: it has no name.
        store = stack.enter_context(tempfile.TemporaryFile(buffering=0))
        variables_of_all = {**(environment or {}), SECRET: new_secret(), STORE: str(store.fileno())}
        files = [stack.enter_context(tempfile.TemporaryFile(buffering=0)) for _ in range(ranks)]
        watch = HangWatch(ranks, hang_timeout_s, stack)
        started: list[_Started] = []
        stack.callback(_kill, started)
        for rank, stderr in enumerate(files):
            variables = _rank_variables(rank, ranks, device, variables_of_all) | watch.variables(rank)
            descriptors = (*watch.descriptors(rank), store.fileno())
            with contextlib.nullcontext() if cluster is None else cluster.entered(rank):
                variables |= {} if cluster is None else cluster.variables(rank)
                started.append(_start(command, rank, variables, descriptors, stderr))
        try:
            _watch(started, watch, deadline, timeout_s, kills_before)
        except KeyboardInterrupt as error:
            # Ranks are told, so that they keep what they measured; then they end, one way or the other.
            _interrupt(started, signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT)
            raise


def _rank_variables(rank: int, ranks: int, device: str, environment: Mapping[str, str]) -> dict[str, str]:
    # A shell inside of another run may hold what belongs to that.
    foreign = ("TORCHELASTIC_", NODE_NAME, RECORD)
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
    if device == "cpu":
        # All ranks are on this host; without this gloo looks up the host's name, which fails without a network.
        inherited.setdefault("GLOO_SOCKET_IFNAME", "lo")
    shown = rank == 0 and sys.stderr.isatty() and os.environ.get("PARADL_PROGRESS") != "0"
    return {
        **inherited,
        **ALLOCATOR_VARIABLES,
        "OMP_NUM_THREADS": "1",
        "PARADL_HOST_CORES": str(len(os.sched_getaffinity(0))),
        **environment,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "PARADL_PROGRESS": "1" if shown else "0",
        MARK: "own",
        LAUNCHER_PID: str(os.getpid()),
        **({"COLUMNS": str(shutil.get_terminal_size().columns)} if rank == 0 else {}),
    }


def _start(
    command: Sequence[str], rank: int, variables: dict[str, str], descriptors: tuple[int, ...], stderr: IO[bytes]
) -> _Started:
    try:
        process = subprocess.Popen(
            list(command),
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=None if rank == 0 else stderr,
            stderr=stderr,
            pass_fds=descriptors,
            # Ctrl-C at the terminal reaches the launcher alone, which then tells the ranks once.
            process_group=0,
        )
    except OSError as error:
        raise WorkError(f"cannot start rank {rank} as {command[0]}: {error.strerror or error}") from error
    return _Started(rank, process, stderr)


def _watch(
    started: list[_Started], watch: HangWatch, deadline: float | None, timeout_s: float | None, kills_before: int
) -> None:
    """Return when all ranks have ended well; raise for the rank to blame otherwise."""
    blame_at: float | None = None
    while True:
        _forward(started[0])
        codes = [item.ended_with() for item in started]
        failed = [item for item, code in zip(started, codes, strict=True) if code]
        now = time.monotonic()
        if failed and blame_at is None:
            blame_at = now + _BLAME_S
        # A rank killed by a signal, or that reports a mistake, is the cause and not a consequence of another's failure.
        blamed = any(code is not None and (code < 0 or code == UserError.exit_code) for code in codes)
        clear = blamed or None not in codes
        if blame_at is not None and not clear and now >= blame_at:
            clear = now >= blame_at + _LOST_BLAME_S or not all(item.lost_a_peer() for item in failed)
        if blame_at is not None and clear:
            raise _failure(failed, len(started), kills_before)
        if None not in codes:
            return
        running = [item.process.pid if code is None else None for item, code in zip(started, codes, strict=True)]
        if deadline is not None and now >= deadline:
            slow = ", ".join(str(rank) for rank, pid in enumerate(running) if pid is not None)
            places = watch.where(running, "did not end in time")
            raise WorkError(
                f"rank {slow} did not end within {timeout_s:g} s and was killed; --timeout sets the limit; {places}",
                resumable=True,
            )
        if blame_at is None:
            watch.check(running)
        time.sleep(_POLL_S)


def _forward(first: _Started) -> None:
    """Pass on what rank 0 wrote to stderr since the last call, but not its final error, which is reported once."""
    if first.muted:
        return
    new = first.stderr_from(first.forwarded)
    end = len(new)
    for mark in (b": error: ", _TRACEBACK.encode()):
        place = new.find(mark)
        if place >= 0:
            end = min(end, new.rfind(b"\n", 0, place) + 1)
            first.muted = True
    first.forwarded += end
    if end:
        sys.stderr.write(new[:end].decode(errors="replace"))
        sys.stderr.flush()


def _kills_for_memory() -> int:
    """How many processes of this host the kernel has killed for memory since it started; 0 where it does not say."""
    try:
        counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(counts.get("oom_kill", 0))


def _failure(failed: list[_Started], ranks: int, kills_before: int) -> ParadlError:
    """The error of the rank that failed first as far as can be told: a signal, a mistake, a failure, a lost peer."""

    def order(item: _Started) -> tuple[int, int]:
        code, message = item.process.returncode, item.error_message() or ""
        if code < 0:
            return 0, item.rank
        if (code == UserError.exit_code and message) or message.startswith(SAYS_ALL):
            return 1, item.rank
        return (3 if item.lost_a_peer() else 2), item.rank

    item = min(failed, key=order)
    code, message = item.process.returncode, item.error_message()
    if code == UserError.exit_code and message:
        return UserError(message)
    if message and message.startswith(SAYS_ALL):
        return WorkError(message)
    how = f"was {ending(code)}" if code < 0 else f"ended with {ending(code)}"
    if code == -signal.SIGKILL and _kills_for_memory() > kills_before:
        how += " by the kernel, which ran out of memory: the run does not fit"
    crashed = -code in _CRASHES
    if crashed:
        how += ": native code crashed; with PYTHONFAULTHANDLER=1 it says where"
    if ranks > 1:
        how += "; the other ranks were ended"
    last = message or item.last_words()
    # What was killed, lost its peers or found the disk full would go on; a crash or an exception would come again.
    resumable = (code < 0 and not crashed) or bool(message and (PEER_LOST in message or _OF_FILES.match(message)))
    return WorkError(f"rank {item.rank} {how}" + (f"; its last words: {last}" if last else ""), resumable=resumable)


def _interrupt(started: list[_Started], number: signal.Signals) -> None:
    for item in started:
        if item.ended_with() is None:
            item.process.send_signal(number)
    end = time.monotonic() + _TERMINATE_S
    for item in started:
        with contextlib.suppress(subprocess.TimeoutExpired):
            item.process.wait(max(0.0, end - time.monotonic()))


def _kill(started: list[_Started]) -> None:
    for item in started:
        if item.ended_with() is None:
            item.process.kill()
    for item in started:
        item.process.wait()
    if started:
        _forward(started[0])
