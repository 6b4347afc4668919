"""Rows of a search's DataFrame, of which CSV and Parquet are made."""

from __future__ import annotations

import msgspec

from predict.prediction.presentation import PredictionRow, filled_row
from predict.search.search import Row as Ranked


class RankedRow(PredictionRow, frozen=True, kw_only=True):
    """A strategy that a search found; fields as of :class:`~predict.search.search.Row`."""

    place: int
    probability_best: float | None
    pareto: bool
    estimate_s: float
    predict_command: str
    train_command: str | None


def ranked_row(ranked: Ranked) -> RankedRow:
    """The row of a strategy that was searched."""
    return filled_row(RankedRow, ranked.prediction.record() | msgspec.structs.asdict(ranked))
