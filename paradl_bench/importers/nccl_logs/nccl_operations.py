"""Which collective a table of nccl-tests is of, over how many ranks; told by the log, checked by its numbers.

Older logs name neither. Counts, sizes and the ratio of bus to algorithm bandwidth tell both where they can
(nccl-tests, ``doc/PERFORMANCE.md``); where they cannot, the table is refused, not guessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paradl_bench.importers.nccl_logs.nccl_rows import Row
from paradl_bench.importers.tables.numbers_read import whole


def _part(ranks: int) -> float:
    return (ranks - 1) / ranks


def _two_parts(ranks: int) -> float:
    return 2 * _part(ranks)


def _one(ranks: int) -> float:
    return 1.0


@dataclass(frozen=True, slots=True)
class Kind:
    """What nccl-tests does with a collective.

    Attributes:
        name: ours; program: nccl-tests', where it is another.
        bus_factor: bus over algorithm bandwidth, of a number of ranks.
        moved: algorithm bandwidth counts this part of the size, of a number of ranks.
        parted: a count is one rank's part of the size, else the whole of it.
        rooted: the root column names a rank.
        reduces: the operation column names a reduction.
    """

    name: str
    program: str = ""
    bus_factor: Callable[[int], float] = _part
    moved: Callable[[int], float] = _one
    parted: bool = False
    rooted: bool = False
    reduces: bool = False


KINDS = (
    Kind("all_reduce", reduces=True, bus_factor=_two_parts),
    Kind("all_gather", parted=True),
    Kind("reduce_scatter", parted=True, reduces=True),
    Kind("broadcast", rooted=True, bus_factor=_one),
    Kind("reduce", rooted=True, reduces=True, bus_factor=_one),
    Kind("send_recv", "sendrecv", reduces=True, bus_factor=_one),
    Kind("all_to_all", "alltoall", parted=True),
    Kind("gather", parted=True, rooted=True),
    Kind("scatter", parted=True, rooted=True),
    # Up to 2.8 these counted what a rank receives, not the size, and took no factor; hypercube does so still.
    Kind("all_gather", parted=True, bus_factor=_one, moved=_part),
    Kind("reduce_scatter", parted=True, reduces=True, bus_factor=_one, moved=_part),
    Kind("hypercube", parted=True, bus_factor=_one, moved=_part),
)
"""Several of one name where generations define bandwidth differently."""
_PROGRAMS = {kind.program or kind.name: kind.name for kind in KINDS}
_BY_PROGRAM = {program.replace("_", ""): name for program, name in _PROGRAMS.items()}
_BEYOND_ANY = 1 << 63
_LONGEST_FIRST = sorted(_PROGRAMS, key=lambda program: (-len(program), program))
_PROGRAM = re.compile(rf"\b({'|'.join(_LONGEST_FIRST)})_perf")
# In a file's name words are run together: nccl_allreduce, all-reduce, broadcast.
_IN_NAME = re.compile(
    "|".join(
        program.replace("_", "[-_]?").replace("allto", "all[-_]?to[-_]?").replace("sendr", "send[-_]?r")
        for program in _LONGEST_FIRST
    )
)


def kinds_called(name: str) -> list[Kind]:
    """What a collective's name stands for, in all generations; empty for an unknown one."""
    return [kind for kind in KINDS if kind.name == name]


def programs_named(text: str) -> list[str]:
    """Collectives whose program the text names (``all_reduce_perf``), in its order."""
    return [_BY_PROGRAM[match.group(1).replace("_", "")] for match in _PROGRAM.finditer(text)]


def operation_in_name(name: str) -> str | None:
    """The one collective that a file's name names; None where it names none or several."""
    operations = {_BY_PROGRAM[re.sub("[-_]", "", match.group())] for match in _IN_NAME.finditer(name.lower())}
    return operations.pop() if len(operations) == 1 else None


def operation_of_experiment(name: str) -> str | None:
    """The collective of a JSON report's ``experiment_name`` (``AllReduce``)."""
    return _BY_PROGRAM.get(name.lower())


def ranks_that_fit(kind: Kind, rows: Sequence[Row], listed: Sequence[int]) -> list[int]:
    """Rank counts under which every row is one of this collective; of those ``listed`` where any are.

    A row of no bytes says nothing. Where neither the list nor the numbers tell, every count fits, and none is given.
    """
    telling = [row for row in rows if not row.moves_nothing]
    candidates = set(listed) or suggested_ranks(kind, telling)
    return sorted(ranks for ranks in candidates if all(_fits(kind, row, ranks) for row in telling))


def suggested_ranks(kind: Kind, rows: Sequence[Row]) -> set[int]:
    """Rank counts that the numbers of rows suggest."""
    rows = [row for row in rows if not row.moves_nothing]
    if kind.parted:
        sizes = {(row.size_bytes, row.count * row.element_bytes) for row in rows if row.count is not None}
        if sizes:
            return {size // part for size, part in sizes if part and size % part == 0}
    if kind.bus_factor(2) == kind.bus_factor(3):
        return set()
    # The ratio is 2 (n - 1) / n, or half of that: the row with the most digits tells n best.
    best = max((half for row in rows for half in row.halves), key=lambda half: half.algbw.value, default=None)
    if best is None or best.algbw.value <= 0:
        return set()
    of_two = kind.bus_factor(2)
    low = (best.busbw.value - best.busbw.rounding) / (best.algbw.value + best.algbw.rounding) / of_two
    high = (best.busbw.value + best.busbw.rounding) / (best.algbw.value - best.algbw.rounding or 1e-9) / of_two
    if not low < 2:
        return set()
    first = max(1, int(2 / (2 - low)))
    last = int(2 / (2 - high)) + 1 if high < 2 else first + 1024
    return set(range(first, min(last, first + 1024) + 1))


def odd_rows(kind: Kind, rows: Sequence[Row], ranks: int) -> list[Row] | None:
    """The few rows that are not of this collective on so many ranks; None where they are not few.

    Rows of small messages, whose bandwidths print as next to 0, fit any: where bandwidths contradict, only rows whose
    bandwidths tell ranks apart weigh against them.
    """
    telling = [row for row in rows if not row.moves_nothing]
    misfits = [row for row in telling if not _fits(kind, row, ranks)]
    contradicting = [row for row in misfits if _has_shape(kind, row, ranks)]
    fitting = [row for row in telling if _fits(kind, row, ranks)]
    weighty = [row for row in fitting if not _has_ratio(1.05 * kind.bus_factor(ranks), row)]
    few = len(misfits) < len(fitting) and (not contradicting or len(contradicting) < len(weighty))
    return misfits if few else None


def _fits(kind: Kind, row: Row, ranks: int) -> bool:
    return _has_shape(kind, row, ranks) and _has_ratio(kind.bus_factor(ranks), row)


def _has_shape(kind: Kind, row: Row, ranks: int) -> bool:
    parts = ranks if kind.parted else 1
    if row.count is None:
        if row.size_bytes % parts:
            return False
    elif row.size_bytes != row.count * row.element_bytes * parts:
        return False
    return row.root in ("", "-1") or _whole_rank(row.root) < ranks


def _has_ratio(factor: float, row: Row) -> bool:
    return all(
        abs(half.busbw.value - factor * half.algbw.value)
        <= 1.02 * (half.busbw.rounding + factor * half.algbw.rounding) + 1e-9
        for half in row.halves
    )


def _whole_rank(text: str) -> int:
    """A root as a number; one that is none counts as the first rank, one of too many digits is beyond any."""
    if not (text.isascii() and text.isdigit()):
        return 0
    rank = whole(text)
    return _BEYOND_ANY if rank is None else rank


def kinds_of_layout(rows: Sequence[Row], columns: Sequence[str]) -> list[Kind]:
    """Collectives that a table's columns and entries leave possible; without columns all of them."""
    if not columns:
        return list(KINDS)
    has_redop, has_root = "redop" in columns, "root" in columns
    if has_redop and has_root:
        # One layout for all: none and -1 stand where there is no reduction or no root.
        rooted = any(row.root not in ("-1", "") for row in rows)
        reduces = any(row.redop not in ("none", "") for row in rows)
        return [kind for kind in KINDS if (kind.rooted, kind.reduces) == (rooted, reduces)]
    if has_redop:
        # The generations before print a reduction for an all-to-all too.
        return [kind for kind in KINDS if not kind.rooted and (kind.reduces or kind.name == "all_to_all")]
    return [kind for kind in KINDS if kind.rooted == has_root and not kind.reduces]
