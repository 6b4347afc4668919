"""Options of the exchange of gradients, for every axis along which ranks hold the same parameters. Light."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Self

import msgspec

from paradl_bench.core.bounds import MOST_BYTES, Bytes, Ranks
from paradl_bench.core.errors import UserError
from paradl_bench.plan.axes.options import AxisOptions, Shown

_EXCHANGES = re.compile("flat|leader|leaders:[1-9][0-9]{0,5}|segmented")
_MIB = 1024 * 1024


def bucket_limits(bucket_cap_mb: float | None) -> tuple[int, int]:
    """Bytes of DDP's first bucket and of all others, from ``--bucket-cap-mb`` (MiB; None for torch's default).

    torch makes the first bucket smaller only where the cap is its default: a cap that is given holds for all.

    Raises:
        UserError: not positive, or more than any memory.
    """
    if bucket_cap_mb is None:
        default = ExchangeOptions()
        return default.first_bucket_bytes, default.bucket_cap_bytes
    if not 1 <= bucket_cap_mb * _MIB <= MOST_BYTES:
        raise UserError(
            f"--bucket-cap-mb {bucket_cap_mb:g} has to be a positive number of MiB, up to {MOST_BYTES >> 20}"
        )
    cap_bytes = int(bucket_cap_mb * _MIB)
    return cap_bytes, cap_bytes


def _read_cap(bucket_cap_mb: float) -> Mapping[str, Any]:
    return dict(zip(("first_bucket_bytes", "bucket_cap_bytes"), bucket_limits(bucket_cap_mb), strict=True))


def _write_cap(options: ExchangeOptions) -> str | None:
    return None if options.has_default_limits else repr(options.bucket_cap_bytes / _MIB)


def _read_exchange(exchange: str) -> Mapping[str, Any]:
    if not _EXCHANGES.fullmatch(exchange):
        raise UserError(f"--exchange {exchange}: give flat, leader, leaders:K (as leaders:2) or segmented")
    return {"exchange": exchange}


def _read_reduce_dtype(dtype: str) -> Mapping[str, Any]:
    if dtype not in ("own", "fp32"):
        raise UserError(f"--reduce-dtype {dtype}: give own or fp32")
    return {"reduce_dtype": dtype}


class ExchangeOptions(AxisOptions, frozen=True, kw_only=True):
    """How gradients are exchanged.

    Attributes:
        first_bucket_bytes, bucket_cap_bytes: DDP's bucket limits (torch's defaults).
        exchange: ``flat``, as DDP's; by a ``leader`` of each node, by ``leaders:K``, or ``segmented``
            (:mod:`~paradl_bench.strategies.exchange.node_groups`).
        ranks_per_node: that the launcher or the user tells of, for an exchange that is not flat; else None.
        fused_bytes: of each message that gradients are exchanged in, in the place of DDP's buckets
            (:mod:`~paradl_bench.strategies.exchange.messages`); empty for DDP's. fused_by: what found them, in words.
        after_backward: whether messages are sent when all of backward is over, and not as their gradients are there.
        reduce_dtype: that shards of bf16 gradients are reduced in, their own or fp32.
    """

    first_bucket_bytes: Bytes = 1024 * 1024
    bucket_cap_bytes: Bytes = 25 * 1024 * 1024
    exchange: str = "flat"
    ranks_per_node: Ranks | None = None
    fused_bytes: tuple[Bytes, ...] = ()
    fused_by: str = ""
    after_backward: bool = False
    reduce_dtype: Literal["own", "fp32"] = "own"

    unsaid: ClassVar[tuple[str, ...]] = ("first_bucket_bytes", "bucket_cap_bytes", "fused_bytes", "after_backward")
    shown: ClassVar[tuple[Shown, ...]] = (
        Shown(
            name="bucket_cap_mb",
            value=float,
            searched="tries several; give values by --caps",
            help="DDP's bucket size in MiB. Default: torch's (25, the first 1).",
            read=_read_cap,
            write=_write_cap,
        ),
        Shown(
            name="exchange",
            metavar="flat|leader|leaders:K|segmented",
            default="flat",
            searched="exchanges gradients flat",
            help="How gradients are exchanged: flat among all ranks; by one or K leaders of each node; or in one"
            " segment for each rank of a node.",
            read=_read_exchange,
        ),
        Shown(
            name="ranks_per_node",
            metavar="R",
            value=int,
            least=1,
            searched="exchanges gradients flat",
            help="Ranks of one node, for --exchange.",
        ),
        Shown(
            name="reduce_dtype",
            metavar="own|fp32",
            default="own",
            searched="reduces gradients in their own dtype",
            help="Dtype in which z2 and z3 reduce bf16 gradients.",
            read=_read_reduce_dtype,
        ),
    )

    def __post_init__(self) -> None:
        if min(self.first_bucket_bytes, self.bucket_cap_bytes) < 0:
            raise ValueError("limits of buckets have to be 0 bytes or more")
        if not _EXCHANGES.fullmatch(self.exchange):
            raise ValueError(f"exchange has to be flat, leader, leaders:K or segmented, not {self.exchange!r}")
        if self.ranks_per_node is not None and self.ranks_per_node < 1:
            raise ValueError(f"ranks_per_node has to be at least 1, not {self.ranks_per_node}")
        if any(size < 1 for size in self.fused_bytes):
            raise ValueError("messages of fused gradients have to be of at least 1 byte")
        if bool(self.fused_bytes) != bool(self.fused_by):
            raise ValueError("fused_bytes and fused_by go together")
        if self.after_backward and not self.fused_bytes:
            raise ValueError("after_backward is of messages: it goes with fused_bytes")

    @property
    def has_default_limits(self) -> bool:
        """Whether buckets are torch's own."""
        return (self.first_bucket_bytes, self.bucket_cap_bytes) == bucket_limits(None)

    def settled(self, degree: int) -> dict[str, str]:
        """The messages, which their words do not tell one by one."""
        return {"fused_bytes": ",".join(map(str, self.fused_bytes))} if self.fused_bytes else {}

    def placed(self, on_node: Callable[[], int | None]) -> Self:
        """Where the exchange knows nodes and nobody said how many ranks these have, those that lie there.

        Raises:
            UserError: ranks on a node where the exchange knows none.
        """
        if self.exchange != "flat":
            known = on_node() if self.ranks_per_node is None else self.ranks_per_node
            return msgspec.structs.replace(self, ranks_per_node=known)
        if self.ranks_per_node is not None:
            raise UserError(
                "--ranks-per-node is for --exchange leader, leaders:K or segmented; a flat one knows no nodes"
            )
        return self
