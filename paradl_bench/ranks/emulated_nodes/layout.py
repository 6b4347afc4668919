"""How ranks are laid on emulated nodes, as options ask for it."""

from __future__ import annotations

import math

import msgspec

from paradl_bench.core.errors import UserError
from paradl_bench.core.units import is_whole, parse_bandwidth
from paradl_bench.records.emulation import EmulatedRacks

INTERFACE = "eth0"
"""Of a node's link, as the ranks on it see it."""
TOP_SWITCH = "switch"
"""The switch that joins all nodes, or all racks."""
_LEAST_BYTES_PER_S, _MOST_BYTES_PER_S = 1e3, 100e9


class NodeLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks on nodes, numbered node by node, equally many on each.

    Attributes:
        link_bytes_per_s: of each node's link, in either direction.
        racks: that hold the nodes, one rack after the other; None where all nodes are on one switch.
    """

    nodes: int
    ranks_per_node: int
    link_bytes_per_s: float
    racks: EmulatedRacks | None = None

    @property
    def ranks(self) -> int:
        """Of all nodes."""
        return self.nodes * self.ranks_per_node

    @property
    def slowest_bytes_per_s(self) -> float:
        """Of all links."""
        return min(self.link_bytes_per_s, self.racks.uplink_bytes_per_s if self.racks else self.link_bytes_per_s)

    def __str__(self) -> str:
        nodes = f"{self.racks.count}x{self.nodes // self.racks.count}" if self.racks else f"{self.nodes}"
        return f"{nodes}x{self.ranks_per_node}"

    def switch_of(self, node: int) -> str:
        """The name of the switch that a node is on: its rack's, or that of all nodes."""
        return f"rack{node * self.racks.count // self.nodes}" if self.racks else TOP_SWITCH

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
    nodes: str | None, ranks_per_node: int | None, link_bandwidth: str | None, *, ranks: int | None
) -> NodeLayout | None:
    """What ``--nodes``, ``--ranks-per-node`` and ``--link-bandwidth`` ask for; None without ``--nodes``.

    Args:
        nodes: how many, as ``4``; or racks, and the nodes of each, as ``2x2``.
        link_bandwidth: of each node's link, and of each rack's uplink where there are racks, as ``1Gbit/s,200Mbit/s``.
        ranks: that the run takes; None where nodes and ranks on each say how many.

    Raises:
        UserError: options that do not go together; the message says what would be right.
    """
    if nodes is None:
        if link_bandwidth is not None:
            raise UserError("--link-bandwidth is for emulated nodes: give --nodes too, at least 1")
        return None
    racks, count = _racks_and_nodes(nodes)
    if ranks is not None and count > ranks:
        runs = "1 rank" if ranks == 1 else f"{ranks} ranks"
        raise UserError(f"--nodes {nodes}: the run has {runs}, fewer than nodes: give --nodes {ranks}, or more ranks")
    rates = _rates(nodes, racks, link_bandwidth)
    if ranks_per_node is None and ranks is not None and ranks % count == 0:
        ranks_per_node = ranks // count
    if ranks_per_node is None:
        of = "" if ranks is None else f", which {ranks} ranks do not fill equally"
        raise UserError(f"--nodes {nodes}{of}: say with --ranks-per-node how many ranks each holds")
    layout = NodeLayout(
        nodes=count,
        ranks_per_node=ranks_per_node,
        link_bytes_per_s=rates[0],
        racks=EmulatedRacks(count=racks, uplink_bytes_per_s=rates[1]) if racks else None,
    )
    if ranks is not None and layout.ranks != ranks:
        raise UserError(
            f"--nodes {nodes} --ranks-per-node {ranks_per_node} hold {layout.ranks} ranks; the run takes {ranks}"
        )
    return layout


def _racks_and_nodes(text: str) -> tuple[int, int]:
    """Racks, 0 where there are none, and the nodes of all."""
    numbers = [int(part) if is_whole(part) else 0 for part in text.split("x")]
    if not all(numbers) or len(numbers) > len(("racks", "nodes")):
        raise UserError(f"--nodes {text}: give how many nodes, as 4, or how many racks and nodes in each, as 2x2")
    return (numbers[0] if len(numbers) > 1 else 0), math.prod(numbers)


def _rates(nodes: str, racks: int, text: str | None) -> list[float]:
    """Bytes/s of each node's link, and of each rack's uplink."""
    wanted, example = "the rate of each node's link", "--link-bandwidth 1Gbit/s"
    if racks:
        wanted, example = "the rates of each node's link and each rack's uplink", f"{example},200Mbit/s"
    if text is None:
        raise UserError(f"--nodes {nodes}: give {wanted} as well, as {example}")
    rates = [parse_bandwidth(rate, "--link-bandwidth") for rate in text.split(",")]
    if len(rates) != (2 if racks else 1):
        raise UserError(f"--nodes {nodes}: give {wanted}, as {example}; --link-bandwidth has {len(rates)}")
    if not all(_LEAST_BYTES_PER_S <= rate <= _MOST_BYTES_PER_S for rate in rates):
        # A token bucket cannot be told less; a loopback does not move more.
        raise UserError(f"--link-bandwidth {text}: give a rate from 1kB/s to 100GB/s")
    return rates
