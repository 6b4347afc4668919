"""Accuracy, coverage and closure on this machine: profiles and real runs in turn, many times over.

    python benchmarks/accuracy/accuracy.py -o DIR [--repetitions 5]

Every repetition profiles the models (one rank, and two at once), sweeps gloo, and trains serial and d2 for real; so
profiles and runs see the same slow and fast spells of the machine. One profile is then fitted from all repetitions and
held against every run. About six minutes a repetition on two cores; an interrupted benchmark goes on when called again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from repetitions import measure_and_validate

SHAPES = {"3x64x64": ("resnet18", "mobilenet_v2"), "3x32x32": ("vgg11",)}
ITERATIONS = {"resnet18": 24, "mobilenet_v2": 30, "vgg11": 12}
BATCHES = (4, 8)


def commands(output: Path, repetition: int) -> Iterator[tuple[list[str], Path]]:
    """(arguments, directory) of one repetition, profiles and runs in turn."""
    base = output / f"r{repetition}"
    for shape, models in SHAPES.items():
        for ranks in (1, 2):
            directory = base / f"layers-{models[0]}-{ranks}"
            batches = ",".join(str(batch // ranks) for batch in BATCHES)
            profile = f"--batch {batches} --ranks-on-host {ranks} --input-shape {shape} --isolated none --blocks 3"
            yield ["layers", ",".join(models), *profile.split(), "--iterations", "3"], directory
        for model in models:
            for batch in BATCHES:
                for strategy in ("serial", "d2"):
                    run = f"--strategy {strategy} --batch {batch} --input-shape {shape} --warmup 3"
                    arguments = ["train", model, *run.split(), "--iterations", str(ITERATIONS[model])]
                    yield arguments, base / f"train-{model}-{strategy}-{batch}"
    sweep = "--ranks 2 --backend gloo --ops all_reduce,broadcast --sizes 128:512M:4 --contexts with-compute --blocks 3"
    yield ["collectives", *sweep.split()], base / "collectives"


if __name__ == "__main__":
    measure_and_validate(__doc__.splitlines()[0], commands, repetitions=5)
