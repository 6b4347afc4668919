"""What a machine with a GPU has to show: the tests that need one, then a reference calibration with its errors.

    make gpu-check OUT=DIR         (or python benchmarks/gpu/gpu_check.py -o DIR [--models resnet50] [--batch 64])

The calibration measures the device's peak and bandwidth, profiles each model in fp32, in fp32 with TensorFloat-32, in
bf16, and in bf16 with channels last, and trains it serially in each, profile and run in turn. It ends with the closure
of the profile (what layers leave of an iteration), predicted against measured iterations, and predicted against the
allocator's peak memory. Where there are several GPUs, NCCL is swept over all of them, and data parallel runs are held
against their prediction too. An interrupted check goes on when called again.

Without a GPU it says so and ends with code 3; ``--device cpu`` rehearses it, in the precisions that a CPU has.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "accuracy"))

from repetitions import run, validate

NO_GPU = 3
TESTS = Path(__file__).parents[2] / "tests" / "gpu"
SIZES = "16:512M:4"

PRECISIONS: dict[str, dict[str, list[str]]] = {
    "cuda": {
        "fp32": [],
        "tf32": ["--tf32"],
        "bf16": ["--dtype", "bf16"],
        "bf16-channels-last": ["--dtype", "bf16", "--channels-last"],
    },
    # A CPU without instructions for bf16 takes minutes for what takes seconds in fp32.
    "cpu": {"fp32": [], "channels-last": ["--channels-last"]},
}
"""By device, what is measured: a name for directories, and options."""


def devices(device: str) -> int:
    """How many of them ranks can have: GPUs, or one CPU."""
    import torch

    return torch.cuda.device_count() if device == "cuda" else 1


def commands(
    options: argparse.Namespace, ranks: int, output: Path, repetition: int
) -> Iterator[tuple[list[str], Path]]:
    """(arguments, directory) of one repetition."""
    base = output / f"r{repetition}"
    on = ["--device", options.device]
    if not repetition:
        yield ["doctor", "--measure", *on], base / "rates"
    if ranks > 1 and not repetition:
        sweep = f"collectives --ranks {ranks} --backend nccl --ops all_reduce,broadcast --sizes {SIZES}"
        yield [*sweep.split(), "--contexts", "with-compute", *on], base / "collectives"
    shape = ["--input-shape", options.input_shape] if options.input_shape else []
    for model in options.models.split(","):
        for name, more in PRECISIONS[options.device].items():
            local = [model, "--batch", str(options.batch), *on, *shape, *more]
            yield ["layers", *local, "--isolated", "none"], base / f"layers-{model}-{name}"
            yield ["train", *local, "--strategy", "serial"], base / f"train-{model}-{name}-serial"
            if ranks > 1:
                whole = [model, "--batch", str(options.batch * ranks), *on, *shape, *more]
                yield ["train", *whole, "--strategy", f"d{ranks}"], base / f"train-{model}-{name}-d{ranks}"


def main() -> int:
    """The check, as options say; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--models", default="resnet50", help="one, or several with commas between them")
    parser.add_argument("--batch", type=int, default=64, help="samples a GPU")
    parser.add_argument("--input-shape", help="of one sample; default: the model's own")
    parser.add_argument("--device", choices=tuple(PRECISIONS), default="cuda")
    parser.add_argument("--repetitions", type=int, default=2)
    options = parser.parse_args()
    ranks = devices(options.device)
    if not ranks:
        print("gpu-check: torch sees no GPU here; --device cpu rehearses the calibration", file=sys.stderr)
        return NO_GPU
    if options.device == "cuda":
        tests = [sys.executable, "-m", "pytest", str(TESTS)]
        failed = subprocess.run(tests, env={**os.environ, "PARADL_TEST_GPU": "required"}).returncode
        if failed:
            return failed
    validate(options.output, partial(commands, options, ranks), options.repetitions)
    run("calibrate", ["show", str(options.output / "profile.json")], shown=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
