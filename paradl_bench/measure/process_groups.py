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
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from paradl_bench.collectives.process_group import make_group
from paradl_bench.emulate_nodes.cluster import nodes_of_rank
from paradl_bench.measure.environment import ALLOCATOR_VARIABLES
from paradl_bench.measure.pulse import beat, begin_pulse
from paradl_bench.measure.rank_place import (
    BACKENDS,
    LISTENER,
    NO_BACKEND,
    PEER_FAILURES,
    PEER_LOST,
    Launcher,
    RankPlace,
    check_backend,
    die_with_launcher,
    launcher_of_environment,
    port_in_use,
    ranks_of_node,
    whole_number,
)
from paradl_bench.spec.errors import ParadlError, UserError, WorkError

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import TCPStore

T = TypeVar("T")

# A rank that hangs is noticed by its signs of life first; a collective that fails would end ranks before they say where
# they stand.
_AFTER_HANG_S = 30.0
# Long beside what waking costs the ranks that measure, short beside a block.
_REST_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """A rank that has joined.

    Attributes:
        device: of this rank (``cpu``, ``cuda:1``).
        backend: of the default process group; ``none`` where there is none.
        core: the core that this rank is pinned to; None on a GPU.
        group: of the ranks that this is about; None for all.
    """

    rank: int
    ranks: int
    local_rank: int
    device: torch.device
    backend: str
    launcher: Launcher
    core: int | None
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

    def share(self, value: T) -> T:
        """Rank 0's value on every rank; a collective, so never inside what is timed."""
        beat()
        if self.backend == NO_BACKEND:
            return value
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        beat()
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of ranks, on every rank; a collective, so never inside what is timed."""
        beat()
        if self.backend == NO_BACKEND:
            return [value]
        import torch.distributed as dist

        boxes: list[T] = [value] * self.ranks
        dist.all_gather_object(boxes, value, self.group)
        beat()
        return boxes


def _check_backend_built(backend: str) -> None:
    import torch.distributed as dist

    available = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    if not available[backend]():
        present = ", ".join(name for name in BACKENDS if available[name]())
        raise UserError(f"backend {backend} is not built into this torch; present are {present}")


@contextlib.contextmanager
def join_ranks(
    backend: str,
    device: str,
    *,
    timeout_s: float,
    hang_timeout_s: float | None = None,
    launcher: str | None = None,
) -> Iterator[RankContext]:
    """Join the ranks that a launcher has started, and leave them however the body ends.

    On a CPU the rank is pinned to the LOCAL_RANK-th core that it is allowed (the RANK-th where this program started
    it, on one host) and uses one thread. Under torchrun and
    srun the process may begin anew, with the allocator's thresholds set: nothing before this call may matter.

    Args:
        backend: ``gloo``, ``nccl``, ``mpi``, or ``none`` for one rank without a process group.
        device: ``cpu`` or ``cuda``.
        timeout_s: how long joining, and then each collective, may take.
        hang_timeout_s: how long this rank may give no sign of life (:mod:`paradl_bench.measure.pulse`); a collective's
            limit is later then, so that every rank says where it stands before one fails. None for no limit.
        launcher: ``--launcher`` as given.

    Raises:
        UserError: no launcher started this process, backend or device can't be had, the port is in use.
        WorkError: the ranks did not meet in time, or another rank went away in the middle of a collective.
    """
    place = launcher_of_environment(launcher)
    if place is None:
        raise UserError("this process is no rank: start it through torchrun or srun, or leave starting to this program")
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
    core = _settle(place, device)
    context = RankContext(
        rank=place.rank,
        ranks=place.ranks,
        local_rank=place.local_rank,
        device=torch.device("cpu") if device == "cpu" else torch.device("cuda", place.local_rank),
        backend=backend,
        launcher=place.launcher,
        core=core,
    )
    if backend == NO_BACKEND:
        beat()
        yield context
        return
    _init_process_group(place, backend, timeout_s)
    beat()
    try:
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

    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def _begin_again_with_thresholds() -> None:
    """Replace this process by itself with the allocator's thresholds set, which glibc reads only at its start.

    torchrun and srun know nothing of them; without them ranks would not be like those that this program starts.
    """
    missing = {name: value for name, value in ALLOCATOR_VARIABLES.items() if name not in os.environ}
    if missing:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | missing)


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
        _take_turns_before_others()
    elif _ranks_here(place) <= len(cores):
        _never_preempt_on_waking()
    torch.set_num_threads(1)
    return core


def _ranks_here(place: RankPlace) -> int:
    """Ranks on this host; all of them where the launcher does not say."""
    return ranks_of_node(place.launcher, place.ranks) or place.ranks


def _never_preempt_on_waking() -> None:
    """Put this rank, and the threads that it makes from now on, under SCHED_BATCH.

    gloo's threads share the rank's core. Under the default policy one that wakes may take the core from the one that
    it waits for, and then polls until the scheduler's next tick: a small all-reduce takes 0.3 or 3.7 ms, by chance.
    Only for ranks that have a core each: where ranks share one, the one that polls would keep the others from it.
    """
    if hasattr(os, "SCHED_BATCH"):
        # A sandbox may forbid it; what holds is recorded either way.
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _take_turns_before_others() -> None:
    """Put this rank, and the threads that it makes from now on, under SCHED_RR.

    Ranks of emulated nodes share cores. Under the default policy the scheduler shares a core out fairly over ranks that
    compute little and wake often, and a call waits for ranks that wait for their share: an all-reduce of 4 KiB among
    four ranks on two cores takes 6 to 7 ms behind sleeps of 1 ms, and 1.5 to 1.9 under this one, where who is ready
    first runs first. The kernel keeps 5% of each core for all others (sched_rt_runtime_us), so that they can end ranks.
    """
    if hasattr(os, "SCHED_RR"):
        # Who may make network namespaces may do this too, but for a container without the right; recorded either way.
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def scheduling_policy() -> str:
    """The scheduling policy of this process, as Linux names it."""
    if not hasattr(os, "sched_getscheduler"):
        return "unknown"
    policies = {
        getattr(os, name): name for name in ("SCHED_OTHER", "SCHED_BATCH", "SCHED_IDLE", "SCHED_FIFO", "SCHED_RR")
    }
    return policies.get(os.sched_getscheduler(0), "unknown")


def _init_process_group(place: RankPlace, backend: str, timeout_s: float) -> None:
    import torch.distributed as dist

    # Its functions take the default group as the default of an argument; imported later, as tracing does, they would
    # keep it (see _leave).
    importlib.import_module("torch.distributed.nn.functional")
    timeout = datetime.timedelta(seconds=timeout_s)
    store = None if place.launcher == "torchrun" else _store(place, timeout)
    try:
        if store is None:
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.ranks, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise WorkError(
            f"rank {place.rank} could not join {place.ranks} ranks over {backend}: {_first(error)}", resumable=True
        ) from error


def _store(place: RankPlace, timeout: datetime.timedelta) -> TCPStore:
    """The store through which ranks meet: rank 0 listens, on the launcher's socket where it handed one over."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, port = _meeting_point(place)
    inherited = os.environ.pop(LISTENER, None)
    try:
        if inherited is None:
            return TCPStore(host, port, place.ranks, place.rank == 0, timeout)
        return TCPStore(host, port, place.ranks, True, timeout, master_listen_fd=int(inherited))
    except RuntimeError as error:
        if "EADDRINUSE" in str(error) or "already in use" in str(error):
            raise UserError(port_in_use(port, "address already in use")) from None
        raise WorkError(f"rank {place.rank} could not reach rank 0 at {host}:{port}: {_first(error)}") from error


def _meeting_point(place: RankPlace) -> tuple[str, int]:
    if place.launcher == "own":
        return os.environ["MASTER_ADDR"], whole_number("MASTER_PORT", os.environ["MASTER_PORT"])
    host = os.environ.get("MASTER_ADDR") or _first_slurm_host()
    given = os.environ.get("MASTER_PORT")
    if given is not None:
        return host, whole_number("MASTER_PORT", given)
    # All ranks of a step derive the same port; consecutive steps of a job take different ones.
    job, step = (os.environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return host, 20000 + (whole_number("SLURM_JOB_ID", job) * 31 + whole_number("SLURM_STEP_ID", step)) % 12000


def _first_slurm_host() -> str:
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise UserError(
            "--launcher srun: SLURM_JOB_NODELIST is not set; start this command through srun, or set MASTER_ADDR"
        )
    command = ["scontrol", "show", "hostnames", nodes]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise WorkError(f"`{' '.join(command)}` failed ({error}); set MASTER_ADDR to the first host") from error
    hosts = result.stdout.split()
    if not hosts:
        raise WorkError(f"`{' '.join(command)}` named no host; set MASTER_ADDR to the first host")
    return hosts[0]


@contextlib.contextmanager
def _peers() -> Iterator[None]:
    """Turn what torch raises when another rank goes away, or does not come, into a WorkError that says so."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, ParadlError) or not _is_peer_failure(error):
            raise
        raise WorkError(f"{PEER_LOST}: {_first(error)}", resumable=True) from error


def _is_peer_failure(error: RuntimeError) -> bool:
    import torch.distributed as dist

    if isinstance(error, dist.DistError):
        return True
    return any(mark in str(error) for mark in PEER_FAILURES)


def _first(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
