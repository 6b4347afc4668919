"""Strategies by the kinds of their axes, which :mod:`paradl_bench.plan.axes.registry` finds."""

from __future__ import annotations

from paradl_bench.plan.strategy import Strategy
from paradl_bench.strategies.nesting.nested_plan import NestedPlanner


def planner_for(strategy: Strategy) -> NestedPlanner:
    """The planner of a strategy's kinds.

    Raises:
        UserError: some kinds do not nest.
    """
    return NestedPlanner(strategy)
