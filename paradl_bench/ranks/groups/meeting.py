"""Where the ranks of a run meet: a store that strangers can neither read nor write, and the key of the run.

Ranks of this program's own launcher inherit a file that has no name. Those of torchrun and srun share a TCP store,
which anyone who reaches it can read and write: its values are sealed with the launch's secret.
"""

from __future__ import annotations

import contextlib
import datetime
import hmac
import os
import secrets
import socket
import subprocess
from typing import Any

from torch.distributed import FileStore, PrefixStore, Store, TCPStore, rendezvous  # type: ignore[attr-defined]

from paradl_bench.core.errors import ParadlError, UserError, WorkError
from paradl_bench.ranks.launch_secret import launch_secret, opened, sealed
from paradl_bench.ranks.rank_place import CALL, STORE, RankPlace, whole_number

_NONCE_BYTES = 32


class SealedStore(Store):
    """Another store, whose values are sealed; counters are not.

    A stranger who counts along can make ranks wait or go on too early, and no more: connections are proven afterwards.
    """

    def __init__(self, inner: Any, secret: bytes) -> None:
        super().__init__()
        self._inner, self._secret = inner, secret

    def set(self, key: str, value: str | bytes) -> None:
        """Seal a value and keep it."""
        content = value.encode() if isinstance(value, str) else value
        self._inner.set(key, sealed(self._secret, key, content))

    def get(self, key: str) -> bytes:
        """Wait for a value and open it.

        Raises:
            WorkError: a stranger wrote it.
        """
        return opened(self._secret, key, self._inner.get(key))

    def add(self, key: str, value: int) -> int:
        """Add to a counter."""
        return int(self._inner.add(key, value))

    def wait(self, keys: list[str], *timeout: datetime.timedelta) -> None:
        """Wait until all keys are there."""
        self._inner.wait(keys, *timeout)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return bool(self._inner.check(keys))

    def delete_key(self, key: str) -> bool:
        """Remove a key."""
        return bool(self._inner.delete_key(key))

    def has_extended_api(self) -> bool:
        """Whether several keys can be read in one call: no."""
        return False

    def clone(self) -> SealedStore:
        """Another connection to the same store."""
        return _kept(SealedStore(self._inner.clone(), self._secret))


# torch holds the part of a store that is written in C++, and calls into the part in Python, which has to be kept.
_stores: list[Any] = []


def _kept(store: SealedStore) -> SealedStore:
    _stores.append(store)
    return store


def forget_stores() -> None:
    """Let go of the stores of a run that was left."""
    _stores.clear()


def meet(place: RankPlace, timeout: datetime.timedelta) -> tuple[Store, bytes]:
    """The store of this run and its key, once every rank is there.

    Raises:
        UserError: there is no secret, or the port is in use.
        WorkError: a rank did not come in time, or one that came is none of this run's.
    """
    secret = launch_secret()
    try:
        if place.launcher == "own":
            store = FileStore(f"/proc/self/fd/{os.environ.pop(STORE)}", -1)
            store.set_timeout(timeout)
            return store, _agreed_key(store, place, secret)
        # torchrun's agent has a store, or torch makes one where the agent has none for its ranks.
        at_torchrun = place.launcher == "torchrun"
        inner: Any = next(iter(rendezvous("env://", timeout=timeout)))[0] if at_torchrun else _of_srun(place, timeout)
        if CALL in os.environ:
            inner = PrefixStore(f"paradl {os.environ[CALL]}", inner)
        key = _agreed_key(_kept(SealedStore(inner, secret)), place, secret)
        # With the key of this run, so that what was written in another one counts for nothing.
        return _kept(SealedStore(inner, key)), key
    except RuntimeError as error:
        if isinstance(error, ParadlError):
            raise
        raise WorkError(
            f"rank {place.rank} could not meet {place.ranks} ranks: {first_line(error)}", resumable=True
        ) from error


def _agreed_key(store: Any, place: RankPlace, secret: bytes) -> bytes:
    """A key that every rank had a part in, so that none can be made to use that of an earlier run."""
    store.set(f"paradl/{place.rank}", secrets.token_bytes(_NONCE_BYTES))
    parts = [store.get(f"paradl/{rank}") for rank in range(place.ranks)]
    return hmac.digest(secret, b"paradl run " + b"".join(parts), "sha256")


def _of_srun(place: RankPlace, timeout: datetime.timedelta) -> Any:
    """A store for which rank 0 listens."""
    host, port = _meeting_point()
    if place.rank:
        try:
            return TCPStore(host, port, None, False, timeout)
        except RuntimeError as error:
            raise WorkError(
                f"rank {place.rank} could not reach rank 0 at {host}:{port}: {first_line(error)}"
            ) from error
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listener(host, port))
        store = TCPStore(host, port, None, True, timeout, False, master_listen_fd=listener.fileno())
        # The store closes it from now on.
        listener.detach()
        return store


def _listener(host: str, port: int) -> socket.socket:
    """A listening socket at the address of the host alone; at all of them where that is not one of this node's, or is
    a loopback's while ranks are on several nodes.
    """
    family, address = socket.AF_INET, ""
    with contextlib.suppress(OSError):
        first = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        family, address = first[0], str(first[4][0])
    alone = os.environ.get("SLURM_STEP_NUM_NODES", os.environ.get("SLURM_NNODES", "1")) == "1"
    if address.startswith("127.") and not alone:
        address = ""
    for place in dict.fromkeys((address, "")):
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((place, port))
            listener.listen(1024)
        except OSError as error:
            listener.close()
            failed = error
        else:
            return listener
    why = (failed.strerror or str(failed)).lower()
    raise UserError(
        f"port {port} cannot be used ({why}); unset MASTER_PORT for a free one, or set it to another"
    ) from None


def _meeting_point() -> tuple[str, int]:
    host = os.environ.get("MASTER_ADDR") or _first_slurm_host()
    given = os.environ.get("MASTER_PORT")
    if given is not None:
        port = whole_number("MASTER_PORT", given)
        if port > 65535:
            raise UserError(f"MASTER_PORT={port} is no port: ports end at 65535")
        return host, port
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


def first_line(error: BaseException) -> str:
    """The first line of what an error says."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
