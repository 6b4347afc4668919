"""The tools that can be run, found by looking."""

from __future__ import annotations

from paradl_bench.core.registry import discover
from paradl_bench.tools.tool import SweepTool


def tools() -> dict[str, SweepTool]:
    """Every tool by name; imports no torch."""
    return discover("paradl_bench.tools", "TOOL", SweepTool)
