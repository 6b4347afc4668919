"""The tools that can be run, found by looking."""

from __future__ import annotations

from paradl_bench.measure.tools.tool import SweepTool
from paradl_bench.spec.registry import discover


def tools() -> dict[str, SweepTool]:
    """Every tool by name; imports no torch."""
    return discover("paradl_bench.measure.tools", "TOOL", SweepTool)
