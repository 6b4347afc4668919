"""Gradients merged into given messages: equal to serial training, sent as planned, and refused where they cannot be."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from in_process import run_in_process
from training_programs import NETWORKS, issued_and_planned

from paradl_bench.ranks.launcher import launch_ranks
from paradl_bench.records.training.training_record import read_run
from paradl_bench.strategies.exchange.options import ExchangeOptions

pytestmark = pytest.mark.distributed

PROGRAM = Path(__file__).parents[2] / "surroundings" / "fused_program.py"
CASES = (
    "Chain:none:1",
    "Chain:none:2",
    "Chain:buffer:1000:1",
    "Chain:buffer:1",
    "Images:none:1",
    "Images:buffer:1K:4",
    "Chain:none:2:after",
)


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    (tmp_path / "networks.py").write_text(NETWORKS)
    return tmp_path


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    result = tmp_path_factory.mktemp("fused") / "result.json"
    launch_ranks([sys.executable, str(PROGRAM), str(result), *CASES], ranks=2, device="cpu", timeout_s=300)
    answers: list[dict[str, Any]] = json.loads(result.read_text())
    return answers


@pytest.mark.parametrize("case", CASES)
def test_merged_gradients_train_as_serial_training(found: list[dict[str, Any]], case: str) -> None:
    for rank in found:
        assert rank[case]["gradients"] < 1e-13
        assert rank[case]["parameters"] < 1e-13


@pytest.mark.parametrize("case", CASES)
def test_messages_are_sent_in_the_order_of_the_plan(found: list[dict[str, Any]], case: str) -> None:
    for rank in found:
        assert rank[case]["sent"] == rank[case]["planned"]
    # Chain: the head, the layer used twice, the first one; bytes of weights and biases in fp32.
    layers = {"Chain:none:1": [520, 624, 336], "Chain:buffer:1000:1": [520, 960], "Chain:buffer:1": [1480]}
    if case in layers:
        assert found[0][case]["sent"][: len(layers[case])] == layers[case]


def test_gradients_that_do_not_come_end_the_run(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["refused"].startswith("WorkError: message 2 of 2 was not sent: 2 of its 2 gradients did not arrive")


def test_what_merged_gradients_issue_is_what_is_planned(workplace: Path) -> None:
    file = workplace / "messages.json"
    # Biased, from its last layer on: the head with the hidden layer, then both convolutions.
    sizes = [4 * (330 + 8224), 4 * (1168 + 224)]
    file.write_text(json.dumps({"model": "m", "strategy": "d2", "batch": 8, "rule": "ada", "messages_bytes": sizes}))
    names = ("BatchNormed", "Biased", "Shared", "Recurrent", "Unused")
    rules = ("fusion=none", "fusion=buffer", "fusion=buffer fusion_buffer=1000")
    cases = [f"{name} d2 - local {rule}" for name in names for rule in rules]
    cases += [f"Biased d2 - local fusion={file}", "BatchNormed d2 - local accumulate=2 fusion=none"]
    cases += ["BatchNormed d2 - sync fusion=none", "Blocks d2 - local recompute=all fusion=none"]
    for result in issued_and_planned(workplace, cases, 2):
        assert all(result[case]["recorded"] == result[case]["collectives"] for case in cases if "sync" not in case)
        assert [result[f"Biased d2 - local {rule}"]["all_reduces"] for rule in rules] == [4, 1, 4]
        assert result[f"Biased d2 - local fusion={file}"]["all_reduces"] == 2
        assert all(seconds > 0 for case in cases for seconds in result[case]["chunk"]["exposed_ge_s"])


def train(workplace: Path, *arguments: str) -> Any:
    line = ("train", "networks:Biased", "--batch", "4", "--iterations", "2", "--warmup", "3", *arguments)
    return run_in_process(workplace, *line)


def test_a_run_proves_and_keeps_its_messages(workplace: Path) -> None:
    sizes = (4 * (330 + 8224), 4 * (1168 + 224))
    content = {"model": "m", "strategy": "d2", "batch": 4, "rule": "mg-wfbp", "messages_bytes": sizes}
    (workplace / "messages.json").write_text(json.dumps(content))
    result = train(workplace, "--strategy", "d2", "--fusion", "messages.json", "--verify", "-o", "run")
    assert result.returncode == 0, result.stderr
    assert "every collective agrees with the plan to the byte" in result.stdout
    run = read_run(workplace / "run")
    assert run.verified is not None
    assert (run.verified.why_not, run.verified.dtype) == ("", "fp64")
    options = run.settings.of(ExchangeOptions)
    assert (options.fused_bytes, options.fused_by) == (sizes, "mg-wfbp (file), 2 messages")
    again = train(workplace, "--strategy", "d2", "--fusion", "none", "-o", "run")
    assert again.returncode == 2
    assert "run was measured with fused_by mg-wfbp (file), 2 messages, not none, 4 messages" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--strategy", "f2", "--fusion", "none"), "--fusion is for data parallelism alone (d2), not for f2"),
        (("--strategy", "serial", "--fusion", "none"), "--fusion is for data parallelism alone (d2), not for serial"),
        (("--strategy", "z1d2", "--fusion", "none"), "--fusion is for data parallelism alone (d2), not for z1d2"),
        (("--strategy", "d2p2", "--fusion", "none"), "--fusion is for data parallelism alone (d2), not for d2p2"),
        (("--strategy", "d2", "--fusion", "ada"), "--fusion ada needs costs: write its messages by predict --fusion"),
        (("--strategy", "d2", "--fusion", "ddp"), "--fusion ddp is what runs without the option"),
        (("--strategy", "d2", "--fusion", "gone.json"), "--fusion gone.json: no such file"),
        (("--strategy", "d2", "--fusion", "networks.py"), "networks.py"),
        (("--strategy", "d2", "--fusion", "other.json"), "message 1 has 12 bytes"),
        (("--strategy", "d2", "--fusion", "none", "--fusion-buffer", "1M"), "--fusion-buffer is for --fusion buffer"),
        (("--strategy", "d2", "--fusion", "buffer", "--fusion-buffer", "0"), "--fusion-buffer: size '0'"),
        (("--strategy", "d2", "--fusion", "none", "--bucket-cap-mb", "1"), "--bucket-cap-mb is for DDP's buckets"),
        (("--strategy", "d2", "--fusion", "none", "--compile"), "--fusion with --compile"),
        (
            ("--strategy", "d4", "--fusion", "none", "--exchange", "leader", "--ranks-per-node", "2"),
            "--fusion exchanges flat: leave out --exchange leader",
        ),
    ],
)
def test_what_cannot_merge_is_refused_in_one_line(workplace: Path, arguments: tuple[str, ...], said: str) -> None:
    other = {"model": "m", "strategy": "d2", "batch": 4, "rule": "ada", "messages_bytes": [12]}
    (workplace / "other.json").write_text(json.dumps(other))
    result = train(workplace, *arguments, "-o", "run")
    assert result.returncode == 2
    assert said in result.stderr
    assert result.stderr.strip().count("\n") == 0
    assert not (workplace / "run").exists()
