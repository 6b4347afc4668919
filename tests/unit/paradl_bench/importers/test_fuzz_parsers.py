"""Any bytes give a result or one clear error: a bounded run of the fuzzer, Hypothesis, and what fuzzing once found."""

from __future__ import annotations

import contextlib
import importlib
import json
import pkgutil
import random
from pathlib import Path

import coverage_guided
import fuzz_targets
import option_targets
import pytest
from coverage_guided import Finding, Fuzzer, Lines
from hypothesis import given, settings
from hypothesis import strategies as st
from parser_seeds import bombs, seeds
from parser_targets import DATA, TOLD, targets

from paradl_bench import network, records
from paradl_bench.api.directory_files import RECORDS
from paradl_bench.core.errors import UserError, shown
from paradl_bench.importers.catalog import importers
from paradl_bench.importers.importer import LogFile
from paradl_bench.records.measurement import MANIFEST_NAME
from predict.costs.files import read_cluster

NAMES = sorted(targets())
RUNS = 150
SLOW_RUNS = 20


@pytest.mark.parametrize("name", sorted(fuzz_targets.targets()))
def test_changed_inputs_give_a_result_or_one_error(name: str) -> None:
    target, inputs = fuzz_targets.targets()[name], fuzz_targets.seeds(name)
    for content in inputs:
        # What is imported at its first use is no input's time.
        target(content)
    fuzzer = Fuzzer(target, inputs, random.Random(f"0 {name}"), traced_every=5, change=fuzz_targets.change_of(name))
    runs = SLOW_RUNS if fuzz_targets.is_slow(name) else RUNS
    fuzzer.run(runs)
    assert fuzzer.runs > runs


def test_every_command_has_a_line_to_fuzz() -> None:
    assert set(option_targets.commands()) == set(option_targets.LINES)


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
def test_shuffled_text_format_pieces_give_results_or_one_error(rows: list[str]) -> None:
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


def test_the_fuzzer_notices_new_lines_and_fails_on_foreign_errors() -> None:
    def target(content: bytes) -> None:
        if content.startswith(b"12"):
            raise KeyError("not ours")

    lines = Lines()
    assert lines.run(target, b"")
    assert not lines.run(target, b"")
    with pytest.raises(AssertionError, match="KeyError: 'not ours'; input b'12"):
        Fuzzer(target, [b"1 1", b"2 12"], random.Random(0)).run(2000)


def test_every_records_file_of_a_directory_is_fuzzed() -> None:
    modules = [
        importlib.import_module(found.name)
        for room in (network, records)
        for found in pkgutil.walk_packages(room.__path__, f"{room.__name__}.")
        if "models" not in found.name
    ]
    files = {
        value
        for module in modules
        for name, value in vars(module).items()
        if name.endswith("_FILE") and str(value).endswith(".jsonl")
    }
    assert files <= set(RECORDS) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_what_the_fuzzer_starts_from_is_read(name: str) -> None:
    # Fuzzing from what is refused at once reaches nothing; pipedream's toy needs a batch, which not every option gives.
    refused = [targets()[name](content) for content in seeds(name)]
    assert refused
    assert not all(refused) or name == "pipedream"


@pytest.mark.parametrize("bomb", sorted(bombs()))
def test_stack_or_memory_bombs_give_a_result_or_one_error(bomb: str) -> None:
    content = bombs()[bomb]
    for name in NAMES:
        Fuzzer(targets()[name], [], random.Random(0)).attempt(content, traced=False)


_NCCL = b"# nThread 1 nGpus 2\n# size count type redop root time algbw busbw #wrong time algbw busbw #wrong\n"
_REPORT = (
    b'{"config":{"devices":[{"hostname":"a"},{"hostname":"a"}]},"args":["broadcast_perf"],"results":[{"size":1024,'
    b'"count":256,"type":"float","root":"ROOT","in_place":{"time":8.0,"alg_bw":0.128,"bus_bw":0.128}}]}'
)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("cluster.yaml", b"name: a\nlevels: " + b"[" * 600),
        ("cluster.yaml", b'name: "\\ud800"\nlevels: [{name: node, ranks: 4}]\n'),
        ("cluster.yaml", b"name: a\nlevels: []\nmemory_bytes_per_rank: " + b"9" * 5000),
        ("cluster.yaml", b"name: !!timestamp x\nlevels: !!int ''\n"),
        ("paradl-net", b"# platform\nMEM_PER_NODE|5e-324|bytes\nMAX_NODE|4|\nGPU_PER_NODE|4|\n"),
        ("profile.json", b'{"schema_version": 1, "a": ' + b"[" * 900 + b"]" * 900 + b"}"),
        ("nccl-tests", _NCCL + b" 1024 256 float sum " + b"9" * 5000 + b" 8 0.13 0.13 0 8 0.13 0.13 0\n"),
        ("nccl-tests", _REPORT.replace(b"ROOT", b"9" * 5000)),
        (
            "measurements",
            b">>> manifest.json\n"
            + (DATA / "collectives-v1" / MANIFEST_NAME).read_bytes()
            + b'>>> collectives.jsonl\n{"library":"gloo","tool":"torch","operation":"","level":"node","ranks":2,'
            b'"message_bytes":4096,"dtype":"fp32","block":0,"samples_s":[[1e-5],[1e-5]],"verified":true}\n',
        ),
    ],
)
def test_what_fuzzing_once_found(name: str, content: bytes) -> None:
    targets()[name](content)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("used layers-v1 iterations.jsonl", "fw_between_s", []),
        ("used training-v1 training.jsonl", "rank", (1 << 20) - 1),
        ("used training-v1 run.json", "exchange", "fp16"),
    ],
)
def test_fields_that_fuzzing_once_found_are_refused(name: str, field: str, value: object) -> None:
    document = json.loads(fuzz_targets.seeds(name)[0])
    assert fuzz_targets.targets()[name](json.dumps(document | {field: value}).encode())


@pytest.mark.parametrize(
    "line", ["PARADL_HOST_CORES=x", "SLURM_PROCID=\xb2", "LOCAL_WORLD_SIZE=\u0661", "MASTER_PORT=65536"]
)
def test_variables_that_fuzzing_once_found_are_read_or_refused(line: str) -> None:
    fuzz_targets.targets()["environment"](f"{line}\nTORCHELASTIC_RUN_ID=x\nRANK=0\nLOCAL_RANK=0\nWORLD_SIZE=1".encode())


def test_an_error_of_any_length_is_shown_as_one_line() -> None:
    line = shown("unknown field `" + "y" * 5000 + "\ud800`\nin a file" + " here" * 100)
    assert len(line) <= 1000
    assert "\n" not in line
    assert line.startswith("unknown field")
    assert line.endswith("here")
    line.encode()
    assert shown("a\n b") == "a b"


def test_a_cluster_files_values_are_numbers_however_yaml_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_bytes(b"\xef\xbb\xbfname: 12\r\nmemory_bytes_per_rank: 16e9\r\nlevels:\r\n- {name: on, ranks: 4}\r\n")
    cluster = read_cluster(path)
    assert (cluster.name, cluster.memory_bytes_per_rank, cluster.levels[0].name) == ("12", 16e9, "on")
    path.write_bytes(b"#" * (1 << 19))
    with pytest.raises(UserError, match="holds more than 256 KiB"):
        read_cluster(path)


def test_the_fuzzer_ends_an_input_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage_guided, "MAX_CPU_S", 0.05)

    def target(content: bytes) -> None:
        while True:
            with contextlib.suppress(Exception):
                sum(range(1000))

    with pytest.raises(Finding, match="TooSlow: more than"):
        Fuzzer(target, [b"1"], random.Random(0)).run(1)
