"""Logs of nccl-tests, rccl-tests, OSU and IMB: well-formed rows are taken, the others counted with their line."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from recorded_logs import DATA, public_data, read_log

from paradl_bench.core.errors import UserError
from paradl_bench.importers.catalog import importers
from paradl_bench.importers.importer import Imported, ImportOptions, LogFile
from paradl_bench.importers.nccl_tests import read
from paradl_bench.importers.tables.numbers_read import half_unit


def reasons(held: Imported) -> dict[int, str]:
    return {item.line: item.why for item in held.dropped}


def sizes(held: Imported, operation: str, buffers: str = "out_of_place") -> list[int]:
    return [r.message_bytes for r in held.collectives if (r.operation, r.buffers) == (operation, buffers)]


def test_rows_split_by_nccl_messages_are_joined_or_counted() -> None:
    held = read_log("nccl-tests", DATA / "nccl-tests-2.17.log")
    assert sizes(held, "all_reduce") == [1024, 4096, 16384, 65536, 1048576]
    # 65536 in place has wrong results, 262144 was cut off for good, 0 bytes are none.
    assert sizes(held, "all_reduce", "in_place") == [1024, 4096, 16384, 1048576]
    lines = (DATA / "nccl-tests-2.17.log").read_text().split("\n")
    found = {int(lines[line - 1].split()[0]): why for line, why in reasons(held).items()}
    assert sorted(found) == [0, 65536, 262144]
    assert found[0].startswith("no bytes were sent")
    assert found[65536].startswith("one of its two times: wrong results")
    assert found[262144] == "cut off after 5 of 13 columns: another row follows it"
    assert held.rows == 8
    cut = next(r for r in held.collectives if r.message_bytes == 16384 and r.buffers == "in_place")
    assert cut.samples_s[0][0] == pytest.approx(2 * 3 * 4e-6 + 1.5 * 16384 / 50e9, rel=1e-3)
    assert (cut.ranks, cut.level, cut.calls_per_sample, cut.verified, cut.dtype) == (4, "system", 20, True, "fp32")
    # What each rank contributes, where nccl-tests counts what all do together; N/A was not verified.
    assert sizes(held, "all_gather") == [256, 2048, 16384]
    assert [r.verified for r in held.collectives if r.operation == "all_gather"] == [True, False] * 3
    assert held.versions == {"nccl-tests": "2.17.6", "nccl": "2.28.7"}
    assert (held.hosts, held.ranks_per_host, held.device_names) == ({"n01", "n02"}, 2, {"Example H100"})


def test_what_is_refused_is_taken_where_it_is_asked_for() -> None:
    keep = ImportOptions(keep=frozenset({"empty", "wrong"}))
    held = read_log("nccl-tests", DATA / "nccl-tests-2.17.log", keep)
    assert sizes(held, "all_reduce", "in_place") == [0, 1024, 4096, 16384, 65536, 1048576]
    (wrong,) = [r for r in held.collectives if r.message_bytes == 65536 and r.buffers == "in_place"]
    assert not wrong.verified


def test_a_run_with_a_dead_rank_is_refused_unless_requested() -> None:
    text = (DATA / "nccl-tests-2.17.log").read_text()
    first = text.index("# Out of bounds")
    died = text[:first] + "n01: Test NCCL failure common.cu:564 'unhandled cuda error'\n" + text[first:]
    log = LogFile(path="died.log", content=died.encode())
    held = read(log, ImportOptions())
    assert sizes(held, "all_reduce") == []
    assert Counter(why.split("(")[0] for why in reasons(held).values())["the run failed "] == 6
    assert sizes(held, "all_gather") == [256, 2048, 16384]
    kept = read(log, ImportOptions(keep=frozenset({"failed"})))
    assert sizes(kept, "all_reduce") == [1024, 4096, 16384, 65536, 1048576]


def test_logs_that_name_no_collective_tell_it_by_their_numbers() -> None:
    held = read_log("nccl-tests", DATA / "nccl-tests-2.4.log")
    assert sizes(held, "all_reduce") == [8, 2048, 524288, 33554432]
    assert sizes(held, "all_gather") == [4, 512, 131072]
    assert "wrong results" in next(iter(reasons(held).values()))
    assert {(r.ranks, r.level, r.calls_per_sample) for r in held.collectives} == {(4, "node", 100)}


def test_the_first_generation_prints_milliseconds() -> None:
    held = read_log("nccl-tests", DATA / "nccl-tests-2.0-2017.log", ImportOptions())
    times = [r.samples_s[0][0] for r in held.collectives if r.buffers == "out_of_place"]
    expected = [5 * (2 * 4e-6 + size / 50e9) for size in (1048576, 8388608, 67108864)]
    assert times == pytest.approx(expected, rel=5e-3)
    assert {r.calls_per_sample for r in held.collectives} == {1}
    assert any("how many iterations" in note for note in held.notes)


def test_markdown_tables_give_ranks_by_their_bandwidth_ratio() -> None:
    path = DATA / "nccl-tests-in-markdown.md"
    with_level = read_log("nccl-tests", path, ImportOptions(level="rack"))
    assert {(r.operation, r.ranks, r.level) for r in with_level.collectives} == {("all_reduce", 16, "rack")}
    assert with_level.rows == 4
    without = read_log("nccl-tests", path)
    assert without.rows == 0
    assert set(reasons(without).values()) == {
        "the log lists no hosts: give --level node, or system where ranks were on several"
    }
    contradicted = read_log("nccl-tests", path, ImportOptions(level="rack", ranks=8))
    assert contradicted.rows == 0
    assert "on 8 ranks" in next(iter(reasons(contradicted).values()))


def test_what_the_log_leaves_open_is_asked_for_not_guessed() -> None:
    open_question = read_log("rccl-tests", DATA / "rccl-tests.log")
    assert set(reasons(open_question).values()) == {"it may be all_reduce or send_recv: give --op"}
    told = read_log("rccl-tests", DATA / "rccl-tests.log", ImportOptions(operation="all_reduce"))
    assert [(r.library, r.tool, r.message_bytes) for r in told.collectives[::2]] == [
        ("rccl", "rccl-tests", 1024),
        ("rccl", "rccl-tests", 32768),
        ("rccl", "rccl-tests", 1048576),
    ]
    wrong = read_log("rccl-tests", DATA / "rccl-tests.log", ImportOptions(operation="all_gather"))
    assert "do not fit all_gather on 2 ranks" in next(iter(reasons(wrong).values()))


def test_a_number_that_was_edited_is_noticed() -> None:
    text = (DATA / "nccl-tests-2.4.log").read_text()
    time = re.search(r"   524288 +131072 +float +sum +([\d.]+)", text)
    assert time
    edited = text.replace(time.group(1), f"{float(time.group(1)) * 1.1:.2f}", 1)
    held = read(LogFile(path="x", content=edited.encode()), ImportOptions())
    assert [why for why in reasons(held).values() if "torn or edited" in why]


def test_json_reports_keep_single_calls_where_the_tool_did() -> None:
    held = read_log("nccl-tests", DATA / "nccl-tests-2.19-report.json")
    assert [(r.message_bytes, r.buffers, r.calls_per_sample) for r in held.collectives] == [
        (4096, "out_of_place", 20),
        (4096, "in_place", 20),
        (1048576, "out_of_place", 1),
        (1048576, "in_place", 20),
    ]
    (calls,) = held.collectives[2].samples_s
    assert len(calls) == 3  # the first one was to be skipped
    assert {r.ranks for r in held.collectives} == {2}
    assert held.variables == {"NCCL_DEBUG": "WARN", "NCCL_ALGO": "Ring"}
    assert held.command_lines == ["./build/all_reduce_perf -b 0 -e 1M -g 2 -J report.json"]


def test_a_torn_report_gives_its_whole_rows_if_requested() -> None:
    content = (DATA / "nccl-tests-2.19-report.json").read_bytes()
    torn = LogFile(path="torn.json", content=content[: content.rindex(b'"in_place"')])
    assert read(torn, ImportOptions()).rows == 0
    held = read(torn, ImportOptions(keep=frozenset({"failed"})))
    assert [r.message_bytes for r in held.collectives] == [4096, 4096]


@pytest.mark.parametrize("name", ["group", "hostname"])
def test_a_report_whose_devices_hold_lists_is_read(name: str) -> None:
    report = json.loads((DATA / "nccl-tests-2.19-report.json").read_bytes())
    report["config"]["devices"][0][name] = ["a"]
    held = read(LogFile(path="odd.json", content=json.dumps(report).encode()), ImportOptions())
    assert {r.ranks for r in held.collectives} == {2}


def test_osu_tables_of_several_generations() -> None:
    with pytest.raises(UserError, match="give --ranks"):
        read_log("osu", DATA / "osu-5.7.log")
    old = read_log("osu", DATA / "osu-5.7.log", ImportOptions(ranks=8, level="system"))
    assert [(r.library, r.operation, r.message_bytes, r.calls_per_sample) for r in old.collectives] == [
        ("mpi-cuda", "all_reduce", 4, 1000),
        ("mpi-cuda", "all_reduce", 1024, 1000),
        ("mpi-cuda", "all_reduce", 262144, 100),
        ("mpi-cuda", "all_reduce", 4194304, 100),
    ]
    # The slowest rank's mean, where the table has it.
    expected = (2 * 7 * 4e-6 + 2 * 7 / 8 * 4194304 / 50e9) * 1.02
    assert old.collectives[-1].samples_s[0][0] == pytest.approx(expected, rel=1e-3)
    new = read_log("osu", DATA / "osu-7.4.log", ImportOptions(level="node"))
    assert [(r.operation, r.ranks, r.message_bytes, r.dtype, r.verified) for r in new.collectives] == [
        ("broadcast", 4, 1, "int8", True),
        ("broadcast", 4, 65536, "int8", True),
        ("send_recv", 2, 8, "int8", False),
        ("send_recv", 2, 4096, "int8", False),
        ("reduce_scatter", 4, 4, "fp32", False),
        ("reduce_scatter", 4, 1024, "fp32", False),
    ]
    assert Counter(why.split(":")[0].split(";")[0] for why in reasons(new).values()) == {
        "wrong results": 1,
        "no bytes were sent": 1,
        "Bandwidth": 2,
        "18 bytes are no whole part on each of 4 ranks": 1,
    }


def test_imb_tables() -> None:
    held = read_log("imb", DATA / "imb-mpi1-2021.log", ImportOptions(level="node"))
    assert [(r.operation, r.ranks, r.message_bytes, r.calls_per_sample) for r in held.collectives] == [
        ("send_recv", 2, 8, 1000),
        ("send_recv", 2, 4096, 1000),
        ("all_reduce", 2, 4, 1000),
        ("all_reduce", 2, 4096, 640),
        ("all_reduce", 4, 4, 1000),
        ("all_reduce", 4, 4096, 640),
        ("reduce_scatter", 4, 1024, 640),
        ("all_reduce", 2, 4, 1000),
    ]
    assert [(r.concurrent, r.group) for r in held.collectives] == [(1, 0)] * 7 + [(2, 0)]
    assert held.collectives[5].samples_s == ((pytest.approx(8.61e-6),),)
    assert held.versions["imb"] == "2021.7"
    assert sorted(why.split(":")[0].split(";")[0] for why in reasons(held).values()) == [
        "Barrier",
        "Sendrecv",
        "no bytes were sent",
        "no bytes were sent",
        "not measured",
        "not measured",
        "wrong results",
    ]


@pytest.mark.parametrize(("text", "half"), [("12.34", 0.005), ("7", 0.5), ("1.5e3", 50.0), (".5", 0.05)])
def test_digits_say_how_far_rounding_goes(text: str, half: float) -> None:
    assert half_unit(text) == pytest.approx(half)


_ROW = re.compile(
    r"^(?:\s*\d+: |\s*\[\d+,\d+\]<stdout>:)?\s*(\d+)\s+\d+\s+(?:float|double)\b(?:\s+[a-z]+)?(?:\s+-?\d+)?"
    r"((?:\s+[\d.]+){3}\s+\S+){2}\s*$"
)
"""A whole row, as a reader who knows nothing of headers would tell it."""


def test_every_row_of_public_nccl_logs_is_recovered_exactly() -> None:
    folder = public_data()
    logs = [*sorted((folder / "nccl-logs").iterdir()), *sorted((folder / "abci-v100" / "nccl_osu").glob("*.nccl"))]
    total = 0
    for path in logs:
        if "imb" in path.name:
            continue
        lines = [match for line in path.read_text().split("\n") if (match := _ROW.match(line))]
        # A row that NCCL's lines tore in two, in two of the files.
        torn = len(re.findall(r"sum\s+-1\w+:\d+:\d+ \[0\] NCCL INFO", path.read_text()))
        held = read_log("nccl-tests", path, ImportOptions(level="system"))
        empty = sum(why.startswith("no bytes") for why in reasons(held).values())
        wrong = sum(why.startswith("wrong results") for why in reasons(held).values())
        assert held.rows + empty + wrong == len(lines) + torn, path.name
        assert empty == sum(match.group(1) == "0" for match in lines), path.name
        assert len(held.dropped) == empty + wrong, path.name
        total += held.rows
    assert total == 981


def test_the_public_osu_and_imb_tables_are_read() -> None:
    folder = public_data()
    for path in sorted((folder / "abci-v100" / "nccl_osu").glob("*.mpi*")):
        held = read_log("osu", path, ImportOptions(ranks=8, level="system"))
        assert held.rows == sum(line[:1].isdigit() for line in path.read_text().split("\n"))
        assert not held.dropped
    imb = read_log("imb", folder / "nccl-logs" / "azure-imb__README.md", ImportOptions(level="system"))
    assert [(r.ranks, r.message_bytes) for r in imb.collectives] == [(1408, 8), (1408, 16)] * 2


@pytest.mark.parametrize(
    ("name", "file", "words"),
    [
        (
            "osu",
            "osu-7.4.log",
            "mpirun noticed that process rank 1 with PID 7 on node n01 exited on signal 9 (Killed).",
        ),
        ("imb", "imb-mpi1-2021.log", "MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD"),
    ],
)
def test_rows_before_a_dead_rank_are_refused_unless_requested(name: str, file: str, words: str) -> None:
    # IMB's last tables are of operations that are not modelled.
    text = (DATA / file).read_text().partition("# Benchmarking Reduce_scatter")[0]
    whole = importers()[name].read(LogFile(path=file, content=text.encode()), ImportOptions(ranks=4, level="node"))
    log = LogFile(path=file, content=f"{text}\n{words}\n".encode())
    held = importers()[name].read(log, ImportOptions(ranks=4, level="node"))
    refused = [item for item in held.dropped if item.why.startswith(f"the run failed ({words[:40]}")]
    # Tables before the last one were whole when the rank died.
    assert 0 < len(refused) <= whole.rows
    assert (held.rows, len(held.collectives)) == (whole.rows - len(refused), len(whole.collectives) - len(refused))
    assert [item.line for item in held.dropped] == sorted(item.line for item in held.dropped)
    kept = importers()[name].read(log, ImportOptions(ranks=4, level="node", keep=frozenset({"failed"})))
    assert kept.rows == whole.rows


def test_ranks_per_node_come_from_listed_hosts_or_from_options() -> None:
    listed = read_log("nccl-tests", DATA / "nccl-tests-2.17.log")
    assert {(record.ranks, record.ranks_per_node) for record in listed.collectives} == {(4, 2)}
    told = read_log("osu", DATA / "osu-5.7.log", ImportOptions(ranks=8, level="system", ranks_per_node=4))
    assert {(record.ranks, record.ranks_per_node) for record in told.collectives} == {(8, 4)}
    silent = read_log("osu", DATA / "osu-5.7.log", ImportOptions(ranks=8, level="system"))
    assert {record.ranks_per_node for record in silent.collectives} == {0}
    inside = read_log("osu", DATA / "osu-5.7.log", ImportOptions(ranks=8, level="node"))
    assert {record.ranks_per_node for record in inside.collectives} == {8}


def test_rows_of_the_public_logs_agree_with_a_second_count() -> None:
    public_data()
    sys.path.insert(0, str(Path(__file__).parents[4] / "benchmarks" / "published"))
    import imports

    found = imports.compare_logs()
    assert {each.file: each.differences for each in found if each.differences} == {}
    assert sum(each.counted for each in found) > 1500
