"""Process groups of some of the ranks, under the limits that hold for all of them."""

from __future__ import annotations

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
