"""The operations that this package holds, found by looking."""

from __future__ import annotations

from paradl_bench.core.registry import discover
from paradl_bench.plan.collectives.routine import Routine
from paradl_bench.plan.cost_terms.terms import CollectiveOperation

_PACKAGE = "paradl_bench.plan.collectives"
OF_STRATEGIES = ("all_gather", "all_reduce", "broadcast", "reduce_scatter", "send_recv")
"""Those that strategies issue whose gradients are exchanged flat: what ``predict search`` needs measurements of."""


def operations() -> dict[str, CollectiveOperation]:
    """Every operation's cost terms and bandwidth factors, by name; imports no torch."""
    return discover(_PACKAGE, "OPERATION", CollectiveOperation)


def routines() -> dict[str, Routine]:
    """How every operation is run and checked through torch.distributed, by name; imports no torch."""
    return discover(_PACKAGE, "ROUTINE", Routine)
