"""Experts of a layer are shared out over ranks that each see samples of their own; tokens go to them and come back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from paradl_bench.core.bounds import Slowdown
from paradl_bench.core.errors import UserError
from paradl_bench.plan.axes.kind import AxisKind, Trait
from paradl_bench.plan.axes.options import AxisOptions, Shown
from paradl_bench.strategies.exchange.options import ExchangeOptions


def _read_imbalance(expert_imbalance: float) -> Mapping[str, Any]:
    if not (math.isfinite(expert_imbalance) and expert_imbalance >= 1):
        raise UserError(f"--expert-imbalance {expert_imbalance:g} has to be at least 1, which is balanced")
    return {"expert_imbalance": float(expert_imbalance)}


class ExpertOptions(AxisOptions, frozen=True, kw_only=True):
    """How tokens are spread over experts.

    Attributes:
        expert_imbalance: rows that the busiest rank computes over those of a rank where all get as many.
    """

    expert_imbalance: Slowdown = 1.0

    shown: ClassVar[tuple[Shown, ...]] = (
        Shown(
            name="expert_imbalance",
            metavar="F",
            value=float,
            help="With expert parallelism: tokens of the busiest rank over the mean of all ranks. Default: 1"
            " (balanced).",
            read=_read_imbalance,
            write=lambda options: _write_imbalance(options),
        ),
    )

    def __post_init__(self) -> None:
        if self.expert_imbalance < 1:
            raise ValueError(f"expert_imbalance has to be at least 1, not {self.expert_imbalance}")


def _write_imbalance(options: AxisOptions) -> str | None:
    assert isinstance(options, ExpertOptions)
    return None if options.expert_imbalance == 1 else repr(options.expert_imbalance)


AXIS = AxisKind(
    name="expert",
    letter="e",
    package=__package__,
    order=7,
    options=(ExchangeOptions, ExpertOptions),
    traits=frozenset(
        {
            Trait.DIVIDES_BATCH,
            Trait.REPLICATES,
            Trait.SHARDS_LAYERS,
            Trait.CUTS_EXPERTS,
            Trait.SENDS_AS_COMPUTED,
        }
    ),
    operations=("all_to_all",),
    cut_less="give fewer ranks along it",
)
