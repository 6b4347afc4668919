"""The program that a launcher starts on every rank to sweep one collective over MPI.

    mpirun -np R python -m paradl_bench.tools.mpi_program OPERATION SIZE,... SECONDS GROUPS FILE

Ranks meet at a barrier before each repetition; every rank's times are kept, and the first rank writes a line a size.
Of several groups (rank r is in group r modulo their number) all call at once and one calls alone, in turn: a line for
each group alone, then one for each of them at once.
"""

from __future__ import annotations

import functools
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from paradl_bench.core.files.json_lines import append_lines
from paradl_bench.plan.collectives.contents import PERIOD, RANK_STRIDE
from paradl_bench.ranks.environment import cpu_name
from paradl_bench.records.samples import CollectiveSamples
from paradl_bench.tools.mpi_sweep import Head

Floats = NDArray[np.float32]
_ELEMENT_BYTES = 4
_WARMUP = 5
_MOST_CALLS = 2000
_FEWEST_CALLS = 5


class Call(NamedTuple):
    """A collective on this rank: what is filled before, the call, what the result has to be."""

    fill: Callable[[], None]
    call: Callable[[], None]
    correct: Callable[[], bool]


def _data(rank: int, elements: int, start: int = 0) -> Floats:
    """Whole numbers, other ones on every rank, whose sums are exact in fp32."""
    return ((np.arange(start, start + elements) + RANK_STRIDE * rank) % PERIOD).astype(np.float32)


def _sum(ranks: int, elements: int, start: int = 0) -> Floats:
    return np.asarray(sum(_data(rank, elements, start) for rank in range(ranks)), np.float32)


def _prepare(comm: Any, mpi: Any, operation: str, elements: int) -> Call:
    rank, ranks = comm.Get_rank(), comm.Get_size()
    given = np.zeros(elements * (ranks if operation == "reduce_scatter" else 1), np.float32)
    taken = given
    if operation in ("all_gather", "reduce_scatter"):
        taken = np.zeros(elements * (ranks if operation == "all_gather" else 1), np.float32)
    reduced = (mpi.IN_PLACE, given) if rank == 0 else (given, None)
    calls: dict[str, Callable[[], None]] = {
        "all_reduce": functools.partial(comm.Allreduce, mpi.IN_PLACE, given),
        "all_gather": functools.partial(comm.Allgather, given, taken),
        "reduce_scatter": functools.partial(comm.Reduce_scatter_block, given, taken),
        "broadcast": functools.partial(comm.Bcast, given, root=0),
        "reduce": functools.partial(comm.Reduce, *reduced, root=0),
        "send_recv": functools.partial(comm.Send, given, dest=ranks - 1)
        if rank == 0
        else functools.partial(comm.Recv, given, source=0),
    }
    promised: dict[str, Callable[[], Floats]] = {
        "all_reduce": lambda: _sum(ranks, elements),
        "all_gather": lambda: np.concatenate([_data(sender, elements) for sender in range(ranks)]),
        "reduce_scatter": lambda: _sum(ranks, elements, rank * elements),
        "broadcast": lambda: _data(0, elements),
        "reduce": lambda: _sum(ranks, elements) if rank == 0 else given,
        "send_recv": lambda: _data(0 if rank == ranks - 1 else rank, elements),
    }

    def fill() -> None:
        given[:] = _data(rank, len(given))

    return Call(fill, calls[operation], lambda: np.array_equal(taken, promised[operation]()))


def _seconds(comm: Any, call: Callable[[], None]) -> float:
    comm.Barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _timed(comm: Any, call: Callable[[], None], calls: int) -> list[float]:
    return [_seconds(comm, call) for _ in range(calls)]


def _in_turn(comm: Any, call: Callable[[], None], calls: int, groups: int) -> tuple[list[float], list[float]]:
    """Times of this rank with all groups at once, and with its own alone, in turn."""
    together, alone = [], []
    for index in range(calls):
        together.append(_seconds(comm, call))
        if index % groups == comm.Get_rank() % groups:
            alone.append(_seconds(comm, call))
        else:
            comm.Barrier()
    return together, alone


def _measure(comm: Any, call: Callable[[], None], point_s: float, groups: int) -> list[tuple[int, Any]]:
    """(groups at once, times of every rank), the latter on the first rank only."""
    usual_s = comm.bcast(max(float(np.median(_timed(comm, call, _WARMUP))), 1e-7), root=0)
    calls = min(max(round(point_s / usual_s), _FEWEST_CALLS), _MOST_CALLS)
    # Sums in place grow beyond fp32, in which adding takes no longer.
    if groups == 1:
        return [(1, comm.gather(_timed(comm, call, calls), root=0))]
    # Every group is alone equally often.
    together, alone = _in_turn(comm, call, groups * max(_FEWEST_CALLS, calls // groups), groups)
    return [(1, comm.gather(alone, root=0)), (groups, comm.gather(together, root=0))]


def main(operation: str, sizes: tuple[int, ...], point_s: float, groups: int, output: Path) -> None:
    """Sweep, and write what was measured on the first rank."""
    import mpi4py
    from mpi4py import MPI

    # Instead of pickles, which run what whoever sent them likes.
    MPI.pickle.__init__(msgspec.msgpack.encode, msgspec.msgpack.decode)  # type: ignore[misc]
    comm = MPI.COMM_WORLD
    index = comm.Get_rank() % groups
    group = comm.Split(index, comm.Get_rank()) if groups > 1 else comm
    hosts = comm.gather(MPI.Get_processor_name(), root=0)
    if hosts is not None:
        library = MPI.Get_library_version().split(",")[0].split("\n")[0].strip("\0 ")
        versions = {"mpi": library, "mpi4py": mpi4py.__version__, "python": platform.python_version()}
        append_lines(output, [Head(hosts=tuple(hosts), device_name=cpu_name(), versions=versions)])
    for size in sizes:
        prepared = _prepare(group, MPI, operation, size // _ELEMENT_BYTES)
        prepared.fill()
        comm.Barrier()
        prepared.call()
        right = comm.gather(prepared.correct(), root=0)
        measured = _measure(comm, prepared.call, point_s, groups)
        if hosts is not None and right is not None:
            append_lines(output, _records(operation, size, groups, hosts, right, measured))


def _records(
    operation: str, size: int, groups: int, hosts: list[str], right: list[bool], measured: list[tuple[int, Any]]
) -> list[CollectiveSamples]:
    """A record for each group, alone and at once; ``hosts`` and ``right`` are of every rank."""
    return [
        CollectiveSamples(
            library="mpi",
            tool="mpi4py",
            operation=operation,
            level="node" if len(set(hosts[index::groups])) == 1 else "system",
            ranks=len(hosts[index::groups]),
            message_bytes=size,
            dtype="fp32",
            block=0,
            samples_s=tuple(map(tuple, times[index::groups])),
            verified=all(right[index::groups]),
            ranks_per_node=max(Counter(hosts[index::groups]).values()),
            concurrent=concurrent,
            group=index if concurrent > 1 else 0,
        )
        for concurrent, times in measured
        for index in range(groups)
    ]


if __name__ == "__main__":
    main(sys.argv[1], tuple(map(int, sys.argv[2].split(","))), float(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
