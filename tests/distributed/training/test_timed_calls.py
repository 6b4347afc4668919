"""Calls of real ranks, timed one by one: all that were issued, in training that stays what it is."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from in_process import run_in_process
from training_programs import NETWORKS

from paradl_bench.records.hosts.host_clocks import HostClocks
from paradl_bench.records.hosts.host_record import read_host_records
from paradl_bench.records.measurement import read_records
from paradl_bench.records.training.call_times import call_times, spent_by_rank
from paradl_bench.records.training.training_record import TRAINING_FILE, TrainingIterations, read_run

pytestmark = pytest.mark.distributed


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    (tmp_path / "networks.py").write_text(NETWORKS)
    return tmp_path


def train(workplace: Path, strategy: str, *arguments: str) -> None:
    line = ("train", "networks:BatchNormed", "--batch", "8", "--warmup", "3", "--no-verify", "--strategy", strategy)
    result = run_in_process(workplace, *line, *arguments)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("strategy", ["d2", "s2", "p2", "z3d2"])
def test_every_call_that_was_issued_is_timed(workplace: Path, strategy: str) -> None:
    train(workplace, strategy, "--iterations", "7", "--time-collectives", "-o", "run")
    records = read_records(workplace / "run", TRAINING_FILE, TrainingIterations)
    timed = [record for record in records if record.calls]
    # Five with their calls timed, then two without.
    assert [(record.rank, len(record.iteration_s)) for record in timed] == [(0, 5), (1, 5)]
    run = read_run(workplace / "run")
    assert not run.differences
    issued = {(one.operation, one.message_bytes, one.group): one.count for one in run.issued if one.when == "iteration"}
    seen: dict[tuple[str, int, tuple[int, ...]], int] = {}
    for call in timed[0].calls:
        key = call.operation, call.message_bytes, call.group
        seen[key] = seen.get(key, 0) + 1
    assert seen == issued
    for record in timed:
        begins = [pair for call in record.calls for pair in zip(call.begin_s, record.iteration_s, strict=True)]
        assert all(begin < whole for begin, whole in begins)
    clocks = HostClocks(read_host_records(workplace / "run"))
    both = [call for call in call_times(records, clocks) if set(call.ranks) == {0, 1}]
    assert len(both) == len(timed[0].calls)
    for rank in spent_by_rank(records, clocks):
        assert rank.transferring_s > 0
        assert rank.rest_s > 0
    assert run.call_timing is not None
    assert (run.call_timing.timed, run.call_timing.others) == (5, 2)


def test_timed_calls_leave_training_as_it_is(workplace: Path) -> None:
    train(workplace, "d2", "--iterations", "5", "-o", "plain")
    train(workplace, "d2", "--iterations", "5", "--time-collectives", "-o", "timed")
    losses = [read_run(workplace / name).losses for name in ("plain", "timed")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 5


@pytest.mark.parametrize(
    ("strategy", "device", "said"),
    [
        ("serial", "cpu", "strategy serial issues no collectives"),
        ("d2", "cuda", "--time-collectives is for --device cpu"),
    ],
)
def test_what_cannot_be_timed_is_refused(tmp_path: Path, strategy: str, device: str, said: str) -> None:
    line = ("train", "vgg11", "--batch", "2", "--strategy", strategy, "--device", device, "-o", "run")
    result = run_in_process(tmp_path, *line, "--time-collectives")
    assert result.returncode == 2
    assert said in result.stderr
