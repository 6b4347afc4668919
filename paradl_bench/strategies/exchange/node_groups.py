"""Exchange of gradients that knows nodes: by a leader of each node, by several, or in segments. Torch-free.

The ranks that exchange gradients, g of them on each of n nodes, send a bucket of m bytes in three steps:

- by K leaders: the bucket is cut into K parts. Each part is reduced to a leader of its own in the node, one after the
  other; each leader all-reduces its part with those of the other nodes, all of them side by side; each part is
  broadcast in the node, one after the other. One leader sends the whole bucket.
- segmented: reduce-scatter in the node, g all-reduces of m/g between nodes side by side, all-gather in the node. A
  bucket is padded to g equal segments, and the padding is sent.

Buckets follow each other: one is sent when the last step of the one before it is done. Ranks are numbered node by node,
equally many on each. The map of used parameters (``find_unused_parameters``) and buffers go over all ranks as before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import Tensor
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.mesh import all_groups, degree_of, group_axes, place_of, zero_stage
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.plan.tasks import Collective, Scope
from paradl_bench.strategies.exchange.buckets import total_bytes
from paradl_bench.strategies.exchange.options import ExchangeOptions


class Step(NamedTuple):
    """One collective of a bucket's exchange.

    Attributes:
        elements: of a message, as the operation defines it.
        start: of what is sent, in the bucket; the bucket's start for a reduce-scatter and what follows it.
        leader: rank within the node that a part is reduced to, or broadcast from.
    """

    operation: str
    scope: Scope
    elements: int
    start: int = 0
    leader: int = 0


class NodeGroups(NamedTuple):
    """How the ranks of a group that exchanges gradients lie on nodes, and how they exchange.

    Attributes:
        axes: indices of the strategy's axes along which gradients are exchanged.
        nodes, per_node: of one group: nodes, and ranks on each.
        leaders: parts of a bucket, each with a leader of its own; 0 for segments.
    """

    axes: tuple[int, ...]
    nodes: int
    per_node: int
    leaders: int

    def leader_index(self, local: int) -> int:
        """What a rank does, by its place in the node: ranks of one leader index issue the same; leaders come first."""
        return min(local, self.leaders) if self.leaders else 0

    def steps(self, elements: int, local: int) -> tuple[Step, ...]:
        """What the rank at a place of its node issues for a bucket, in order."""
        if not self.leaders:
            part = -(-elements // self.per_node)
            return (
                Step("reduce_scatter", "node", part),
                Step("all_reduce", "between nodes", part),
                Step("all_gather", "node", part),
            )
        size, longer = divmod(elements, self.leaders)
        parts = [(i * size + min(i, longer), size + (i < longer), i) for i in range(self.leaders)]
        parts = [part for part in parts if part[1]]
        return (
            *(Step("reduce", "node", count, start, leader) for start, count, leader in parts),
            *(Step("all_reduce", "between nodes", count, start) for start, count, leader in parts if leader == local),
            *(Step("broadcast", "node", count, start, leader) for start, count, leader in parts),
        )

    def collectives(self, bucket: Sequence[Tensor], local: int) -> list[Collective]:
        """The same, of a plan."""
        elements = sum(tensor.elements for tensor in bucket)
        return self.collectives_of(elements, total_bytes(bucket) // elements if elements else 0, local)

    def collectives_of(self, elements: int, element_bytes: int, local: int) -> list[Collective]:
        """The same, of a bucket that is so many elements."""
        return [
            Collective(
                operation=step.operation,
                message_bytes=step.elements * element_bytes,
                ranks=self.per_node if step.scope == "node" else self.nodes,
                axes=self.axes,
                scope=step.scope,
                per_node=self.per_node,
            )
            for step in self.steps(elements, local)
        ]


def node_groups(strategy: Strategy, settings: PlanSettings) -> NodeGroups | None:
    """How a strategy's ranks exchange gradients on nodes; None where the exchange is flat, and for one device.

    Raises:
        UserError: nobody exchanges gradients through DistributedDataParallel without a pipeline, nodes are not known or
            hold unlike numbers of ranks, there is one node, no two ranks of a group share one, or more leaders than
            ranks on a node.
    """
    options = settings.of(ExchangeOptions)
    if options.exchange == "flat" or not strategy.axes:
        return None
    axes, what = group_axes(strategy, Trait.REPLICATES), f"--exchange {options.exchange}"
    if zero_stage(strategy) > 1 or degree_of(strategy, Trait.STAGES) > 1 or not axes:
        raise UserError(
            f"strategy {strategy}: {what} is for data and spatial parallelism without a pipeline, up to ZeRO stage 1"
        )
    on_node = options.ranks_per_node
    if on_node is None:
        raise UserError(f"{what} needs to know the nodes: give --ranks-per-node")
    if strategy.ranks > on_node and strategy.ranks % on_node:
        raise UserError(
            f"strategy {strategy}: {what} is for full nodes, and {strategy.ranks} ranks do not fill nodes of {on_node};"
            " give another --ranks-per-node"
        )
    groups = [[rank // on_node for rank in group] for group in all_groups(strategy, axes)]
    counts = {count for group in groups for count in Counter(group).values()}
    nodes = {len(set(group)) for group in groups}
    if nodes == {1}:
        raise UserError(
            f"strategy {strategy}: {what} is for several nodes, and ranks that exchange gradients share one of"
            f" {on_node} ranks; give --ranks-per-node of less, or --exchange flat"
        )
    if counts == {1}:
        raise UserError(
            f"strategy {strategy}: {what} is for ranks that share a node, and no two that exchange gradients share one"
            f" of {on_node} ranks; give --exchange flat"
        )
    if len(counts) > 1 or len(nodes) > 1:
        raise UserError(
            f"strategy {strategy}: nodes of {on_node} ranks hold unlike numbers of ranks that exchange gradients;"
            " give another --ranks-per-node, or --exchange flat"
        )
    grouped = NodeGroups(axes, nodes.pop(), counts.pop(), _leaders(options.exchange))
    if grouped.leaders > grouped.per_node:
        raise UserError(
            f"strategy {strategy}: {what} is more leaders than the {grouped.per_node} ranks that exchange gradients on"
            f" a node; give at most leaders:{grouped.per_node}"
        )
    return grouped


def _leaders(exchange: str) -> int:
    if exchange == "segmented":
        return 0
    return int(exchange.partition(":")[2] or 1)


class Placed(NamedTuple):
    """Ranks by what they do: leaders and others issue unlike things.

    Attributes:
        roles: (what a rank runs of the layers, its leader index): how many ranks.
        positions: index of the role, per place on the node and, of each, per position in the replica.
        per_node: places on the node.
    """

    roles: dict[tuple[int, int], int]
    positions: tuple[int, ...]
    per_node: int


def place_roles(strategy: Strategy, shards: Sequence[int], groups: NodeGroups | None) -> Placed:
    """Which roles ranks play.

    Args:
        shards: per position in the replica, the index of what is run there.
    """
    if groups is None or not groups.leaders:
        replicas = degree_of(strategy, Trait.DIVIDES_BATCH)
        counts = {(index, 0): shards.count(index) * replicas for index in sorted(set(shards))}
        return Placed(counts, tuple(shards), 1)
    rank_counts: Counter[tuple[int, int]] = Counter()
    at: dict[tuple[int, int], tuple[int, int]] = {}
    for members in all_groups(strategy, groups.axes):
        for index, rank in enumerate(members):
            local, place = index % groups.per_node, place_of(strategy, rank)
            at[local, place] = shards[place], groups.leader_index(local)
            rank_counts[at[local, place]] += 1
    roles = {role: rank_counts[role] for role in sorted(rank_counts)}
    number = {role: index for index, role in enumerate(roles)}
    # Along a spatial axis some places of a node stand at some positions only; no rank asks for the others.
    positions = tuple(
        number[at[local, place]] if (local, place) in at else 0
        for local in range(groups.per_node)
        for place in range(len(shards))
    )
    return Placed(roles, positions, groups.per_node)
