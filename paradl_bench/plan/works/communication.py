"""What ranks do together: collectives, halos of neighbours, and what crosses a pipeline's cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import msgspec

from paradl_bench.plan.works.work import Communication

Scope = Literal["group", "node", "between nodes"]


class Collective(Communication, frozen=True, kw_only=True, tag="collective"):
    """A collective over a group of ``ranks`` ranks that starts when the last of them arrives.

    Attributes:
        message_bytes: as the operation defines it: the whole buffer of all_reduce and broadcast, a rank's own part of
            all_gather and reduce_scatter.
        scope: all ranks along the axes; those of them on one node; or those that stand at one place of each node.
        per_node: ranks along the axes on a node, where ``scope`` is not the whole group.
        known_bytes: of an all-to-all, the message that does not depend on other ranks, where others may send more; 0
            where that is the message.
    """

    kind: ClassVar[str] = "collective"
    meets: ClassVar[bool] = True

    operation: str
    message_bytes: int
    ranks: int
    scope: Scope = "group"
    per_node: int = 0
    known_bytes: int = 0

    @property
    def label(self) -> str:
        """The operation."""
        return self.operation

    @property
    def details(self) -> dict[str, str | int]:
        """Bytes, ranks, and which of them where it is not all."""
        scope = {} if self.scope == "group" else {"reach": self.scope}
        return {"bytes": self.message_bytes, "ranks": self.ranks, **scope}

    @property
    def is_of_layer(self) -> bool:
        """All but the broadcast of buffers."""
        return self.operation != "broadcast"

    @property
    def name_in_breakdowns(self) -> str:
        """The operation, of a layer's."""
        return self.operation if self.is_of_layer else ""

    @property
    def category(self) -> str:
        """The operation, of buffers too."""
        return self.operation

    @property
    def group(self) -> tuple[tuple[int, ...], str, int]:
        """With its scope."""
        return self.axes, self.scope, self.per_node

    @property
    def messages(self) -> tuple[tuple[str, int], ...]:
        """One call."""
        return ((self.operation, self.known_bytes or self.message_bytes),)


class HaloExchange(Communication, frozen=True, kw_only=True, tag="halo_exchange"):
    """Messages between ranks that own neighbouring positions, all under way at once.

    Attributes:
        sends_bytes, receives_bytes: of each message that this role sends and receives.
    """

    kind: ClassVar[str] = "halo exchange"
    meets: ClassVar[bool] = True

    sends_bytes: tuple[int, ...]
    receives_bytes: tuple[int, ...]

    @property
    def details(self) -> dict[str, str | int]:
        """Bytes in both directions."""
        return {"bytes": sum(self.sends_bytes), "received_bytes": sum(self.receives_bytes)}

    @property
    def name_in_breakdowns(self) -> str:
        """Of all halos together."""
        return "halo"

    @property
    def messages(self) -> tuple[tuple[str, int], ...]:
        """One call a message."""
        return tuple(("send_recv", size) for size in (*self.sends_bytes, *self.receives_bytes))


class Transfer(Communication, frozen=True, kw_only=True, tag="transfer"):
    """What crosses one cut of a pipeline for one micro-batch: activations forward, their gradients backward.

    Or, once an iteration, gradients of parameters that stages share, from a rank that holds them to another one. The
    sender's task takes the time of the messages; the receiver's takes none, and waits until the matching send is done:
    the n-th receive of a cut and a phase matches its n-th send.

    Attributes:
        cut: index of the stage in front of the cut; of shared parameters, the sender's place along the pipeline.
        message_bytes: of each value that crosses.
        to: of shared parameters, the receiver's place; -1 for what crosses a cut.
    """

    kind: ClassVar[str] = "transfer"

    direction: Literal["send", "receive"]
    phase: Literal["FW", "BW"]
    cut: int
    message_bytes: tuple[int, ...]
    to: int = -1

    def on_other_stage(self, layers: Mapping[str, str], cuts: Mapping[int, int]) -> Transfer:
        """Across the cut there."""
        return msgspec.structs.replace(self, cut=cuts[self.cut])

    @property
    def label(self) -> str:
        """What is sent or received."""
        if self.to >= 0:
            return f"{self.direction} gradients of shared parameters"
        return f"{self.direction} {'activations' if self.phase == 'FW' else 'gradients'}"

    @property
    def details(self) -> dict[str, str | int]:
        """Bytes, and where they cross."""
        where = {"cut": self.cut} if self.to < 0 else {"from_place": self.cut, "to_place": self.to}
        return {"bytes": sum(self.message_bytes), **where}

    @property
    def category(self) -> str:
        """Its kind."""
        return self.kind

    @property
    def messages(self) -> tuple[tuple[str, int], ...]:
        """One call a value."""
        return tuple(("send_recv", size) for size in self.message_bytes)
