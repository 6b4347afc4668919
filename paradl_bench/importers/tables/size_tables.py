"""What OSU's and IMB's tables have in common: a row a size, whose time in microseconds is a mean over many calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from paradl_bench.importers.importer import Imported, ImportOptions
from paradl_bench.importers.plausible import implausible_call
from paradl_bench.importers.tables.markdown import Columns, PipeRow, columns_of, shown
from paradl_bench.importers.tables.numbers_read import decimal, whole
from paradl_bench.records.samples import CollectiveSamples

REDUCING = ("all_reduce", "reduce", "reduce_scatter")
"""Collectives of numbers; the others move bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmarks:
    """How a project's benchmarks print their tables.

    Attributes:
        tool: as records name it. prints: the same in a message on columns of somebody's own.
        size, count: columns of bytes, and of the calls that a time is the mean of.
        least: column of the fastest rank's time. times: of the slowest rank's, or what stands for it, the best first.
        in_markdown: the column by what :func:`heading_of` gives of a header.
        words: the column that holds no number, where there is one.
        wrong, verified: whether a row's results were found to be wrong; whether they were looked at.
        of_mean: note on a table without the first of ``times``.
    """

    tool: str
    prints: str
    size: str
    count: str
    least: str
    times: tuple[str, ...]
    in_markdown: Mapping[tuple[str, str], str]
    words: str = ""
    wrong: Callable[[Mapping[str, str]], bool]
    verified: Callable[[Mapping[str, str]], bool]
    of_mean: str = ""

    def seconds(self, values: Mapping[str, str]) -> float:
        """A row's time; 0 where it holds none."""
        column = next((name for name in self.times if name in values), None)
        return (decimal(values[column]) or 0.0 if column else 0.0) * 1e-6


@dataclass(slots=True, kw_only=True)
class SizeTable:
    """The table that rows belong to now.

    Attributes:
        ranks: None where the table does not say. concurrent: how many groups of so many ran it at once.
        refusal: why none of its rows can be taken; None where they can.
        markdown: the columns of a table in Markdown, while its lines go on.
    """

    line: int
    library: str = "mpi"
    operation: str = ""
    dtype: str = ""
    ranks: int | None = None
    concurrent: int = 1
    columns: tuple[str, ...] = ()
    refusal: str | None = None
    markdown: Columns | None = None

    def entries(
        self, line: str, row: PipeRow | None, of: Benchmarks, read_heading: Callable[[SizeTable, str], bool]
    ) -> list[str]:
        """The entries of a line that may be a row; none where it is a heading, which is taken up."""
        if row is None:
            if self.markdown is not None:
                self.markdown, self.columns = None, ()
            return [] if read_heading(self, line) else line.split()
        columns = columns_of(row.cells, of.in_markdown, size=of.size, times=of.times, tool=of.prints)
        commented = row.cells[0].startswith("#")
        if columns is not None:
            self.markdown, self.columns = columns, columns.names
        elif row.first or commented:
            if row.first:
                self.markdown, self.columns = None, ()
            read_heading(self, row.cells[0] if commented else line)
        elif self.markdown is not None and not row.rule and any(row.cells):
            return self.markdown.entries(row.cells, size=of.size, count=of.count)
        return []


@dataclass(slots=True)
class SizeRows:
    """Takes rows up as measurements, or drops them with the reason; ``ranks`` tells how many a good row's table had."""

    result: Imported
    options: ImportOptions
    path: str
    of: Benchmarks
    ranks: Callable[[SizeTable], int]

    def take(self, table: SizeTable, number: int, line: str, words: list[str], *, why: str | None = None) -> None:
        """One row; ``why`` it can't be taken, where that is known."""
        refusal = table.refusal or why or (table.markdown.refusal if table.markdown else None)
        if whole(words[0]) is None:
            # B-Caffe's logs and others glue things to the size; what looks like a row is counted.
            if table.markdown is not None:
                self.result.drop(number, line, refusal or f"{shown(words[0])} is no whole number of bytes")
            elif len(words) > 1 and words[0][:1].isdigit() and all(decimal(word) is not None for word in words[1:]):
                self.result.drop(number, line, "its first column is no size")
            return
        values = dict(zip(table.columns, words, strict=False))
        refusal = refusal or self._why_not(table, words, values)
        if refusal is None:
            ranks, size = self.ranks(table), int(values[self.of.size])
            refusal = implausible_call(ranks, size, self.of.seconds(values))
            # Both projects count what all ranks keep together.
            if refusal is None and table.operation == "reduce_scatter" and size % ranks:
                refusal = f"{size} bytes are no whole part on each of {ranks} ranks"
        if refusal is not None:
            self.result.drop(number, line, refusal)
            return
        size //= ranks if table.operation == "reduce_scatter" else 1
        self._add(table, number, values, ranks, size)

    def _why_not(self, table: SizeTable, words: list[str], values: Mapping[str, str]) -> str | None:
        of, keep = self.of, self.options.keep
        if len(words) != len(table.columns):
            return f"{len(words)} of {len(table.columns)} columns"
        if any(decimal(word) is None for name, word in values.items() if name != of.words):
            return "a column holds no number"
        size, calls = whole(values.get(of.size, "")), whole(values.get(of.count, "1"))
        if size is None or calls is None or not (0 <= size < 2**63 and 1 <= calls < 10**12):
            return f"size or {of.count.strip('#').lower()} are no count"
        group = whole(values.get("Group", "0"))
        if group is None or not 0 <= group < table.concurrent:
            return "its group is none of those that ran at once"
        if size == 0 and "empty" not in keep:
            return "no bytes were sent; --keep empty takes it anyway"
        if of.seconds(values) <= 0:
            return "no time above 0"
        if (decimal(values.get(of.least, "")) or 0.0) * 1e-6 > of.seconds(values):
            return "its least time is above its largest"
        if of.wrong(values) and "wrong" not in keep:
            return "wrong results; --keep wrong takes it anyway"
        return None

    def _add(self, table: SizeTable, number: int, values: Mapping[str, str], ranks: int, size: int) -> None:
        of, options, where = self.of, self.options, f"{self.path} line {table.line}"
        calls = whole(values.get(of.count, "")) or options.iterations
        if of.of_mean and of.times[0] not in values:
            self.result.note(f"{where}: {of.of_mean}")
        if calls is None:
            counted = of.count.strip("#").lower()
            self.result.note(f"{where}: the file does not say how many {counted} each time is the mean of; 1 is taken")
        self.result.rows += 1
        self.result.collectives.append(
            CollectiveSamples(
                library=options.library or table.library,
                tool=of.tool,
                operation=table.operation,
                level=options.level or "",
                ranks=ranks,
                message_bytes=size,
                dtype=table.dtype,
                block=0,
                samples_s=((of.seconds(values),),),
                verified=of.verified(values),
                calls_per_sample=calls or 1,
                source=f"{self.path}:{number}",
                concurrent=table.concurrent,
                group=int(values.get("Group", 0)),
                ranks_per_node=options.ranks_on_a_node(ranks, options.level or ""),
            )
        )
