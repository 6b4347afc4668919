"""Options of context parallelism. Light."""

from __future__ import annotations

from typing import ClassVar, Literal

from paradl_bench.plan.axes.options import AxisOptions, Shown


class ContextOptions(AxisOptions, frozen=True, kw_only=True):
    """How an attention gets at the tokens of other ranks.

    Attributes:
        context_exchange: whether keys and values are gathered, tokens are exchanged for heads, or keys and values go
            round.
    """

    context_exchange: Literal["gather", "all-to-all", "ring"] = "gather"

    of_shards: ClassVar[bool] = True
    tried: ClassVar[tuple[str, ...]] = ("context_exchange",)
    shown: ClassVar[tuple[Shown, ...]] = (
        Shown(
            name="context_exchange",
            choices=("gather", "all-to-all", "ring"),
            default="gather",
            searched="tries all there are",
            help="With context parallelism: how attention gets the tokens of other ranks. gather: keys and values are"
            " gathered. all-to-all: tokens are exchanged for heads. ring: keys and values go round in a ring"
            " beside attention.",
        ),
    )

    @property
    def by_heads(self) -> bool:
        """Whether a rank attends with some heads to all tokens."""
        return self.context_exchange == "all-to-all"

    @property
    def by_ring(self) -> bool:
        """Whether keys and values go from rank to rank, beside attention with those at hand."""
        return self.context_exchange == "ring"
