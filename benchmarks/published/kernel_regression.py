"""Held-out errors of kernel regressors: ours, the paper's network, and untuned trees, on the same kernels.

    python benchmarks/published/kernel_regression.py [DIR ...] [--seeds 5] [--without-mlp] [-o DIR]
                                                     [--data ../shared/data]

Beside them, what no regressor on shapes can know: trees that are told as well what the three kernels measured before
took (a GPU that was heated is slower), what kernels of nearly the same shape differ by when their trees' difference is
taken out (benchmarks/published/kernel_neighbours.py), and, of a sweep in blocks, what blocks of one kernel differ by.

Without DIR: convolution (forward) and linear kernels of V100, A100 and T4 in neusight-ops under --data (fp32, torch
2.1; sitar-lab/NeuSight, MIT). With DIR: directories of `paradl-bench kernels`. A fifth of the shapes of every device is
held out, another by each seed; no shape occurs twice. Everything that is chosen is chosen on the other four fifths.
About half a minute a device, kernel and seed on one core, most of it for the network.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from kernel_neighbours import neighbours

from calibrate.fitting.kernels.kernel_drift import hats
from calibrate.fitting.kernels.kernel_fit import FEWEST_KERNELS
from calibrate.fitting.kernels.kernel_trial import Timed, Trial, timed_kernels, timed_shapes, try_candidates
from calibrate.kernels.features import roofline_features
from calibrate.kernels.model import roofline_s
from calibrate.kernels.trees import evaluate_trees, grow_trees
from paradl_bench.core.files.storage import encode_pretty, write_bytes_atomically, write_text_atomically
from paradl_bench.network.kernel import KERNELS_FILE, KernelSamples, KernelShape
from paradl_bench.records.measurement import read_records

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"
KERNELS_BEFORE = 3
ORDER = ("mlp", "plain trees", "trees", "trees and mlp", "process", "trees and process")
WORDS = {
    "mlp": "the paper's network",
    "plain trees": "untuned trees on log sizes and FLOPs",
    "trees": "trees on roofline features",
    "trees and mlp": "mean of trees and network",
    "process": "Gaussian process",
    "trees and process": "mean of trees and process",
    "taken": "**taken** (least error on the validation part)",
    "in order": "trees, place in the sweep known",
    "kernels before": "trees, place in the sweep and the three kernels before known",
    "neighbours": "no error but what kernels less than a tenth apart in size differ by",
    "blocks": "no error but that of the times held against, by how blocks of a kernel differ",
}


class Group(NamedTuple):
    """Kernels of one kind on one device.

    Attributes:
        blocks: of each kernel the medians of its blocks; empty where it was measured once.
    """

    what: str
    device: str
    timed: Timed
    blocks: tuple[tuple[float, ...], ...] = ()


def convolution(row: dict[str, str]) -> KernelShape:
    """Square input and kernel, as the table has them."""
    batch, channels, filters, kernel, extent, stride, padding = (
        int(row[name])
        for name in ("B", "Input_Channel", "Output_Channel", "Kernel_Szie", "Input_Size", "Stride", "Padding")
    )
    out = (extent + 2 * padding - kernel) // stride + 1
    sizes = {"batch": batch, "in_channels": channels, "out_channels": filters, "groups": 1}
    for prefix, value in (("in", extent), ("kernel", kernel), ("stride", stride), ("padding", padding), ("out", out)):
        sizes |= {f"{prefix}_height": value, f"{prefix}_width": value}
    weights, read, written = channels * filters * kernel**2, batch * channels * extent**2, batch * filters * out**2
    return KernelShape(
        kind="conv",
        stage="FW",
        sizes=sizes,
        flops=2 * written * channels * kernel**2,
        bytes=4 * (weights + read + written),
    )


def linear(row: dict[str, str]) -> KernelShape:
    """B x M rows of K features to N."""
    rows, columns, depth = int(row["B"]) * int(row["M"]), int(row["N"]), int(row["K"])
    return KernelShape(
        kind="linear",
        stage="FW",
        sizes={"batch": rows, "in_features": depth, "out_features": columns},
        flops=2 * rows * columns * depth,
        bytes=4 * (rows * depth + depth * columns + rows * columns),
    )


def public_groups(data: Path) -> Iterator[Group]:
    """Tables of neusight-ops, in the order in which they were measured."""
    for what, shape_of in (("conv", convolution), ("linear", linear)):
        path = data / "neusight-ops" / f"op_{what}_fp32.csv"
        if not path.exists():
            sys.exit(f"{path} is not here: give directories of paradl-bench kernels instead")
        with path.open(encoding="utf-8", newline="") as stream:
            rows = list(csv.DictReader(stream))
        for device in sorted({row["device"] for row in rows}):
            own = [row for row in rows if row["device"] == device]
            # A shape that stood there twice could fall on both sides of a split; none does.
            found = {
                str(shape.sizes): (shape, float(row["latency_ms"]) * 1e-3) for row in own if (shape := shape_of(row))
            }
            shapes, seconds = zip(*found.values(), strict=True)
            yield Group(what, device, timed_shapes(shapes, seconds, "fp32"))


def swept_groups(directories: list[Path]) -> Iterator[Group]:
    """What `paradl-bench kernels` swept, per kind, stage and settings."""
    records = [record for directory in directories for record in read_records(directory, KERNELS_FILE, KernelSamples)]
    blocks: dict[tuple[str, str], dict[str, list[KernelSamples]]] = {}
    for record in records:
        of_group = blocks.setdefault((_title(record.shape), record.dtype), {})
        of_group.setdefault(str(record.shape.sizes), []).append(record)
    for timed in timed_kernels(records):
        what = _title(timed.shapes[0])
        if len(timed.shapes) >= FEWEST_KERNELS:
            of_shapes = blocks[what, timed.dtype].values()
            medians = [[statistics.median(block.samples_s) for block in of_shape] for of_shape in of_shapes]
            yield Group(what, timed.dtype, timed, tuple(tuple(each) for each in medians if len(each) > 1))


def _title(shape: KernelShape) -> str:
    return " ".join((shape.kind, *shape.settings.values(), shape.stage))


def errors(group: Group, seed: int, with_mlp: bool) -> dict[str, dict[str, float]]:
    """Errors of every candidate on the fifth that this seed holds out."""
    trial = try_candidates(group.timed, seed=seed, with_mlp=with_mlp)
    found: dict[str, dict[str, float]] = {
        each.model: {"re": each.held_out_re, "wre": each.held_out_wre, "bias": each.held_out_bias}
        for each in trial.candidates
    }
    found["taken"] = dict(found[trial.chosen])
    if trial.fitted.drift_s:
        found["in order"] = {"re": trial.in_order_re, "drift_ms": trial.fitted.drift_s[-1] * 1e3}
    found["kernels before"] = {"re": error_with_kernels_before(group.timed, trial, seed)}
    if alike := neighbours(group.timed, trial.fitted.drift_s, seed=seed):
        found["neighbours"] = alike._asdict()
    if group.blocks:
        found["blocks"] = {"re": error_of_medians(group.blocks)}
    return found


def error_with_kernels_before(timed: Timed, trial: Trial, seed: int) -> float:
    """Mean |RE| on the part held out of trees that know as well what was measured right before each kernel.

    Of the three kernels before, logs of the time and of its ratio to the roofline; the drift is out as the trial found
    it. This is no estimate that anybody could make: it says how much of the error is the sweep's, not the shape's.
    """
    fitted = trial.refitted
    base_s = roofline_s(timed.kernels, *fitted.roofline)
    drift_s = hats(timed.order) @ np.array(fitted.drift_s) if fitted.drift_s else np.zeros(len(base_s))
    log_ratio = np.log(np.maximum(timed.seconds - drift_s, 0.3 * fitted.roofline[0]) / base_s)
    before = [
        np.pad(values, (back, 0), mode="edge")[: len(base_s)]
        for back in range(1, KERNELS_BEFORE + 1)
        for values in (np.log(timed.seconds), log_ratio)
    ]
    features = np.column_stack([roofline_features(timed.kernels, timed.names)[1], *before])
    out = np.isin(timed.order, trial.held_out.order)
    arrays = grow_trees(features[~out], log_ratio[~out], seed=seed)
    estimated = base_s[out] * np.exp(evaluate_trees(arrays, features[out])) + drift_s[out]
    return float(np.mean(np.abs(estimated / timed.seconds[out] - 1)))


def error_of_medians(blocks: Sequence[Sequence[float]]) -> float:
    """Mean |RE| that an estimate without any error has against medians of blocks, which have theirs.

    From the mean difference of two blocks of a kernel, blocks' logs taken as normal around the kernel's own.
    """
    apart = [statistics.mean(abs(math.log(a / b)) for a, b in itertools.combinations(each, 2)) for each in blocks]
    sd = statistics.mean(apart) * math.sqrt(math.pi) / 2
    draws = np.random.default_rng(0).standard_normal((100_000, max(map(len, blocks))))
    of_median = {count: float(np.mean(np.abs(np.median(draws[:, :count], axis=1)))) for count in set(map(len, blocks))}
    return sd * statistics.mean(of_median[len(each)] for each in blocks)


def report(results: dict[str, dict[str, list[dict[str, dict[str, float]]]]], command: str) -> str:
    """Tables of mean |RE| and WRE: mean over seeds, and the least and largest of them."""
    lines = ["# Held-out errors of kernel regressors", "", f"    {command}", ""]
    lines += [
        "RE and WRE in %: mean over the seeds (least to largest). A fifth of the shapes held out by each seed.",
        "",
    ]
    for what, devices in results.items():
        lines += [f"## {what}", "", "| regressor | " + " | ".join(devices) + " | mean RE |"]
        lines += ["|---|" + "---|" * (len(devices) + 1)]
        for model in (*ORDER, "taken", "in order", "kernels before", "neighbours", "blocks"):
            if not all(model in seed for seeds in devices.values() for seed in seeds):
                continue
            cells = [_cell([seed[model] for seed in seeds]) for seeds in devices.values()]
            means = [
                statistics.mean(seeds[at][model]["re"] for seeds in devices.values())
                for at in range(min(len(seeds) for seeds in devices.values()))
            ]
            lines.append(f"| {WORDS[model]} | " + " | ".join(cells) + f" | {_spread(means)} |")
        lines.append("")
    return "\n".join(lines)


def _cell(values: list[dict[str, float]]) -> str:
    if "pairs" in values[0]:
        unsure = statistics.mean(value["standard_error"] for value in values)
        correlation = statistics.mean(value["correlation"] for value in values)
        own = statistics.mean(value["own_re"] for value in values)
        of = f"{values[0]['pairs']:.0f} pairs, standard error {unsure:.1%}, correlation {correlation:.2f}"
        of += f", their own error {own:.1%}"
        return f"{_spread([value['re'] for value in values])}; {of}"
    wre = f"; WRE {statistics.mean(value['wre'] for value in values):.1%}" if "wre" in values[0] else ""
    return _spread([value["re"] for value in values]) + wre


def _spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.1%} ({min(values):.1%} to {max(values):.1%})"


def main() -> None:
    """Run, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="*", type=Path, metavar="DIR", help="of paradl-bench kernels")
    parser.add_argument("--seeds", type=int, default=5, help="how many splits (default 5)")
    parser.add_argument("--without-mlp", action="store_true", help="leave the paper's network out: much faster")
    parser.add_argument("--data", type=Path, default=DATA, help="that holds neusight-ops")
    parser.add_argument("-o", "--output", type=Path, help="folder for report.md and report.json")
    given = parser.parse_args()
    groups = swept_groups(given.directories) if given.directories else public_groups(given.data)
    results: dict[str, dict[str, list[Any]]] = {}
    kernels: dict[str, int] = {}
    for group in groups:
        kernels[f"{group.what} {group.device}"] = len(group.timed.shapes)
        for seed in range(given.seeds):
            found = errors(group, seed, not given.without_mlp)
            results.setdefault(group.what, {}).setdefault(group.device, []).append(found)
            taken = ", ".join(f"{model} {value['re']:.1%}" for model, value in found.items())
            print(f"{group.what}, {group.device}, seed {seed}: {taken}", file=sys.stderr, flush=True)
    command = " ".join(("python benchmarks/published/kernel_regression.py", *sys.argv[1:]))
    text = report(results, command)
    print(text)
    if given.output is not None:
        write_text_atomically(given.output / "report.md", text)
        content = {"command": command, "kernels": kernels, "errors_by_seed": results}
        write_bytes_atomically(given.output / "report.json", encode_pretty(content))


if __name__ == "__main__":
    main()
