"""Clusters as nested levels, from the inside out (inside a node, inside a rack, between racks)."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from paradl_bench.core.bounds import PositiveEstimatedBytes, PositiveRate, Ranks, Seconds, SecondsPerByte, Slowdown
from paradl_bench.core.errors import UserError

NODE = "node"
"""Name of the innermost level, whose ranks share a host."""
RACK, SYSTEM = "rack", "system"
"""Names of a measured group's level where its ranks are on several hosts: of one rack, or of any."""


class Level(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One level of the network.

    Attributes:
        name: ``node``, ``rack``, ``system``; a profile's communication fits carry the same names.
        ranks: how many ranks one unit of this level holds.
        alpha_s, beta_s_per_byte: start-up and per-byte time, where the cluster file states them (else the profile).
        contention: phi, flows that share this level's bottleneck link; multiplies beta. None where nobody stated it:
            then what the profile measured of groups at once, else what is assumed.
    """

    name: str
    ranks: Ranks
    alpha_s: Seconds | None = None
    beta_s_per_byte: SecondsPerByte | None = None
    contention: Slowdown | None = None


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A machine to predict for: its levels from the inside out and the memory of one rank."""

    name: str
    levels: tuple[Level, ...]
    memory_bytes_per_rank: PositiveEstimatedBytes | None = None

    def __post_init__(self) -> None:
        if not self.levels:
            raise ValueError(f"cluster {self.name!r} has no levels")
        names = [level.name for level in self.levels]
        if len(set(names)) != len(names):
            raise ValueError(f"two levels of cluster {self.name!r} have one name; communication is looked up by it")
        for inner, outer in zip(self.levels, self.levels[1:], strict=False):
            if outer.ranks < inner.ranks:
                raise ValueError(f"level {outer.name!r} holds fewer ranks than {inner.name!r} inside it")

    def level_of(self, ranks: int) -> Level:
        """The innermost level that holds ``ranks`` ranks placed side by side: the slowest that a flat ring crosses.

        Raises:
            UserError: the cluster holds fewer ranks.
        """
        for level in self.levels:
            if ranks <= level.ranks:
                return level
        raise UserError(f"{ranks} ranks do not fit cluster {self.name!r}, which holds {self.levels[-1].ranks}")

    @property
    def ranks_per_node(self) -> int:
        """Ranks of the innermost level, which share a host."""
        return self.levels[0].ranks


def nested(innermost: Level, outer: Iterable[Level]) -> tuple[Level, ...]:
    """Measured levels from the inside out: by the ranks that they were measured on, a rack before the system.

    A level that was measured on fewer ranks than the one inside it holds as many as that.
    """
    known = {level.name: level for level in outer}
    in_rack = known[RACK].ranks if RACK in known else 0

    def size(level: Level) -> tuple[int, bool]:
        return max(level.ranks, in_rack if level.name == SYSTEM else 0), level.name == SYSTEM

    levels = [innermost]
    for level in sorted(known.values(), key=size):
        levels.append(msgspec.structs.replace(level, ranks=max(level.ranks, levels[-1].ranks)))
    return tuple(levels)


class ClusterFile(Cluster, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cluster as a person describes it, with its device; a profile knows its devices itself.

    Attributes:
        device_name: as in the profile of such a device. Predicting from a profile of another one needs both rates.
        peak_flops, memory_bandwidth_bytes_per_s: what one rank sustains, in the dtype that is trained in.
    """

    device_name: str | None = None
    peak_flops: PositiveRate | None = None
    memory_bandwidth_bytes_per_s: PositiveRate | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.device_name is not None and not self.device_name.strip():
            raise ValueError(f"cluster {self.name!r}: device_name is empty: name the device, or leave it out")
        for label in ("peak_flops", "memory_bandwidth_bytes_per_s"):
            if getattr(self, label) is not None and not self.device_name:
                raise ValueError(f"cluster {self.name!r}: {label} is of a device: state its device_name as well")
