"""What the emulation suites say of their runs: each beside its prediction, how strategies rank, errors of activity."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
from emulation_cases import FOUND, Case

from paradl_bench.plan.mesh import zero_stage
from paradl_bench.plan.strategy import parse_strategy
from predict.validation.validation import validate_runs
from predict.validation.validation_scores import spearman


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration in the table.

    Attributes:
        layout: nodes x ranks on each. error: (predicted - measured) / measured. holds: whether the interval does.
        noise_floor: run-to-run spread of the measurement, relative to it.
        activity: how far begin and end of ranks' units of work are off, in the mean and on the worst rank, relative to
            the iteration; None where they are not known. units: the same of every unit, by rank, as ``{"FW1": 0.01}``.
    """

    model: str
    layout: str
    strategy: str
    options: str
    predicted_s: float
    measured_s: float
    error: float
    holds: bool
    noise_floor: float
    explained_by: str
    issued_equals_plan: bool | None
    activity: tuple[float, float] | None
    units: tuple[dict[str, float], ...] = ()

    @property
    def kind(self) -> str:
        """Of its strategy: the kinds of its axes, from the outermost, and ZeRO's stage."""
        strategy = parse_strategy(self.strategy)
        stage = zero_stage(strategy)
        return f"{strategy.name}, ZeRO {stage}" if stage else strategy.name

    @property
    def in_turns(self) -> bool:
        """Whether ranks work on one micro-batch after the other."""
        return any("FW2" in units for units in self.units)


def rows_of(profile: Path, cases: Sequence[Case]) -> list[Row]:
    """Every run beside its prediction by the simulation."""
    complete = {case.directory: case for case in cases if case.complete}
    if not complete:
        return []
    # By force: layers and collectives were not measured in one environment.
    report = validate_runs(profile, [Path(directory) for directory in complete], cluster_path=None, force=True)
    return [
        Row(
            model=pair.model,
            layout=str(complete[pair.run].layout),
            strategy=complete[pair.run].strategy,
            options=" ".join(
                [f"{name}={text}" for name, text in pair.options.items() if name not in FOUND]
                + ([] if pair.bucket_cap_bytes == 25 * 1024**2 else [f"bucket={pair.bucket_cap_bytes / 1024**2:g}MiB"])
                + ([f"slow_rank={complete[pair.run].slow_rank}"] if complete[pair.run].slow_rank else [])
            ),
            predicted_s=pair.predicted_s,
            measured_s=pair.measured_median_s,
            error=pair.error,
            holds=pair.covered,
            noise_floor=pair.noise_floor,
            explained_by=pair.explained_by,
            issued_equals_plan=pair.issued_equals_plan,
            activity=(pair.activity.mean_error, pair.activity.worst_rank_error) if pair.activity else None,
            units=tuple(
                {name: round(error, 4) for name, error in rank.by_unit.items()}
                for rank in (pair.activity.ranks if pair.activity else ())
            ),
        )
        for pair in report.pairs
        if pair.evaluator == "simulate"
    ]


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown, and below how strategies rank at every size."""
    known = [row.activity[0] for row in rows if row.activity]
    lines = [
        "| model | nodes x ranks | strategy | options | predicted s | measured s | error | in interval |"
        " activity error (worst rank) | as planned |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(
            f"| {row.model} | {row.layout} | {row.strategy} | {row.options} | {row.predicted_s:.4g} |"
            f" {row.measured_s:.4g} | {row.error:+.1%} | {'yes' if row.holds else 'no'} | {_activity(row)} |"
            f" {'yes' if row.issued_equals_plan else 'no'} |"
            for row in rows
        ),
        "",
        f"mean accuracy {1 - _mean(abs(row.error) for row in rows):.1%},"
        f" intervals hold {_mean(row.holds for row in rows):.0%} of {len(rows)}"
        + (f", activity error {_mean(known):.1%} in the mean" if known else "")
        + _turns(rows),
        "",
        "| kind | runs | mean accuracy | farthest off | in interval |",
        "|---|---|---|---|---|",
        *_kinds(rows),
        "",
        "| model | nodes x ranks | best predicted | best measured | regret | noise floor | order |",
        "|---|---|---|---|---|---|---|",
        *(_ranking(group) for group in _sizes(rows)),
        "",
        "| model | nodes x ranks | of | predicted s | measured s | slower than the best, predicted | measured |",
        "|---|---|---|---|---|---|---|",
        *(line for group in _sizes(rows) for line in _places(group)),
    ]
    return "\n".join(lines) + "\n"


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def activity_table(rows: Sequence[Row]) -> str:
    """Of every run a line each rank, with the error of all its work and of each unit (DistSim, figures 9 and 10)."""
    lines = []
    for row in rows:
        columns = tuple(dict.fromkeys(name for units in row.units for name in units))
        lines += [f"{row.model}, {row.layout}, {row.strategy} {row.options}".rstrip(), ""]
        lines += [f"| rank | all | {' | '.join(columns)} |", "|---" * (2 + len(columns)) + "|"]
        for rank, units in enumerate(row.units):
            errors = [_mean(units.values()), *(units.get(name) for name in columns)]
            cells = " | ".join("" if error is None else f"{error:.1%}" for error in errors)
            lines.append(f"| {rank} | {cells} |")
        lines.append("")
    return "\n".join(lines)


def _kinds(rows: Sequence[Row]) -> Iterator[str]:
    of_kind: dict[str, list[Row]] = {}
    for row in rows:
        of_kind.setdefault(row.kind, []).append(row)
    for kind, found in of_kind.items():
        farthest = max((row.error for row in found), key=abs)
        held = sum(row.holds for row in found)
        yield f"| {kind} | {len(found)} | {1 - _mean(abs(row.error) for row in found):.1%} | {farthest:+.1%} | {held} |"


def _turns(rows: Sequence[Row]) -> str:
    """How far forward and backward of single micro-batches are off, over runs, ranks and turns."""
    errors = sorted(
        error
        for row in rows
        if row.in_turns
        for units in row.units
        for name, error in units.items()
        if name.startswith(("FW", "BW"))
    )
    if not errors:
        return ""
    return f", of single turns {statistics.median(errors):.1%} in the median and {errors[-1]:.1%} at most"


def _activity(row: Row) -> str:
    return f"{row.activity[0]:.1%} ({row.activity[1]:.1%})" if row.activity else "not known"


def _sizes(rows: Sequence[Row]) -> list[list[Row]]:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.model, row.layout), []).append(row)
    return list(groups.values())


def _ranking(rows: Sequence[Row]) -> str:
    """Which was predicted best and which was; regret is what the first takes longer than the second.

    The order is Spearman's correlation of predicted and measured ranks.
    """
    predicted, measured = min(rows, key=lambda row: row.predicted_s), min(rows, key=lambda row: row.measured_s)
    names = [f"{row.strategy} {row.options}".strip() for row in (predicted, measured)]
    regret = predicted.measured_s / measured.measured_s - 1
    order = spearman(*(np.array([getattr(row, name) for row in rows]) for name in ("predicted_s", "measured_s")))
    head = f"| {rows[0].model} | {rows[0].layout} | {names[0]} | {names[1]} |"
    return f"{head} {regret:.1%} | {measured.noise_floor:.1%} | {'' if order is None else f'{order:.2f}'} |"


def _places(rows: Sequence[Row]) -> Iterator[str]:
    """Best, second, median and worst as predicted (DistSim, Table 2)."""
    ordered = sorted(rows, key=lambda row: row.predicted_s)
    count, best = len(ordered), ordered[0]
    for place, index in {"best": 0, "second": 1 % count, "median": count // 2, "worst": -1}.items():
        row = ordered[index]
        slower = f"{row.predicted_s / best.predicted_s:.2f} | {row.measured_s / best.measured_s:.2f}"
        name = f"{place}: {row.strategy} {row.options}".strip()
        yield f"| {row.model} | {row.layout} | {name} | {row.predicted_s:.4g} | {row.measured_s:.4g} | {slower} |"
