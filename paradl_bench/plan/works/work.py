"""What every kind of work says of itself; those who plan, price, simulate and show works ask for nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntEnum
from typing import ClassVar

import msgspec


class Sort(Enum):
    """What a work occupies a rank with.

    ``COMPUTE`` is what a ghost sleeps. ``COPY`` moves what the model holds. A ``TIMER`` and ``INPUT`` count neither as
    compute nor as communication.
    """

    COMPUTE = "compute"
    COPY = "copy"
    TIMER = "timer"
    INPUT = "input"
    COMMUNICATION = "communication"


class Phase(IntEnum):
    """Phases of an iteration."""

    FW = 0
    BW = 1
    GE = 2
    WU = 3
    IO = 4
    H2D = 5


class Stream(IntEnum):
    """What a task occupies on its role; tasks of one stream run one at a time, in the plan's order."""

    COMPUTE = 0
    COMMUNICATION = 1
    COPY = 2
    INPUT = 3
    COPY_ENGINE = 4


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What a task does; each kind is a subclass, whose fields tell one work of the kind from another.

    Attributes:
        kind: its name, in the words of a report. sort: what it occupies a rank with.
        meets: whether it is over for all of its ranks at once, so that they are level afterwards.
        sizes: the fields that say how much it is, which a person asks for.
    """

    kind: ClassVar[str]
    sort: ClassVar[Sort]
    meets: ClassVar[bool] = False
    sizes: ClassVar[tuple[str, ...]] = ()

    @property
    def label(self) -> str:
        """What this one is called in a trace or a ledger."""
        return self.kind

    @property
    def way(self) -> str:
        """``FW``, ``BW`` or ``WU``: to which part of computing it belongs; empty for what does not compute."""
        return ""

    def on_other_stage(self, layers: Mapping[str, str], cuts: Mapping[int, int]) -> Work:
        """The same of another rank's stages; ``layers`` has names there by those here, ``cuts`` numbers of cuts."""
        return self

    @property
    def details(self) -> dict[str, str | int]:
        """What a person asks of it: its shapes and bytes."""
        return {name: getattr(self, name) for name in self.sizes}

    @property
    def is_of_layer(self) -> bool:
        """Whether it is communication for a layer, where it stands in forward or backward."""
        return False

    @property
    def name_in_breakdowns(self) -> str:
        """As what its exposed seconds are listed, where it stands in forward or backward; empty for nothing apart."""
        return ""

    @property
    def category(self) -> str:
        """What a trace colours it by in forward and backward; empty for the phase itself."""
        return self.name_in_breakdowns


class Communication(Work, frozen=True, kw_only=True):
    """What a rank does together with others.

    Attributes:
        axes: indices of the strategy's axes that its ranks lie along; 0 is the outermost.
    """

    sort: ClassVar[Sort] = Sort.COMMUNICATION

    axes: tuple[int, ...] = (0,)

    @property
    def is_of_layer(self) -> bool:
        """Of all kinds that do not say otherwise."""
        return True

    @property
    def group(self) -> tuple[tuple[int, ...], str, int]:
        """Axes, scope and ranks along them on a node: equal for works among the same ranks."""
        return self.axes, "group", 0

    @property
    def messages(self) -> tuple[tuple[str, int], ...]:
        """(operation, bytes) of each call that it is made of."""
        raise NotImplementedError
