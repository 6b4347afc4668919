"""Signs of life of a rank, by which one that hangs is noticed, and where its threads stand then.

A rank of this program's own launcher writes the time of each sign into a file that the launcher maps: nothing runs
beside what is measured, and the launcher sees a rank that is stopped as well as one that waits. Under torchrun and srun
nobody watches, so that a thread of the rank's own does; it sleeps a tenth of the limit at a time.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import struct
import sys
import threading
import time
from dataclasses import dataclass

from paradl_bench.ranks.rank_place import node_name

PULSES = "PARADL_PULSE_FD"
STACKS = "PARADL_STACKS_FD"
"""Variables that a launcher sets for a rank: the file of all ranks' signs of life, the one for this rank's stacks."""
STACK_SIGNAL = signal.SIGUSR1
"""Has a rank that watches over itself, or is watched, write where its threads stand; nothing else happens."""

# What many ranks take that load torch from one shared file system, and wait for the last of them.
_START_S = 300.0
_JOINING = -1.0
_TIME = struct.Struct("d")
_GRACE_S = 5.0
_EXIT_CODE = 3


@dataclass(slots=True)
class _Pulse:
    """Where this process leaves its signs of life."""

    at_s: float = 0.0
    shared: mmap.mmap | None = None
    offset: int = 0


_pulse = _Pulse()


def beat() -> None:
    """Say that this rank gets on; a microsecond, and no call into the kernel."""
    _set(time.monotonic())


def _set(at_s: float) -> None:
    _pulse.at_s = at_s
    if _pulse.shared is not None:
        _TIME.pack_into(_pulse.shared, _pulse.offset, at_s)


def file_bytes(ranks: int) -> int:
    """Size of the file that holds the ranks' signs of life."""
    return ranks * _TIME.size


def limit_of(at_s: float, limit_s: float) -> float:
    """How long a rank may give no sign of life after one at ``at_s``: it may take long to load torch and to join."""
    return limit_s if at_s > 0 else max(limit_s, _START_S)


def read_beats(shared: mmap.mmap, ranks: int) -> list[float]:
    """When each rank last gave a sign of life, on the host's monotonic clock.

    0 for one that cannot say where it stands yet, below 0 for one that can and has not joined.
    """
    return [float(_TIME.unpack_from(shared, rank * _TIME.size)[0]) for rank in range(ranks)]


def begin_pulse(rank: int, ranks: int, launched_here: bool, hang_timeout_s: float | None) -> None:
    """Let this rank be watched, by the launcher that handed it the files or by a thread of its own.

    It can say where it stands from now on; its first sign of life comes when it has joined.

    Args:
        hang_timeout_s: how long it may give no sign of life; None for ever.
    """
    pulses, stacks = os.environ.pop(PULSES, None), os.environ.pop(STACKS, None)
    if launched_here and pulses is not None and stacks is not None:
        _pulse.shared = mmap.mmap(int(pulses), file_bytes(ranks))
        _pulse.offset = rank * _TIME.size
        faulthandler.register(STACK_SIGNAL, file=int(stacks), all_threads=True)
        _set(_JOINING)
    elif not launched_here and hang_timeout_s is not None:
        faulthandler.register(STACK_SIGNAL, file=sys.__stderr__ or 2, all_threads=True)
        who = f"rank {rank} of {ranks} on {node_name()}"
        threading.Thread(target=_watch, args=(who, hang_timeout_s), name="pulse", daemon=True).start()


def _watch(who: str, limit_s: float) -> None:
    last_look = time.monotonic()
    since = last_look
    while True:
        time.sleep(min(limit_s / 10, 30.0))
        now = time.monotonic()
        if now - last_look > limit_s / 2:
            since = now  # the whole process was stopped, as a suspended job is
        last_look = now
        if now - max(since, _pulse.at_s) > limit_of(_pulse.at_s, limit_s):
            _give_up(who, limit_s)


def _give_up(who: str, limit_s: float) -> None:
    """Say where this rank stands, leave the others the time to say so as well, and end it."""
    say = sys.__stderr__ or sys.stderr
    say.write(f"{who}: no progress for {limit_s:g} s; stacks of its threads:\n")
    say.flush()
    faulthandler.dump_traceback(file=say, all_threads=True)
    time.sleep(_GRACE_S)
    say.write(
        f"paradl-bench: error: {who} made no progress for {limit_s:g} s (--hang-timeout); a rank that shows no stack"
        " is stopped or gone; what was measured is kept: run the same command again to go on\n"
    )
    say.flush()
    os._exit(_EXIT_CODE)
