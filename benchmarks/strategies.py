"""Accuracy of every strategy that shares a model out, on two ranks: measured shards against a shard taken as 1/p.

    python benchmarks/strategies.py -o DIR [--repetitions 3]

A repetition profiles each model whole, as one rank of every strategy runs it, two ranks at once, and by micro-batches
(a pipeline has as many as ranks; one rank and two in turn, since stages wait for each other), then trains serial and
every strategy for real, in turn. A shared host changes its speed for minutes, so repetitions are short and several:
profiles and runs alternate, and see the same host. The first one sweeps the collectives that the plans hold, too:
alone, beside and behind compute. One profile is then fitted from all of them and held against every run; memory too. An
interrupted benchmark goes on when called again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from repetitions import measure_and_validate

MODELS = {"vgg11": ("3x32x32", 8, 6), "resnet18": ("3x64x64", 8, 12), "cosmoflow": ("4x32x32x32", 2, 12)}
"""Input shape, global batch, timed iterations."""
SHARDS = ("f2", "c2", "s2")
STRATEGIES = ("serial", *SHARDS, "p2")
SIZES = "16:512M:4"
"""From statistics of a few numbers to the gradients of vgg11."""


def commands(output: Path, repetition: int) -> Iterator[tuple[list[str], Path]]:
    """(arguments, directory) of one repetition."""
    base = output / f"r{repetition}"
    for model, (shape, batch, iterations) in MODELS.items():
        shards = ["--shards", ",".join(SHARDS)]
        micro = batch // 2
        measured = (("1", "1", batch, []), ("2", "2", batch, shards), ("micro", "1,2", micro, []))
        for name, ranks, local, more in measured:
            settings = f"--batch {local} --input-shape {shape} --ranks-on-host {ranks} --isolated none --blocks 2"
            yield ["layers", model, *settings.split(), "--iterations", "2", *more], base / f"layers-{model}-{name}"
        for strategy in STRATEGIES:
            settings = f"--strategy {strategy} --batch {batch} --input-shape {shape} --warmup 3"
            arguments = ["train", model, *settings.split(), "--iterations", str(iterations)]
            yield arguments, base / f"train-{model}-{strategy}"
    if repetition:
        return
    sweep = f"--ranks 2 --backend gloo --ops all_reduce,broadcast,all_gather,send_recv --sizes {SIZES}"
    beside = ["--beside-compute", "--behind-compute", "--blocks", "3"]
    yield ["collectives", *sweep.split(), *beside], base / "collectives"


if __name__ == "__main__":
    measure_and_validate(__doc__.splitlines()[0], commands, repetitions=3)
