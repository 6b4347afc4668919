"""A rank's side: joining the ranks that this program, torchrun or srun has started, and leaving them.

On a CPU a rank pins itself to one core and one thread, so that measurements of one rank and of several are alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import gc
import importlib
import os
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from paradl_bench.core.errors import ParadlError, UserError, WorkError
from paradl_bench.ranks.emulated_nodes.cluster import nodes_of_rank
from paradl_bench.ranks.environment import ALLOCATOR_VARIABLES
from paradl_bench.ranks.groups.process_group import make_group
from paradl_bench.ranks.groups.proof import prove_ranks, use_run_key
from paradl_bench.ranks.pulse import beat, begin_pulse
from paradl_bench.ranks.rank_place import (
    BACKENDS,
    NO_BACKEND,
    PEER_FAILURES,
    PEER_LOST,
    Launcher,
    RankPlace,
    check_backend,
    die_with_launcher,
    launcher_of_environment,
    ranks_of_node,
)

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

# A rank that hangs is noticed by its signs of life first; a collective that fails would end ranks before they say where
# they stand.
_AFTER_HANG_S = 30.0
# Long beside what waking costs the ranks that measure, short beside a block.
_REST_S = 0.02
_CLOSED = f"{PEER_LOST}, which has ended; or a process outside of this run connected instead"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """A rank that has joined.

    Attributes:
        device: of this rank (``cpu``, ``cuda:1``).
        backend: of the default process group; ``none`` where there is none.
        core: the core that this rank is pinned to; None on a GPU.
        cores: that the rank was allowed before it was pinned, for what it starts beside itself.
        group: of the ranks that this is about; None for all.
    """

    rank: int
    ranks: int
    local_rank: int
    device: torch.device
    backend: str
    launcher: Launcher
    core: int | None
    cores: frozenset[int] = frozenset()
    group: torch.distributed.ProcessGroup | None = None

    @property
    def settings(self) -> dict[str, str]:
        """What was set for this rank that changes its times, for the environment of what it measures."""
        return {} if self.core is None else {"pinned": "one core a rank", "scheduling": scheduling_policy()}

    def barrier(self) -> None:
        """Wait for all ranks; where there is no process group, a sign of life and no more."""
        beat()
        if self.backend != NO_BACKEND:
            import torch.distributed as dist

            dist.barrier(self.group)
            beat()

    def rest(self) -> None:
        """Wait for all ranks as one that has nothing to do meanwhile, as long as it takes; the others call ``barrier``.

        It wakes to say that it lives, so a rank that waits for another's long work is not taken for one that hangs.
        """
        import torch.distributed as dist

        waiting = dist.barrier(self.group, async_op=True)
        while not waiting.is_completed():
            beat()
            time.sleep(_REST_S)
        waiting.wait()
        beat()

    def first(self, count: int) -> RankContext:
        """The first ``count`` ranks among themselves; every rank calls this, in the same order of counts.

        What comes back is of no use to ranks that are not among them.
        """
        if count == self.ranks:
            return self
        # A group of one would cost a call for nothing.
        group = make_group(range(count)) if count > 1 else None
        backend = self.backend if count > 1 else NO_BACKEND
        return dataclasses.replace(self, ranks=count, backend=backend, group=group)

    def share(self, value: T, of: Any) -> T:
        """Rank 0's value on every rank; a collective, so never inside what is timed.

        Args:
            of: its type, which is checked where it arrives.
        """
        beat()
        if self.backend == NO_BACKEND:
            return value
        from paradl_bench.ranks.groups.messages import share_value

        shared: T = share_value(value, of, self.group, self._message_device)
        beat()
        return shared

    def gather(self, value: T, of: Any) -> list[T]:
        """Every rank's value, in the order of ranks, on every rank; a collective, so never inside what is timed.

        Args:
            of: the type of each, which is checked where it arrives.
        """
        beat()
        if self.backend == NO_BACKEND:
            return [value]
        from paradl_bench.ranks.groups.messages import gather_values

        gathered: list[T] = gather_values(value, of, self.group, self._message_device)
        beat()
        return gathered

    @property
    def _message_device(self) -> str | torch.device:
        return self.device if self.backend == "nccl" else "cpu"


def _check_backend_built(backend: str) -> None:
    import torch.distributed as dist

    available = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    if not available[backend]():
        present = ", ".join(name for name in BACKENDS if available[name]())
        raise UserError(f"backend {backend} is not built into this torch; present are {present}")


@contextlib.contextmanager
def join_ranks(
    backend: str, device: str, *, timeout_s: float, hang_timeout_s: float | None = None, launcher: str | None = None
) -> Iterator[RankContext]:
    """Join the ranks that a launcher has started, and leave them however the body ends.

    On a CPU the rank is pinned to the LOCAL_RANK-th core that it is allowed (the RANK-th where this program started
    it, on one host) and uses one thread. Under torchrun and srun the process may begin anew, with the allocator's
    thresholds set: nothing before this call may matter.

    Args:
        backend: ``gloo``, ``nccl``, ``mpi``, or ``none`` for one rank without a process group.
        timeout_s: how long joining, and then each collective, may take.
        hang_timeout_s: how long this rank may give no sign of life (:mod:`paradl_bench.ranks.pulse`); a collective's
            limit is later then, so that every rank says where it stands before one fails. None for no limit.

    Raises:
        UserError: no launcher started this process, backend or device can't be had, the port is in use.
        WorkError: the ranks did not meet in time, or another rank went away in the middle of a collective.
    """
    place = launcher_of_environment(launcher)
    if place is None:
        raise UserError(
            "this process is not a rank: start it through torchrun or srun, or let this program start the ranks"
        )
    if place.launcher == "own":
        die_with_launcher()
    else:
        _begin_again_with_thresholds()
    begin_pulse(place.rank, place.ranks, place.launcher == "own", hang_timeout_s)
    if hang_timeout_s is not None:
        timeout_s = min(timeout_s, hang_timeout_s + _AFTER_HANG_S)
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device cuda: torch sees no GPU here; run on a GPU machine, or with --device cpu")
    if backend != NO_BACKEND:
        check_backend(backend, device)
        _check_backend_built(backend)
    elif place.ranks != 1:
        raise UserError(f"{place.ranks} ranks were started, but this run takes one")
    cores, core = frozenset(os.sched_getaffinity(0)), _settle(place, device)
    context = RankContext(
        rank=place.rank,
        ranks=place.ranks,
        local_rank=place.local_rank,
        device=torch.device("cpu") if device == "cpu" else torch.device("cuda", place.local_rank),
        backend=backend,
        launcher=place.launcher,
        core=core,
        cores=cores,
    )
    if backend == NO_BACKEND:
        beat()
        yield context
        return
    try:
        _join(place, backend, timeout_s)
        with _peers():
            yield context
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        _leave()


def _leave() -> None:
    """Destroy the process group and end its threads.

    gloo's threads end with the last reference to the group. One that outlives the interpreter aborts the process when
    it lets go of a tensor, so modules that hold the group (DDP, in cycles with their hooks) have to be gone by then.
    """
    import torch.distributed as dist

    from paradl_bench.ranks.groups.meeting import forget_stores

    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    use_run_key(None)
    forget_stores()


def _world() -> torch.distributed.ProcessGroup:
    # Held by nobody here: it has to be gone when the rank leaves.
    import torch.distributed as dist

    world = dist.group.WORLD
    assert world is not None
    return world


def _begin_again_with_thresholds() -> None:
    """Replace this process by itself with the allocator's thresholds set, which glibc reads only at its start.

    torchrun and srun know nothing of them; without them ranks would not be like those that this program starts.
    """
    missing = {name: value for name, value in ALLOCATOR_VARIABLES.items() if name not in os.environ}
    if missing:
        # The command that this process is.
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | missing)  # nosec B606


def _settle(place: RankPlace, device: str) -> int | None:
    """Take this rank's core and one thread, or its GPU; returns the core."""
    import torch

    cores = sorted(os.sched_getaffinity(0))
    os.environ.setdefault("PARADL_HOST_CORES", str(len(cores)))
    if device == "cuda":
        if place.local_rank >= torch.cuda.device_count():
            raise UserError(
                f"local rank {place.local_rank} has no GPU of its own: torch sees {torch.cuda.device_count()};"
                " start at most one rank a GPU"
            )
        torch.cuda.set_device(place.local_rank)
        return None
    # Emulated nodes share the host's cores, so that ranks of all of them are counted.
    core = cores[(place.rank if place.launcher == "own" else place.local_rank) % len(cores)]
    os.sched_setaffinity(0, {core})
    # On nodes the policy is the same however many ranks there are: sweeps of few and of many are of one cluster.
    if nodes_of_rank() is not None:
        # Ranks of emulated nodes share cores. Under the default policy the scheduler shares a core out fairly over
        # ranks that compute little and wake often, and a call waits for ranks that wait for their share: an all-reduce
        # of 4 KiB among four ranks on two cores takes 6 to 7 ms behind sleeps of 1 ms, and 1.5 to 1.9 under this one,
        # where who is ready first runs first. The kernel keeps 5% of each core for all others (sched_rt_runtime_us),
        # so that they can end ranks.
        _schedule_by(os.SCHED_RR, 1)
    elif (ranks_of_node(place.launcher, place.ranks) or place.ranks) <= len(cores):
        # gloo's threads share the rank's core. Under the default policy one that wakes may take the core from the one
        # that it waits for, and then polls until the scheduler's next tick: a small all-reduce takes 0.3 or 3.7 ms, by
        # chance. Only for ranks that have a core each: where ranks share one, the one that polls would keep the others
        # from it.
        _schedule_by(os.SCHED_BATCH, 0)
    torch.set_num_threads(1)
    return core


def _schedule_by(policy: int, priority: int) -> None:
    """Put this rank, and the threads that it makes from now on, under one of Linux's policies."""
    # A sandbox or container may forbid it; what holds is recorded either way.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, policy, os.sched_param(priority))


def scheduling_policy() -> str:
    """The scheduling policy of this process, as Linux names it."""
    names = ("SCHED_OTHER", "SCHED_BATCH", "SCHED_IDLE", "SCHED_FIFO", "SCHED_RR")
    policies = {getattr(os, name): name for name in names}
    return policies.get(os.sched_getscheduler(0), "unknown")


def _init_process_group(place: RankPlace, backend: str, timeout_s: float) -> None:
    import torch.distributed as dist

    from paradl_bench.ranks.groups.meeting import meet
    from paradl_bench.ranks.groups.messages import unpickle_plain_values_alone

    # Its functions take the default group as the default of an argument; imported later, as tracing does, they would
    # keep it (see _leave).
    importlib.import_module("torch.distributed.nn.functional")
    unpickle_plain_values_alone()
    if backend == "gloo" and ranks_of_node(place.launcher, place.ranks) == place.ranks:
        # As under this program's own launcher: nobody on the network can reach ranks that are all on this host.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout = datetime.timedelta(seconds=timeout_s)
    store, key = meet(place, timeout)
    use_run_key(key)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.ranks, timeout=timeout)


def _join(place: RankPlace, backend: str, timeout_s: float) -> None:
    """Make the process group, and prove its ranks; a stranger who calls may end either."""
    from paradl_bench.ranks.groups.meeting import first_line

    try:
        _init_process_group(place, backend, timeout_s)
        beat()
        prove_ranks(_world())
    except (RuntimeError, ValueError) as error:
        if isinstance(error, ParadlError):
            raise
        why = _CLOSED if any(mark in str(error) for mark in PEER_FAILURES[:2]) else first_line(error)
        raise WorkError(
            f"rank {place.rank} could not join {place.ranks} ranks over {backend}: {why}", resumable=True
        ) from error


@contextlib.contextmanager
def _peers() -> Iterator[None]:
    """Turn what torch raises when another rank goes away, or does not come, into a WorkError that says so."""
    import torch.distributed as dist

    from paradl_bench.ranks.groups.meeting import first_line

    try:
        yield
    except RuntimeError as error:
        lost = isinstance(error, dist.DistError) or any(mark in str(error) for mark in PEER_FAILURES)
        if isinstance(error, ParadlError) or not lost:
            raise
        raise WorkError(f"{PEER_LOST}: {first_line(error)}", resumable=True) from error
