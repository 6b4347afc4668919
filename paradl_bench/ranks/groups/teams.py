"""Disjoint groups of ranks that run a collective at once, so that their contention for links is seen.

Rank r is in group r modulo the number of groups, which is what nccl-tests calls ``NCCL_TESTS_SPLIT="MOD K"``: on
several nodes every group reaches over all of them and shares each node's link with the others, as the data groups of
replicas do whose layers are shared inside a node. Or groups are of ranks side by side, as such replicas are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paradl_bench.ranks.emulated_nodes.cluster import nodes_of_rank
from paradl_bench.ranks.groups.agreement import host_numbers
from paradl_bench.ranks.groups.process_group import make_group
from paradl_bench.ranks.groups.process_groups import RankContext
from paradl_bench.records.cluster import NODE, RACK, SYSTEM

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """The group that this rank is in.

    Attributes:
        index: of the group; groups: the ranks of each.
        process_group: the context's where there is one group, and None for the default one.
        level: that the group spans. ranks_per_node: the most of its ranks that share a host.
    """

    index: int
    groups: tuple[range, ...]
    rank: int
    process_group: torch.distributed.ProcessGroup | None
    level: str
    ranks_per_node: int

    @property
    def count(self) -> int:
        """How many groups there are."""
        return len(self.groups)

    @property
    def ranks(self) -> int:
        """How many ranks the group has."""
        return len(self.groups[self.index])

    def first_rank(self, members: range) -> int:
        """Of all ranks, the first of a group whose ranks are side by side; 0 of every other."""
        return members[0] if members.step == 1 else 0


def form_teams(context: RankContext, count: int, *, side_by_side: bool = False) -> Team:
    """Part all ranks into ``count`` groups, equally large; every rank calls this.

    Args:
        side_by_side: groups of ranks that follow each other, instead of every ``count``-th.
    """
    hosts = host_numbers(context)
    size = context.ranks // count
    groups = tuple(
        range(index * size, (index + 1) * size) if side_by_side else range(index, context.ranks, count)
        for index in range(count)
    )
    # Every rank has to make every group, in the same order.
    made = [make_group(members) for members in groups] if count > 1 else [context.group]
    index = next(number for number, members in enumerate(groups) if context.rank in members)
    on_host = Counter(hosts[rank] for rank in groups[index])
    return Team(
        index=index,
        groups=groups,
        rank=groups[index].index(context.rank),
        process_group=made[index],
        level=level_spanned(hosts, groups[index]),
        ranks_per_node=max(on_host.values()),
    )


def level_spanned(hosts: Sequence[float], members: Sequence[int]) -> str:
    """The level that some ranks span. Racks are known of emulated nodes alone; else several hosts are the system.

    Args:
        hosts: of every rank, a number.
    """
    if len({hosts[rank] for rank in members}) == 1:
        return NODE
    nodes = nodes_of_rank()
    return RACK if nodes is not None and nodes.in_one_rack(members) else SYSTEM


def leave_team(context: RankContext, team: Team) -> None:
    """Let a team's process group go, which keeps threads: ranks may go on to measure something else. A collective."""
    import torch.distributed as dist

    context.barrier()
    if team.count > 1:
        dist.destroy_process_group(team.process_group)
