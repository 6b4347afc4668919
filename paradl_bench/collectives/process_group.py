"""Process groups of some of the ranks: made under the limits that hold for all of them, and let go without a hang."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import datetime

    from torch.distributed import ProcessGroup


def make_group(ranks: Sequence[int]) -> ProcessGroup:
    """A group of ``ranks``, of whose operations each may take as long as one of all ranks; every rank calls this.

    torch's own default is half an hour (10 min with NCCL), whatever the ranks joined with: where one of them fails
    inside of such a group, the others would wait as long.
    """
    import torch.distributed as dist

    made: ProcessGroup = dist.new_group(list(ranks), timeout=_limit())
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
