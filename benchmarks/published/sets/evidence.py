"""What predictions of GPUs that no iteration was timed on take for unknown: how far kernels and hosts may be off.

``predict.costs.compute.host_dispatch`` holds what came of it. Nothing here reads an answer: both are of inputs.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import statistics
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from sets.neusight import traces
from sets.neusight_kernels import FOLDERS, devices
from shipped.regressors import Regressors, key_of, own_regressors, read_records
from shipped.tables import Device, read_kernels

from calibrate.fitting.kernels.kernel_trial import timed_kernels

NEEDS = (Path("kineto"), Path("neusight-train", "kernels"))
_PRODUCTS = ("addmm", "linear", "matmul")
_BACKWARD = "autograd::engine::evaluate_function: "
_ADDS_UP = "AccumulateGrad"
_SEQUENCE = "Sequence number"

Event = dict[str, Any]


def dispatch_us(data: Path) -> dict[str, tuple[float, float]]:
    """Median microseconds from an operation that runs a kernel to the next one, forward and backward, by trace."""
    paths = sorted((data / "kineto").rglob("*.json.gz"))
    return {path.name.split(".")[0]: _dispatch_us(path) for path in paths}


def _dispatch_us(path: Path) -> tuple[float, float]:
    with gzip.open(path) as stream:
        events = [each for each in json.load(stream)["traceEvents"] if each.get("ph") == "X"]
    operations = [each for each in events if each.get("cat") == "cpu_op"]
    launches = [each for each in events if each.get("cat") == "cuda_runtime" and "LaunchKernel" in each["name"]]
    engine = Counter(each["tid"] for each in operations if each["name"].startswith(_BACKWARD)).most_common(1)[0][0]
    others = Counter(each["tid"] for each in operations if each["tid"] != engine).most_common(1)[0][0]
    backward = [each for each in _outermost(operations, launches, engine) if _ADDS_UP not in each["name"]]
    differentiated = {each["args"].get(_SEQUENCE) for each in operations if each["tid"] == engine} - {None}
    forward = [
        each for each in _outermost(operations, launches, others) if each["args"].get(_SEQUENCE) in differentiated
    ]
    return _median_gap_us(forward), _median_gap_us(backward)


def _outermost(operations: list[Event], launches: list[Event], thread: int) -> Iterator[Event]:
    """Operations of a thread that stand in no other one, and launch a kernel."""
    at_us = sorted(each["ts"] for each in launches if each["tid"] == thread)
    end_us = -math.inf
    for each in sorted((each for each in operations if each["tid"] == thread), key=lambda e: (e["ts"], -e["dur"])):
        if each["ts"] >= end_us:
            end_us = each["ts"] + each["dur"]
            if bisect_right(at_us, end_us) > bisect_left(at_us, each["ts"]):
                yield each


def _median_gap_us(operations: list[Event]) -> float:
    starts = [each["ts"] for each in operations]
    return statistics.median(after - before for before, after in pairwise(starts))


def timed_twice(data: Path) -> dict[str, float]:
    """By trace, forward products by the regressors of their GPU's table over the same products one by one."""
    found = {}
    for device in devices():
        folder = FOLDERS[device.name]
        own, like = own_regressors(read_records(device, data))
        for trace in traces(data):
            if trace.parent.name == folder:
                found[f"{folder} {trace.stem}"] = _ratio(device, {**like, **own}, trace, data)
    return found


def _ratio(device: Device, regressors: Regressors, trace: Path, data: Path) -> float:
    by_key: Mapping[Any, Any] = {key_of(each.model): each for each in regressors.values()}
    one = dataclasses.replace(device.kernels[0], files=(str(trace.relative_to(data)),))
    by_table_s = one_by_one_s = 0.0
    for timed in timed_kernels(read_kernels(device, one, data)):
        shape = timed.shapes[0]
        key = shape.kind, shape.stage, tuple(sorted(shape.settings.items())), timed.dtype
        if shape.kind in _PRODUCTS and shape.stage == "FW" and key in by_key:
            by_table_s += float(np.exp(by_key[key].logs(timed)).sum())
            one_by_one_s += float(np.sum(timed.seconds))
    return by_table_s / one_by_one_s


def lines(data: Path) -> list[str]:
    """Both as a section of a report."""
    twice, hosts = timed_twice(data), dispatch_us(data)
    apart = math.sqrt(statistics.fmean(math.log(each) ** 2 for each in twice.values()))
    networks = {name: [us for trace, us in hosts.items() if name in trace] for name in ("resnet", "worker")}
    middle = [statistics.fmean(statistics.median(each[at] for each in us) for us in networks.values()) for at in (0, 1)]
    shown = (f"{name} {ratio - 1:+.1%}" for name, ratio in twice.items())
    return [
        "## What is unknown of a GPU that no iteration was timed on",
        "",
        "No answer is among these. Products of a trace by the table of kernels of its GPU, over the same one by one:",
        f"{'; '.join(shown)}. Root mean square of logarithms {apart:.3f}, so {apart / math.sqrt(2):.3f}"
        " for one of two.",
        "",
        "Microseconds from an operation that runs a kernel to the next, forward and backward, in traces of ResNet-50"
        " and DLRM (facebookresearch/param @ 1e115ffc, MIT), the mean of the two:"
        f" {middle[0]:.0f} and {middle[1]:.0f}.",
        "",
    ]
