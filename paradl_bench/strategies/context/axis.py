"""Ranks compute parts of the sequence; attentions gather keys and values, or exchange tokens for heads."""

from __future__ import annotations

from paradl_bench.plan.axes.kind import AxisKind, Trait
from paradl_bench.strategies.context.options import ContextOptions
from paradl_bench.strategies.exchange.options import ExchangeOptions

AXIS = AxisKind(
    name="context",
    letter="x",
    package=__package__,
    order=6,
    options=(ExchangeOptions, ContextOptions),
    traits=frozenset({Trait.REPLICATES, Trait.SHARDS_LAYERS, Trait.CUTS_TOKENS, Trait.SENDS_AS_COMPUTED}),
    operations=("all_gather", "reduce_scatter", "all_to_all"),
    cut_less="give fewer ranks along it",
)
