"""Process groups of some of the ranks: made under the limits that hold for all of them, and let go without a hang."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING

from paradl_bench.ranks.groups.proof import prove_ranks

if TYPE_CHECKING:
    import datetime

    from torch.distributed import ProcessGroup


_SILENT_BACKEND = "fake"
"""torch's backend for tests of its own, whose calls move nothing and are over at once."""
_silent: ContextVar[bool] = ContextVar("silent", default=False)


@contextlib.contextmanager
def silent_groups() -> Iterator[None]:
    """Meshes that are made inside have groups that move nothing: calls take the caller's own time and no more.

    Raises:
        ImportError: this torch does not have them.
    """
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

    token = _silent.set(True)
    try:
        yield
    finally:
        _silent.reset(token)


def groups_are_silent() -> bool:
    """Whether groups that are made now are to move nothing."""
    return _silent.get()


def is_silent(group: ProcessGroup) -> bool:
    """Whether calls on a group move nothing."""
    import torch.distributed as dist

    return str(dist.get_backend(group)) == _SILENT_BACKEND


def make_group(ranks: Sequence[int], *, silent: bool = False) -> ProcessGroup:
    """A group of ``ranks``, of whose operations each may take as long as one of all ranks; every rank calls this.

    torch's own default is half an hour (10 min with NCCL), whatever the ranks joined with: where one of them fails
    inside of such a group, the others would wait as long.
    """
    import torch.distributed as dist

    backend = _SILENT_BACKEND if silent else None
    made: ProcessGroup = dist.new_group(list(ranks), timeout=_limit(), backend=backend)
    prove_ranks(made)
    return made


def end_groups(groups: Sequence[ProcessGroup]) -> None:
    """Let groups go, which keep threads; every rank calls this, when all have ended what they called on the groups.

    Modules that exchange gradients over them have to be out of reach: what is left of those is collected here, before
    the groups. torch lets go of such a module's reducer, and with it of a group that nobody else holds, without giving
    up the interpreter's lock, and waits for the group's threads; one of them may wait for that very lock, to let go of
    its last call's state, and the rank hangs for ever. Whoever holds a group beside the module, as the caller does
    here, lets go of it with the lock given up.
    """
    import torch.distributed as dist

    gc.collect()
    for group in groups:
        dist.destroy_process_group(group)


def _limit() -> datetime.timedelta | None:
    """How long an operation of all ranks may take; None where the backend has no limit (MPI)."""
    import torch.distributed as dist

    world = dist.group.WORLD
    if world is None:
        return None  # torch says what is wrong
    # The same for all devices: it is given once, to init_process_group.
    backend = world._get_backend(world._device_types[0])
    try:
        limit: datetime.timedelta | None = getattr(backend.options, "_timeout", None)
    except RuntimeError:
        return None  # how torch says that a backend has no options
    return limit
