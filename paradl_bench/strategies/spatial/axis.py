"""Ranks compute blocks of positions, with halos from their neighbours."""

from __future__ import annotations

from typing import ClassVar

from paradl_bench.plan.axes.kind import AxisKind, Trait
from paradl_bench.plan.axes.options import AxisOptions, Shown
from paradl_bench.strategies.exchange.options import ExchangeOptions


class SpatialOptions(AxisOptions, frozen=True, kw_only=True):
    """How far positions are cut.

    Attributes:
        spatial_until: name of the layer before which blocks of positions are gathered; None for as late as possible.
    """

    spatial_until: str | None = None

    of_shards: ClassVar[bool] = True
    shown: ClassVar[tuple[Shown, ...]] = (
        Shown(
            name="spatial_until",
            metavar="LAYER",
            help="The first layer that is not spatially parallel: its input is gathered. Default: the first layer that"
            " needs all positions.",
        ),
    )


AXIS = AxisKind(
    name="spatial",
    letter="s",
    package=__package__,
    order=1,
    dims=3,
    options=(ExchangeOptions, SpatialOptions),
    traits=frozenset({Trait.REPLICATES, Trait.SHARDS_LAYERS, Trait.CUTS_POSITIONS}),
    # What ranks send their neighbours, and receive of them, at once: halos.
    operations=("exchange",),
    cut_less="cut fewer layers by --spatial-until",
)
