"""Prices by kind of work; each file beside this one that declares ``COSTS``, found by discovery."""

from __future__ import annotations

from functools import cache
from typing import Any

from paradl_bench.core.registry import discover
from paradl_bench.plan.works.work import Work
from predict.costs.hardware.what_if_device import Demand, DemandContext
from predict.costs.kinds.kind_costs import KindCosts


@cache
def kind_costs() -> dict[type[Work], KindCosts[Any]]:
    """Every kind that can be priced. The input joins a plan when that is priced (predict.simulation.input_tasks)."""
    costs_by_name: dict[str, KindCosts[Any]] = discover("predict.costs.kinds", "COSTS", KindCosts)
    return {costs.kind: costs for costs in costs_by_name.values()}


def costs_of(work: Work) -> KindCosts[Any]:
    """Those of a work's kind; of a kind without a price a file of this folder has to declare one."""
    return kind_costs()[type(work)]


def demand_of(work: Work, context: DemandContext) -> Demand | None:
    """What a work asks of the device; None for what takes as long on any."""
    return costs_of(work).demand(work, context)
