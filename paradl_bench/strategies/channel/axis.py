"""Ranks compute with some of the input channels of each layer."""

from __future__ import annotations

from paradl_bench.plan.axes.kind import AxisKind, Trait
from paradl_bench.strategies.splitting.options import SplitOptions

AXIS = AxisKind(
    name="channel",
    letter="c",
    package=__package__,
    order=3,
    options=(SplitOptions,),
    traits=frozenset({Trait.SHARDS_LAYERS, Trait.SPLITS_INPUTS}),
    cut_less="leave layers whole by --split",
)
