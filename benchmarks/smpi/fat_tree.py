"""A three-level fat tree for SimGrid, with 1:3 oversubscription above the racks, and who runs where.

SimGrid's FAT_TREE routes by destination (D-mod-k), so that flows may meet on one uplink while another is idle. Ranks of
a node talk over its loopback, which flows do not share; a node's own link is shared by all of its ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from xml.sax.saxutils import quoteattr

from paradl_bench.records.cluster import NODE, ClusterFile, Level

RACK = "rack"
POD = "pod"
SYSTEM = "system"


@dataclass(frozen=True, slots=True, kw_only=True)
class FatTree:
    """The simulated machine.

    Attributes:
        nodes_per_rack: below a leaf switch; uplinks: links from there to the switches of its pod, a third as many.
            Racks and pods are so small that sweeps on 64 ranks reach over all levels: of links that nobody measured
            there is nothing to predict from.
        racks_per_pod: and as many links from each switch of a pod to the core, so that only leaves are oversubscribed.
        pods: how many.
        bandwidth_bytes_per_s, latency_s: of every link, such that exchanges take about as long as layers that CPUs
            compute; loopback_*: within a node.
    """

    ranks_per_node: int = 4
    nodes_per_rack: int = 3
    uplinks: int = 1
    racks_per_pod: int = 2
    pods: int = 43
    bandwidth_bytes_per_s: float = 1.25e9
    latency_s: float = 1e-6
    loopback_bandwidth_bytes_per_s: float = 5e9
    loopback_latency_s: float = 0.5e-6

    def __post_init__(self) -> None:
        counts = (self.ranks_per_node, self.nodes_per_rack, self.uplinks, self.racks_per_pod, self.pods)
        if min(counts) < 1:
            raise ValueError(f"a fat tree has at least one of each part, not {counts}")
        amounts = (self.bandwidth_bytes_per_s, self.loopback_bandwidth_bytes_per_s)
        if not all(0 < amount < math.inf for amount in amounts):
            raise ValueError(f"bandwidths have to be above 0, not {amounts}")
        if not all(0 <= latency < math.inf for latency in (self.latency_s, self.loopback_latency_s)):
            raise ValueError(f"latencies have to be at least 0, not {self.latency_s} and {self.loopback_latency_s}")

    @property
    def nodes(self) -> int:
        """Of the whole machine."""
        return self.nodes_per_rack * self.racks_per_pod * self.pods

    @property
    def ranks(self) -> int:
        """Of the whole machine."""
        return self.nodes * self.ranks_per_node

    @property
    def oversubscription(self) -> float:
        """Nodes of a rack over the links that leave it."""
        return self.nodes_per_rack / self.uplinks

    @property
    def levels(self) -> tuple[Level, ...]:
        """From the inside out, with how many ranks a unit of each holds."""
        rack = self.ranks_per_node * self.nodes_per_rack
        return (
            Level(name=NODE, ranks=self.ranks_per_node),
            Level(name=RACK, ranks=rack),
            Level(name=POD, ranks=rack * self.racks_per_pod),
            Level(name=SYSTEM, ranks=self.ranks),
        )

    def level_of(self, span: int) -> str:
        """Name of the innermost level that holds so many ranks side by side."""
        return next(level.name for level in self.levels if span <= level.ranks)

    def cluster(self) -> ClusterFile:
        """As the cluster file of a person who knows the machine's shape, and nothing of its speed."""
        return ClusterFile(name="fat tree", levels=self.levels)

    def platform_xml(self) -> str:
        """SimGrid's platform file."""
        shape = ((self.nodes_per_rack, self.racks_per_pod, self.pods), (1, self.uplinks, self.racks_per_pod), (1, 1, 1))
        attributes = {
            "id": "fat-tree",
            "prefix": "node-",
            "suffix": "",
            "radical": f"0-{self.nodes - 1}",
            "speed": "1Gf",
            "bw": f"{self.bandwidth_bytes_per_s:.17g}Bps",
            "lat": f"{self.latency_s:.17g}s",
            "loopback_bw": f"{self.loopback_bandwidth_bytes_per_s:.17g}Bps",
            "loopback_lat": f"{self.loopback_latency_s:.17g}s",
            "topology": "FAT_TREE",
            "topo_parameters": ";".join(["3", *(",".join(map(str, row)) for row in shape)]),
            "sharing_policy": "SPLITDUPLEX",
        }
        told = " ".join(f"{name}={quoteattr(value)}" for name, value in attributes.items())
        return (
            "<?xml version='1.0'?>\n"
            '<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">\n'
            f'<platform version="4.1">\n  <cluster {told}/>\n</platform>\n'
        )

    def host_file(self, ranks: int, processes: int = 1) -> str:
        """Nodes of the first ``ranks`` ranks side by side, each rank of so many processes.

        Raises:
            ValueError: more ranks than the machine has.
        """
        if ranks > self.ranks:
            raise ValueError(f"{ranks} ranks do not fit {self.nodes} nodes of {self.ranks_per_node}")
        return "".join(f"node-{rank // self.ranks_per_node}\n" * processes for rank in range(ranks))
