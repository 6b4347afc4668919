"""Where a process stands among ranks, and what a launcher and the ranks that it starts tell each other; torch-free."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
from dataclasses import dataclass
from typing import Literal

from paradl_bench.core.errors import UserError, WorkError, unknown_choice
from paradl_bench.core.units import is_whole
from paradl_bench.ranks.emulated_nodes.cluster import NODE_NAME

Launcher = Literal["own", "torchrun", "srun"]

LAUNCHERS: tuple[Launcher, ...] = ("own", "torchrun", "srun")
BACKENDS = ("gloo", "nccl", "mpi")
NO_BACKEND = "none"
"""Backend of a run on one rank that needs no process group."""

MARK = "PARADL_LAUNCHER"
LAUNCHER_PID = "PARADL_LAUNCHER_PID"
STORE = "PARADL_STORE_FD"
"""Variables that a launcher sets for its ranks: that it is this program, its process, the file in which they meet."""
CALL = "PARADL_CALL"
"""Variable that counts the measurements that ranks of one launch begin: each meets in a place of its own."""
PEER_LOST = "lost the connection to another rank"
"""How the error of a rank starts whose peer went away: another one is to blame."""
PEER_FAILURES = ("Connection closed by peer", "Connection reset by peer", "gloo/transport", "Timed out waiting", "NCCL")
"""What torch's own errors say where a peer went away."""
DOES_NOT_FIT = "does not fit"
NOT_AS_SERIAL = "does not train as serial training does"
SAYS_ALL = (DOES_NOT_FIT, NOT_AS_SERIAL)
"""Beginnings of failures that say all that is to be said; the rank that found them does not matter."""


def die_with_launcher() -> None:
    """Have the kernel end this rank when its launcher is killed, which then can't end it itself (Linux).

    Ends it at once where the launcher is gone already; of a process that is no rank of this program it does nothing.
    """
    launcher = os.environ.get(LAUNCHER_PID)
    if launcher is None or os.environ.get(MARK) != "own":
        return
    with contextlib.suppress(OSError, AttributeError):
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if launcher != str(os.getppid()):
        raise WorkError("the launcher of this rank is gone")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where a process stands among the ranks, as its launcher's variables say."""

    launcher: Launcher
    rank: int
    ranks: int
    local_rank: int


def launcher_of_environment(choice: str | None) -> RankPlace | None:
    """This process's place among ranks that a launcher has started; None where it has to start its own.

    Args:
        choice: ``--launcher``; None takes torchrun where torchrun started this process, else own. Slurm's variables
            are believed only when asked for, since a batch shell has them too.

    Raises:
        UserError: an unknown launcher, or one that did not start this process.
    """
    if choice is not None and choice not in LAUNCHERS:
        raise unknown_choice("launcher", choice, LAUNCHERS)
    if choice in (None, "own") and os.environ.get(MARK) == "own":
        return _place("own", rank="RANK", ranks=("WORLD_SIZE",), local_rank="LOCAL_RANK")
    if choice == "torchrun" or (choice is None and "TORCHELASTIC_RUN_ID" in os.environ):
        return _place("torchrun", rank="RANK", ranks=("WORLD_SIZE",), local_rank="LOCAL_RANK")
    if choice == "srun":
        # Inside a step that has fewer tasks than its job, only the step's own count is right.
        counts = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
        return _place("srun", rank="SLURM_PROCID", ranks=counts, local_rank="SLURM_LOCALID")
    return None


def refuse_emulation(place: RankPlace | None) -> None:
    """Refuse emulated nodes for ranks that another launcher has started.

    Raises:
        UserError: torchrun or srun did.
    """
    if place is not None and place.launcher != "own":
        raise UserError(f"--nodes emulates nodes for ranks that this program starts; {place.launcher} started this one")


def _place(launcher: Launcher, *, rank: str, ranks: tuple[str, ...], local_rank: str) -> RankPlace:
    def number(*names: str) -> int:
        for name in names:
            if name in os.environ:
                return whole_number(name, os.environ[name])
        raise UserError(f"--launcher {launcher}: {names[-1]} is not set; start this command through {launcher}")

    place = RankPlace(launcher=launcher, rank=number(rank), ranks=number(*ranks), local_rank=number(local_rank))
    if place.rank >= place.ranks:
        raise UserError(f"{rank}={place.rank} is no rank of {place.ranks}: ranks count from 0")
    return place


def ranks_of_node(launcher: str | None, ranks: int) -> int | None:
    """How many ranks share a node, as the launcher's variables say; None where they do not, or nodes hold unlike ones.

    Args:
        launcher: ``--launcher`` as given. ranks: of the run; ranks of this program's own share this node.

    Raises:
        UserError: as of :func:`launcher_of_environment`.
    """
    place = launcher_of_environment(launcher)
    if place is None or place.launcher == "own":
        return ranks
    if place.launcher == "torchrun":
        text = os.environ.get("LOCAL_WORLD_SIZE", "")
    else:
        # As "2(x3)" for two on each of three nodes; unlike numbers are listed with commas.
        text = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get("SLURM_NTASKS_PER_NODE", "")
        text = text.partition("(")[0] if "," not in text else ""
    return int(text) if is_whole(text) else None


def node_name() -> str:
    """What tells the node of this process from others: Slurm's name for it inside of a step or job, else the host's.

    Several of Slurm's nodes may be emulated on one host, as in its own tests; to Slurm, and to who asked for two nodes,
    they are two. So are those that this program emulates.
    """
    return os.environ.get(NODE_NAME) or os.environ.get("SLURMD_NODENAME") or platform.node()


def cluster_or_host() -> str:
    """What measurements have to share to be alike: ``PARADL_CLUSTER``, which stands for alike nodes, else the host.

    A job is put on other nodes than the one before it; whether they are alike in device, versions and settings is
    compared all the same.
    """
    return os.environ.get("PARADL_CLUSTER") or platform.node()


def whole_number(name: str, text: str) -> int:
    """The number that a variable of the environment holds.

    Raises:
        UserError: it holds something else.
    """
    if not is_whole(text.strip()):
        raise UserError(f"{name}={text!r} in the environment is no whole number")
    return int(text)


def check_backend(backend: str, device: str) -> None:
    """Refuse a backend that is unknown or does not serve the device; whether torch has it, ranks find out.

    Raises:
        UserError: says what would be right.
    """
    if backend not in BACKENDS:
        raise unknown_choice("backend", backend, BACKENDS)
    if backend == "nccl" and device != "cuda":
        raise UserError(f"backend nccl moves data between GPUs, not on device {device}; use --backend gloo")
