"""Ranks compute some of the filters of each layer."""

from __future__ import annotations

from paradl_bench.plan.axes.kind import AxisKind, Trait
from paradl_bench.strategies.splitting.options import FilterOptions, SplitOptions

AXIS = AxisKind(
    name="filter",
    letter="f",
    package=__package__,
    order=2,
    options=(SplitOptions, FilterOptions),
    traits=frozenset({Trait.SHARDS_LAYERS, Trait.SPLITS_OUTPUTS}),
    cut_less="leave layers whole by --split",
)
