"""Reference results of one GPU: eight networks in fp32 and bf16, kernel regressors, and nccl-tests through the wrapper.

    python benchmarks/gpu/gpu_results.py -o results/h200/DATE-COMMIT [--networks resnet50,gpt2] [--nccl-tests SOURCE]
    python benchmarks/gpu/gpu_results.py -o results/h200/DATE-COMMIT --analyse

The first needs the GPU: its rates; of each network the times of its layers in both precisions, and a serial run to hold
predictions against; a sweep of kernels in both; the parts that strategies make of the layers, in fp32; and, where the
source of nccl-tests is given, its programs, built without MPI, on the one GPU. What matters most comes first, so that a
GPU lent for minutes (``--minutes``) is well used. What is complete is passed over when it is called again, what was cut
short goes on; what fails is told at the end, and keeps nothing else from being measured.

The second needs none: it fits a profile a network, validates the runs, holds regressors against kernels that they have
not seen, and writes `summary.md` and `summary.json`: closure, iterations, memory, seconds of GPU.

Measurements lie below raw/, all else beside it is small. Ends with code 3 without a GPU, and where something failed;
``--device cpu`` rehearses all but nccl-tests on small networks, which takes some minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from paradl_bench.core.files.storage import write_text_atomically  # noqa: E402
from paradl_bench.measure.layers.summary import closures  # noqa: E402
from paradl_bench.records.measurement import is_complete  # noqa: E402

MISTAKE, FAILED = 2, 3
PRECISIONS = ("fp32", "bf16")
RAW, SECONDS, SHARDS = "raw", "seconds.json", "shards-fp32"
OPERATIONS, SIZES = "all_reduce,all_gather,reduce_scatter,broadcast", "1K:512M:4"


class Case(NamedTuple):
    """A network as it is measured; ``shards`` are strategies of which one rank's layers are measured in fp32."""

    name: str
    model: str
    batch: int
    sample: tuple[str, ...]
    shards: str
    optimizer: str = "sgd"


CASES: dict[str, tuple[Case, ...]] = {
    "cuda": (
        Case("resnet50", "resnet50", 64, (), "f2,c2,s2"),
        Case("gpt2-345m", "gpt2-345m", 4, ("--sequence", "1024"), "t2,t4", "adam"),
        Case("bert-large", "bert-large", 8, ("--sequence", "512"), "t2,t4", "adam"),
        Case("gpt2-large", "gpt2-large", 1, ("--sequence", "1024"), "t2,t4", "adam"),
        Case("vgg16", "vgg16", 32, (), "f2,c2,s2"),
        Case("cosmoflow-128", "cosmoflow", 8, ("--input-shape", "4x128x128x128"), "s2,f2"),
        Case("resnet152", "resnet152", 32, (), "f2,c2,s2"),
        Case("cosmoflow-256", "cosmoflow", 1, ("--input-shape", "4x256x256x256"), "s2,f2"),
    ),
    "cpu": (
        Case("resnet18", "resnet18", 2, ("--input-shape", "3x32x32"), "f2"),
        Case("cosmoflow", "cosmoflow", 2, ("--input-shape", "4x8x8x8"), "s2"),
    ),
}
"""By device, in the order of measuring; those of a CPU rehearse. BERT and GPT-2 large are as NeuSight trained them."""


def measurements(options: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """(directory below raw/, arguments of paradl-bench) of everything that needs the device."""
    on = ["--device", options.device]
    yield "rates", ["doctor", "--measure", *on]
    for case in chosen(options):
        for dtype in PRECISIONS:
            local = [*of_case(case), *on, "--dtype", dtype]
            yield f"{case.name}/layers-{dtype}", ["layers", *local]
            yield f"{case.name}/train-{dtype}", ["train", *local, "--strategy", "serial"]
    yield "kernels", ["kernels", *on, "--dtype", ",".join(PRECISIONS), "--budget", options.kernel_budget]
    for case in chosen(options):
        yield f"{case.name}/{SHARDS}", ["layers", *of_case(case), *on, "--dtype", "fp32", "--shards", case.shards]
    if options.nccl_tests:
        tool = ["--tool", "nccl-tests", "--tool-path", str(options.nccl_tests / "build")]
        yield "nccl-tests", ["collectives", "--ranks", "1", *tool, "--ops", OPERATIONS, "--sizes", SIZES]


def of_case(case: Case) -> list[str]:
    """What names a network, its batch and its optimizer to a command."""
    return [case.model, "--batch", str(case.batch), *case.sample, "--optimizer", case.optimizer]


def chosen(options: argparse.Namespace) -> list[Case]:
    """The networks that were asked for."""
    known = {case.name: case for case in CASES[options.device]}
    names = options.networks.split(",") if options.networks else list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"gpu-results: unknown network {unknown[0]!r}; there are {', '.join(known)}", file=sys.stderr)
        sys.exit(MISTAKE)
    return [known[name] for name in names]


def measure(options: argparse.Namespace) -> list[str]:
    """Measure what is not complete; what failed, a line each."""
    failed = []
    if options.nccl_tests and not (options.nccl_tests / "build").exists():
        code, _ = timed(["make", "-C", str(options.nccl_tests), "-j", "MPI=0"])
        failed += ["nccl-tests could not be built"] if code else []
    spent = seconds_so_far(options.output)
    end = time.monotonic() + options.minutes * 60
    for name, arguments in measurements(options):
        directory = options.output / RAW / name
        if is_complete(directory):
            continue
        if time.monotonic() > end:
            return [*failed, f"{name} and what follows: no minute was left"]
        code, seconds = timed([sys.executable, "-m", "paradl_bench", *arguments, "-o", str(directory)])
        spent[name] = spent.get(name, 0.0) + seconds
        write_text_atomically(options.output / SECONDS, json.dumps(spent, indent=1) + "\n")
        failed += [f"{name} ended with exit code {code}"] if code else []
    return failed


def timed(command: list[str]) -> tuple[int, float]:
    """Exit code and seconds of a command, whose tables are dropped."""
    print("$", *command, flush=True)
    begin = time.perf_counter()
    code = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
    return code, time.perf_counter() - begin


def seconds_so_far(output: Path) -> dict[str, float]:
    """Seconds of all attempts, by measurement."""
    path = output / SECONDS
    found: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
    return found


def analyse(options: argparse.Namespace) -> list[str]:
    """Fit and validate what is there, and write the summary; what failed or is missing, a line each."""
    raw, failed, rows = options.output / RAW, [], []
    for case in chosen(options):
        layers = [raw / case.name / f"layers-{dtype}" for dtype in PRECISIONS]
        runs = [raw / case.name / f"train-{dtype}" for dtype in PRECISIONS]
        missing = [str(each.relative_to(raw)) for each in (*layers, *runs) if not is_complete(each)]
        if missing:
            failed.append(f"{case.name}: not complete: {', '.join(missing)}")
            continue
        place = options.output / case.name
        fitted = [*layers, *filter(is_complete, (raw / case.name / SHARDS, raw / "rates"))]
        fit = ["calibrate", "fit", *map(str, fitted), "-o", str(place / "profile.json"), "--force"]
        report = ["predict", "validate", "--from-profile", str(place / "profile.json"), *map(str, runs)]
        place.mkdir(parents=True, exist_ok=True)
        for module, *words in (fit, [*report, "-o", str(place / "report"), "--force"]):
            code, _ = timed([sys.executable, "-m", module, *words])
            if code:
                failed.append(f"{case.name}: {module} {words[0]} ended with exit code {code}")
                break
        else:
            rows += summary_rows(case, layers, place / "report" / "report.json")
    if is_complete(raw / "kernels"):
        held_out = [str(ROOT / "benchmarks/published/kernel_regression.py"), str(raw / "kernels"), "--without-mlp"]
        code, _ = timed([sys.executable, *held_out, "-o", str(options.output / "regressors")])
        failed += [f"regressors: exit code {code}"] if code else []
    else:
        failed.append("kernels: not complete")
    write_summary(options.output, rows, failed)
    return failed


def summary_rows(case: Case, layers: list[Path], report: Path) -> list[dict[str, Any]]:
    """A row a precision: closure of the whole layers, the serial run against its prediction, and memory."""
    pairs = [pair for pair in json.loads(report.read_text())["pairs"] if pair["evaluator"] == "simulate"]
    rows = []
    for dtype, directory in zip(PRECISIONS, layers, strict=True):
        (closure,) = (each for each in closures(directory) if not each.shard)
        (pair,) = (pair for pair in pairs if pair["dtype"] == dtype)
        memory = pair["memory"] or {}
        rows.append(
            {
                "network": case.name,
                "dtype": dtype,
                "batch": case.batch,
                "closure_remainder": closure.remainder_relative,
                "predicted_s": pair["predicted_s"],
                "measured_s": pair["measured_median_s"],
                "accuracy": pair["accuracy"],
                "memory_error": memory.get("error"),
                "memory_of": memory.get("measured"),
            }
        )
    return rows


def write_summary(output: Path, rows: list[dict[str, Any]], failed: list[str]) -> None:
    """``summary.json``, and ``summary.md`` for a reader."""
    spent = seconds_so_far(output)
    output.mkdir(parents=True, exist_ok=True)
    found = {"networks": rows, "gpu_seconds": spent, "failed": failed}
    write_text_atomically(output / "summary.json", json.dumps(found, indent=1) + "\n")
    lines = ["| network | dtype | batch | closure remainder | predicted | measured | accuracy | memory error |"]
    lines.append("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        memory = "-" if row["memory_error"] is None else f"{row['memory_error']:+.1%} ({row['memory_of']})"
        times = f"{row['predicted_s'] * 1e3:.2f} ms | {row['measured_s'] * 1e3:.2f} ms | {row['accuracy']:.1%}"
        about = f"{row['network']} | {row['dtype']} | {row['batch']}"
        lines.append(f"| {about} | {row['closure_remainder']:+.1%} | {times} | {memory} |")
    layers_s = sum(seconds for name, seconds in spent.items() if "/layers-" in name)
    lines += [
        "",
        f"Layers took {layers_s / 60:.1f} minutes of the device, all measurements {sum(spent.values()) / 60:.1f}.",
    ]
    lines += [f"- {line}" for line in failed]
    write_text_atomically(output / "summary.md", "\n".join(lines) + "\n")


def main() -> int:
    """Measure, or analyse; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--analyse", action="store_true", help="fit and validate what was measured; needs no GPU")
    parser.add_argument("--networks", default="", help="names, with commas between them; default: all")
    parser.add_argument("--kernel-budget", default="4m", help="of the sweep of kernels, for each precision")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no measurement after them")
    parser.add_argument("--nccl-tests", type=Path, help="its source, where it is built; left out without")
    parser.add_argument("--device", choices=tuple(CASES), default="cuda")
    options = parser.parse_args()
    chosen(options)
    if not options.analyse and options.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            print("gpu-results: torch sees no GPU here; --device cpu rehearses", file=sys.stderr)
            return FAILED
    options.output.mkdir(parents=True, exist_ok=True)
    failed = analyse(options) if options.analyse else measure(options)
    for line in failed:
        print(f"gpu-results: {line}", file=sys.stderr)
    return FAILED if failed else 0


if __name__ == "__main__":
    sys.exit(main())
