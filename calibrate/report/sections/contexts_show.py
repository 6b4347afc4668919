"""What surrounds collectives, in a table and in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from calibrate.profile.collectives.contexts import InContext
from calibrate.profile.profile import Profile
from paradl_bench.core.statistics import Z90
from paradl_bench.core.terminal.tables import table
from paradl_bench.core.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

_WORDS = ("operation", "library", "level", "context")
_NUMBERS = ("ranks", "bytes", "added", "factor", "residual")


def print_contexts(profile: Profile, console: Console) -> None:
    """A table of all entries; nothing where there are none."""
    if not profile.contexts:
        return
    title = "In context, a call takes added + factor x its idle time (90% intervals)"
    rows = [(fit.operation, fit.library, fit.level, _surrounded_by(fit), *_numbers(fit)) for fit in profile.contexts]
    console.print(table((*_WORDS, *_NUMBERS), rows, title=title, keys=4))
    console.print("For groups at once, the factor (phi) multiplies only the time that bytes take.")


def _surrounded_by(entry: InContext) -> str:
    words = f"{entry.context}={entry.groups}" if entry.context == "groups" else entry.context
    over = f" over level {entry.neighbour_level}" if entry.neighbour_level else ""
    by = f" ({', '.join(entry.neighbours)})" if entry.neighbours else ""
    if entry.context != "with-compute":
        return words + over + by
    return f"{words}{by}, which takes {entry.neighbour_factor:.2f} ± {Z90 * entry.neighbour_sd:.2f}"


def _numbers(entry: InContext) -> tuple[str, ...]:
    added = f"{format_seconds(entry.added_s)} ± {format_seconds(Z90 * entry.added_sd_s)}"
    return (
        _range(entry.ranks, str),
        _range(entry.bytes_range, format_bytes),
        "waits for it" if entry.waits else added,
        "" if entry.waits else f"{entry.factor:.2f} ± {Z90 * entry.factor_sd:.2f}",
        f"{entry.residual_relative_median:.1%}",
    )


def _range(span: tuple[int, int], words: Callable[[int], str]) -> str:
    low, high = map(words, span)
    return low if low == high else f"{low} to {high}"


def context_words(entry: InContext) -> str:
    """What an entry is about, on a line."""
    about = f"{entry.library} {entry.operation}, level {entry.level}, {_range(entry.ranks, str)} ranks"
    groups = f"={entry.groups}" if entry.groups > 1 else ""
    over = f" over level {entry.neighbour_level}" if entry.neighbour_level else ""
    sizes = f", {_range(entry.bytes_range, format_bytes)}" if entry.context == "with-compute" else ""
    return f"{about}{sizes}, {entry.context}{groups}{over}"
