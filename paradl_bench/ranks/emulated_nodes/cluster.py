"""An emulated cluster for the length of a run: its nodes, and what a launcher does with them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from paradl_bench.core.terminal.command_line import say
from paradl_bench.ranks.emulated_nodes.layout import INTERFACE, NodeLayout
from paradl_bench.ranks.emulated_nodes.links import connect
from paradl_bench.ranks.emulated_nodes.namespaces import Namespace, NoNamespaces, new_namespace
from paradl_bench.ranks.emulated_nodes.time_slices import short_time_slices
from paradl_bench.records.emulation import EmulatedNodes

NODE_NAME = "PARADL_EMULATED_NODE"
RECORD = "PARADL_EMULATED_NODES"
"""Variables that a launcher sets for a rank: its node's name, and what the environment records of all nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedCluster:
    """Nodes that are up.

    Attributes:
        namespaces: one a node; empty where there is one level alone.
    """

    layout: NodeLayout
    record: EmulatedNodes
    namespaces: tuple[Namespace, ...]

    def entered(self, rank: int) -> contextlib.AbstractContextManager[None]:
        """Have the sockets and processes that are made in the body on the node of a rank."""
        if not self.namespaces:
            return contextlib.nullcontext()
        return self.namespaces[self.layout.node_of(rank)].entered()

    def variables(self, rank: int) -> dict[str, str]:
        """What a rank is told of its node."""
        record = {RECORD: msgspec.json.encode(self.record).decode()}
        if not self.namespaces:
            return record
        return record | {
            # torch warns of every address that has no name, as those of the nodes have none.
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
            NODE_NAME: self.layout.name(self.layout.node_of(rank)),
            "LOCAL_RANK": str(self.layout.local_rank(rank)),
            "LOCAL_WORLD_SIZE": str(self.layout.ranks_per_node),
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }


@contextlib.contextmanager
def emulated_cluster(layout: NodeLayout | None) -> Iterator[EmulatedCluster | None]:
    """Bring up the nodes of a layout, gone after the body; None for None.

    Where namespaces can't be made all ranks share one level, which is said and recorded.

    Raises:
        WorkError: they can be made and not be joined: ``ip`` or ``tc`` is missing or fails.
    """
    if layout is None:
        yield None
        return
    with contextlib.ExitStack() as stack:
        cluster = _brought_up(layout, stack)
        say(f"emulated: {cluster.record.words}")
        yield cluster


def _brought_up(layout: NodeLayout, stack: contextlib.ExitStack) -> EmulatedCluster:
    nodes: list[Namespace] = []
    shaping = one_level = ""
    try:
        # One more than nodes, for the switches.
        switch, *nodes = [stack.enter_context(new_namespace()) for _ in range(layout.nodes + 1)]
    except NoNamespaces as error:
        one_level = str(error)
    else:
        shaping = connect(layout, switch, nodes)
    record = EmulatedNodes(
        nodes=layout.nodes,
        ranks_per_node=layout.ranks_per_node,
        link_bytes_per_s=layout.link_bytes_per_s,
        racks=layout.racks,
        shaping=shaping,
        one_level=one_level,
        time_slice_ms=stack.enter_context(short_time_slices()),
    )
    return EmulatedCluster(layout=layout, record=record, namespaces=tuple(nodes))


def nodes_of_rank() -> EmulatedNodes | None:
    """The emulated nodes among which this process is a rank; None where it is on none."""
    text = os.environ.get(RECORD)
    return None if text is None else msgspec.json.decode(text, type=EmulatedNodes)
