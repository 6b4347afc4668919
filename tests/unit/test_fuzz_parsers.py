"""Any bytes give a result or one clear error: a bounded run of the fuzzer, Hypothesis, and what fuzzing once found."""

from __future__ import annotations

import random

import pytest
from coverage_guided import Fuzzer, Lines
from hypothesis import given, settings
from hypothesis import strategies as st
from parser_targets import TOLD, seeds, targets

from paradl_bench.measure.importers.catalog import importers
from paradl_bench.measure.importers.importer import LogFile

NAMES = sorted(targets())
RUNS = 150


@pytest.mark.parametrize("name", NAMES)
def test_changed_files_give_a_result_or_one_error(name: str) -> None:
    fuzzer = Fuzzer(targets()[name], seeds(name), random.Random(f"0 {name}"), traced_every=3)
    fuzzer.run(RUNS)
    assert fuzzer.runs > RUNS


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25)
@given(content=st.binary(max_size=300) | st.text(max_size=300).map(lambda text: text.encode("utf-8", "replace")))
def test_any_bytes_give_a_result_or_one_error(name: str, content: bytes) -> None:
    targets()[name](content)


_WORDS = st.sampled_from(
    [
        "#",
        "size",
        "count",
        "type",
        "redop",
        "time",
        "algbw",
        "busbw",
        "#wrong",
        "1024",
        "256",
        "float",
        "sum",
        "-1",
        "12.5",
        "0",
        "N/A",
        "# nThread 1 nGpus 2",
        "#  Rank 0 on h device 0 [0x0] X",
        "h:1:2 [0] NCCL INFO x",
        "0:",
        "# OSU MPI Allreduce Latency Test v5.7",
        "# Size  Avg Latency(us)",
        "# Benchmarking Allreduce",
        "# #processes = 4",
        "#bytes",
        "#repetitions",
        "t_max[usec]",
        "node1 -- node2",
        "CONV_1",
        "FC",
        "3x4x4",
        "3x2x3x3",
        "2x4x4",
        "LATENCY",
        "1e-6",
    ]
)
"""Pieces of all text formats: put together at random they come nearer to a table than bytes do."""
_ROWS = st.tuples(st.sampled_from(" |"), st.lists(_WORDS, max_size=16)).map(lambda row: row[0].join(row[1]))


@settings(max_examples=60)
@given(rows=st.lists(_ROWS, max_size=12))
def test_pieces_of_the_text_formats_in_any_order_give_a_result_or_one_error(rows: list[str]) -> None:
    content = "\n".join(rows).encode()
    for name in importers():
        targets()[name](content)


def test_half_a_surrogate_pair_in_json_is_replaced() -> None:
    (report,) = [content for content in seeds("nccl-tests") if content.startswith(b"{")]
    for name, content, place in (
        ("nccl-tests", report, b"Example H100"),
        ("kineto", seeds("kineto")[0], b"aten::conv2d"),
    ):
        assert place in content
        torn = content.replace(place, b"\\ud800 \\udc00 \\ud83d\\ude00")
        targets()[name](torn)
        held = importers()[name].read(LogFile(path="x", content=torn), TOLD)
        words = held.device_names | {record.operation for record in held.layers}
        assert any("\ufffd \ufffd \U0001f600" in word for word in words)


def test_true_is_no_number_of_ranks() -> None:
    content = seeds("kineto")[0]
    changed = content.replace(b'"Group size": 4', b'"Group size": true').replace(
        b'"world_size": 4', b'"world_size": true'
    )
    assert changed != content
    targets()["kineto"](changed)


def test_the_fuzzer_tells_new_lines_and_fails_on_an_error_that_is_not_ours() -> None:
    def target(content: bytes) -> None:
        if content.startswith(b"12"):
            raise KeyError("not ours")

    lines = Lines()
    assert lines.run(target, b"")
    assert not lines.run(target, b"")
    with pytest.raises(AssertionError, match="KeyError: 'not ours'; input b'12"):
        Fuzzer(target, [b"1 1", b"2 12"], random.Random(0)).run(2000)
