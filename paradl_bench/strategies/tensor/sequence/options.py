"""Options of tensor parallelism beside the choice of layers. Light."""

from __future__ import annotations

from typing import ClassVar, Literal

from paradl_bench.plan.axes.options import AxisOptions, Shown


class SequenceOptions(AxisOptions, frozen=True, kw_only=True):
    """What ranks of tensor parallelism hold between the pairs of linear layers.

    Attributes:
        sequence_parallel: whether that is a part of the sequence each, or all of it.
    """

    sequence_parallel: Literal["off", "on"] = "off"

    of_shards: ClassVar[bool] = True
    tried: ClassVar[tuple[str, ...]] = ("sequence_parallel",)
    shown: ClassVar[tuple[Shown, ...]] = (
        Shown(
            name="sequence_parallel",
            choices=("off", "on"),
            default="off",
            searched="tries both",
            help="With tensor parallelism: each rank computes norms, dropout and residuals on a part of the sequence.",
        ),
    )

    @property
    def on(self) -> bool:
        """Whether the sequence is cut."""
        return self.sequence_parallel == "on"
