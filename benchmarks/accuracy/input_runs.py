"""Runs that read images beside their predictions: serial and d2, 0 and 1 workers, overlapped and not.

    python benchmarks/accuracy/input_runs.py -o DIR [--repetitions 3]

Every repetition profiles ResNet-18, reading, and gloo, and trains in turn. One profile is then fitted from all of them
and held against every run. The first repetition makes the images. About two minutes a repetition on two cores; an
interrupted benchmark goes on when called again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from repetitions import measure_and_validate

from paradl_bench.measure.input.images import make_images

LOCAL_BATCH = 4
IMAGES = 96
RUNS = (("serial", 0, "pytorch"), ("serial", 1, "pytorch"), ("d2", 0, "naive"), ("d2", 1, "cntk"), ("d2", 1, "mxnet"))
"""Strategy, workers of a rank, preset."""


def commands(output: Path, repetition: int) -> Iterator[tuple[list[str], Path]]:
    """(arguments, directory) of one repetition."""
    images, base = output / "images", output / f"r{repetition}"
    for _ in make_images(images, IMAGES, seed=0):
        pass
    reading = f"--crop 64 --batch {LOCAL_BATCH} --workers 0,1,2 --samples 32 --blocks 2 --loader-batches 6"
    yield ["io", str(images), *reading.split()], base / "io"
    model = f"--input-shape 3x64x64 --batch {LOCAL_BATCH}"
    for ranks in (1, 2):
        profile = f"{model} --ranks-on-host {ranks} --isolated none --blocks 3 --iterations 3"
        yield ["layers", "resnet18", *profile.split()], base / f"layers-{ranks}"
    sweep = "--ranks 2 --backend gloo --ops all_reduce,broadcast --sizes 128:64M:8 --contexts with-compute --blocks 3"
    yield ["collectives", *sweep.split()], base / "collectives"
    for strategy, workers, preset in RUNS:
        batch = LOCAL_BATCH * (2 if strategy == "d2" else 1)
        run = f"--strategy {strategy} --batch {batch} --input-shape 3x64x64 --warmup 3 --iterations 20 --no-verify"
        fed = ["--input", str(images), "--io-workers", str(workers), "--preset", preset]
        yield ["train", "resnet18", *run.split(), *fed], base / f"train-{strategy}-{workers}-{preset}"


if __name__ == "__main__":
    measure_and_validate(__doc__.splitlines()[0], commands, repetitions=3)
