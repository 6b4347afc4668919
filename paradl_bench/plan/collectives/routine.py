"""How an operation is run through torch.distributed: one record an operation, after nccl-tests' ``testColl``.

torch is imported inside the functions, by those who run; the models read the same files without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paradl_bench.plan.collectives import contents

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup, Work

ELEMENT_BYTES = 4
"""Buffers hold fp32."""


@dataclass(frozen=True, slots=True)
class Buffers:
    """What one rank passes to the operation: flat fp32 tensors on the rank's device.

    Attributes:
        input, output: an operation that works in place uses the output alone.
    """

    input: torch.Tensor
    output: torch.Tensor

    def clear(self) -> None:
        """Zero both: sums stay zero however often an operation in place is repeated, and never overflow."""
        self.input.zero_()
        self.output.zero_()


def in_place(message: int, ranks: int) -> tuple[int, int]:
    """Elements of an operation that takes and leaves its message in one buffer."""
    return 0, message


@dataclass(frozen=True, slots=True, kw_only=True)
class Routine:
    """How one rank of ``ranks`` runs an operation.

    Attributes:
        name: the operation's.
        call: start the operation, by (buffers, rank, ranks, process group); ranks are those of the group, None of which
            is the default one. What to wait for, or None on a rank that takes no part.
        correct: whether the output is what the operation has to leave there, by (buffers, rank, ranks).
        elements: (elements of a message, ranks) to the elements of a rank's input and output.
        sides: of a number of ranks, those that take part.
    """

    name: str
    call: Callable[[Buffers, int, int, ProcessGroup | None], Work | None]
    correct: Callable[[Buffers, int, int], bool]
    elements: Callable[[int, int], tuple[int, int]] = in_place
    sides: Callable[[int], tuple[int, ...]] = lambda ranks: tuple(range(ranks))

    def buffers(self, pool: Buffers, message_bytes: int, ranks: int) -> Buffers:
        """The parts of a pool's tensors that a message of ``message_bytes`` needs."""
        inputs, outputs = self.elements(message_bytes // ELEMENT_BYTES, ranks)
        return Buffers(pool.input[:inputs], pool.output[:outputs])

    def fill(self, buffers: Buffers, rank: int) -> None:
        """This rank's data into what it gives: the input, or the one buffer of an operation in place."""
        given = buffers.input if buffers.input.numel() else buffers.output
        contents.write_period(given, contents.rank_period(rank))
