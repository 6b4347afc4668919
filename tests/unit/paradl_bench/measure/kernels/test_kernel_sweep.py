"""Sweeping in this process: what is written, going on after an interruption, what can't run, the budget."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from paradl_bench.core.errors import UserError, WorkError
from paradl_bench.core.units import parse_duration
from paradl_bench.measure.kernels import runs as kernel_runs
from paradl_bench.measure.kernels import sweep as sweeping
from paradl_bench.measure.kernels.design import Design, SweptKernel, shapes_of
from paradl_bench.measure.kernels.request import (
    DESIGN_FILE,
    PROGRESS_FILE,
    SKIPPED_FILE,
    KernelsRequest,
    SkippedKernel,
    SweepProgress,
)
from paradl_bench.measure.kernels.runs import Caches, build_run
from paradl_bench.measure.kernels.summary import summarise_sweep
from paradl_bench.network.kernel import KERNELS_FILE, KernelSamples
from paradl_bench.ranks.clocks import CpuClock, ThreadClock
from paradl_bench.ranks.groups.process_groups import RankContext
from paradl_bench.records.measurement import read_manifest, read_records

REQUEST = KernelsRequest(
    kinds=("conv", "linear", "activation", "optimizer", "copy"),
    device="cpu",
    dtypes=("fp32", "bf16"),
    samples=10,
    kernel_s=0.001,
    memory_bytes=4_000_000,
    blocks=2,
    repetitions=2,
)
CONTEXT = RankContext(
    rank=0, ranks=1, local_rank=0, device=torch.device("cpu"), backend="none", launcher="own", core=None
)


@pytest.fixture(autouse=True)
def quick_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's speeds only order kernels here."""
    monkeypatch.setitem(kernel_runs._MATRIX, "cpu", 64)
    monkeypatch.setitem(kernel_runs._STREAM_BYTES, "cpu", 2**20)


def sweep(output: Path, request: KernelsRequest = REQUEST) -> list[KernelSamples]:
    sweeping.sweep_kernels(request, CONTEXT, output, ("paradl-bench", "kernels"))
    return read_records(output, KERNELS_FILE, KernelSamples)


def test_every_stage_of_every_kernel_is_measured_in_every_block(tmp_path: Path) -> None:
    records = sweep(tmp_path / "out")
    design = msgspec.json.decode((tmp_path / "out" / DESIGN_FILE).read_bytes(), type=Design)
    expected = Counter(
        (shape.kind, shape.stage, kernel.dtype, block)
        for kernel in design.kernels
        for shape in shapes_of(kernel)
        for block in range(2)
    )
    assert Counter((r.shape.kind, r.shape.stage, r.dtype, r.block) for r in records) == expected
    assert {r.shape.stage for r in records if r.shape.kind == "conv"} == {"FW", "BW_input", "BW_weight"}
    assert {r.dtype for r in records} == {"fp32", "bf16"}
    assert all(value > 0 for record in records for value in record.samples_s)
    summary = summarise_sweep(tmp_path / "out")
    assert (summary.planned, summary.kernels, summary.complete, summary.skipped) == (10, 10, True, {})
    assert summary.samples == sum(len(record.samples_s) for record in records)
    assert read_manifest(tmp_path / "out").environment.settings["caches"] == "training"


def test_an_interrupted_sweep_keeps_what_it_has_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()

    def interrupted(*arguments: Any) -> Any:
        if next(calls) == 7:
            raise KeyboardInterrupt
        return build_run(*arguments)

    monkeypatch.setattr(sweeping, "build_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sweep(tmp_path / "out")
    first = read_records(tmp_path / "out", KERNELS_FILE, KernelSamples)
    assert len({(str(r.shape.sizes), r.shape.kind, r.dtype, r.block) for r in first}) == 7
    assert not read_manifest(tmp_path / "out").complete
    records = sweep(tmp_path / "out")
    assert records[: len(first)] == first
    visits = Counter((str(r.shape), r.dtype, r.block) for r in records)
    assert set(visits.values()) == {1}
    assert len({visit[:2] for visit in visits}) * 2 == len(visits)
    # Seven visits, the one interrupted, and those of all ten kernels in two blocks that were left.
    assert next(calls) == 7 + 1 + (10 * 2 - 7)


def test_one_block_has_no_spread_between_blocks(tmp_path: Path) -> None:
    request = msgspec.structs.replace(REQUEST, kinds=("activation",), dtypes=("fp32",), samples=2, blocks=1)
    sweep(tmp_path / "out", request)
    assert {stage.spread_relative for stage in summarise_sweep(tmp_path / "out").stages} == {None}


def test_another_command_does_not_go_on_in_its_directory(tmp_path: Path) -> None:
    sweep(tmp_path / "out")
    with pytest.raises(UserError, match="measured with caches training, not warm"):
        sweep(tmp_path / "out", msgspec.structs.replace(REQUEST, caches="warm"))


def test_a_failing_kernel_is_kept_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(kernel: SweptKernel, *arguments: Any) -> Any:
        if kernel.kind == "activation":
            raise RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
            )
        return build_run(kernel, *arguments)

    monkeypatch.setattr(sweeping, "build_run", refusing)
    records = sweep(tmp_path / "out")
    assert "activation" not in {record.shape.kind for record in records}
    skipped = read_records(tmp_path / "out", SKIPPED_FILE, SkippedKernel)
    assert {record.kernel.kind for record in skipped} == {"activation"}
    assert len({record.kernel.key for record in skipped}) == len(skipped), "tried once, not once a block"
    assert all(
        reason.split(": ")[1] == "does not fit in memory" for reason in summarise_sweep(tmp_path / "out").skipped
    )


def test_a_sweep_of_which_nothing_runs_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(*arguments: Any) -> Any:
        raise RuntimeError("not implemented for 'Half'")

    monkeypatch.setattr(sweeping, "build_run", refusing)
    with pytest.raises(WorkError, match="no kernel ran: not implemented for 'Half'"):
        sweep(tmp_path / "out")


def test_a_budget_ends_a_sweep_after_whole_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = msgspec.structs.replace(
        REQUEST, kinds=("activation",), dtypes=("fp32",), samples=None, budget_s=10.0, repetitions=1
    )
    ticks = itertools.count()
    # A machine on which every visit takes a quarter of a second, whatever was estimated.
    monkeypatch.setattr(sweeping.time, "monotonic", lambda: 0.25 * next(ticks))
    monkeypatch.setattr(sweeping, "_ROUND", 4)
    records = sweep(tmp_path / "out", request)
    visits = Counter(
        str(record.shape.sizes) + str(record.shape.settings) for record in records if record.shape.stage == "FW"
    )
    spent = sum(part.wall_s for part in read_records(tmp_path / "out", PROGRESS_FILE, SweepProgress))
    assert set(visits.values()) == {2}
    assert 8.0 <= spent <= 10.25
    assert read_manifest(tmp_path / "out").complete


def test_caches_are_left_warm_or_as_training_leaves_them() -> None:
    device = torch.device("cpu")
    assert Caches("warm", device).buffer_bytes == 0
    caches = Caches("training", device)
    assert 2**20 <= caches.buffer_bytes <= 64 * 2**20
    small, whole = torch.full((4,), 3.0), torch.arange(4)
    caches.settle([small, whole])
    assert small.tolist() == [3.0] * 4


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90.0), ("90s", 90.0), ("10m", 600.0), ("1.5h", 5400.0), ("40ms", 0.04), ("8us", 8e-6)]
)
def test_times_parse(text: str, seconds: float) -> None:
    assert parse_duration(text, "--budget") == seconds


@pytest.mark.parametrize("text", ["", "0", "-1s", "ten", "5d", "1e3", "nan"])
def test_what_is_no_time_is_refused_with_the_option(text: str) -> None:
    with pytest.raises(UserError, match=r"--budget: .* write 10us, 40ms"):
        parse_duration(text, "--budget")


def test_waiting_counts_on_the_wall_clock_alone() -> None:
    walls, of_thread = CpuClock(), ThreadClock()
    at_wall, at_thread = walls.stamp(), of_thread.stamp()
    threading.Event().wait(0.05)
    waited_s, worked_s = walls.seconds(at_wall, walls.stamp()), of_thread.seconds(at_thread, of_thread.stamp())
    assert worked_s < 0.5 * waited_s


@pytest.mark.parametrize("references", [(1e-4,), (1e-4, 0.0), (1e-4, -1.0)])
def test_a_reference_belongs_to_every_sample(references: tuple[float, ...]) -> None:
    shape = {"kind": "linear", "stage": "FW", "sizes": {"batch": 1}}
    row = {"shape": shape, "dtype": "fp32", "block": 0, "samples_s": (1.0, 2.0), "reference_s": references}
    with pytest.raises(msgspec.ValidationError, match="reference_s"):
        msgspec.convert(row, KernelSamples)
