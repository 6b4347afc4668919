"""Ranks compute some of the heads or features of pairs of linear layers."""

from __future__ import annotations

from paradl_bench.plan.axes.kind import AxisKind, Trait
from paradl_bench.strategies.splitting.options import SplitOptions
from paradl_bench.strategies.tensor.sequence.options import SequenceOptions

AXIS = AxisKind(
    name="tensor",
    letter="t",
    package=__package__,
    order=5,
    distsim="M",
    options=(SplitOptions, SequenceOptions),
    traits=frozenset({Trait.SHARDS_LAYERS, Trait.CUTS_FEATURES, Trait.SENDS_AS_COMPUTED}),
    cut_less="leave layers whole by --split",
)
