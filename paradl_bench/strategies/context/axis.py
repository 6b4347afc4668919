"""Ranks compute parts of the sequence; keys and values are gathered before each attention."""

from __future__ import annotations

from paradl_bench.plan.axes.kind import AxisKind, Trait
from paradl_bench.strategies.exchange.options import ExchangeOptions

AXIS = AxisKind(
    name="context",
    letter="x",
    package=__package__,
    order=6,
    options=(ExchangeOptions,),
    traits=frozenset({Trait.REPLICATES, Trait.SHARDS_LAYERS, Trait.NEEDS_LOSS, Trait.SENDS_AS_COMPUTED}),
    operations=("all_gather", "reduce_scatter"),
    cut_less="give fewer ranks along it",
)
