"""How ranks are laid on emulated nodes, as options ask for it."""

from __future__ import annotations

import msgspec

from paradl_bench.core.errors import UserError
from paradl_bench.core.units import parse_bandwidth

INTERFACE = "eth0"
"""Of a node's link, as the ranks on it see it."""
_LEAST_BYTES_PER_S, _MOST_BYTES_PER_S = 1e3, 100e9


class NodeLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks on nodes, numbered node by node, equally many on each.

    Attributes:
        link_bytes_per_s: of each node's link, in either direction.
    """

    nodes: int
    ranks_per_node: int
    link_bytes_per_s: float

    @property
    def ranks(self) -> int:
        """Of all nodes."""
        return self.nodes * self.ranks_per_node

    def __str__(self) -> str:
        return f"{self.nodes}x{self.ranks_per_node}"

    def node_of(self, rank: int) -> int:
        """The node that holds a rank."""
        return rank // self.ranks_per_node

    def local_rank(self, rank: int) -> int:
        """The rank's number on its node."""
        return rank % self.ranks_per_node

    def address(self, node: int) -> str:
        """IPv4 address of a node, in a network of the emulated cluster's own."""
        return f"10.0.{(node + 1) // 256}.{(node + 1) % 256}"

    @staticmethod
    def name(node: int) -> str:
        """What a node is called where hosts are named."""
        return f"node{node}"


def layout_of_options(
    nodes: int | None, ranks_per_node: int | None, link_bandwidth: str | None, *, ranks: int | None
) -> NodeLayout | None:
    """What ``--nodes``, ``--ranks-per-node`` and ``--link-bandwidth`` ask for; None without ``--nodes``.

    Args:
        ranks: that the run takes; None where nodes and ranks on each say how many.

    Raises:
        UserError: options that do not go together; the message says what would be right.
    """
    if nodes is None:
        if link_bandwidth is not None:
            raise UserError("--link-bandwidth is of emulated nodes: give --nodes as well, at least 1")
        return None
    if ranks is not None and nodes > ranks:
        runs = "1 rank" if ranks == 1 else f"{ranks} ranks"
        raise UserError(f"--nodes {nodes}: the run has {runs}, fewer than nodes: give --nodes {ranks}, or more ranks")
    if link_bandwidth is None:
        raise UserError(f"--nodes {nodes}: give the rate of each node's link as well, as --link-bandwidth 1Gbit/s")
    if ranks_per_node is None and ranks is not None and ranks % nodes == 0:
        ranks_per_node = ranks // nodes
    if ranks_per_node is None:
        of = "" if ranks is None else f", which {ranks} ranks do not fill equally"
        raise UserError(f"--nodes {nodes}{of}: say with --ranks-per-node how many ranks each holds")
    rate = parse_bandwidth(link_bandwidth, "--link-bandwidth")
    if not _LEAST_BYTES_PER_S <= rate <= _MOST_BYTES_PER_S:
        # A token bucket cannot be told less; a loopback does not move more.
        raise UserError(f"--link-bandwidth {link_bandwidth}: give a rate from 1kB/s to 100GB/s")
    layout = NodeLayout(nodes=nodes, ranks_per_node=ranks_per_node, link_bytes_per_s=rate)
    if ranks is not None and layout.ranks != ranks:
        raise UserError(
            f"--nodes {nodes} --ranks-per-node {ranks_per_node} hold {layout.ranks} ranks; the run takes {ranks}"
        )
    return layout
