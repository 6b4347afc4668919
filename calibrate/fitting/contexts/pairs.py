"""What one measurement tells of a collective in a context: its times idle, and in the context."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from calibrate.fitting.reading import Placed
from paradl_bench.core.statistics import Floats
from paradl_bench.plan.cost_terms.terms import CollectiveOperation
from paradl_bench.records.contexts.context import Context, ContextSamples
from paradl_bench.records.emulation import GHOSTS

TICK_S = 1e-9
"""A clock's tick is no time; relative errors need one."""


class NotFitted(Exception):
    """Why a context is left out, in words."""


class About(NamedTuple):
    """What is fitted together; ``ranks`` is 0 where all counts are, ``ghosts`` whether they stand for compute."""

    context: Context
    library: str
    operation: str
    level: str
    neighbour_level: str = ""
    groups: int = 1
    ranks: int = 0
    ghosts: bool = False

    @property
    def words(self) -> str:
        """For a note."""
        where = f"{self.library} {self.operation} {self.level}"
        return f"{where}, {self.groups} groups at once" if self.groups > 1 else f"{where} {self.context}"


class Point(NamedTuple):
    """A size: how many ranks, of which bytes; how many of them share a node, where that matters."""

    ranks: int
    message_bytes: int
    ranks_per_node: int = 0


class Measured(NamedTuple):
    """A record and its times, one a repetition; idle and in the context not necessarily equally many.

    Attributes:
        block: (directory, block). idle_s: empty where nothing alike ran idle.
    """

    point: Point
    block: tuple[int, int]
    idle_s: Floats
    in_context_s: Floats
    record: ContextSamples


def paired(
    records: Iterable[Placed[ContextSamples]], operations: Mapping[str, CollectiveOperation]
) -> Iterator[tuple[About, Measured]]:
    """Each record; those of operations without cost terms, which say whose time is a call's, are left out."""
    for directory, record in records:
        if record.operation not in operations:
            continue
        beside = record.context == "with-compute"
        links = record.context == "groups"
        about = About(
            record.context,
            record.library,
            record.operation,
            record.level,
            record.neighbour_level,
            record.groups,
            # What shares a host's cores depends on how many do. What shares links depends on the groups.
            ranks=0 if links else record.ranks,
            ghosts=beside and record.neighbour == GHOSTS,
        )
        point = Point(record.ranks, record.message_bytes, record.ranks_per_node)
        call_seconds = operations[record.operation].call_seconds
        idle_s, in_context_s = (np.maximum(half(call_seconds), TICK_S) for half in (record.idle_s, record.in_context_s))
        yield about, Measured(point, (directory, record.block), idle_s, in_context_s, record)
