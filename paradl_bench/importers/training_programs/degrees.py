"""How many ranks a program has along each axis, and the strategy that nests them in the program's order. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from paradl_bench.plan.strategy import Axis, Strategy


class Degrees(NamedTuple):
    """How many ranks along each axis, 1 where there is none.

    ``stage`` is that of ZeRO, which parts things along ``data``, ``expert`` and ``context``, and ``replicas`` how often
    its shards are there.
    """

    pipeline: int = 1
    data: int = 1
    tensor: int = 1
    stage: int = 0
    replicas: int = 1
    expert: int = 1
    context: int = 1

    @property
    def reading(self) -> int:
        """Ranks that each read samples of their own."""
        return self.replicas * self.data * self.expert

    @property
    def exchanging(self) -> int:
        """Ranks that exchange gradients of what all of them hold."""
        return self.reading * self.context

    @property
    def ranks(self) -> int:
        """In all."""
        return self.pipeline * self.exchanging * self.tensor

    def strategy(self, order: Sequence[str]) -> Strategy:
        """The axes of more than one rank, from the outermost; of replicas that is a data axis too.

        A data axis of one rank says which stage ranks along the sequence, or with other experts, are sharded by.
        """
        beside = self.context * self.expert > 1
        return Strategy(
            axes=tuple(
                Axis(
                    kind="data" if kind == "replicas" else kind,
                    extents=(degree,),
                    prefix=self.stage if kind == "data" else 0,
                )
                for kind in order
                if (degree := getattr(self, kind)) > 1 or (kind == "data" and self.stage and beside)
            )
        )
