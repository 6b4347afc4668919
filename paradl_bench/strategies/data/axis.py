"""Replicas that each compute a part of the mini-batch, ZeRO as their prefix."""

from __future__ import annotations

from paradl_bench.plan.axes.kind import AxisKind, Prefix, Trait
from paradl_bench.strategies.exchange.options import ExchangeOptions

AXIS = AxisKind(
    name="data",
    letter="d",
    package=__package__,
    order=0,
    prefix=Prefix(letter="z", most=3, what="ZeRO stage"),
    distsim="D",
    options=(ExchangeOptions,),
    traits=frozenset({Trait.DIVIDES_BATCH, Trait.REPLICATES}),
)
