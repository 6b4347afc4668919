"""Damaged files of other tools: what is lost is counted, once, and what is whole is kept."""

from __future__ import annotations

import codecs
import json

import pytest
from recorded_logs import DATA

from paradl_bench.core.errors import UserError
from paradl_bench.importers.catalog import importers
from paradl_bench.importers.importer import Imported, ImportOptions, LogFile
from paradl_bench.importers.nccl_tests import read
from paradl_bench.importers.writing import read_files


def reasons(held: Imported) -> dict[int, str]:
    return {item.line: item.why for item in held.dropped}


def table_of_eight(*rows: str, after: str = "") -> LogFile:
    """A table of all_reduce on 8 ranks of one host: eight good rows, and what else is given."""
    lines = ["# nThread 1 nGpus 8 warmup iters: 5 iters: 20 validation: 0"]
    lines += [f"#   Rank {rank:2} Pid {rank + 1} on n01 device {rank:2} [0x00] Example A100" for rank in range(8)]
    lines.append("#  size  count  type  redop  time  algbw  busbw  error  time  algbw  busbw  error")
    for size in (2**power for power in range(10, 18)):
        time = 30 + size / 1000
        half = f"{time:.2f} {size / time / 1e3:.2f} {1.75 * size / time / 1e3:.2f} 0e+00"
        lines.append(f"{size} {size // 4} float sum {half} {half}")
    return LogFile(
        path="eight.log", content="\n".join([*lines, *rows, "# Out of bounds values : 0 OK", after]).encode()
    )


_TIMES = "75.00 13.98 24.47 0e+00"


@pytest.mark.parametrize(
    ("rows", "kept", "dropped"),
    [
        ((f"1048576.5 262144 float sum {_TIMES} {_TIMES}", f"1e6 250000 float sum {_TIMES} {_TIMES}"), 8, [19, 20]),
        (("9" * 150, f"{'9' * 30} {'9' * 29} float sum 1e300 0 0 0 1e300 0 0 0"), 8, [19, 20]),
        ((f"1048576 262144 fl@at sum {_TIMES} {_TIMES}",), 8, [19]),
        # Torn where a word begins, and put together; inside of a word, and lost, once.
        (("1048576    n01:1:2 [0] NCCL INFO x", f"262144 float sum {_TIMES} {_TIMES}"), 9, []),
        (("1048576 262144 n01:1:2 [0] NCCL INFO x", f"float sum {_TIMES} {_TIMES}"), 9, []),
        (("1048576 262144 flon01:1:2 [0] NCCL INFO x", f"at sum {_TIMES} {_TIMES}"), 8, [19]),
        (("1048576 262144 float sum 7n01:1:2 [0] NCCL INFO x", f"5.00 13.98 24.47 0e+00 {_TIMES}"), 8, [19]),
        # A row that was cut off, and a damaged one behind it.
        (("2097152 524288 float sum", f"1e6 250000 float sum {_TIMES} {_TIMES}"), 8, [19, 20]),
        (
            ("3 ranks were slow in this run", "0f1c2d:1:2 [0] NCCL INFO x", "2 n01 warnings", "# 4 8 16", "done 8"),
            8,
            [],
        ),
    ],
)
def test_damaged_table_rows_are_counted_once_and_prose_never(
    rows: tuple[str, ...], kept: int, dropped: list[int]
) -> None:
    held = read(table_of_eight(*rows, after="4 8\n16"), ImportOptions())
    assert (held.rows, sorted(reasons(held))) == (kept, dropped)


@pytest.mark.parametrize("size", ["4.1e3", "4096B", "4096n01:"])
def test_a_damaged_size_of_imb_is_counted(size: str) -> None:
    text = (DATA / "imb-mpi1-2021.log").read_text()
    row = next(line for line in text.split("\n") if line.split()[:2] == ["4096", "640"])
    damaged = text.replace(row, row.replace("4096", size), 1)
    held = importers()["imb"].read(LogFile(path="x", content=damaged.encode()), ImportOptions(level="node"))
    assert [why for why in reasons(held).values() if why == "its first column is no size"]
    assert held.rows + len(held.dropped) == 15


@pytest.mark.parametrize(
    "row", ["1048576 7 float sum " + f"{_TIMES} {_TIMES}", f"1048576 262144 float sum 75.00 13.98 42.47 0e+00 {_TIMES}"]
)
def test_a_row_that_contradicts_the_others_is_dropped_alone(row: str) -> None:
    held = read(table_of_eight(row), ImportOptions(operation="all_reduce"))
    assert held.rows == 8
    assert reasons(held) == {19: "unlike the other rows: sizes, counts and bandwidths do not fit all_reduce on 8 ranks"}


def test_a_table_most_of_whose_rows_contradict_is_refused_whole() -> None:
    damaged = [f"{size} 7 float sum {_TIMES} {_TIMES}" for size in (2**power for power in range(18, 27))]
    held = read(table_of_eight(*damaged), ImportOptions(operation="all_reduce"))
    assert (held.rows, len(held.dropped)) == (0, 17)
    # Small messages fit any number of ranks, and don't outvote the large ones.
    text = table_of_eight().content.decode()
    lines = [line for line in text.split("\n") if "Rank  7" not in line]
    small = [f"{size} {size // 4} float sum 30.00 0.00 0.00 0e+00 30.00 0.00 0.00 0e+00" for size in range(4, 64, 4)]
    log = LogFile(path="seven.log", content="\n".join([*lines, *small]).encode())
    assert read(log, ImportOptions(operation="all_reduce")).rows == 0


_ITERATION = "0 data 12 0 0 0\n1 conv1 300 500 90 400\n2 fc 80 150 0 0\n"


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("paradl-net", "CONV_1|3x8x8|3x6x3x3|6x8x8|nan\nFC|6x8x8|6x12x8x8|12x1x1|0.1\n", "line 1: a shape or"),
        ("paradl-net", "MPOOL|9999x9999x9999x9999x9999|0|1|1\nFC|6x8x8|6x12x8x8|12x1x1|0.1\n", "line 1: a shape or"),
        ("paradl-net", "FC|6x8x8|6x12x8x8|12x1x1|0.1\nFOO|3x8x8|3x6x3x3|6x8x8|1\n", "line 2: no layer: names"),
        ("pipedream", "node1 -- A -- forward_compute_time=1.0, backward_compute_time=1.0, activation_size=8.0,"
         " parameter_size=0.000\nnode2 -- B -- forward_comp", "line 2: neither a node nor an edge"),
        ("ssgd-trace", _ITERATION.replace("300", "nan"), "line 2: a time is no number"),
        ("ssgd-trace", _ITERATION + "3 fc2 8 1", "line 4: 4 of 6 columns"),
    ],
)  # fmt: skip
def test_a_network_missing_layers_is_refused_unless_requested(name: str, text: str, why: str) -> None:
    log = LogFile(path="a.txt", content=text.encode())
    with pytest.raises(UserError, match=why) as refused:
        read_files(importers()[name], [log], ImportOptions(batch=4))
    assert str(refused.value).endswith("correct the file, or give --keep incomplete")
    kept = ImportOptions(batch=4, keep=frozenset({"incomplete"}))
    (found,) = read_files(importers()[name], [log], kept)
    assert "is not whole" in found.held.notes[-1]


def test_a_torn_iteration_of_several_leaves_the_network_whole() -> None:
    text = _ITERATION.replace("300", "nan") + _ITERATION + _ITERATION
    log = LogFile(path="a.txt", content=text.encode())
    ((held),) = (file.held for file in read_files(importers()["ssgd-trace"], [log], ImportOptions(batch=4)))
    assert [layer.name for layer in held.networks[0].layers] == ["1.conv1", "2.fc"]
    assert {len(record.samples_s) for record in held.layers} == {2}
    assert [item.line for item in held.dropped] == [1, 2, 3]


@pytest.mark.parametrize(
    ("line", "bytes_a_second"),
    [
        ("BANDWIDTH|12.5e9|bytes/s", 12.5e9),
        ("BANDWIDTH|12.5|GB/s", 12.5e9),
        ("BANDWIDTH|12.5|GBps", 12.5e9),
        ("BANDWIDTH|1|MiB/s", 2**20),
        ("BANDWIDTH|100|Gbit/s", 12.5e9),
        ("BANDWIDTH|100|Gb/s", 12.5e9),
        ("BANDWIDTH|7|", 7.0),
    ],
)
def test_a_platforms_units_are_read(line: str, bytes_a_second: float) -> None:
    log = LogFile(path="a.plat", content=f"{line}\nMEM_PER_NODE|16|GiB\nLATENCY|2|us\nMAX_NODE|4|\n".encode())
    held = importers()["paradl-net"].read(log, ImportOptions())
    (cluster,) = held.clusters
    assert cluster.levels[0].beta_s_per_byte == pytest.approx(1 / bytes_a_second)
    assert cluster.levels[0].alpha_s == pytest.approx(2e-6)
    assert (cluster.memory_bytes_per_rank, held.dropped) == (16 * 2**30, [])


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("BANDWIDTH|12.5|furlongs", "the unit of BANDWIDTH, 'furlongs', is not known: bytes/s, KB/s"),
        ("BANDWIDTH|12.5|GB", "the unit of BANDWIDTH, 'GB', is not known"),
        ("BANDWIDTH|foo|GB/s", "the value of BANDWIDTH is no number from 0 on"),
        ("BANDWIDTH|-1|GB/s", "the value of BANDWIDTH is no number from 0 on"),
        ("BANDWITH|1|GB/s", "no KEY|value|unit with a key of"),
    ],
)
def test_a_platform_without_bandwidth_gives_no_cluster_but_a_reason(line: str, why: str) -> None:
    log = LogFile(path="a.plat", content=f"LATENCY|2e-6|s\n{line}\n".encode())
    held = importers()["paradl-net"].read(log, ImportOptions())
    assert held.clusters == []
    assert reasons(held)[2].startswith(why)
    assert held.notes == ["a.plat: it gives no cluster, because it has no readable BANDWIDTH above 1 byte/s"]


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("nccl-tests", "nccl-tests-2.17.log"),
        ("nccl-tests", "nccl-tests-2.19-report.json"),
        ("osu", "osu-7.4.log"),
        ("imb", "imb-mpi1-2021.log"),
        ("kineto", "kineto-rank2.json"),
        ("ssgd-trace", "ssgd-alexnet.txt"),
        ("pipedream", "pipedream-toy.graph.txt"),
        ("paradl-net", "tiny.net"),
    ],
)
@pytest.mark.parametrize(
    ("mark", "encoding"),
    [
        (codecs.BOM_UTF8, "utf-8"),
        (codecs.BOM_UTF16_LE, "utf-16-le"),
        (codecs.BOM_UTF16_BE, "utf-16-be"),
        (codecs.BOM_UTF32_LE, "utf-32-le"),
        (b"", "utf-16-le"),
        (b"", "utf-16-be"),
    ],
)
def test_a_byte_order_mark_or_nul_bytes_give_the_encoding(name: str, file: str, mark: bytes, encoding: str) -> None:
    options = ImportOptions(batch=4, ranks=4, level="node")
    content = (DATA / file).read_bytes()
    marked = mark + content.decode().encode(encoding)
    plain, held = (importers()[name].read(LogFile(path=file, content=each), options) for each in (content, marked))
    assert held == plain


def test_some_nul_bytes_do_not_make_a_text_utf_16() -> None:
    text = (DATA / "osu-7.4.log").read_bytes()
    # As a crash leaves them behind the last line written.
    for content in (text + bytes(len(text)), text[:101] + bytes(40) + text[101:], b"8\0", b"", bytes(1000)):
        log = LogFile(path="a.log", content=content)
        assert log.text == content.decode()
    # A log of another alphabet has fewer NUL bytes, and a torn last character does no harm.
    wide = "# Größe in Bytes: 8, время в микросекундах\n# Size\n8 12.5\n16 13.5\n"
    assert LogFile(path="a.log", content=wide.encode("utf-16-le") + b"8").text.startswith(wide)


_OSU = "# OSU MPI Allreduce Latency Test v5.7\n# Size  Avg Latency(us)  Min Latency(us)  Max Latency(us)  Iterations\n"
_IMB = "# Benchmarking Allreduce\n# #processes = 4\n#bytes #repetitions t_min[usec] t_max[usec] t_avg[usec]\n"
_NODE = "{} -- A -- forward_compute_time={}, backward_compute_time=1.0, activation_size=8.0, parameter_size=0.000\n"


@pytest.mark.parametrize(
    ("name", "text", "line", "why"),
    [
        ("osu", _OSU + "8 5 4 6 10\n16 1e300 4 1e300 10\n", 4, "no call takes that long"),
        ("osu", _OSU + "8 5 4 6 10\n16 1e15 4 1e15 10\n", 4, "no call takes that long"),
        (
            "osu",
            _OSU + "8 5 4 6 10\n1000000000000000000 6 5 7 10\n",
            4,
            "1000000000000000000 bytes in 7e-06 s: no link is that fast",
        ),
        (
            "osu",
            _OSU + "8 5 4 6 10\n9000000000000000000 6 5 7 10\n",
            4,
            "9000000000000000000 bytes: no message is that large",
        ),
        ("osu", _OSU + "8 5 4 6 10\n16 50 60 40 10\n", 4, "its least time is above its largest"),
        ("imb", _IMB + "8 10 4 6 5\n16 10 4 1e300 5\n", 5, "no call takes that long"),
        (
            "imb",
            _IMB.replace("= 4", "= 10000000") + "8 10 4 6 5\n" + _IMB + "8 10 4 6 5\n",
            4,
            "10000000 ranks: no more than 1048576 are taken",
        ),
        ("imb", _IMB + "8 10 4 6 5\n16 10 6 4 5\n", 5, "its least time is above its largest"),
        ("ssgd-trace", _ITERATION + _ITERATION.replace("500", "1e300"), 5, "no layer takes that long"),
        ("pipedream", _NODE.format("node1", 1) + _NODE.format("node2", 1e15), 2, "no layer takes that long"),
        ("pipedream", _NODE.format("node1", 1) + "\tnode1 -- node9\n", 2, "no node9 is described"),
    ],
)
def test_what_cannot_be_is_dropped_with_its_line(name: str, text: str, line: int, why: str) -> None:
    log = LogFile(path="a.txt", content=text.encode())
    held = importers()[name].read(log, ImportOptions(batch=4, ranks=4, level="node"))
    assert reasons(held)[line] == why
    assert held.rows > 0


@pytest.mark.parametrize("between", ["", "\n", "\n\n  "])
def test_reports_behind_each_other_in_one_file_are_all_read(between: str) -> None:
    report = (DATA / "nccl-tests-2.19-report.json").read_text().strip()
    one = read(LogFile(path="a.json", content=report.encode()), ImportOptions())
    both = read(LogFile(path="a.json", content=(report + between + report).encode()), ImportOptions())
    assert (both.rows, len(both.collectives)) == (2 * one.rows, 2 * len(one.collectives))
    # Results are numbered through.
    assert len({record.source for record in both.collectives}) == 2 * len({record.source for record in one.collectives})
    assert both.ranks_per_host == one.ranks_per_host
    torn = LogFile(path="a.json", content=(report + between + report[: report.rindex('"in_place"')]).encode())
    assert read(torn, ImportOptions()).rows == one.rows


def test_trace_events_of_absurd_duration_are_dropped() -> None:
    document = json.loads((DATA / "kineto-rank2.json").read_bytes())
    options = ImportOptions(batch=4, ranks=4, level="node")

    def read() -> Imported:
        log = LogFile(path="trace.json", content=json.dumps(document).encode())
        return importers()["kineto"].read(log, options)

    whole = read()
    event = next(each for each in document["traceEvents"] if "nccl" in each.get("name", "").lower())
    event["dur"] = 1.7e15
    held = read()
    assert sum(len(each.samples_s[0]) for each in held.collectives) < sum(
        len(each.samples_s[0]) for each in whole.collectives
    )
    assert len(held.notes) + len(held.dropped) > len(whole.notes) + len(whole.dropped)


def test_rows_that_a_terminal_coloured_and_titled_are_read() -> None:
    row = f"\x1b]0;sweep\x07\x1b[1;32m1048576\x1b[0m 262144 \x1b[?25lfloat sum {_TIMES} {_TIMES}\x1b[K\r"
    held = read(table_of_eight(row), ImportOptions())
    assert (held.rows, held.dropped) == (9, [])
    assert max(record.message_bytes for record in held.collectives) == 1048576
