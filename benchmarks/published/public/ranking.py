"""On every set of runs at one size: is what was predicted best the best measured, or within the noise floor of it?

From the repository's own results (``predict validate``'s pairs.csv, simulate), and B-Caffe's two ways to exchange.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from public import bcaffe
from public.pairs import Pair, markdown

EVALUATOR = "simulate"


class Candidate(NamedTuple):
    """A strategy at one size: seconds predicted and measured, and its run's noise floor (relative; 0 unknown)."""

    name: str
    predicted_s: float
    measured_s: float
    noise_floor: float


class Choice(NamedTuple):
    """A set of candidates, and what came of taking the one predicted best.

    Attributes:
        regret: how much slower that one is than the best measured.
        floor: the larger noise floor of the two; None where their runs have none.
    """

    where: str
    what: str
    candidates: tuple[Candidate, ...]

    @property
    def taken(self) -> Candidate:
        """Predicted best."""
        return min(self.candidates, key=lambda each: each.predicted_s)

    @property
    def best(self) -> Candidate:
        """Measured best."""
        return min(self.candidates, key=lambda each: each.measured_s)

    @property
    def regret(self) -> float:
        """Of taking the one predicted best."""
        return self.taken.measured_s / self.best.measured_s - 1

    @property
    def floor(self) -> float:
        """The larger noise floor of the two."""
        return max(self.taken.noise_floor, self.best.noise_floor)

    @property
    def right(self) -> bool:
        """Whether the choice is the best, or within the noise floor of it."""
        return self.regret <= self.floor


def of_results(results: Path) -> list[Choice]:
    """Sets of one model, batch and number of ranks in every pairs.csv that ``predict validate`` wrote."""
    found = []
    for path in sorted(results.glob("*/*/*/pairs.csv")):
        with open(path, newline="") as stream:
            rows = [row for row in csv.DictReader(stream) if row.get("evaluator") == EVALUATOR]
        groups: dict[tuple[str, ...], dict[str, list[dict[str, str]]]] = {}
        for row in rows:
            repetition = row["run"].rpartition("/")[0]
            key = repetition, *(row[name] for name in ("model", "input_shape", "ranks", "batch", "dtype", "optimizer"))
            groups.setdefault(key, {}).setdefault(_configuration(row), []).append(row)
        for (repetition, model, shape, ranks, batch, *_), strategies in groups.items():
            if len(strategies) > 1:
                what = f"{model} {shape}, {ranks} ranks, batch {batch}{', ' + repetition if repetition else ''}"
                where = path.parent.relative_to(results).as_posix()
                found.append(Choice(where, what, tuple(_candidate(*each) for each in strategies.items())))
    return found


def _configuration(row: dict[str, str]) -> str:
    """What was chosen: the strategy, and the options that differ from run to run."""
    options = [f"{key.removeprefix('options.')} {row[key]}" for key in row if key.startswith("options.") and row[key]]
    return ", ".join([row["strategy"], f"{int(row['bucket_cap_bytes']) >> 20} MiB", *options])


def _candidate(name: str, rows: Sequence[dict[str, str]]) -> Candidate:
    predicted, measured, floors = (
        median(float(row[column] or 0) for row in rows)
        for column in ("predicted_s", "measured_median_s", "noise_floor")
    )
    return Candidate(name, predicted, measured, floors)


def of_exchanges(pairs: Iterable[Pair]) -> list[Choice]:
    """B-Caffe: wait-free or merged, at each number of nodes; these runs have no noise floor."""
    groups: dict[tuple[str, int], list[Candidate]] = {}
    for pair in pairs:
        if pair.chosen and pair.source.startswith(bcaffe.SOURCE):
            name = pair.what.rpartition(", ")[2]
            candidate = Candidate(name, pair.predicted_s, pair.measured_s, 0.0)
            groups.setdefault((pair.source, pair.ranks), []).append(candidate)
    return [Choice(source, f"{ranks} nodes", tuple(own)) for (source, ranks), own in groups.items() if len(own) > 1]


def table(choices: Iterable[Choice]) -> list[str]:
    """Markdown, a set a line."""
    rows = [
        (
            choice.where,
            choice.what,
            str(len(choice.candidates)),
            choice.taken.name,
            choice.best.name,
            f"{choice.regret:.1%}",
            f"{choice.floor:.1%}" if choice.floor else "unknown",
            "yes" if choice.right else "**no**",
        )
        for choice in choices
    ]
    heads = ("results", "set", "strategies", "predicted best", "measured best", "regret", "noise floor", "within it")
    return markdown(heads, rows)
