"""What ghost layers sleep, and what a run of them leaves beside a real run's record (file ``ghost.json``).

A table is made of a profile by ``predict ghost`` and read by ``paradl-bench train --emulate``.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from paradl_bench.core.bounds import (
    Index,
    PositiveCount,
    Ratio,
    Relative,
    Seconds,
    Seed,
    Share,
    SignedRelative,
    SignedSeconds,
)
from paradl_bench.core.files.storage import decode_json
from paradl_bench.records.slow_rank import SlowRank

GHOST_FILE = "ghost.json"
GhostPhase = Literal["FW", "BW", "BW_input", "BW_weight"]
"""``BW_input`` and ``BW_weight`` where a schedule runs the parts of backward by themselves."""
_MOST = 95
"""Per cent of iterations, that the host takes so long at most: the upper end of a 90% interval."""


class GhostSpread(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a rank's iterations spread as a whole, of a run whose sleeps are drawn (:mod:`paradl_bench.emulation.draws`).

    Attributes:
        tied_quantiles: by how much all of a rank's compute is slower than in the mean, relative to it, at evenly spaced
            probabilities from 0 to 1.
        samples: how many measured iterations they rest on.

    Raises:
        ValueError: fewer than two quantiles, falling ones, one that leaves nothing of the compute, or no samples.
    """

    tied_quantiles: tuple[SignedRelative, ...]
    samples: PositiveCount

    def __post_init__(self) -> None:
        if len(self.tied_quantiles) < 2 or list(self.tied_quantiles) != sorted(self.tied_quantiles):
            raise ValueError("tied_quantiles has to hold at least two numbers that do not fall")
        if self.tied_quantiles[0] <= -1:
            raise ValueError(f"tied_quantiles has to be more than -1, not {self.tied_quantiles[0]}")


class DrawnSleeps(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the sleeps of a run were drawn with.

    Attributes:
        seed: of all draws; with it, rank and iteration say what was drawn.
        samples: as of :class:`GhostSpread`.
    """

    seed: Seed
    samples: PositiveCount


class GhostRole(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds that a rank of one role of the plan computes, undilated.

    Attributes:
        layers: by layer and phase; of a layer's shard where the rank holds one. What a layer is missing takes no time.
        between: by phase, one operation's share of the time between operations.
        update_s: the weight update.
        own_relative_sd: by layer and phase, the standard deviation of one run of it with its share of the time between
            operations, by itself, over its seconds; empty where sleeps do not spread.
        update_own_relative_sd: the same of the weight update.
    """

    layers: dict[str, dict[GhostPhase, Seconds]]
    between: dict[Literal["FW", "BW"], Seconds]
    update_s: Seconds
    own_relative_sd: dict[str, dict[GhostPhase, Relative]] = {}
    update_own_relative_sd: Relative = 0.0

    def seconds(self, layer: str, phase: GhostPhase, rounds: int = 1) -> float:
        """One run of a layer's phase, with its share of the time between operations; 0 of what the plan does not run.

        The parts of backward have their share of it each, as planned. A layer that runs in so many rounds has
        its share once for all of them.
        """
        alone_s = self.layers.get(layer, {}).get(phase)
        if alone_s is None:
            return 0.0
        return alone_s + self.between.get("FW" if phase == "FW" else "BW", 0.0) / rounds

    def relative_sd(self, layer: str, phase: GhostPhase) -> float:
        """How one run of a layer's phase spreads by itself, over its seconds; 0 where it does not."""
        return self.own_relative_sd.get(layer, {}).get(phase, 0.0)


class GhostTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every rank of a run sleeps, by the cost model that predicts the run.

    Attributes:
        profile: as it was given. profile_sha256: of its bytes.
        network_digest: of the network that the seconds are of.
        strategy, batch: of the plan; batch is the global mini-batch. options: what else decides it, by the names of
            commands' options (:func:`paradl_bench.emulation.table.options_of`); empty in tables of before.
        roles: distinct ones. role_of_rank: per rank, the index of its role.
        sources: share of a role's seconds by where they come from (``measured``, ``scaled``, ...), over all roles.
        extrapolated: in words, what no measurement covers.
        spread: of a run whose sleeps spread; None where they do not.
    """

    profile: str
    profile_sha256: str
    network_digest: str
    strategy: str
    batch: PositiveCount
    roles: tuple[GhostRole, ...]
    role_of_rank: tuple[Index, ...]
    sources: dict[str, Share] = {}
    extrapolated: tuple[str, ...] = ()
    spread: GhostSpread | None = None
    options: dict[str, str] = {}

    def __post_init__(self) -> None:
        if not self.role_of_rank or not all(0 <= role < len(self.roles) for role in self.role_of_rank):
            raise ValueError("role_of_rank has to give every rank one of the roles")

    def of_rank(self, rank: int) -> GhostRole:
        """What a rank sleeps."""
        return self.roles[self.role_of_rank[rank]]


class GhostRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an emulated run says of itself; every number in seconds an iteration, by phase (FW, BW, WU).

    Attributes:
        profile, profile_sha256: whose seconds were slept. dilate: how many times as long.
        slow_rank: the one that slept longer than the others by a factor; None where none did.
        drawn: with what single sleeps were drawn; None where each took what the profile says.
        slept_s: asked for on the rank that sleeps most, dilation included and nothing drawn; what a prediction takes
            for compute.
        framework_s: median iteration of rank 0 alone that sleeps nothing: what dispatching the layers takes the host,
            which stands in for a part of their sleep. Of a pipeline it is the whole model's, on all micro-batches, over
            the pipeline's ranks.
        oversleep_s: median iteration of rank 0 alone, less what was asked for: what of both is left beyond it.
        without_compute_s: median iteration of the slowest rank of all that sleep nothing: communication and framework.
            It is no phase, but the whole.
        host_s: the same of a strategy whose groups move nothing: what all ranks, at once, take this host's cores for
            besides communication; of it a run shows what no sleep hides. None where it was not measured.
        host_iteration_s: each of those iterations, on its slowest rank.
    """

    profile: str
    profile_sha256: str
    dilate: Ratio
    slept_s: dict[str, Seconds]
    framework_s: dict[str, Seconds]
    oversleep_s: dict[str, SignedSeconds]
    without_compute_s: SignedSeconds
    host_s: Seconds | None = None
    host_iteration_s: tuple[Seconds, ...] = ()
    slow_rank: SlowRank | None = None
    drawn: DrawnSleeps | None = None

    @property
    def host_at_most_s(self) -> float:
        """What the host takes in 95 of 100 iterations; 0 where it was not measured.

        Ranks that wait for each other wait for whichever the host holds up, as each iteration's slowest rank tells.
        """
        return float(np.percentile(self.host_iteration_s or (self.host_s or 0.0,), _MOST))

    @property
    def overhead(self) -> float:
        """The framework's time on one rank, relative to what is slept; 0 where nothing is slept."""
        slept = sum(self.slept_s.values())
        return sum(self.framework_s.values()) / slept if slept else 0.0


def read_table(content: bytes, where: str) -> GhostTable:
    """Read and validate a table; the message begins with ``where``.

    Raises:
        UserError: no table, or a wrong field (named by its path).
    """
    return decode_json(content, GhostTable, where=where)
