"""From runs of nccl-tests to measurements: which collective, how many ranks, which rows count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paradl_bench.importers.failures import refusal
from paradl_bench.importers.importer import Imported, ImportOptions
from paradl_bench.importers.nccl_logs.nccl_operations import (
    Kind,
    kinds_called,
    kinds_of_layout,
    odd_rows,
    operation_in_name,
    ranks_that_fit,
    suggested_ranks,
)
from paradl_bench.importers.nccl_logs.nccl_rows import Half, Row
from paradl_bench.importers.plausible import implausible_call, implausible_time
from paradl_bench.records.samples import CollectiveSamples


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A table with what is known of it, from text or JSON alike.

    Attributes:
        stated: the collective that the program itself names; named: those that stand near it.
        columns: names of the columns, which leave some collectives possible; empty where they leave all.
        ranks: counts of ranks that the log leaves possible; empty where it says nothing.
        hosts: how many hosts took part; None where the log does not say.
        ranks_per_node: the most that share a host; 0 where the log does not list all of them.
        groups: how many groups of ranks ran it at once.
        calls: iterations that each time is the mean of.
        failure: what says that a rank died, or None.
    """

    line: int
    rows: Sequence[Row]
    stated: str | None
    named: tuple[str, ...]
    columns: tuple[str, ...]
    ranks: tuple[int, ...]
    hosts: int | None
    ranks_per_node: int
    groups: int
    calls: int | None
    failure: str | None


def add_sweep(result: Imported, sweep: Sweep, options: ImportOptions, *, library: str, tool: str, path: str) -> None:
    """Add a table's rows as measurements, or drop them with the reason."""
    resolved = _resolved(sweep, options, path)
    if isinstance(resolved, str):
        for row in sweep.rows:
            result.drop(row.line, row.text, resolved)
        return
    kind, ranks, odd = resolved
    for row in odd:
        result.drop(row.line, row.text, f"unlike the other rows: {_contradiction(kind.name, (ranks,))}")
    if sweep.calls is None and options.iterations is None:
        result.note(
            f"{path} line {sweep.line}: the file does not say how many iterations each time is the mean of; 1 is taken"
        )
    if kind.name == "send_recv":
        result.note(f"{path} line {sweep.line}: in sendrecv_perf every rank sends and receives at the same time")
    if not all(row.dtype for row in sweep.rows):
        result.note(f"{path} line {sweep.line}: there is no column of types; {options.dtype} is taken (--dtype)")
    level = level_of(sweep, options, ranks)
    for row in sweep.rows:
        if row in odd:
            continue
        records = _records(result, row, kind, ranks, options)
        result.rows += bool(records)
        result.collectives += [
            CollectiveSamples(
                library=options.library or library,
                tool=tool,
                operation=kind.name,
                level=level,
                ranks=ranks,
                message_bytes=row.size_bytes // ranks if kind.parted else row.size_bytes,
                dtype=row.dtype or options.dtype,
                block=0,
                samples_s=half.samples_s or ((half.seconds,),),
                verified=half.checked and not half.is_wrong(row.dtype or options.dtype, ranks),
                calls_per_sample=1 if half.samples_s else (sweep.calls or options.iterations or 1),
                buffers=half.buffers,
                source=f"{path}:{row.line}",
                concurrent=sweep.groups,
                ranks_per_node=min(sweep.ranks_per_node, ranks) or options.ranks_on_a_node(ranks, level),
            )
            for half in records
        ]


def _resolved(sweep: Sweep, options: ImportOptions, path: str) -> tuple[Kind, int, list[Row]] | str:
    """The collective, its ranks and rows that are not of it, or in words why none is taken."""
    if sweep.failure is not None and "failed" not in options.keep:
        return refusal(sweep.failure)
    odd: list[Row] = []
    identified = identify(sweep, options, path)
    if isinstance(identified, str):
        few = _without_odd_rows(sweep, options, path)
        if few is None:
            return identified
        identified, odd = few
    kind, ranks = identified
    if sweep.hosts is None and options.level is None and ranks > 1:
        return "the log lists no hosts: give --level node, or system where ranks were on several"
    return kind, ranks, odd


def level_of(sweep: Sweep, options: ImportOptions, ranks: int) -> str:
    """``node`` where one host took part, else what the option says, else ``system``; several hosts are no node."""
    if sweep.hosts == 1 or (sweep.hosts is None and ranks == 1):
        return "node"
    on_several = sweep.hosts is not None and options.level in (None, "node")
    return "system" if on_several else options.level or "system"


def _told(sweep: Sweep, options: ImportOptions) -> tuple[tuple[int, ...], str | None]:
    """Counts of ranks and the collective that log or options tell; none and None where neither does."""
    return sweep.ranks or ((options.ranks,) if options.ranks else ()), sweep.stated or options.operation


def identify(sweep: Sweep, options: ImportOptions, path: str) -> tuple[Kind, int] | str:
    """The collective of a table and its ranks, or in words why they can't be told.

    What the program states is taken if the numbers allow it; else the user's option; else programs named near the
    table, then in the file's name; else what columns and numbers leave, if that is one.
    """
    listed, told = _told(sweep, options)
    if told is not None:
        return _only(kinds_called(told), sweep, listed) or _contradiction(told, listed)
    possible = kinds_of_layout(sweep.rows, sweep.columns)
    in_name = operation_in_name(path.rsplit("/", 1)[-1])
    unnamed = [kind for kind in possible if kind.name != "hypercube"]
    named = [[kind for kind in possible if kind.name == name] for name in (*reversed(sweep.named), in_name)]
    for kinds in (*named, unnamed):
        if identified := _only(kinds, sweep, listed):
            return identified
    fitting = sorted({kind.name for kind in unnamed if ranks_that_fit(kind, sweep.rows, listed)})
    if len(fitting) > 1:
        return f"it may be {' or '.join(fitting)}: give --op"
    if listed:
        return _contradiction(" or ".join(sorted({kind.name for kind in unnamed})) or "any collective", listed)
    return "neither the log nor its numbers say the number of ranks: give --ranks"


def _without_odd_rows(sweep: Sweep, options: ImportOptions, path: str) -> tuple[tuple[Kind, int], list[Row]] | None:
    """The collective of all but a few rows, which contradict the others, and these; None where there is none.

    A table whose rows agree with each other but not with what is told of it has no odd rows.
    """
    listed, told = _told(sweep, options)
    kinds = kinds_called(told) if told is not None else kinds_of_layout(sweep.rows, sweep.columns)
    if any(ranks_that_fit(kind, sweep.rows, ()) for kind in kinds):
        return None
    fewest: list[Row] | None = None
    for kind in kinds:
        for ranks in sorted(set(listed) or suggested_ranks(kind, sweep.rows)):
            odd = odd_rows(kind, sweep.rows, ranks)
            if odd and (fewest is None or len(odd) < len(fewest)):
                fewest = odd
    if fewest is None:
        return None
    rest = replace(sweep, rows=[row for row in sweep.rows if row not in fewest])
    identified = identify(rest, options, path)
    return None if isinstance(identified, str) else (identified, fewest)


def _only(kinds: Sequence[Kind], sweep: Sweep, listed: Sequence[int]) -> tuple[Kind, int] | None:
    fitting = [(kind, ranks) for kind in kinds for ranks in ranks_that_fit(kind, sweep.rows, listed)]
    # Small messages only, whose bandwidths print as 0, fit both of a collective's definitions: they mean one thing.
    return fitting[0] if len({(kind.name, ranks) for kind, ranks in fitting}) == 1 else None


def _contradiction(name: str, listed: Sequence[int]) -> str:
    if not listed:
        return f"neither the log nor its numbers say how many ranks this {name} had: give --ranks"
    counts = " or ".join(map(str, sorted(set(listed))))
    return f"sizes, counts and bandwidths do not fit {name} on {counts} ranks"


def _records(result: Imported, row: Row, kind: Kind, ranks: int, options: ImportOptions) -> list[Half]:
    """The halves of a row that count; what is not taken is dropped once a reason."""
    reasons: Counter[str] = Counter()
    taken = []
    for half in row.halves:
        why = _why_not(row, half, kind, ranks, options)
        if why is None:
            taken.append(half)
        else:
            reasons[why] += 1
    for why, count in reasons.items():
        where = "" if count == len(row.halves) else "one of its two times: "
        result.drop(row.line, row.text, where + why)
    return taken


def _why_not(row: Row, half: Half, kind: Kind, ranks: int, options: ImportOptions) -> str | None:
    if row.size_bytes == 0 and "empty" not in options.keep:
        return "no bytes were sent; --keep empty takes it anyway"
    if half.cpu_time:
        return "cputime is the host's time to issue calls, not the time of the collective"
    if half.is_wrong(row.dtype or options.dtype, ranks) and "wrong" not in options.keep:
        return "wrong results; --keep wrong takes it anyway"
    if half.seconds <= 0:
        return "a time of 0"
    why = implausible_call(ranks, row.size_bytes, half.seconds)
    if why is not None:
        return why
    if any(implausible_time(time) for process_s in half.samples_s for time in process_s):
        return "no call takes that long"
    expected = row.size_bytes * kind.moved(ranks) / half.seconds / 1e9
    slack = half.algbw.rounding * 1.02 + expected * (half.rounding_s / half.seconds) * 1.05 + expected * 1e-5
    if abs(expected - half.algbw.value) > slack:
        return f"torn or edited: {half.algbw.value:g} GB/s is not its size over its time ({expected:.4g})"
    return None
