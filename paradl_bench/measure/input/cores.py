"""Cores of processes that read: a rank is pinned to one, and its loader's workers use all that it was allowed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def on_cores(cores: frozenset[int]) -> Iterator[None]:
    """Let this process and those that it starts use these cores, under the default scheduling; then pin it again."""
    pinned, policy = os.sched_getaffinity(0), os.sched_getscheduler(0)
    settle(cores, os.SCHED_OTHER)
    try:
        yield
    finally:
        settle(pinned, policy)


def settle(cores: frozenset[int] | set[int], policy: int = os.SCHED_OTHER) -> None:
    """Put this process on cores, under one of Linux's scheduling policies without priorities."""
    os.sched_setaffinity(0, cores)
    if os.sched_getscheduler(0) != policy:
        os.sched_setscheduler(0, policy, os.sched_param(0))
