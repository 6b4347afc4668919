"""NeuSight: an iteration on one GPU from the times of its operations, traced and timed one by one on the same GPU.

Inputs are a trace's rows (embedding, one block, head) and how often the block stands. The answer is the measured time
of forward and backward; the weight update was not measured. A time of one operation holds its launch and the events
around it: operations that run no kernel (a size, a view) take from 8 us. In an iteration a GPU runs behind its host,
so what such an operation takes in the median is taken off every part of every other one. That was decided when errors
of the plain sums had been seen. How long a host takes to dispatch a whole iteration is not among the inputs.
"""

from __future__ import annotations

import csv
import json
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from public.toolkit import TraceLayer, run, write_trace
from sets.measured_layers import Place, Timed, write_layers
from sets.runs import Predicted, PublishedSet, Run, mean_error, short_by

from paradl_bench.importers.catalog import importers
from paradl_bench.importers.importer import ImportOptions, load_file
from paradl_bench.importers.operator_tables.expressions import NoNumber, shape_of
from paradl_bench.records.devices.sheet import DeviceSheet, sheet_of_measured

SOURCE = "NeuSight, one GPU"
CITED = "sitar-lab/NeuSight @ 6945927d, MIT"
INPUTS = "operations traced on the same GPU, one by one"
NEEDS = (Path("neusight-train"),)
CAUSES = (
    "A trace has one time of each operation: the interval has what kernels alone leave open, and an unmeasured host.",
    "That launches are taken off was decided when the errors of plain sums had been seen.",
    "On the A100 all that is missing is in forward. Its table of kernels, of the same authors, has forward products 14"
    " to 23% longer than its traces: a part of it, and no input says what else.",
)
SHARE_OF_PEAK = 0.5
H100_WITHIN = 0.04
"""Of the simplest prediction: FLOPs of products over half of the fp32 peak, whatever the GPU."""
_WITHOUT_KERNEL = ("size", "<built-in function getitem>", "<built-in function getattr>")
_VIEW = re.compile(r"^(view|permute|transpose|expand|unsqueeze|reshape|type|type_as|to|long)$")
_PARAMETER_BYTES = 4
"""A trace does not say how large parameters are, and the weight update is not predicted."""
_IN_BLOCK = re.compile(r"\.(?:h|layer|layers)\.0'")
_DEVICES = {
    "NVIDIA_A100_80GB_PCIe": "NVIDIA A100 80GB PCIe",
    "NVIDIA_H100_80GB_HBM3": "NVIDIA H100 80GB HBM3",
    "NVIDIA_L4": "NVIDIA L4",
    "Tesla_V100-PCIE-32GB": "Tesla V100-PCIE-32GB",
}


class Operation(NamedTuple):
    """A row of a trace: ms of forward, backward and adding up gradients; forward FLOPs where it is a product."""

    forward_ms: float
    backward_ms: float
    added_ms: float
    flops: float
    in_block: bool
    has_kernel: bool
    is_view: bool


class Answer(NamedTuple):
    """A run that was measured, in seconds; ``name`` is ``DEVICE MODEL-train-SEQUENCE-BATCH``."""

    name: str
    forward_s: float
    backward_s: float


class Halves(NamedTuple):
    """One prediction: by what, seconds of forward and of backward, and the 90% interval of both together."""

    by: str
    forward_s: float
    backward_s: float
    interval_s: tuple[float, float] | None = None

    def predicted(self) -> Predicted:
        """Of both together."""
        return Predicted(self.by, self.forward_s + self.backward_s, self.interval_s)


def traces(data: Path) -> list[Path]:
    """Traces of whole models that an answer lies beside."""
    found = sorted((data / "neusight-train").glob("*/*-train-*-*.csv"))
    return [path for path in found if path.with_suffix(".json").exists()]


def read_answer(trace: Path) -> Answer:
    """What was measured: never read by what predicts."""
    told = json.loads(trace.with_suffix(".json").read_text())
    return Answer(f"{trace.parent.name} {trace.stem}", told["fw_latency"] * 1e-3, told["bwall_latency"] * 1e-3)


def blocks_of(trace: Path) -> int:
    """How often the block stands; of the file beside the trace it is the one number that is no answer."""
    return int(json.loads(trace.with_suffix(".json").read_text())["num_layer"])


def read_operations(trace: Path) -> list[Operation]:
    """Rows of a trace that took any time."""
    with open(trace, newline="") as stream:
        return [_operation(row) for row in csv.DictReader(stream) if float(row["latency"] or 0) > 0]


def in_block(row: dict[str, str]) -> bool:
    """Whether a row of a trace is of the one block that stands for all."""
    return _IN_BLOCK.search(row["meta"]) is not None


def _operation(row: dict[str, str]) -> Operation:
    return Operation(
        forward_ms=float(row["fw_latency"]),
        backward_ms=float(row["bw_latency"]),
        added_ms=float(row["acc_latency"]),
        flops=_product_flops(row),
        in_block=in_block(row),
        has_kernel=row["target"] not in _WITHOUT_KERNEL,
        # A number is the host's.
        is_view=row["output_shape"] == "(1,)" or _VIEW.match(row["target"]) is not None,
    )


def _product_flops(row: dict[str, str]) -> float:
    is_linear = row["op"] == "call_module" and row["meta"].endswith("linear.Linear'>)])}")
    if not is_linear and not re.search(r"built-in method (addmm|matmul|bmm) ", row["target"]):
        return 0.0
    try:
        # Of addmm the first is what is added.
        read = shape_of(row["input_shapes"])[1 if "addmm" in row["target"] else 0]
        inner = read[-1] if isinstance(read, tuple) else 0
        written = [extent for extent in shape_of(row["output_shape"]) if isinstance(extent, int)]
    except NoNumber:
        return 0.0
    return 2.0 * math.prod(written) * inner if isinstance(inner, int) else 0.0


def launch_ms(operations: Sequence[Operation]) -> float:
    """What an operation without a kernel takes: the median, of one trace."""
    return statistics.median(each.forward_ms for each in operations if not each.has_kernel)


def layers(operations: Sequence[Operation], blocks: int, taken_off_ms: float) -> list[TraceLayer]:
    """Operations of the whole model, the block repeated, each part of one shorter by what was taken off."""
    first = next(at for at, each in enumerate(operations) if each.in_block)
    order = [
        *(each for each in operations[:first]),
        *(each for _ in range(blocks) for each in operations if each.in_block),
        *(each for each in operations[first:] if not each.in_block),
    ]
    return list(_shortened(order, taken_off_ms))


def _shortened(order: Sequence[Operation], taken_off_ms: float) -> Iterator[TraceLayer]:
    for number, each in enumerate(order):
        if taken_off_ms and (each.is_view or not each.has_kernel):
            yield TraceLayer(f"op{number}", 0.0, 0.0, 0.0, 0)
            continue
        parts_ms = (each.forward_ms, each.backward_ms, each.added_ms)
        forward, backward, added = (max(part - taken_off_ms, 0.0) * 1e-3 for part in parts_ms)
        # Only what adds up gradients has a parameter, and what lies before the first one needs no backward.
        yield TraceLayer(f"op{number}", forward, backward + added, 0.0, _PARAMETER_BYTES if each.added_ms else 0)


def simulated(trace: Path, taken_off_ms: float, by: str, work: Path) -> Halves:
    """By import, fit and ``predict`` with its default evaluator, of the operations alone."""
    operations = read_operations(trace)
    work.mkdir(parents=True)
    of_whole = layers(operations, blocks_of(trace), taken_off_ms)
    write_trace(work / "trace.txt", [of_whole] * 2)
    options = ImportOptions(batch=1, model="traced")
    (network,) = importers()["ssgd-trace"].read(load_file(work / "trace.txt"), options).networks
    # The first layer reads the mini-batch.
    pairs = zip(network.layers, of_whole, strict=True)
    timed = [Timed(layer, each.forward_s, each.backward_s) for layer, each in pairs]
    place = Place(_DEVICES[trace.parent.name], int(_sheet(trace).memory_bytes), "neusight")
    # Times as they are have the host's launches in them already.
    write_layers(work / "in", trace, network, timed, place, "fp32", mode="isolated" if taken_off_ms else "in_situ")
    run("calibrate", "fit", str(work / "in"), "-o", str(work / "profile.json"))
    about = ("--from-profile", str(work / "profile.json"), "--model", "traced", "--strategy", "serial", "--batch", "1")
    told = json.loads(run("predict", *about, "--json"))[0]
    low_s, high_s = told["interval_s"]
    return Halves(by, told["phases_s"]["FW"], told["phases_s"]["BW"], (low_s, high_s))


def _sheet(trace: Path) -> DeviceSheet:
    sheet = sheet_of_measured(_DEVICES[trace.parent.name])
    if sheet is None:
        raise ValueError(f"no device sheet of {trace.parent.name}")
    return sheet


def by_flops(trace: Path) -> Halves:
    """FLOPs of products, twice as many backward, over a constant share of the fp32 peak."""
    operations, blocks = read_operations(trace), blocks_of(trace)
    forward_s = sum(each.flops * (blocks if each.in_block else 1) for each in operations) / (
        SHARE_OF_PEAK * _sheet(trace).peak("fp32")
    )
    return Halves("FLOPs", forward_s, 2 * forward_s)


def predictions(trace: Path, work: Path) -> list[Halves]:
    """Of one run: chosen first, then as timed one by one, then by FLOPs."""
    taken_off_ms = launch_ms(read_operations(trace))
    return [
        simulated(trace, taken_off_ms, "simulate, launches taken off", work / "off"),
        simulated(trace, 0.0, "simulate, as timed", work / "as-timed"),
        by_flops(trace),
    ]


def published(data: Path, work: Path) -> tuple[PublishedSet, ...]:
    """The set of all runs; answers are read once predictions stand."""
    found = [(trace, predictions(trace, work / f"{at}")) for at, trace in enumerate(traces(data))]
    runs = tuple(_run(read_answer(trace), each) for trace, each in found)
    return (PublishedSet(SOURCE, CITED, INPUTS, (*CAUSES, of_h100(runs)), runs, wanted=0.08),)


def of_h100(runs: Sequence[Run]) -> str:
    """What is wanted of the H100's runs."""
    own = [run for run in runs if "H100" in run.name]
    size, _ = mean_error(own, 0)
    return f"H100 alone, {len(own)} runs: mean {size:.1%}, {short_by(size, H100_WITHIN)}."


def _run(answer: Answer, found: Sequence[Halves]) -> Run:
    first = found[0]
    parts = f"{first.forward_s / answer.forward_s - 1:+.1%}, {first.backward_s / answer.backward_s - 1:+.1%}"
    predicted = tuple(each.predicted() for each in found)
    return Run(answer.name, answer.forward_s + answer.backward_s, predicted, f"forward, backward: {parts}")
