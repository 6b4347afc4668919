"""A launcher's watch over its ranks: which of them hang, and where the threads of every rank stand.

A rank that waits for another one hangs too, and who is to blame cannot be told from outside: every rank's place is
named, and a rank that is stopped, or waits for a disk, is told as such, since it cannot say where it stands.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from paradl_bench.core.errors import WorkError
from paradl_bench.core.terminal.command_line import say
from paradl_bench.ranks.pulse import PULSES, STACK_SIGNAL, STACKS, file_bytes, limit_of, read_beats

# A thread that is about to write its stack does so at its next instruction; a core that is shared may keep it.
_STACKS_S = 3.0
_POLL_S = 0.05
_SHOWN_PLACES = 8
_FRAME = re.compile(r'^\s+File "(.*)", line (\d+) in (\S+)')
_CURRENT = "Current thread"
_STATES = {
    "T": "is stopped (SIGSTOP): it cannot show its stack",
    "t": "is stopped by a debugger: it cannot show its stack",
    "D": "waits for a disk or a file system: it cannot show its stack",
    "Z": "has ended",
}


class HangWatch:
    """Signs of life of the ranks of one launcher.

    Args:
        limit_s: how long a rank may give none; None for ever.
    """

    def __init__(self, ranks: int, limit_s: float | None, stack: contextlib.ExitStack) -> None:
        self._ranks = ranks
        self._limit_s = limit_s
        self._pulses, *self._stacks = (_temporary(stack) for _ in range(1 + ranks))
        self._pulses.truncate(file_bytes(ranks))
        self._shared = stack.enter_context(contextlib.closing(mmap.mmap(self._pulses.fileno(), file_bytes(ranks))))
        self._since = self._last_look = time.monotonic()

    def variables(self, rank: int) -> dict[str, str]:
        """What the rank finds its files by."""
        return {PULSES: str(self._pulses.fileno()), STACKS: str(self._stacks[rank].fileno())}

    def descriptors(self, rank: int) -> tuple[int, int]:
        """Of the files that the rank inherits."""
        return self._pulses.fileno(), self._stacks[rank].fileno()

    def check(self, pids: Sequence[int | None]) -> None:
        """Print every rank's stack where one gives no sign of life.

        Args:
            pids: of the ranks; None for one that has ended.

        Raises:
            WorkError: one gave none; names the place of every rank.
        """
        now = time.monotonic()
        if self._limit_s is None:
            return
        if now - self._last_look > self._limit_s / 2:
            self._since = now  # this process was stopped, and its ranks with it, as those of a suspended job are
        self._last_look = now
        beats = read_beats(self._shared, self._ranks)
        if all(
            pid is None or now - max(self._since, at) <= limit_of(at, self._limit_s)
            for pid, at in zip(pids, beats, strict=True)
        ):
            return
        raise WorkError(
            f"no progress for {self._limit_s:g} s (--hang-timeout): {self.where(pids, 'made no progress')};"
            " the ranks were ended",
            resumable=True,
        )

    def where(self, pids: Sequence[int | None], what: str) -> str:
        """Print every rank's stack; returns the places where ranks stand, those that share one named together.

        Args:
            pids: of the ranks; None for one that has ended.
            what: is said of each rank whose stack is printed, as in ``made no progress``.
        """
        joined = [at != 0 for at in read_beats(self._shared, self._ranks)]
        states = [None if pid is None else _state(pid) for pid in pids]
        self._ask_for_stacks(
            {
                rank: pid
                for rank, pid in enumerate(pids)
                if pid is not None and joined[rank] and states[rank] not in _STATES
            }
        )
        places: dict[str, list[int]] = {}
        for rank, state in enumerate(states):
            text = self._stack_of(rank)
            if pids[rank] is None:
                place = "has ended"
            elif text:
                place = _place(text)
                say(f"rank {rank} {what}; stacks of its threads:\n{text.rstrip()}", lines=True)
            elif not joined[rank]:
                place = "had not begun"
            else:
                place = _STATES.get(state or "", "does not answer")
                say(f"rank {rank} {place}")
            places.setdefault(place, []).append(rank)
        listed = [f"{_named(ranks)} {place}" for place, ranks in places.items()]
        more = [f"and {len(listed) - _SHOWN_PLACES} other places"] if len(listed) > _SHOWN_PLACES else []
        return ", ".join(listed[:_SHOWN_PLACES] + more)

    def _ask_for_stacks(self, pid_of_rank: Mapping[int, int]) -> None:
        for pid in pid_of_rank.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, STACK_SIGNAL)
        end = time.monotonic() + _STACKS_S
        sizes: dict[int, int] = {}
        while time.monotonic() < end:
            time.sleep(_POLL_S)
            before, sizes = sizes, {rank: os.fstat(self._stacks[rank].fileno()).st_size for rank in pid_of_rank}
            if sizes == before and all(sizes.values()):
                return

    def _stack_of(self, rank: int) -> str:
        size = os.fstat(self._stacks[rank].fileno()).st_size
        return os.pread(self._stacks[rank].fileno(), size, 0).decode(errors="replace")


def _temporary(stack: contextlib.ExitStack) -> IO[bytes]:
    return stack.enter_context(tempfile.TemporaryFile(buffering=0))


def _state(pid: int) -> str:
    """One letter, as of ``ps``: R, S, D, T, Z; empty where the process is gone or the system does not say."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _place(stack: str) -> str:
    """The innermost frame of the thread that the signal came to, which is the one that measures."""
    lines = stack.splitlines()
    begin = next((index for index, line in enumerate(lines) if line.startswith(_CURRENT)), 0)
    for line in lines[begin:]:
        match = _FRAME.match(line)
        if match:
            return f"is in {match.group(3)} ({Path(match.group(1)).name}:{match.group(2)})"
    return "shows no frame"


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
