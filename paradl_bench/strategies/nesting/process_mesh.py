"""Process groups along the axes of a strategy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from paradl_bench.plan.mesh import all_groups, group_of
from paradl_bench.plan.strategy import Strategy
from paradl_bench.ranks.groups.process_group import groups_are_silent, make_group
from paradl_bench.strategies.exchange.node_exchange import NodeExchange
from paradl_bench.strategies.exchange.node_groups import NodeGroups
from paradl_bench.strategies.running.group_functions import Group
from paradl_bench.strategies.running.spans import Spans


class ProcessMesh:
    """The groups that this process belongs to; every rank makes the same ones in the same order.

    Attributes:
        strategy: whose axes the mesh has; as many ranks as the default group.
        spans: layer-wise communication of all groups of this process.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.spans = Spans()
        self._of_nodes: list[dist.ProcessGroup] = []
        self._made: dict[tuple[tuple[tuple[int, ...], ...], bool], dist.ProcessGroup] = {}

    def group(self, axes: Sequence[int], *, heard: bool = False) -> Group:
        """The group along ``axes`` (indices into the strategy's); a collective the first time that it is asked for.

        Args:
            heard: whether it moves what is sent where other groups move nothing.
        """
        rank = dist.get_rank()
        members = group_of(self.strategy, axes, rank)
        silent = groups_are_silent() and not heard
        return Group(
            process_group=self._process_group(all_groups(self.strategy, axes), silent),
            rank=members.index(rank),
            size=len(members),
            spans=self.spans,
        )

    def node_exchange(self, groups: NodeGroups, device: torch.device) -> NodeExchange:
        """What exchanges gradients within and between nodes, over groups of its own; a collective over all ranks."""
        rank, size = dist.get_rank(), groups.per_node
        everywhere = all_groups(self.strategy, groups.axes)
        nodes = [members[at : at + size] for members in everywhere for at in range(0, len(members), size)]
        leading = range(groups.leaders or size)
        between = [members[local::size] for members in everywhere for local in leading]
        # Groups of their own: a thread issues on them beside what this one issues on the others.
        node_ranks = next(ranks for ranks in nodes if rank in ranks)
        node, leaders = (_make_groups(ranks, groups_are_silent()) for ranks in (nodes, between))
        assert node is not None
        self._of_nodes += [node] if leaders is None else [node, leaders]
        return NodeExchange(groups, node_ranks, node, leaders, device)

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Every process group of this rank, the one of all ranks first."""
        return (_world(), *self._made.values(), *self._of_nodes)

    def _process_group(self, groups: tuple[tuple[int, ...], ...], silent: bool) -> dist.ProcessGroup:
        if len(groups) == 1 and not silent:
            return _world()
        if (groups, silent) not in self._made:
            made = _make_groups(groups, silent)
            assert made is not None
            self._made[groups, silent] = made
        return self._made[groups, silent]


def _make_groups(groups: Sequence[tuple[int, ...]], silent: bool) -> dist.ProcessGroup | None:
    """The one of these groups that this rank is in, if any; every rank makes all of them."""
    own_group = None
    for ranks in groups:
        made = make_group(ranks, silent=silent)
        if dist.get_rank() in ranks:
            own_group = made
    return own_group


def _world() -> dist.ProcessGroup:
    whole: dist.ProcessGroup = dist.group.WORLD  # type: ignore[assignment]
    return whole
