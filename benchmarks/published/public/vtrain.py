"""vTrain: GPT-like models on one node of eight A100, from fewer to more ranks of data parallelism.

The data hold whole iterations and all-reduce tables, and no time of any kernel. So what can be predicted is what data
parallelism adds: of runs that differ in nothing but its degree, so that each replica does the same work, the one with
the lowest degree is known, and

    predicted(d) = measured(d0) + AR(d, W) - AR(d0, W)

with the all-reduce behind backward, as Megatron's does it, W the fp16 gradients of the fullest stage, and AR fitted to
the tables. Perfect scaling adds nothing. Without kernels nothing tells tensor and pipeline degrees apart.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from communication import Fits, costs_of, vtrain
from public.pairs import Pair

from paradl_bench.core.statistics import Z90
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Collective

SOURCE = "vTrain A100"
VOCABULARY = 51_200
"""Rows of the token embedding: GPT-2's, padded as Megatron pads them."""
GRADIENT_BYTES = 2

Exchange = Callable[[int, int], tuple[float, float]]
"""Seconds and standard deviation of an all-reduce, of ranks and bytes."""


class Shape(NamedTuple):
    """What stays the same while the degree of data parallelism grows."""

    micro_batch: int
    micro_batches: int
    hidden: int
    heads: int
    layers: int
    sequence: int
    tensor: int
    pipeline: int

    @property
    def gradient_bytes(self) -> int:
        """Of a rank of the first stage: its layers, and the embeddings of tokens and places."""
        of_layers = self.layers // self.pipeline * (12 * self.hidden + 13) * self.hidden
        of_tokens = VOCABULARY * self.hidden
        return GRADIENT_BYTES * ((of_layers + of_tokens) // self.tensor + self.sequence * self.hidden)

    def __str__(self) -> str:
        degrees = f"t{self.tensor}p{self.pipeline}"
        return f"h{self.hidden} L{self.layers} {degrees}, {self.micro_batches} x {self.micro_batch}"


def read_runs(path: Path) -> dict[Shape, dict[int, float]]:
    """Seconds of an iteration by shape and degree of data parallelism."""
    found: dict[Shape, dict[int, float]] = {}
    with open(path, newline="", encoding="utf-8-sig") as stream:
        for row in list(csv.reader(stream))[1:]:
            _, batch, micro_batch, hidden, heads, layers, sequence, tensor, data, pipeline = map(int, row[:10])
            of_replica = batch // (micro_batch * data)
            shape = Shape(micro_batch, of_replica, hidden, heads, layers, sequence, tensor, pipeline)
            found.setdefault(shape, {})[data] = float(row[10]) * 1e-3
    return found


def pairs(data: Path) -> list[Pair]:
    """Every run of a shape that was measured with a lower degree of data parallelism as well."""
    exchange = _fitted(data)
    runs = read_runs(data / "vtrain-a100" / "ground_truth_single_half.csv")
    return [pair for shape, seconds in runs.items() for pair in _of_shape(shape, seconds, exchange)]


def _fitted(data: Path) -> Exchange:
    source = vtrain(data, "a100")
    fits, _ = Fits(source).of(lambda key, point: True)
    costs = costs_of(source, fits, "nccl")

    def exchange(ranks: int, size: int) -> tuple[float, float]:
        if ranks == 1:
            return 0.0, 0.0
        work = Collective(operation="all_reduce", message_bytes=size, ranks=ranks)
        found = costs.cost(work, parse_strategy(f"d{ranks}"))
        return found.cost.seconds, math.hypot(*(shift for _, shift in found.modes))

    return exchange


def _of_shape(shape: Shape, seconds: dict[int, float], exchange: Exchange) -> Iterator[Pair]:
    lowest = min(seconds)
    known_s, known_sd = exchange(lowest, shape.gradient_bytes)
    for degree in sorted(set(seconds) - {lowest}):
        added_s, added_sd = exchange(degree, shape.gradient_bytes)
        predicted_s = seconds[lowest] + added_s - known_s
        width = Z90 * (added_sd + known_sd)
        yield Pair(
            source=SOURCE,
            what=f"{shape}: d{lowest} to d{degree}",
            ranks=degree * shape.tensor * shape.pipeline,
            evaluator="all-reduce behind backward",
            chosen=True,
            unit="iteration",
            predicted_s=predicted_s,
            low_s=predicted_s - width,
            high_s=predicted_s + width,
            perfect_s=seconds[lowest],
            measured_s=seconds[degree],
        )
