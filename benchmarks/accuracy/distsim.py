"""Accuracy of DistSim's networks and ways of parallelism on two real ranks: tensor, pipeline, data.

    python benchmarks/accuracy/distsim.py -o DIR [--repetitions 2]

BERT, GPT-2 and T5 at a tiny size (:mod:`emulated_networks`). A repetition sweeps collectives, and of each network
measures the layers, whole and as a rank of ``t2`` has them, by one rank and by two at once; right behind it trains by
2M1P1D, 1M2P1D and 1M1P2D. One profile is fitted from all repetitions and held against every run: batch time, and
activity of both ranks. What is complete is not measured again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from repetitions import measure_and_validate

NETWORKS = ("bert", "gpt2", "t5")
STRATEGIES = {"2M1P1D": "", "1M2P1D": "--micro-batches 2 --schedule 1f1b", "1M1P2D": ""}
BATCH, ITERATIONS, REPETITIONS = 8, 20, 2


def commands(output: Path, repetition: int) -> Iterator[tuple[list[str], Path]]:
    """A repetition's measurements, runs right behind the layers of their network."""
    base = output / f"r{repetition}"
    layers = f"--batch {BATCH // 2},{BATCH} --ranks-on-host 1,2 --shards t2 --isolated none --blocks 2 --no-verify"
    trained = f"--batch {BATCH} --iterations {ITERATIONS} --no-verify"
    swept = "--ranks 2 --ops all_reduce,broadcast,send_recv --sizes 4K,64K,512K,4M --blocks 2"
    contexts = ["--contexts", "after-compute,with-compute,with-all-reduce"]
    yield ["collectives", *swept.split(), *contexts], base / "collectives"
    for name in NETWORKS:
        model = f"emulated_networks:tiny_{name}"
        yield ["layers", model, *layers.split()], base / f"layers-{name}"
        for strategy, options in STRATEGIES.items():
            yield (
                ["train", model, "--strategy", strategy, *trained.split(), *options.split()],
                base / f"{name}-{strategy}",
            )


if __name__ == "__main__":
    networks = str(Path(__file__).parents[1] / "networks")
    os.environ["PYTHONPATH"] = os.pathsep.join([networks, os.environ.get("PYTHONPATH", "")])
    measure_and_validate(__doc__.splitlines()[0], commands, REPETITIONS)
