"""How often calls of collectives are congested, how much longer they take then, and what that adds, in a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from calibrate.profile.collectives.communication import Congestion
from calibrate.profile.profile import Profile
from paradl_bench.core.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

_SHOWN = 12


def print_congestion(profile: Profile, console: Console) -> None:
    """A row an entry, those first that add most; nothing for a profile whose fits saw none."""
    from rich.table import Table

    found = [(fit, each) for fit in profile.communication for each in fit.congestion]
    seen = [(fit, each) for fit, each in found if each.probability]
    if not seen:
        return
    seen.sort(key=lambda pair: -pair[1].mean_excess)
    table = Table(
        title="Congestion: calls far above the usual time, which alpha and beta leave out", title_justify="left"
    )
    for name in ("operation", "library", "level", "regime"):
        table.add_column(name, overflow="fold")
    for name in ("ranks", "bytes", "calls", "congested", "take", "adds in the mean"):
        table.add_column(name, justify="right", overflow="fold")
    for fit, each in seen[:_SHOWN]:
        table.add_row(fit.operation, fit.library, fit.level, fit.regime, *_row(each))
    console.print(table)
    console.print(
        "Congested: share of calls in a typical block. Take: times the usual time, in the mean and at most. Adds: to"
        " many calls in a row (± standard deviation); to an iteration with few of them less (docs/model.md)."
    )
    left, spared = len(seen) - _SHOWN, len(found) - len(seen)
    if left > 0:
        console.print(f"{left} more add less; --json lists them.")
    if spared:
        console.print(f"Of the same fits, {spared} rank counts and ranges of sizes saw none in a typical block.")


def _row(each: Congestion) -> tuple[str, ...]:
    low, high = each.bytes_range
    sizes = format_bytes(low) if low == high else f"{format_bytes(low)} to {format_bytes(high)}"
    mean = sum(each.ratios) / len(each.ratios)
    adds = f"{each.mean_excess:.1%} ±{each.mean_excess * each.relative_sd:.1%}"
    return (
        str(each.ranks),
        sizes,
        str(each.calls),
        f"{each.probability:.1%}",
        f"{mean:.2f}, {max(each.ratios):.2f}",
        adds,
    )
