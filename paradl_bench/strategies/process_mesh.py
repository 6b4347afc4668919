"""Process groups along the axes of a strategy."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from paradl_bench.spec.strategy import Strategy
from paradl_bench.strategies.group_functions import Group, Spans
from paradl_bench.strategies.mesh import all_groups, group_of


class ProcessMesh:
    """The groups that this process belongs to; every rank makes the same ones in the same order.

    Attributes:
        strategy: whose axes the mesh has; as many ranks as the default group.
        spans: layer-wise communication of all groups of this process.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.spans = Spans()
        self._made: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup] = {}

    def group(self, axes: Sequence[int]) -> Group:
        """The group along ``axes`` (indices into the strategy's); a collective the first time that it is asked for."""
        rank = dist.get_rank()
        members = group_of(self.strategy, axes, rank)
        return Group(
            process_group=self._process_group(all_groups(self.strategy, axes), members),
            rank=members.index(rank),
            size=len(members),
            spans=self.spans,
        )

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Every process group of this rank, the one of all ranks first."""
        return (_world(), *self._made.values())

    def _process_group(self, groups: tuple[tuple[int, ...], ...], members: tuple[int, ...]) -> dist.ProcessGroup:
        if len(groups) == 1:
            return _world()
        if groups not in self._made:
            for ranks in groups:
                made = dist.new_group(list(ranks))
                if ranks == members:
                    self._made[groups] = made
        return self._made[groups]


def _world() -> dist.ProcessGroup:
    whole: dist.ProcessGroup = dist.group.WORLD  # type: ignore[assignment]
    return whole
