"""Sweeps that several groups of ranks ran at once, as contexts: of other tools' programs, logs, and older sweeps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain

from paradl_bench.records.contexts.context import ContextSamples, Rows
from paradl_bench.records.samples import CollectiveSamples

_Key = tuple[object, ...]


def swept_groups(sweeps: Iterable[tuple[int, CollectiveSamples]]) -> Iterator[tuple[int, ContextSamples]]:
    """A record a block and size, all of its groups together, beside what ran alone in that block.

    Where nothing alike did (of the same tool, ranks, level and bytes), beside what did in the directory, else anywhere.

    Args:
        sweeps: numbers of directories, and what they hold.
    """
    alone: dict[_Key, list[CollectiveSamples]] = defaultdict(list)
    at_once: dict[tuple[int, int, int, int, int, int, _Key], list[CollectiveSamples]] = defaultdict(list)
    for directory, swept in sweeps:
        what = swept.library, swept.operation, swept.level, swept.tool, swept.dtype, swept.buffers
        alike: _Key = (*what, swept.ranks, swept.message_bytes, len(swept.samples_s))
        if swept.concurrent == 1:
            for key in ((alike, directory, swept.block), (alike, directory), (alike,)):
                alone[key].append(swept)
        elif swept.message_bytes > 0:
            size = swept.ranks, swept.message_bytes, swept.ranks_per_node
            at_once[directory, swept.block, *size, swept.concurrent, alike].append(swept)
    for (directory, block, ranks, message_bytes, per_node, groups, alike), together in sorted(at_once.items()):
        keys: tuple[_Key, ...] = ((alike, directory, block), (alike, directory), (alike,))
        beside = next((alone[key] for key in keys if key in alone), [])
        first = together[0]
        record = ContextSamples(
            library=first.library,
            operation=first.operation,
            level=first.level,
            ranks=ranks,
            message_bytes=message_bytes,
            dtype=first.dtype,
            block=block,
            context="groups",
            groups=groups,
            ranks_per_node=per_node,
            idle_end_s=_rows(beside),
            end_s=_rows(together),
            verified=all(swept.verified for swept in (*together, *beside)),
        )
        yield directory, record


def _rows(records: Iterable[CollectiveSamples]) -> Rows:
    """A list a rank of a group, the calls of all records behind each other."""
    of_ranks = zip(*(record.samples_s for record in records), strict=True)
    return tuple(tuple(chain.from_iterable(of_rank)) for of_rank in of_ranks)
