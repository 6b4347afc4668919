"""Tables in Markdown with pipes: read by their header as the same tables without are, or dropped with the reason."""

from __future__ import annotations

import msgspec
import pytest

from paradl_bench.importers.catalog import importers
from paradl_bench.importers.importer import Imported, ImportOptions, LogFile
from paradl_bench.importers.tables.markdown import lines_and_cells

OPTIONS = ImportOptions(ranks=8, level="node", iterations=20)


def read(name: str, text: str, options: ImportOptions = OPTIONS) -> Imported:
    return importers()[name].read(LogFile(path="a.md", content=text.encode()), options)


def reasons(held: Imported) -> dict[int, str]:
    return {item.line: item.why for item in held.dropped}


def _half(size: int) -> str:
    time = 30 + size / 1000
    return f"{time:.2f} {size / time / 1e3:.2f} {1.75 * size / time / 1e3:.2f} 0"


NCCL = ["# size count type redop root time algbw busbw #wrong time algbw busbw #wrong"]
NCCL += [f"{size} {size // 4} float sum -1 {_half(size)} {_half(size)}" for size in (1024, 65536, 1 << 20)]
OSU = ["# Size  Avg_Latency(us)  Min_Latency(us)  Max_Latency(us)  Iterations", "8 5 4 6 10", "16 7 6 8.5 10"]
IMB = ["#bytes #repetitions t_min[usec] t_max[usec] t_avg[usec]", "8 10 4 6 5", "16 10 4 7.5 5"]
ABOVE = {
    "nccl-tests": "all_reduce_perf -g 8\n",
    "rccl-tests": "all_reduce_perf -g 8\n",
    "osu": "# OSU MPI Allreduce Latency Test v5.7\n",
    "imb": "# Benchmarking Allreduce\n# #processes = 8\n",
}


def piped(lines: list[str], how: str) -> str:
    rows = [line.replace("# ", "").split() for line in lines]
    rule = ["---:", *["---"] * (len(rows[0]) - 1)]
    if how == "no rule":
        found = [" | ".join(row) for row in rows]
        return "\n".join(f"| {row} |" for row in found)
    found = [" | ".join(row) for row in [rows[0], rule, *rows[1:]]]
    if how == "bare":
        return "\n".join(found)
    if how == "quoted":
        return "\n".join(f"> | {row} |" for row in found)
    if how == "marked":
        return "\n".join([f"| # {found[0]} |", *(f"|{row}|" for row in found[1:])])
    if how == "comment":
        return "\n".join([f"# | {found[0]} |", *(f"|{row}|" for row in found[1:])])
    return "\r\n".join(f"|{row}|" for row in found)


@pytest.mark.parametrize("how", ["closed", "bare", "quoted", "marked", "comment", "no rule"])
@pytest.mark.parametrize(("name", "lines"), [("nccl-tests", NCCL), ("rccl-tests", NCCL), ("osu", OSU), ("imb", IMB)])
def test_a_piped_table_is_read_like_a_plain_one(name: str, lines: list[str], how: str) -> None:
    plain = "\n".join(line.replace("_Latency", " Latency") for line in lines)
    expected = read(name, ABOVE[name] + plain)
    held = read(name, f"{ABOVE[name]}\n{piped([line.replace('_L', '&L') for line in lines], how)}\n".replace("&", " "))
    assert expected.rows == len(lines) - 1
    assert not held.dropped
    assert [msgspec.structs.replace(record, source="") for record in held.collectives] == [
        msgspec.structs.replace(record, source="") for record in expected.collectives
    ]


CHOSEN = """### AllReduce

| size | time (µs) | algbw (GB/s) | busbw (GB/s) |
|-----:|----------:|-------------:|-------------:|
| 8 KiB | 7.67 | 1.07 | 1.87 |
| 4,194,304 | 390.18 | 10.75 | 18.81 |
| **134217728** | **12,182.60** | **11.02** | **19.28** |
| 4 MB | 390.18 | 10.75 | 18.81 |
| 134217728 | 2.60 | 11.02 | 19.28 |
| 134217728 | 2.60 | 11.02 |
| 134217728 | 2,600 | 11.02 | 19.28 |
"""


def test_a_table_of_chosen_columns_is_read_by_its_header() -> None:
    held = read("nccl-tests", CHOSEN)
    assert [(r.operation, r.ranks, r.message_bytes, r.dtype) for r in held.collectives] == [
        ("all_reduce", 8, size, "fp32") for size in (8192, 4194304, 134217728)
    ]
    assert held.collectives[2].samples_s == ((pytest.approx(12182.60e-6),),)
    why = reasons(held)
    assert why[8] == "'4 MB' is no whole number of bytes"
    assert why[9].startswith("torn or edited")
    assert why[10] == "3 of 4 columns"
    assert why[11] == "a time or bandwidth is no number"
    assert any("no column of types" in note for note in held.notes)
    # The ratio of bandwidths tells the ranks, as it does without pipes.
    assert {r.ranks for r in read("nccl-tests", CHOSEN, ImportOptions(level="node")).collectives} == {8}
    wrong = read("nccl-tests", CHOSEN, ImportOptions(level="node", ranks=4))
    assert not wrong.rows
    # A ratio below 1 may be another collective's.
    other = CHOSEN[: CHOSEN.index("| 4,194")].replace("7.67 | 1.07 | 1.87", "3.81 | 2.15 | 1.88")
    (why_not,) = reasons(read("nccl-tests", other.replace("AllReduce", "Results"), OPTIONS)).values()
    assert why_not.startswith("it may be all_gather or")
    assert why_not.endswith("give --op")
    assert read("nccl-tests", other.replace("AllReduce", "ReduceScatter"), OPTIONS).rows == 1


def test_only_size_and_time_are_enough_with_their_units() -> None:
    rows = "| bytes | latency (ms) |\n|---|---|\n| 4096 | 1.5 |\n"
    told = ImportOptions(ranks=4, level="node", operation="all_gather", dtype="bf16")
    (record,) = read("nccl-tests", rows, told).collectives
    assert (record.message_bytes, record.samples_s, record.dtype) == (1024, ((0.0015,),), "bf16")
    held = read("nccl-tests", rows.replace(" (ms)", ""), told)
    assert reasons(held) == {3: "its header does not say the unit of time, and has no algbw that tells"}


def test_units_may_stand_below_the_header() -> None:
    table = "| size | count | type | time | algbw | busbw |\n|-|-|-|-|-|-|\n| (B) | (elements) | | (us) | (GB/s) | |\n"
    row = "| 16384 | 1024 | float | 31.67 | 0.52 | 0.39 |\n"
    told = ImportOptions(ranks=4, level="node", operation="all_gather")
    assert read("nccl-tests", table + row, told).rows == 1
    held = read("nccl-tests", table.replace("(B)", "(KB)") + row)
    assert reasons(held) == {4: "its header's 'size (KB)' is in a unit that nccl-tests does not print"}


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ("size | time (us) | nodes", "its header names 'nodes', which is no column of nccl-tests"),
        ("size | time (us) | size", "its header names a column twice"),
        ("size | algbw | busbw", "its header names no times"),
        ("size | time (us) | busbw (Gbps)", "its header's 'busbw (Gbps)' is in a unit that nccl-tests does not print"),
        ("size | time (us) | time (ms)", "its header gives times in two units"),
        ("size | time (us) oop | time (us)", "its header does not say which columns are in place"),
        ("size | time (us) ip | algbw ip", None),
    ],
)
def test_rows_under_an_ambiguous_header_are_dropped(header: str, why: str | None) -> None:
    text = f"| {header} |\n|---|---|---|\n| 4096 | 4.096 | 1.0 |\n"
    held = read("nccl-tests", text, ImportOptions(ranks=4, level="node", operation="all_reduce"))
    assert reasons(held) == ({3: why} if why else {})
    assert [r.buffers for r in held.collectives] == ([] if why else ["in_place"])


def test_columns_in_place_are_told_from_those_out_of_place() -> None:
    text = (
        "| size | time(us) ip | algbw ip | busbw ip | time(us) oop | algbw oop | busbw oop |\n"
        "|-|-|-|-|-|-|-|\n| 4096 | 2.048 | 2.0 | 3.0 | 4.096 | 1.0 | 1.5 |\n"
    )
    held = read("nccl-tests", text, ImportOptions(ranks=4, level="node", operation="all_reduce"))
    assert {r.buffers: r.samples_s[0][0] for r in held.collectives} == {
        "in_place": pytest.approx(2.048e-6),
        "out_of_place": pytest.approx(4.096e-6),
    }


@pytest.mark.parametrize(
    ("name", "table", "why"),
    [
        ("osu", "Size | Host to Host", "its header names 'Host to Host', which is no column of OSU's"),
        ("osu", "Size | Latency", "its header names 'Latency', which is no column of OSU's latency tables or lacks"),
        ("osu", "Size | Min Latency(us)", "its header names none of Max Latency"),
        ("osu", "Latency (us) | Size", "its header does not begin with 'Size'"),
        ("imb", "#bytes | t_avg[usec]", "its header names none of t_max"),
        ("imb", "#bytes | #bytes", "its header names a column twice"),
    ],
)
def test_osu_and_imb_rows_under_an_unclear_header_are_dropped(name: str, table: str, why: str) -> None:
    held = read(name, f"{ABOVE[name]}\n{table}\n---|---\n8 | 3.5\nx | y\n")
    assert [line for line, text in reasons(held).items() if text.startswith(why)] == [
        ABOVE[name].count("\n") + 4,
        ABOVE[name].count("\n") + 5,
    ]


def test_foreign_tables_and_lines_with_pipes_are_no_rows() -> None:
    boxes = "+---+---+\n| GPU  Name | Bus-Id |\n|====+====|\n|  0  A100  | 00:1E |\n+---+---+\n"
    foreign = "| GPU | Memory |\n|---|---|\n| 8 | 40 |\n\n"
    noise = "n01:1:2 [0] NCCL INFO Channel 00 | 0 1 2 | 3\n"
    plain = "\n".join(NCCL)
    expected = read("nccl-tests", ABOVE["nccl-tests"] + plain)
    lines = plain.split("\n")
    text = boxes + foreign + ABOVE["nccl-tests"] + "\n".join([*lines[:2], noise.strip(), *lines[2:], boxes])
    held = read("nccl-tests", text)
    assert (held.rows, held.dropped) == (expected.rows, [])
    # A row of the tool's under a header that is none of its, and a plain row below a table with pipes.
    held = read("nccl-tests", f"{piped(NCCL, 'closed')}\n\n{lines[1]}\n\n| a | b |\n|---|---|\n| 8 | 2 | float | 3 |\n")
    assert set(reasons(held).values()) == {"no table's header stands above it"}
    assert (held.rows, len(held.dropped)) == (3, 2)


def test_lines_keep_their_numbers() -> None:
    text = "a\n| b | c |\n\nd | e\n--|--\nf\x0c | g\n"
    found = [(number, line, row.cells if row else None) for number, line, row in lines_and_cells(text)]
    assert [line for _, line, _ in found] == text.split("\n")
    assert [number for number, _, cells in found if cells] == [2, 4, 5, 6]
