"""Stamps of one iteration, and what a record keeps of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from paradl_bench.measure.execution.micro_steps import Row
from paradl_bench.measure.input.feed import Fed
from paradl_bench.records.training.training_record import Turn
from paradl_bench.strategies.running.spans import COPIES

Seconds = Callable[[Any, Any], float]
"""From one stamp to another."""


class Stamps(NamedTuple):
    """One iteration: stamps at its start and end and at the end of backward, and the loss, still on the device.

    What it was fed is None where samples are drawn in memory, once for all iterations.

    Layer-wise communication is (what, begin, end) in the order of issue, and so are the copies around it. So are the
    turns at forward and backward (``FW``, ``BW``) of micro-batches, or of a pipeline's stages. The loss is None where
    another stage computes it.
    """

    begin: Any
    last_gradient: Any
    backward_end: Any
    end: Any
    loss: torch.Tensor | None
    fw_communication: list[Row]
    bw_communication: list[Row]
    turns: list[Row]
    fed: Fed | None


def turns_of(stamps: Sequence[Stamps], seconds: Seconds) -> tuple[Turn, ...]:
    """Turns at forward and backward, where there is more than one of either and they alternate alike."""
    if len(stamps[0].turns) <= 2 or len({len(item.turns) for item in stamps}) > 1:
        return ()
    return tuple(
        Turn(
            way="FW" if several[0][0] == "FW" else "BW",
            begin_s=tuple(seconds(item.begin, turn[1]) for item, turn in zip(stamps, several, strict=True)),
            end_s=tuple(seconds(item.begin, turn[2]) for item, turn in zip(stamps, several, strict=True)),
        )
        for several in zip(*(item.turns for item in stamps), strict=True)
    )


def communication_of(iterations: Sequence[Sequence[Row]], seconds: Seconds) -> dict[str, tuple[float, ...]]:
    """Seconds of each kind of layer-wise communication, one value an iteration."""
    sums = _sums(iterations, seconds)
    return {what: values for what, values in sums.items() if what != COPIES}


def copies_of(iterations: Sequence[Stamps], seconds: Seconds) -> tuple[float, ...]:
    """Seconds that cutting tensors and putting them together took, one value an iteration; empty where none was."""
    return _sums([[*item.fw_communication, *item.bw_communication] for item in iterations], seconds).get(COPIES, ())


def _sums(iterations: Sequence[Sequence[Row]], seconds: Seconds) -> dict[str, tuple[float, ...]]:
    sums: dict[str, list[float]] = {}
    for index, rows in enumerate(iterations):
        for what, begin, end in rows:
            of_iterations = sums.setdefault(what, [0.0] * len(iterations))
            of_iterations[index] += seconds(begin, end)
    return {what: tuple(of_iterations) for what, of_iterations in sums.items()}
