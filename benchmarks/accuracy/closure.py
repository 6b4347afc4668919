"""Closure: how the layers of six networks add up against iterations that nobody probed.

python benchmarks/accuracy/closure.py -o DIR [--blocks 8]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from paradl_bench.measure.layers.summary import closures

SUBJECTS = {"resnet18,resnet50,mobilenet_v2,densenet121,googlenet": "3x64x64", "vgg11": "3x32x32"}


def main() -> None:
    """Measure, then print the remainder beside its interval and the noise floor."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--batch", default="4")
    options = parser.parse_args()
    found = []
    for number, (models, shape) in enumerate(SUBJECTS.items()):
        directory = options.output / f"layers-{number}"
        settings = ["--batch", options.batch, "--input-shape", shape, "--blocks", str(options.blocks)]
        command = [sys.executable, "-m", "paradl_bench", "layers", models, *settings, "--isolated", "none"]
        subprocess.run([*command, "-o", str(directory)], check=True, stdout=subprocess.DEVNULL)
        found += closures(directory)
    print(
        f"{'model':14} {'iteration':>11} {'layers':>10} {'between':>10} {'remainder':>10}  90% interval     noise floor"
    )
    for c in found:
        low, high = c.remainder_interval
        print(
            f"{c.model:14} {c.iteration_s * 1e3:8.1f} ms {c.layers_s * 1e3:7.1f} ms {c.between_s * 1e3:7.1f} ms "
            f"{c.remainder_relative:+10.1%}  [{low:+.1%}, {high:+.1%}]  {c.noise_floor_relative:.1%} ({c.pairs} pairs)"
        )


if __name__ == "__main__":
    main()
