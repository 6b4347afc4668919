"""Strategies by the kinds of their axes; each folder beside this file is a kind of axis, found by discovery."""

from __future__ import annotations

from paradl_bench.spec.errors import UserError
from paradl_bench.spec.registry import discover
from paradl_bench.spec.strategy import KIND_OF_LETTER, LETTER_OF_KIND, Strategy
from paradl_bench.strategies.axis_planner import AxisPlanner
from paradl_bench.strategies.nested_plan import NestedPlanner


def axis_planners() -> dict[str, AxisPlanner]:
    """The planner of each kind of axis, by kind."""
    return discover("paradl_bench.strategies", "PLANNER", AxisPlanner, submodule="plan")  # type: ignore[type-abstract]


def planner_for(strategy: Strategy) -> NestedPlanner:
    """The planner of a strategy's kinds.

    Raises:
        UserError: a kind of axis is not planned, or some do not nest; the message names those that are.
    """
    planners = axis_planners()
    for axis in strategy.axes:
        if axis.kind not in planners:
            letters = {kind: letter for letter, kind in KIND_OF_LETTER.items()}
            choices = ", ".join(f"{kind} ({letters[kind]}2)" for kind in LETTER_OF_KIND if kind in planners)
            raise UserError(
                f"strategy {strategy}: {axis.kind} parallelism cannot be planned or run yet; serial can, and {choices}"
            )
    return NestedPlanner(strategy, planners)
