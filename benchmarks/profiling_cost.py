"""Cost of profiling: `layers` of one model at one batch against 60 of its training iterations, as whole processes.

python benchmarks/profiling_cost.py [--model resnet50] [--batch 8] [--repetitions 3]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ITERATIONS = 60


def seconds(arguments: list[str]) -> float:
    """Wall time of one command in a directory of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "paradl_bench", *arguments, "-o", str(Path(folder) / "out")]
        begin = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - begin


def main() -> None:
    """Time both in turn (A B A B ...) and print medians and the ratio of each pair."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--batch", default="8")
    parser.add_argument("--input-shape", default="3x64x64")
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    shared = [options.model, "--batch", options.batch, "--input-shape", options.input_shape]
    profiled, trained = [], []
    for _ in range(options.repetitions):
        profiled.append(seconds(["layers", *shared]))
        warmup = 3
        counted = ["--iterations", str(ITERATIONS - warmup), "--warmup", str(warmup)]
        trained.append(seconds(["train", *shared, "--strategy", "serial", *counted]))
        print(f"layers {profiled[-1]:.1f} s, {ITERATIONS} iterations {trained[-1]:.1f} s", flush=True)
    ratios = [a / b for a, b in zip(profiled, trained, strict=True)]
    print(f"median: layers {statistics.median(profiled):.1f} s, training {statistics.median(trained):.1f} s")
    print(f"ratio: median {statistics.median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    main()
