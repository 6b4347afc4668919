"""A prediction beside what was measured and beside perfect scaling, and how many of them did."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from statistics import fmean

import msgspec


class Pair(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One predicted time and the measured one.

    Attributes:
        source: whose measurement. what: the configuration, in words; ranks: of it.
        evaluator: that predicted, with what it was told. chosen: whether it is the one that the source is judged by.
        unit: of what a time is: an iteration or an epoch.
        predicted_s, low_s, high_s: with its 90% interval. perfect_s: what perfect scaling from the input run gives.
        measured_s: the answer.
    """

    source: str
    what: str
    ranks: int
    evaluator: str
    chosen: bool
    unit: str
    predicted_s: float
    low_s: float
    high_s: float
    perfect_s: float
    measured_s: float

    def __post_init__(self) -> None:
        for name in ("predicted_s", "perfect_s", "measured_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{self.what}: {name} has to be a time above 0, not {value}")
        if not self.low_s <= self.predicted_s <= self.high_s:
            raise ValueError(f"{self.what}: {self.predicted_s} lies outside of its interval")

    @property
    def error(self) -> float:
        """Signed, relative to what was measured."""
        return self.predicted_s / self.measured_s - 1

    @property
    def perfect_error(self) -> float:
        """Of perfect scaling."""
        return self.perfect_s / self.measured_s - 1

    @property
    def extra(self) -> float:
        """Predicted over perfect scaling."""
        return self.predicted_s / self.perfect_s - 1

    @property
    def measured_extra(self) -> float:
        """Measured over perfect scaling."""
        return self.measured_s / self.perfect_s - 1

    @property
    def covered(self) -> bool:
        """Whether the interval holds what was measured."""
        return self.low_s <= self.measured_s <= self.high_s


def accuracy(errors: Iterable[float]) -> float:
    """Mean of 1 - |error|."""
    return fmean(1 - abs(error) for error in errors)


_SCALES = ((1.0, "s"), (1e-3, "ms"))


def seconds(value: float) -> str:
    """A time with four digits."""
    scale, unit = next((each for each in _SCALES if value >= each[0]), _SCALES[-1])
    return f"{value / scale:.4g} {unit}"


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table's lines."""
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


_HEADS = (
    "run", "evaluator", "predicted", "90% interval", "measured", "perfect scaling", "extra predicted", "extra measured",
    "error", "error of perfect scaling", "inside",
)  # fmt: skip


def table(pairs: Iterable[Pair]) -> list[str]:
    """Every pair, in Markdown."""
    rows = [
        (
            pair.what,
            pair.evaluator,
            seconds(pair.predicted_s),
            f"{seconds(pair.low_s)} to {seconds(pair.high_s)}",
            seconds(pair.measured_s),
            seconds(pair.perfect_s),
            f"{pair.extra:+.1%}",
            f"{pair.measured_extra:+.1%}",
            f"{pair.error:+.1%}",
            f"{pair.perfect_error:+.1%}",
            "yes" if pair.covered else "no",
        )
        for pair in pairs
    ]
    return markdown(_HEADS, rows)


def scores(pairs: Sequence[Pair]) -> list[str]:
    """Accuracy of each evaluator beside that of perfect scaling on the same runs, in Markdown."""
    rows = []
    for evaluator in dict.fromkeys(pair.evaluator for pair in pairs):
        own = [pair for pair in pairs if pair.evaluator == evaluator]
        rows.append(
            (
                f"**{evaluator}**" if own[0].chosen else evaluator,
                str(len(own)),
                f"{accuracy(pair.error for pair in own):.1%}",
                f"{accuracy(pair.perfect_error for pair in own):.1%}",
                f"{max(abs(pair.error) for pair in own):.1%}",
                f"{fmean(pair.covered for pair in own):.0%}",
            )
        )
    return markdown(("evaluator", "runs", "accuracy", "perfect scaling", "worst error", "interval holds"), rows)


def as_csv(pairs: Iterable[Pair]) -> str:
    """Every pair, a line each."""
    stream = io.StringIO()
    derived = ("error", "perfect_error", "extra", "measured_extra", "covered")
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow((*Pair.__struct_fields__, *derived))
    for pair in pairs:
        writer.writerow([getattr(pair, name) for name in (*Pair.__struct_fields__, *derived)])
    return stream.getvalue()
