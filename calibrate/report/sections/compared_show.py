"""Compared runs of a profile, and what its intervals count of their errors, in a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from calibrate.profile.compared_runs import LEAST_CONFIGURATIONS, PredictionError, prediction_errors
from calibrate.profile.profile import Profile
from paradl_bench.core.statistics import Z90
from paradl_bench.core.terminal.tables import table
from paradl_bench.core.units import counted, format_difference

if TYPE_CHECKING:
    from rich.console import Console

_COLUMNS = ("kind", "configurations", "most ranks", "mean error", "root mean square", "expected", "added")


def print_compared(profile: Profile, console: Console) -> None:
    """A row for each kind of axis; nothing where no run was compared."""
    if not profile.runs_compared:
        return
    rows = [(kind, *_numbers(error)) for kind, error in prediction_errors(profile.runs_compared).items()]
    title = "Runs over their predictions, by kind of axis; added: to half of a 90% interval, in quadrature"
    console.print(table(_COLUMNS, rows, title=title))


def compared_lines(profile: Profile) -> Iterator[str]:
    """What runs took over their predictions in the mean, on a line; nothing where no run was compared."""
    runs = profile.runs_compared
    if runs:
        told = "; ".join(f"{kind} {_words(error)}" for kind, error in prediction_errors(runs).items())
        yield f"{counted(len(runs), 'run')} over their predictions in the mean, and what that adds to intervals: {told}"


def _words(error: PredictionError) -> str:
    added = f"{Z90 * error.relative_sd:.1%}" if error.relative_sd else "nothing"
    few = f" ({counted(error.configurations, 'configuration')})" if error.configurations < LEAST_CONFIGURATIONS else ""
    return f"{format_difference(error.mean)}, {added}{few}"


def _numbers(error: PredictionError) -> tuple[str, ...]:
    return (
        str(error.configurations),
        str(error.ranks),
        format_difference(error.mean),
        f"{error.root_mean_square:.1%}",
        f"{error.expected:.1%}",
        f"{Z90 * error.relative_sd:.1%}",
    )
