"""Forward and backward of an iteration: of the whole local batch, or of micro-batches whose gradients add up."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from paradl_bench.strategies.nesting.parallel import ParallelModule
from paradl_bench.strategies.running.autocast import Entered

Row = tuple[str, Any, Any]
"""What was under way, and stamps at its begin and end."""


class MicroSteps:
    """A rank's samples in equal micro-batches, which go forward and backward one after the other.

    The loss of each counts as its share, so that gradients are those of the mean over all samples; they are exchanged
    in the last backward alone, where the exchange can wait.

    Args:
        loss: a mean over samples.
        count: of micro-batches; it divides the samples.
    """

    def __init__(
        self,
        parallel: ParallelModule,
        loss: Callable[[Any, torch.Tensor], torch.Tensor],
        inputs: torch.Tensor,
        targets: torch.Tensor,
        count: int,
        entered: Entered = contextlib.nullcontext,
    ) -> None:
        self._parallel, self._loss = parallel, parallel.sharded_loss(loss)
        self._count, self._entered = count, entered
        self.feed(inputs, targets)

    def feed(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Take these samples from now on."""
        self._batches = list(zip(inputs.chunk(self._count), targets.chunk(self._count), strict=True))

    def run(self, begin: Any, stamp: Callable[[], Any], rows: list[Row], enter: Callable[[str], None]) -> torch.Tensor:
        """Run all of them; returns the loss over all samples, or this rank's share of it.

        Args:
            rows: takes every turn at forward and backward (``FW``, ``BW``), which follow each other without a gap.
            enter: told what is next, in words.
        """
        total: torch.Tensor | None = None
        for step, (inputs, targets) in enumerate(self._batches, start=1):
            if step == self._count:
                loss, begin = self._turn(inputs, targets, begin, stamp, rows, enter)
            else:
                with self._parallel.without_exchange():
                    loss, begin = self._turn(inputs, targets, begin, stamp, rows, enter)
            total = loss if total is None else total + loss
        assert total is not None
        return total

    def _turn(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        begin: Any,
        stamp: Callable[[], Any],
        rows: list[Row],
        enter: Callable[[str], None],
    ) -> tuple[torch.Tensor, Any]:
        """Forward and backward of one; returns its share of the loss, and the stamp at its end."""
        enter("forward")
        with self._entered():
            loss = self._loss(self._parallel.module(inputs), targets)
            if self._count > 1:
                loss = loss / self._count
        forward_end = stamp()
        rows.append(("FW", begin, forward_end))
        enter("backward")
        loss.backward()  # type: ignore[no-untyped-call]
        backward_end = stamp()
        rows.append(("BW", forward_end, backward_end))
        return loss.detach(), backward_end


def by_turn(rows: list[Row]) -> tuple[list[Row], list[Row], list[Row]]:
    """Layer-wise communication inside of forward turns and of backward turns, and the turns, whose rows end them."""
    inside: dict[str, list[Row]] = {"FW": [], "BW": []}
    since: list[Row] = []
    for row in rows:
        if row[0] in inside:
            inside[row[0]] += since
            since = []
        else:
            since.append(row)
    return inside["FW"], inside["BW"], [row for row in rows if row[0] in inside]
