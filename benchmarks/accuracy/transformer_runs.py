"""Accuracy of the axes that train transformers on two real ranks: ZeRO 3, tensor, context, experts, pipeline.

    python benchmarks/accuracy/transformer_runs.py -o DIR [--repetitions 1] [--tiny]

GPT-2, a Llama and a Mixtral of the emulation suite (:mod:`emulated_networks`), whose iterations take 0.2 to 0.5 s. With
``--tiny`` they are as small as in DistSim's benchmark, and take 20 to 60 ms, in which the framework's own work shows.

A repetition sweeps collectives. Then it measures the layers of each network, whole and as a rank of a strategy that
splits them has them, by one rank and by two at once, and trains by every strategy right behind. One profile is fitted
from all repetitions and held against every run. What is complete is not measured again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from repetitions import measure_and_validate

BATCH, ITERATIONS, REPETITIONS = 4, 8, 1
_SIZES, _TINY_SIZES = "4K,64K,512K,4M,32M", "4K,64K,512K,4M"
TINY_BATCH, TINY_ITERATIONS = 8, 20
_OF_ALL = (
    ("z3d2", ""),
    ("t2", "--sequence-parallel on"),
    ("x2", "--context-exchange ring"),
    ("x2", "--context-exchange all-to-all"),
    ("p2", "--micro-batches 2 --schedule 1f1b"),
)
STRATEGIES = {"gpt2": _OF_ALL, "llama": _OF_ALL, "mixtral": (("z3d2", ""), ("e2", ""), _OF_ALL[-1])}
SHARDS = {"gpt2": "z3d2,t2,x2", "llama": "z3d2,t2,x2", "mixtral": "z3d2,e2"}


def commands(output: Path, repetition: int, *, tiny: bool) -> Iterator[tuple[list[str], Path]]:
    """A repetition's measurements, runs right behind the layers of their network."""
    base = output / f"r{repetition}"
    batch, iterations = (TINY_BATCH, TINY_ITERATIONS) if tiny else (BATCH, ITERATIONS)
    swept = "--ranks 2 --ops all_reduce,all_gather,reduce_scatter,all_to_all,exchange,broadcast,send_recv --blocks 2"
    swept += f" --sizes {_TINY_SIZES if tiny else _SIZES}"
    contexts = ["--contexts", "after-compute,with-compute,with-all-reduce"]
    yield ["collectives", *swept.split(), *contexts], base / "collectives"
    for name, strategies in STRATEGIES.items():
        model = f"emulated_networks:{'tiny_' if tiny else ''}{name}"
        layers = f"--batch {batch // 2},{batch} --ranks-on-host 1,2 --isolated none --blocks 2 --no-verify"
        yield ["layers", model, *layers.split(), "--shards", SHARDS[name]], base / f"layers-{name}"
        for strategy, options in strategies:
            trained = f"--strategy {strategy} --batch {batch} --iterations {iterations} --no-verify {options}"
            words = "-".join([name, strategy, *options.replace("--", "").split()])
            yield ["train", model, *trained.split()], base / words


if __name__ == "__main__":
    networks = str(Path(__file__).parents[1] / "networks")
    os.environ["PYTHONPATH"] = os.pathsep.join([networks, os.environ.get("PYTHONPATH", "")])
    measure_and_validate(__doc__.splitlines()[0], commands, REPETITIONS, tiny="the smallest networks")
