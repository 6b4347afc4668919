"""Settings of a plan beside its strategy: buckets, schedule, micro-batches, recomputation, exchange between nodes."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from paradl_bench.core.bounds import MOST_BYTES, MOST_MICRO_BATCHES, Bytes, MicroBatches, PositiveCount, Ranks
from paradl_bench.core.errors import UserError

RECOMPUTE_ALL = ("all",)
"""``PlanSettings.recompute`` of every block that the network's names tell."""

_EXCHANGES = re.compile("flat|leader|leaders:[1-9][0-9]{0,5}|segmented")


class PlanSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What, besides the network and the strategy, decides a plan.

    Attributes:
        batch: global mini-batch.
        optimizer: ``sgd`` (with momentum) or ``adam``.
        first_bucket_bytes, bucket_cap_bytes: DDP's bucket limits (torch's defaults).
        batch_norm: statistics of each rank's own samples and positions, or synchronised over all ranks.
        micro_batches: of a pipeline; None for as many as it has ranks.
        schedule: of a pipeline, by name.
        stages: the first layer of every stage of a pipeline but the first; empty for a cut that balances FLOPs.
        cut_by: what ``stages`` balance where they were found and not given, in words.
        accumulate: micro-batches that a rank goes through before gradients are exchanged and weights updated, where
            there is no pipeline.
        recompute: modules, patterns of them or slices of sequences whose activations are not kept but computed again in
            backward (:mod:`~paradl_bench.strategies.passes.recomputation`); :data:`RECOMPUTE_ALL` for all blocks, empty
            for none.
        split: names or patterns (``features.*``) of the layers that filter, channel and tensor parallelism split; empty
            for all that can be.
        filter_backward: how filter parallelism sums the gradients of layers' inputs: all of them on each rank, or its
            part where it needs no more.
        spatial_until: name of the layer before which blocks of positions are gathered; None for as late as possible.
        exchange: of gradients: ``flat``, as DDP's; by a ``leader`` of each node, by ``leaders:K``, or ``segmented``
            (:mod:`~paradl_bench.strategies.data.node_groups`).
        ranks_per_node: that the launcher or the user tells of, for an exchange that is not flat; else None.
        blocking: whether a process waits for a collective of ZeRO stages 2 and 3 where it calls it, as on a CPU; else
            these run on streams of their own.
    """

    batch: PositiveCount
    optimizer: str = "sgd"
    batch_norm: Literal["local", "sync"] = "local"
    first_bucket_bytes: Bytes = 1024 * 1024
    bucket_cap_bytes: Bytes = 25 * 1024 * 1024
    micro_batches: MicroBatches | None = None
    schedule: str = "gpipe"
    stages: tuple[str, ...] = ()
    cut_by: str = ""
    accumulate: MicroBatches = 1
    recompute: tuple[str, ...] = ()
    split: tuple[str, ...] = ()
    filter_backward: Literal["all-reduce", "reduce-scatter"] = "all-reduce"
    spatial_until: str | None = None
    exchange: str = "flat"
    ranks_per_node: Ranks | None = None
    blocking: bool = False

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"batch has to be at least 1, not {self.batch}")
        if min(self.first_bucket_bytes, self.bucket_cap_bytes) < 0:
            raise ValueError("limits of buckets have to be 0 bytes or more")
        for name, count in (("micro_batches", self.micro_batches), ("accumulate", self.accumulate)):
            if count is not None and not 1 <= count <= MOST_MICRO_BATCHES:
                raise ValueError(f"{name} has to be from 1 to {MOST_MICRO_BATCHES}, not {count}")
        if not _EXCHANGES.fullmatch(self.exchange):
            raise ValueError(f"exchange has to be flat, leader, leaders:K or segmented, not {self.exchange!r}")
        if self.ranks_per_node is not None and self.ranks_per_node < 1:
            raise ValueError(f"ranks_per_node has to be at least 1, not {self.ranks_per_node}")

    @property
    def options(self) -> dict[str, str]:
        """Settings other than batch, optimizer, bucket limits and what follows from the library that are not the
        defaults, in words.
        """
        apart = ("batch", "optimizer", "first_bucket_bytes", "bucket_cap_bytes", "blocking")
        defaults = PlanSettings(batch=1)
        chosen = {name: value for name, value in msgspec.structs.asdict(self).items() if name not in apart}
        return {
            name: ",".join(value) if isinstance(value, tuple) else str(value)
            for name, value in chosen.items()
            if value != getattr(defaults, name)
        }


def ranks_per_node(exchange: str, given: int | None, known: int | None) -> int | None:
    """What ``--exchange`` and ``--ranks-per-node`` make of ranks on a node; None where the exchange is flat.

    Args:
        known: what the launcher or the cluster says.

    Raises:
        UserError: an exchange that there is none of, or ranks on a node where none are asked for.
    """
    if not _EXCHANGES.fullmatch(exchange):
        raise UserError(f"--exchange {exchange}: give flat, leader, leaders:K (as leaders:2) or segmented")
    if exchange != "flat":
        return known if given is None else given
    if given is not None:
        raise UserError("--ranks-per-node is for --exchange leader, leaders:K or segmented; a flat one knows no nodes")
    return None


def bucket_limits(bucket_cap_mb: float | None) -> tuple[int, int]:
    """Bytes of DDP's first bucket and of all others, from ``--bucket-cap-mb`` (MiB; None for torch's default).

    torch makes the first bucket smaller only where the cap is its default: a cap that is given holds for all.

    Raises:
        UserError: not positive, or more than any memory.
    """
    if bucket_cap_mb is None:
        default = PlanSettings(batch=1)
        return default.first_bucket_bytes, default.bucket_cap_bytes
    if not 1 <= bucket_cap_mb * 1024 * 1024 <= MOST_BYTES:
        raise UserError(
            f"--bucket-cap-mb {bucket_cap_mb:g} has to be a positive number of MiB, up to {MOST_BYTES >> 20}"
        )
    cap_bytes = int(bucket_cap_mb * 1024 * 1024)
    return cap_bytes, cap_bytes


def library_blocks(backend: str) -> bool:
    """Whether a collective that is not asked to be asynchronous keeps its process waiting: NCCL's run on streams."""
    return backend != "nccl"


class Limit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The largest number of PEs along an axis, and what sets it (``p <= 64: fewest filters, layer conv1``)."""

    axis: str
    ranks: Ranks
    reason: str

    def __str__(self) -> str:
        return f"p <= {self.ranks}: {self.reason}"
