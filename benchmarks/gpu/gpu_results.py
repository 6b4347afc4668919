"""Reference results of one GPU: eight networks in fp32 and bf16, kernel regressors, and nccl-tests through the wrapper.

    python benchmarks/gpu/gpu_results.py -o results/h200/DATE-COMMIT [--networks resnet50,gpt2] [--nccl-tests SOURCE]
    python benchmarks/gpu/gpu_results.py -o results/h200/DATE-COMMIT --analyse

The first needs the GPU: its rates; of each network the times of its layers in both precisions, and a serial run to hold
predictions against; a sweep of kernels in both; the parts that strategies make of the layers, in fp32; and, where the
source of nccl-tests is given, its programs, built without MPI, on the one GPU. What matters most comes first, so that a
GPU lent for minutes (``--minutes``) is well used. What is complete is passed over when it is called again, what was cut
short goes on; what fails is told at the end, and keeps nothing else from being measured.

The second needs none: it fits a profile a network, validates the runs, holds regressors against kernels that they have
not seen, and writes `summary.md` and `summary.json`: closure, iterations, memory, seconds of GPU. It predicts every run
by three more profiles: of the other networks alone, with the kernels, and by published kernels (``--published``). It
holds the sweep's kernels against published ones as well.

Measurements lie below raw/, all else beside it is small. Ends with code 3 without a GPU, and where something failed;
``--device cpu`` rehearses all but nccl-tests on small networks, which takes some minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

from gpu_analysis import analyse  # noqa: E402
from gpu_cases import (  # noqa: E402
    CASES,
    FAILED,
    PRECISIONS,
    RAW,
    SECONDS,
    SHARDS,
    chosen,
    of_case,
    seconds_so_far,
    timed,
)

from paradl_bench.core.files.storage import write_text_atomically  # noqa: E402
from paradl_bench.records.measurement import is_complete  # noqa: E402

OPERATIONS, SIZES = "all_reduce,all_gather,reduce_scatter,broadcast", "1K:512M:4"


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


def main() -> int:
    """Measure, or analyse; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--analyse", action="store_true", help="fit and validate what was measured; needs no GPU")
    parser.add_argument("--published", default="h100-sxm", help="a profile that comes with the tool")
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
