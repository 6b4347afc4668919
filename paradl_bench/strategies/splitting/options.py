"""Options of axes that split layers by filters, channels or features. Light."""

from __future__ import annotations

from typing import ClassVar, Literal

from paradl_bench.core.units import parse_layers
from paradl_bench.plan.axes.options import AxisOptions, Shown


class SplitOptions(AxisOptions, frozen=True, kw_only=True):
    """Which layers are split.

    Attributes:
        split: names or patterns (``features.*``) of layers; empty for all that can be.
    """

    split: tuple[str, ...] = ()

    of_shards: ClassVar[bool] = True
    shown: ClassVar[tuple[Shown, ...]] = (
        Shown(
            name="split",
            metavar="all|LAYER[,LAYER...]",
            help="Layers that filter, channel and tensor parallelism split, by name or pattern (features.*). Default:"
            " all that can be split.",
            read=lambda text: {"split": parse_layers(text, "--split")},
        ),
    )


class FilterOptions(AxisOptions, frozen=True, kw_only=True):
    """What filter parallelism communicates.

    Attributes:
        filter_backward: how the gradients of layers' inputs are summed: all of them on each rank, or its part where it
            needs no more.
    """

    filter_backward: Literal["all-reduce", "reduce-scatter"] = "all-reduce"

    of_shards: ClassVar[bool] = True
    shown: ClassVar[tuple[Shown, ...]] = (
        Shown(
            name="filter_backward",
            choices=("all-reduce", "reduce-scatter"),
            default="all-reduce",
            help="How filter parallelism sums input gradients. reduce-scatter is used only where each rank needs just"
            " its own part of the sum.",
        ),
    )
