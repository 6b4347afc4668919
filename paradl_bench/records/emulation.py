"""What of a measurement was not real, which its environment records.

Nodes that share one host, layers that sleep, messages that a simulator computed.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from paradl_bench.core.bounds import Count, PositiveRate, Ranks, Ratio
from paradl_bench.core.units import format_bandwidth

GHOSTS = "ghosts"
"""Name of what stands for compute beside and before calls, where layers are to sleep."""
LINUX_TIME_SLICE_MS = 100
"""What ``SCHED_RR`` gives a thread unless told otherwise."""


class EmulatedRacks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Racks of emulated nodes, equally many in each: nodes of one share a switch, and an uplink to all other racks.

    Attributes:
        uplink_bytes_per_s: rate asked for of each rack's uplink, in either direction.
    """

    count: Ranks
    uplink_bytes_per_s: PositiveRate


class EmulatedNodes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nodes that were network namespaces of one host, each with a link to a switch.

    Attributes:
        nodes, ranks_per_node: as asked for. Measurements of one emulated cluster may differ in them, as those of a real
            one do; of different clusters in the rest.
        link_bytes_per_s: rate asked for of each node's link, in either direction; what is reached is measured.
        racks: that the nodes are in; None where all share one switch.
        shaping: how links were held to it; empty where they were not.
        one_level: why there were no nodes apart; empty where there were. All ranks then shared the host's loopback.
        time_slice_ms: how long a thread of a rank keeps a core that other ranks wait for; Linux's own in older records.

    Raises:
        ValueError: both or neither of ``shaping`` and ``one_level``, or racks that nodes do not fill equally.
    """

    nodes: Ranks
    ranks_per_node: Ranks
    link_bytes_per_s: PositiveRate
    racks: EmulatedRacks | None = None
    shaping: str = ""
    one_level: str = ""
    time_slice_ms: Count = LINUX_TIME_SLICE_MS

    def __post_init__(self) -> None:
        if bool(self.shaping) == bool(self.one_level):
            raise ValueError("emulated nodes have links that are shaped, or say why there is one level")
        if self.racks is not None and self.nodes % self.racks.count:
            raise ValueError(f"{self.nodes} nodes do not fill {self.racks.count} racks equally")

    @property
    def nodes_per_rack(self) -> int:
        """Of each rack; 0 without racks."""
        return 0 if self.racks is None else self.nodes // self.racks.count

    def in_one_rack(self, ranks: Iterable[int]) -> bool:
        """Whether all of some ranks are in one rack; never without racks."""
        of_rack = self.nodes_per_rack * self.ranks_per_node
        return of_rack > 0 and len({rank // of_rack for rank in ranks}) == 1

    @property
    def ranks(self) -> int:
        """Of all nodes."""
        return self.nodes * self.ranks_per_node

    @property
    def kind(self) -> str:
        """What measurements have to share to be of one emulated cluster, in words."""
        slices = f", time slices of {self.time_slice_ms} ms" if self.time_slice_ms != LINUX_TIME_SLICE_MS else ""
        if self.one_level:
            return f"nodes on one level ({self.one_level}){slices}"
        uplinks = f", racks with uplinks of {format_bandwidth(self.racks.uplink_bytes_per_s)}" if self.racks else ""
        return f"nodes with links of {format_bandwidth(self.link_bytes_per_s)}{uplinks} ({self.shaping}){slices}"

    @property
    def words(self) -> str:
        """In a line."""
        nodes = f"{self.racks.count} x {self.nodes_per_rack}" if self.racks else f"{self.nodes}"
        return f"{nodes} x {self.ranks_per_node} ranks, {self.kind}"


class EmulatedLayers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layers that slept instead of computing (:mod:`paradl_bench.emulation`).

    Attributes:
        profile_sha256: of the profile's file that said for how long.
        dilate: how many times as long as it said.
        slow_rank: one rank that slept longer than the others by a factor, as ``FACTOR@RANK``; empty where none did.
        spread: whether single sleeps were drawn as the profile's samples spread.
    """

    profile_sha256: str
    dilate: Ratio = 1.0
    slow_rank: str = ""
    spread: bool = False

    @property
    def kind(self) -> str:
        """What measurements have to share to be alike, in words."""
        slow = f", slow rank {self.slow_rank}" if self.slow_rank else ""
        drawn = ", drawn as its samples spread" if self.spread else ""
        profile = self.profile_sha256[:12]
        return f"layers that sleep {self.dilate:g} times as long as profile {profile} says{drawn}{slow}"


class SimulatedMessages(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Messages that went over no link: a simulator computed what they take.

    Attributes:
        simulator: which, with its version.
        platform: what it simulated, in words.
        platform_sha256: of all that it was told of that, its settings included.

    Raises:
        ValueError: one of them is empty.
    """

    simulator: str
    platform: str
    platform_sha256: str

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not getattr(self, name):
                raise ValueError(f"simulated messages say of which {name}")

    @property
    def kind(self) -> str:
        """What measurements have to share to be of one simulated cluster, in words."""
        return f"messages simulated by {self.simulator}: {self.platform} (platform {self.platform_sha256[:12]})"


class Emulation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was emulated, or simulated.

    Raises:
        ValueError: nothing was, or messages between emulated nodes, which are sent, were simulated.
    """

    nodes: EmulatedNodes | None = None
    layers: EmulatedLayers | None = None
    messages: SimulatedMessages | None = None

    def __post_init__(self) -> None:
        if self.nodes is None and self.layers is None and self.messages is None:
            raise ValueError("an emulation says what was emulated: nodes, layers, messages")
        if self.nodes is not None and self.messages is not None:
            raise ValueError("messages between emulated nodes are sent, not simulated: give one of nodes and messages")

    @property
    def kind(self) -> str:
        """What measurements have to share to be alike, in words."""
        return "; ".join(part.kind for part in (self.nodes, self.layers, self.messages) if part is not None)

    @property
    def words(self) -> str:
        """In a line."""
        words = [] if self.nodes is None else [self.nodes.words]
        return "; ".join([*words, *(part.kind for part in (self.layers, self.messages) if part is not None)])

    @property
    def computing(self) -> Emulation | bool:
        """The same with layers that compute; false where nothing else was emulated."""
        if self.nodes is None and self.messages is None:
            return False
        return msgspec.structs.replace(self, layers=None)


def emulated_nodes(emulated: Emulation | bool) -> EmulatedNodes | None:
    """The nodes that were emulated apart from each other; None where there were none, or one level alone."""
    nodes = emulated.nodes if isinstance(emulated, Emulation) else None
    return None if nodes is None or nodes.one_level else nodes


def simulated_messages(emulated: Emulation | bool) -> SimulatedMessages | None:
    """The messages that a simulator computed; None where they were sent."""
    return emulated.messages if isinstance(emulated, Emulation) else None


def words_of_emulation(emulated: Emulation | bool) -> str:
    """What was emulated, in a line; empty for what was real."""
    return emulated.words if isinstance(emulated, Emulation) else ""


def kind_of_emulation(emulated: Emulation | bool) -> str:
    """What measurements have to share to be alike; ``no`` for what was real."""
    return emulated.kind if isinstance(emulated, Emulation) else "no"
