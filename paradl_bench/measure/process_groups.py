"""Ranks: started by this program, by torchrun or by srun; joined, watched, and ended.

The launcher's side imports no torch. Every rank gets torchrun's variables, glibc's allocator thresholds and one
OpenMP thread, and on a CPU pins itself to one core, so that measurements of one rank and of several are alike.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import gc
import importlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Literal, TypeVar

from paradl_bench.measure.environment import ALLOCATOR_VARIABLES
from paradl_bench.spec.errors import ParadlError, UserError, WorkError, unknown_choice
from paradl_bench.terminal import say

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import TCPStore

T = TypeVar("T")
Launcher = Literal["own", "torchrun", "srun"]

LAUNCHERS: tuple[Launcher, ...] = ("own", "torchrun", "srun")
BACKENDS = ("gloo", "nccl", "mpi")
NO_BACKEND = "none"
"""Backend of a run on one rank that needs no process group."""

_MARK = "PARADL_LAUNCHER"
_LAUNCHER_PID = "PARADL_LAUNCHER_PID"
_LISTENER = "PARADL_LISTEN_FD"
_PEER_LOST = "lost the connection to another rank"
_POLL_S = 0.05
# Beyond this, ranks that share cores say nothing about ranks that do not, and may exhaust the host's memory.
_RANKS_PER_CORE = 8
# A rank whose peer failed by an exception often exits before that peer does: wait for the one to blame.
_BLAME_S = 2.0
_TERMINATE_S = 5.0
_ERROR_LINE = re.compile(r"^[\w-]+: error: (.*)$")
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where a process stands among the ranks, as its launcher's variables say."""

    launcher: Launcher
    rank: int
    ranks: int
    local_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """A rank that has joined.

    Attributes:
        device: of this rank (``cpu``, ``cuda:1``).
        backend: of the default process group; ``none`` where there is none.
        core: the core that this rank is pinned to; None on a GPU.
    """

    rank: int
    ranks: int
    local_rank: int
    device: torch.device
    backend: str
    launcher: Launcher
    core: int | None

    @property
    def settings(self) -> dict[str, str]:
        """What was set for this rank that changes its times, for the environment of what it measures."""
        return {} if self.core is None else {"pinned": "one core a rank", "scheduling": scheduling_policy()}

    def barrier(self) -> None:
        """Wait for all ranks; nothing where there is no process group."""
        if self.backend != NO_BACKEND:
            import torch.distributed as dist

            dist.barrier()

    def share(self, value: T) -> T:
        """Rank 0's value on every rank; a collective, so never inside what is timed."""
        if self.backend == NO_BACKEND:
            return value
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of ranks, on every rank; a collective, so never inside what is timed."""
        if self.backend == NO_BACKEND:
            return [value]
        import torch.distributed as dist

        boxes: list[T] = [value] * self.ranks
        dist.all_gather_object(boxes, value)
        return boxes


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
    if choice in (None, "own") and os.environ.get(_MARK) == "own":
        return _place("own", rank="RANK", ranks=("WORLD_SIZE",), local_rank="LOCAL_RANK")
    if choice == "torchrun" or (choice is None and "TORCHELASTIC_RUN_ID" in os.environ):
        return _place("torchrun", rank="RANK", ranks=("WORLD_SIZE",), local_rank="LOCAL_RANK")
    if choice == "srun":
        # Inside a step that has fewer tasks than its job, only the step's own count is right.
        counts = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
        return _place("srun", rank="SLURM_PROCID", ranks=counts, local_rank="SLURM_LOCALID")
    return None


def _place(launcher: Launcher, *, rank: str, ranks: tuple[str, ...], local_rank: str) -> RankPlace:
    def number(*names: str) -> int:
        for name in names:
            if name in os.environ:
                return _whole_number(name, os.environ[name])
        raise UserError(f"--launcher {launcher}: {names[-1]} is not set; start this command through {launcher}")

    place = RankPlace(launcher=launcher, rank=number(rank), ranks=number(*ranks), local_rank=number(local_rank))
    if place.rank >= place.ranks:
        raise UserError(f"{rank}={place.rank} is no rank of {place.ranks}: ranks count from 0")
    return place


def _whole_number(name: str, text: str) -> int:
    if not text.strip().isdigit():
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


def _check_backend_built(backend: str) -> None:
    import torch.distributed as dist

    available = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    if not available[backend]():
        present = ", ".join(name for name in BACKENDS if available[name]())
        raise UserError(f"backend {backend} is not built into this torch; present are {present}")


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


# --- The launcher's side ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Started:
    """A rank that was started, and the files that hold what it printed."""

    rank: int
    process: subprocess.Popen[bytes]
    stderr: IO[bytes]
    forwarded: int = 0
    muted: bool = False

    def stderr_from(self, start: int) -> bytes:
        """What was printed from byte ``start`` on; read without seeking, since the rank writes at the same offset."""
        size = os.fstat(self.stderr.fileno()).st_size
        return os.pread(self.stderr.fileno(), max(0, size - start), start)

    def stderr_lines(self) -> list[str]:
        """Lines that are not empty, without terminal escapes."""
        text = _ESCAPE.sub("", self.stderr_from(0).decode(errors="replace"))
        return [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]

    def error_message(self) -> str | None:
        """The message of the one-line error that the rank ended with, if it did."""
        for line in reversed(self.stderr_lines()):
            match = _ERROR_LINE.match(line)
            if match:
                return match.group(1)
        return None

    def last_words(self) -> str:
        """The exception that ended the rank, or the last three lines that it printed."""
        lines = self.stderr_lines()
        ended_by_exception = any("Traceback (most recent call last)" in line for line in lines)
        return " | ".join(lines[-1:] if ended_by_exception else lines[-3:])


def launch_ranks(
    command: Sequence[str],
    *,
    ranks: int,
    device: str,
    timeout_s: float | None,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Start ``ranks`` processes of ``command`` on this host and wait for all of them.

    Rank 0's output is passed through; the others' is kept for errors. When one fails the rest is killed.

    Args:
        command: program and arguments, as ``[sys.executable, "-m", "paradl_bench", ...]``.
        device: ``cpu`` or ``cuda``.
        timeout_s: how long all may take; None for no limit.
        environment: variables to set besides torchrun's and the allocator's.

    Raises:
        UserError: a rank ended with a user's mistake (exit code 2), or the port in ``MASTER_PORT`` is in use.
        WorkError: a rank failed (names it, its exit code or signal, its last lines), or the time was up.
        KeyboardInterrupt: passed on after the ranks were interrupted and have ended.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listen(os.environ.get("MASTER_PORT")))
        files = [stack.enter_context(tempfile.TemporaryFile(buffering=0)) for _ in range(ranks)]
        started: list[_Started] = []
        stack.callback(_kill, started)
        for rank, stderr in enumerate(files):
            variables = _rank_variables(rank, ranks, device, listener, environment or {})
            started.append(_start(command, rank, variables, listener if rank == 0 else None, stderr))
        try:
            _watch(started, deadline, timeout_s)
        except KeyboardInterrupt:
            # Ranks are told, so that they keep what they measured; then they end, one way or the other.
            _interrupt(started)
            raise


def _listen(port: str | None) -> socket.socket:
    """A listening socket for the ranks' store: made here, handed to rank 0, so that nobody takes the port between."""
    number = 0 if port is None else _whole_number("MASTER_PORT", port)
    if number > 65535:
        raise UserError(f"MASTER_PORT={number} is no port: ports end at 65535")
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", number))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise UserError(_port_in_use(number, error.strerror or str(error))) from None
    return listener


def _port_in_use(port: int, why: str) -> str:
    return f"port {port} cannot be used ({why}); unset MASTER_PORT for a free one, or set it to another"


def _rank_variables(
    rank: int, ranks: int, device: str, listener: socket.socket, environment: Mapping[str, str]
) -> dict[str, str]:
    variables = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC_")}
    variables.update(ALLOCATOR_VARIABLES)
    variables.update({"OMP_NUM_THREADS": "1", "PARADL_HOST_CORES": str(len(os.sched_getaffinity(0)))})
    if device == "cpu":
        # All ranks are on this host; without this gloo looks up the host's name, which fails without a network.
        variables.setdefault("GLOO_SOCKET_IFNAME", "lo")
    variables.update(environment)
    shown = rank == 0 and sys.stderr.isatty() and os.environ.get("PARADL_PROGRESS") != "0"
    variables.update(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(listener.getsockname()[1]),
            "PARADL_PROGRESS": "1" if shown else "0",
            _MARK: "own",
            _LAUNCHER_PID: str(os.getpid()),
        }
    )
    if rank == 0:
        variables[_LISTENER] = str(listener.fileno())
        variables["COLUMNS"] = str(shutil.get_terminal_size().columns)
    return variables


def _start(
    command: Sequence[str],
    rank: int,
    variables: dict[str, str],
    listener: socket.socket | None,
    stderr: IO[bytes],
) -> _Started:
    try:
        process = subprocess.Popen(
            list(command),
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=None if rank == 0 else stderr,
            stderr=stderr,
            pass_fds=() if listener is None else (listener.fileno(),),
            # Ctrl-C at the terminal reaches the launcher alone, which then tells the ranks once.
            process_group=0,
        )
    except OSError as error:
        raise WorkError(f"cannot start rank {rank} as {command[0]}: {error.strerror or error}") from error
    return _Started(rank, process, stderr)


def _watch(started: list[_Started], deadline: float | None, timeout_s: float | None) -> None:
    """Return when all ranks have ended well; raise for the rank to blame otherwise."""
    blame_at: float | None = None
    while True:
        _forward(started[0])
        codes = [item.process.poll() for item in started]
        failed = [item for item, code in zip(started, codes, strict=True) if code]
        now = time.monotonic()
        if failed and blame_at is None:
            blame_at = now + _BLAME_S
        # A rank killed by a signal, or that reports a mistake, is the cause and not a consequence of another's failure.
        blamed = any(code is not None and (code < 0 or code == UserError.exit_code) for code in codes)
        clear = blamed or None not in codes
        if blame_at is not None and (clear or now >= blame_at):
            raise _failure(failed, len(started))
        if None not in codes:
            return
        if deadline is not None and now >= deadline:
            slow = ", ".join(str(item.rank) for item, code in zip(started, codes, strict=True) if code is None)
            raise WorkError(f"rank {slow} did not end within {timeout_s:g} s and was killed; --timeout sets the limit")
        time.sleep(_POLL_S)


def _forward(first: _Started) -> None:
    """Pass on what rank 0 wrote to stderr since the last call, but not its final error, which is reported once."""
    if first.muted:
        return
    new = first.stderr_from(first.forwarded)
    end = len(new)
    for mark in (b": error: ", b"Traceback (most recent call last)"):
        found = new.find(mark)
        if found >= 0:
            end = min(end, new.rfind(b"\n", 0, found) + 1)
            first.muted = True
    first.forwarded += end
    if end:
        sys.stderr.write(new[:end].decode(errors="replace"))
        sys.stderr.flush()


def _failure(failed: list[_Started], ranks: int) -> ParadlError:
    """The error of the rank that failed first as far as can be told: a signal, a mistake, a failure, a lost peer."""

    def order(item: _Started) -> tuple[int, int]:
        code, message = item.process.returncode, item.error_message() or ""
        if code < 0:
            return 0, item.rank
        if code == UserError.exit_code and message:
            return 1, item.rank
        return (3 if _PEER_LOST in message else 2), item.rank

    item = min(failed, key=order)
    code, message = item.process.returncode, item.error_message()
    if code == UserError.exit_code and message:
        return UserError(message)
    how = f"was killed by signal {-code} ({_signal_name(-code)})" if code < 0 else f"ended with exit code {code}"
    if ranks > 1:
        how += "; the other ranks were ended"
    last = message or item.last_words()
    return WorkError(f"rank {item.rank} {how}" + (f"; its last words: {last}" if last else ""))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def _interrupt(started: list[_Started]) -> None:
    for item in started:
        if item.process.poll() is None:
            item.process.send_signal(signal.SIGINT)
    end = time.monotonic() + _TERMINATE_S
    for item in started:
        with contextlib.suppress(subprocess.TimeoutExpired):
            item.process.wait(max(0.0, end - time.monotonic()))


def _kill(started: list[_Started]) -> None:
    for item in started:
        if item.process.poll() is None:
            item.process.kill()
    for item in started:
        item.process.wait()
    if started:
        _forward(started[0])


# --- A rank's side ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def join_ranks(backend: str, device: str, *, timeout_s: float, launcher: str | None = None) -> Iterator[RankContext]:
    """Join the ranks that a launcher has started, and leave them however the body ends.

    On a CPU the rank is pinned to the LOCAL_RANK-th core that it is allowed and uses one thread. Under torchrun and
    srun the process may begin anew, with the allocator's thresholds set: nothing before this call may matter.

    Args:
        backend: ``gloo``, ``nccl``, ``mpi``, or ``none`` for one rank without a process group.
        device: ``cpu`` or ``cuda``.
        timeout_s: how long joining, and then each collective, may take.
        launcher: ``--launcher`` as given.

    Raises:
        UserError: no launcher started this process, backend or device can't be had, the port is in use.
        WorkError: the ranks did not meet in time, or another rank went away in the middle of a collective.
    """
    place = launcher_of_environment(launcher)
    if place is None:
        raise UserError("this process is no rank: start it through torchrun or srun, or leave starting to this program")
    if place.launcher == "own":
        _die_with_launcher()
    else:
        _begin_again_with_thresholds()
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
        yield context
        return
    _init_process_group(place, backend, timeout_s)
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


def _die_with_launcher() -> None:
    """Have the kernel end this rank when its launcher is killed, which then can't end it itself (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.environ.get(_LAUNCHER_PID, "") != str(os.getppid()):
        raise WorkError("the launcher of this rank is gone")


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
    core = cores[place.local_rank % len(cores)]
    os.sched_setaffinity(0, {core})
    if _ranks_here(place) <= len(cores):
        _never_preempt_on_waking()
    torch.set_num_threads(1)
    return core


def _ranks_here(place: RankPlace) -> int:
    """Ranks on this host; all of them where the launcher does not say."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(told) if told.isdigit() else place.ranks


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
            f"rank {place.rank} could not join {place.ranks} ranks over {backend}: {_first(error)}"
        ) from error


def _store(place: RankPlace, timeout: datetime.timedelta) -> TCPStore:
    """The store through which ranks meet: rank 0 listens, on the launcher's socket where it handed one over."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, port = _meeting_point(place)
    inherited = os.environ.pop(_LISTENER, None)
    try:
        if inherited is None:
            return TCPStore(host, port, place.ranks, place.rank == 0, timeout)
        return TCPStore(host, port, place.ranks, True, timeout, master_listen_fd=int(inherited))
    except RuntimeError as error:
        if "EADDRINUSE" in str(error) or "already in use" in str(error):
            raise UserError(_port_in_use(port, "address already in use")) from None
        raise WorkError(f"rank {place.rank} could not reach rank 0 at {host}:{port}: {_first(error)}") from error


def _meeting_point(place: RankPlace) -> tuple[str, int]:
    if place.launcher == "own":
        return "127.0.0.1", _whole_number("MASTER_PORT", os.environ["MASTER_PORT"])
    host = os.environ.get("MASTER_ADDR") or _first_slurm_host()
    given = os.environ.get("MASTER_PORT")
    if given is not None:
        return host, _whole_number("MASTER_PORT", given)
    # All ranks of a step derive the same port; consecutive steps of a job take different ones.
    job, step = (os.environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return host, 20000 + (_whole_number("SLURM_JOB_ID", job) * 31 + _whole_number("SLURM_STEP_ID", step)) % 12000


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
        raise WorkError(f"{_PEER_LOST}: {_first(error)}") from error


def _is_peer_failure(error: RuntimeError) -> bool:
    import torch.distributed as dist

    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    marks = ("Connection closed by peer", "Connection reset by peer", "gloo/transport", "Timed out waiting", "NCCL")
    return any(mark in text for mark in marks)


def _first(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
