"""The text that nccl-tests prints, cut into runs: what stands above a table, and its rows.

Logs are rarely clean. Lines carry a rank's label (``0:``, ``[1,0]<stdout>:``), NCCL's own lines stand between rows and
inside them, several runs follow each other, tables are pasted into Markdown, with pipes or without.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from paradl_bench.core.terminal.printed import plain
from paradl_bench.importers.failures import FAILURE
from paradl_bench.importers.importer import Dropped
from paradl_bench.importers.nccl_logs.nccl_markdown import PipeLayout, pipe_layout
from paradl_bench.importers.nccl_logs.nccl_operations import operation_in_name, programs_named
from paradl_bench.importers.nccl_logs.nccl_rows import (
    DTYPES,
    Buffers,
    Layout,
    Row,
    begins_as_a_row,
    is_entry,
    layout_of,
    looks_like_a_row,
    parse_row,
)
from paradl_bench.importers.tables.markdown import PipeRow, lines_and_cells
from paradl_bench.importers.tables.numbers_read import whole

_LABEL = re.compile(r"^\s*(?:\[\d{1,6},\d{1,6}\]<std(?:out|err)>:|\d{1,6}: )")
# host:pid:thread [device] NCCL INFO ...; newer ones put a time in front.
_NCCL_LINE = re.compile(
    r"[^\s:]{1,255}:\d{1,9}:\d{1,9} \[-?\d{1,4}\] (?:N|R)CCL (?:INFO|WARN|ERROR|TRACE|ABORT|CALL)\b"
)
_RANK = re.compile(
    r"#\s+Rank\s+(?P<rank>\d{1,7})(?:\s+Group\s+(?P<group>\d{1,7}))?(?:\s+Pid\s+\d{1,9})?\s+on\s+(?P<host>\S{1,255})"
    r"\s+device\s+\d{1,4}\s+\[[^\]]{1,40}\]\s*(?P<device>.{0,200})$"
)
_SETTINGS = re.compile(r"(warmup iters|agg iters|iters|validation|graph|nThread|nGpus|unalign):? +(-?\d{1,9})(?=\D|$)")
_START = re.compile(r"# Collective test starting: (\S{1,100})")
_TEST_VERSION = re.compile(r"# nccl-tests version (\S{1,40})(?:.*nccl-library=(\d{1,9}))?")
_RCCL_VERSION = re.compile(r"rccl-tests: Version (\S{1,80})")
_LIBRARY = re.compile(r"\b(?:N|R)CCL version (\d[\w.+-]{0,40})|compiled with NCCL (\d{1,3}\.\d{1,3})")
_UNIT_CELL = re.compile(r"(?:\([^()]{1,20}\))?")
# nccl-tests' own lines begin with one.
_MARKDOWN_HEADING = re.compile(r"#{2,6} ")
_CLOSING = ("# Out of bounds values", "# Avg bus bandwidth")
_LONGEST_HEADING = 200
_OPENING = (
    "# nThread",
    "# Collective test starting",
    "# nccl-tests version",
    "# Using devices",
    "# NCCL Tests compiled",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRank:
    """A rank as the log lists it; ``group`` where the run was split into several."""

    rank: int
    group: int
    host: str
    device: str


@dataclass(slots=True)
class Run:
    """One run of one program: what stands above its table, and the table.

    Attributes:
        programs: collectives whose program a command line above the table names.
        stated: the one that the program itself names; None in older generations.
        failure: the first line that says that a rank died; None without.
        closed: whether what stands below a table was seen.
        piped: whether the layout is that of a table in Markdown, which lines without pipes are no rows of.
    """

    line: int
    programs: list[str] = field(default_factory=list)
    stated: str | None = None
    command_line: str = ""
    ranks: list[ListedRank] = field(default_factory=list)
    settings: dict[str, int] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    layout: Layout | None = None
    rows: list[Row] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    failure: str | None = None
    out_of_bounds: int | None = None
    closed: bool = False
    piped: bool = False

    @property
    def begun(self) -> bool:
        """Whether rows were seen, good or bad: what opens a run then opens the next one."""
        return bool(self.rows or self.dropped)


@dataclass(slots=True)
class _Cut:
    """The first part of a row that something was printed into."""

    line: int
    text: str
    tokens: list[str]


@dataclass(slots=True)
class _PipeTable:
    """The table in Markdown that rows belong to.

    Attributes:
        layout: None where it holds something else; a text says why its rows can't be read.
        header: its cells.
        awaits_units: whether no row was seen: the units may stand in a line of their own.
    """

    layout: PipeLayout | str | None = None
    header: tuple[str, ...] = ()
    awaits_units: bool = True

    def with_units(self, cells: tuple[str, ...], single: Buffers) -> PipeLayout | str | None:
        """The layout with units that stand below the header; None where the cells are none."""
        if len(cells) != len(self.header) or not any(cells) or not all(map(_UNIT_CELL.fullmatch, cells)):
            return None
        return pipe_layout([f"{name} {unit}" for name, unit in zip(self.header, cells, strict=True)], single=single)


class _Reader:
    """Reads line by line; ``run`` is the one that lines belong to now."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.run = Run(1)
        self.cut: _Cut | None = None
        self.single: Buffers = ""
        self.pipes = _PipeTable()

    def read_cells(self, number: int, line: str, row: PipeRow) -> None:
        """Take up a line of a table in Markdown: a header, a row, or a line of a table that holds something else."""
        self._look_for_failure(line)
        layout = pipe_layout(row.cells, single=self.single)
        if layout is None and self.pipes.awaits_units and not row.rule:
            layout = self.pipes.with_units(row.cells, self.single)
        if layout is not None:
            self._pipe_header(number, row.cells, layout)
        elif row.first:
            self.pipes = _PipeTable()
            self._note_buffers(line)
        elif not row.rule:
            self._pipe_row(number, line, row.cells)

    def _pipe_header(self, number: int, cells: tuple[str, ...], layout: PipeLayout | str) -> None:
        if self.run.begun:
            self._next_run(number)
        self.pipes = _PipeTable(layout, cells)
        self.run.layout = layout.layout if isinstance(layout, PipeLayout) else None
        self.run.piped = True

    def _pipe_row(self, number: int, line: str, cells: tuple[str, ...]) -> None:
        self._lose_cut("another row follows it")
        self.pipes.awaits_units = False
        layout = self.pipes.layout
        if layout is None:
            if looks_like_a_row(list(cells)):
                self._drop(number, line, "no table's header stands above it")
            return
        tokens = layout.tokens(cells) if isinstance(layout, PipeLayout) else layout
        if isinstance(tokens, list) and isinstance(layout, PipeLayout):
            row = parse_row(layout.layout, tokens, line=number, text=line)
            if isinstance(row, Row):
                self.run.rows.append(row)
                return
            tokens = row
        self._drop(number, line, str(tokens))

    def read(self, number: int, raw: str) -> None:
        line = _LABEL.sub("", plain(raw)).rstrip()
        self._look_for_failure(line)
        # Most lines name no library; on a long one the search for what does takes a while.
        names = "CCL " in line
        library = _LIBRARY.search(line) if names else None
        if library:
            self.run.versions.setdefault("nccl", library.group(1) or library.group(2))
        noise = _NCCL_LINE.search(line) if names else None
        if noise:
            self._cut_at(number, line, noise.group())
        elif line.lstrip().startswith("#") or line.startswith("rccl-tests:"):
            self._heading(number, line)
        else:
            self._body(number, line)

    def _note_buffers(self, line: str) -> None:
        if "in-place" in line or "out-of-place" in line:
            self.single = "in_place" if "out-of-place" not in line else ""

    def close(self) -> list[Run]:
        self._next_run(0)
        return self.runs

    def _next_run(self, number: int) -> None:
        self._lose_cut("its rest is missing")
        if self.run.begun:
            self.runs.append(self.run)
        self.run = Run(number)

    def _look_for_failure(self, line: str) -> None:
        if self.run.failure is None and FAILURE.search(line):
            self.run.failure = line.strip()

    def _cut_at(self, number: int, line: str, noise: str) -> None:
        """Take what stands before NCCL's own line as the first part of a row, if it is one."""
        before = line[: line.index(noise)]
        # The host's name is glued to the last word of the row.
        host = noise.split(":")[0]
        words = [*before.split(), _without_host(host, {rank.host for rank in self.run.ranks})]
        tokens = [word for word in words if word]
        # A host's name may begin with a digit: alone it is no row.
        if looks_like_a_row(tokens) or (not self._go_on(tokens) and before.strip() and self._torn(tokens)):
            self._row(number, line, tokens)

    def _heading(self, number: int, line: str) -> None:
        text = line.lstrip()
        if self.run.begun and (text.startswith(_OPENING) or text.startswith("rccl-tests:") or _RANK.match(text)):
            self._next_run(number)
        if _MARKDOWN_HEADING.match(text):
            named = operation_in_name(text[:_LONGEST_HEADING])
            self._name_program(number, [named] if named else [])
            return
        layout = layout_of(text, single=self.single)
        if layout is not None:
            if self.run.begun:
                self._next_run(number)
            self.run.layout = layout
            self.run.piped = False
            return
        self._note_buffers(text)
        _read_heading(self.run, text)

    def _name_program(self, number: int, named: list[str]) -> None:
        if named and self.run.begun:
            self._next_run(number)
        self.run.programs += named

    def _body(self, number: int, line: str) -> None:
        tokens = line.split()
        if looks_like_a_row(tokens):
            self._row(number, line, tokens)
        elif self._go_on(tokens):
            return
        elif self._torn(tokens):
            self._row(number, line, tokens)
        else:
            named = programs_named(line)
            self._name_program(number, named)
            if named:
                self.run.command_line = " ".join(line.split())

    def _go_on(self, tokens: list[str]) -> bool:
        """Add the rest of a row that was cut; whether the words are one."""
        if self.cut is None or not tokens or not all(map(is_entry, tokens)):
            return False
        columns = len(self.run.layout.columns) if self.run.layout else 0
        # A row has one type: this is another row, though a damaged one.
        if _has_type(tokens) and (_has_type(self.cut.tokens) or len(tokens) >= columns):
            return False
        cut, self.cut = self.cut, None
        self._row(cut.line, cut.text, [*cut.tokens, *tokens])
        return True

    def _torn(self, tokens: list[str]) -> bool:
        """Whether the words, no whole row's, are one that was torn or damaged: only inside a table."""
        return self.run.layout is not None and not (self.run.closed or self.run.piped) and begins_as_a_row(tokens)

    def _row(self, number: int, text: str, tokens: list[str]) -> None:
        self._lose_cut("another row follows it")
        layout = None if self.run.piped else self.run.layout
        if layout is None:
            self._drop(number, text, "no table's header stands above it")
            return
        row = parse_row(layout, tokens, line=number, text=text)
        if isinstance(row, Row):
            self.run.rows.append(row)
        elif len(tokens) < len(layout.columns):
            # Its rest may stand below lines that another process printed in between.
            self.cut = _Cut(number, text, tokens)
        else:
            self._drop(number, text, row)

    def _lose_cut(self, why: str) -> None:
        if self.cut is not None:
            cut, self.cut = self.cut, None
            columns = len(self.run.layout.columns) if self.run.layout else 0
            self._drop(cut.line, cut.text, f"cut off after {len(cut.tokens)} of {columns} columns: {why}")

    def _drop(self, number: int, text: str, why: str) -> None:
        self.run.dropped.append(Dropped(line=number, text=text, why=why))


def _without_host(glued: str, hosts: set[str]) -> str:
    """What stands before a host's name in one word: of known hosts the name itself, else all that is a number."""
    for host in sorted(hosts, key=len, reverse=True):
        if glued.endswith(host):
            return glued[: -len(host)]
    match = re.match(r"-?\d{1,19}(?:\.\d{1,9})?(?=[A-Za-z])", glued)
    return match.group() if match else ""


def _has_type(tokens: list[str]) -> bool:
    return any(token in DTYPES for token in tokens)


def _read_heading(run: Run, text: str) -> None:
    rank = _RANK.match(text)
    if rank:
        group = int(rank["group"] or 0)
        run.ranks.append(
            ListedRank(rank=int(rank["rank"]), group=group, host=rank["host"], device=rank["device"].strip())
        )
        return
    start = _START.match(text)
    if start:
        run.stated = next(iter(programs_named(start.group(1))), None)
    version = _TEST_VERSION.match(text)
    if version:
        run.versions["nccl-tests"] = version.group(1)
        if version.group(2):
            run.versions["nccl"] = library_version(int(version.group(2)))
    version = _RCCL_VERSION.match(text)
    if version:
        run.versions["rccl-tests"] = version.group(1)
    if text.startswith("# nThread"):
        run.settings |= {name: int(value) for name, value in _SETTINGS.findall(text)}
    run.closed = run.closed or text.startswith(_CLOSING)
    bounds = re.match(r"# Out of bounds values : (\d{1,12}) ", text + " ")
    if bounds:
        run.out_of_bounds = whole(bounds.group(1))


def library_version(code: int) -> str:
    """NCCL's version of its code: 22902 is 2.29.2, and 2804 (before 2.9) is 2.8.4."""
    if code < 10000:
        return f"{code // 1000}.{code % 1000 // 100}.{code % 100}"
    return f"{code // 10000}.{code % 10000 // 100}.{code % 100}"


def read_runs(text: str) -> list[Run]:
    """The runs of a log, in order; those without any row are left out."""
    reader = _Reader()
    for number, line, cells in lines_and_cells(text):
        if cells is None:
            reader.read(number, line)
        else:
            reader.read_cells(number, line, cells)
    return reader.close()
