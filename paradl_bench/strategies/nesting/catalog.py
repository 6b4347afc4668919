"""Strategies by the kinds of their axes; each folder beside this file is a kind of axis, found by discovery."""

from __future__ import annotations

from paradl_bench.core.registry import discover
from paradl_bench.plan.axis_planner import AxisPlanner
from paradl_bench.plan.strategy import Strategy
from paradl_bench.strategies.nesting.nested_plan import NestedPlanner


def axis_planners() -> dict[str, AxisPlanner]:
    """The planner of each kind of axis, by kind."""
    return discover("paradl_bench.strategies", "PLANNER", AxisPlanner, submodule="plan")  # type: ignore[type-abstract]


def planner_for(strategy: Strategy) -> NestedPlanner:
    """The planner of a strategy's kinds.

    Raises:
        UserError: some kinds do not nest.
    """
    return NestedPlanner(strategy, axis_planners())
