"""Writes a validation as Markdown, CSV and JSON, and prints its table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from paradl_bench.core.files.storage import encode_pretty, write_bytes_atomically, write_text_atomically
from paradl_bench.core.terminal.command_line import open_console, refuse_overwrite, tell, write_output
from paradl_bench.core.terminal.printed import in_code, in_markdown
from paradl_bench.core.terminal.tables import table
from paradl_bench.core.units import format_accuracy, format_difference, format_seconds
from paradl_bench.plan.settings import SIMULATED_ALONE
from paradl_bench.records.training.call_times import PARTS
from predict.prediction.presentation import flat_row, rows_csv
from predict.validation.runs import PHASES
from predict.validation.shown.findings import findings
from predict.validation.validation_report import (
    EVALUATORS,
    PREDICTOR,
    Pair,
    PredictedFactor,
    Repeated,
    RepeatedPrediction,
    Report,
    pairs_of,
)

FILES = ("report.md", "pairs.csv", "report.json")

_TOLD = ("schedule", *SIMULATED_ALONE, "exchange", "fused_by", "batch_norm")
_ALL = "all"


class _Table(NamedTuple):
    """Titles of columns, and cells."""

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]


def refuse_existing(directory: Path, *, force: bool) -> None:
    """Raise before any work is done where a report stands that may not be replaced."""
    for name in FILES:
        refuse_overwrite(str(directory / name), force=force)


def write_report(directory: Path, report: Report) -> Path:
    """Write report.md, pairs.csv and report.json; returns the first."""
    write_text_atomically(directory / "report.md", markdown(report))
    write_bytes_atomically(directory / "pairs.csv", rows_csv([csv_row(pair) for pair in report.pairs]))
    write_bytes_atomically(directory / "report.json", encode_pretty(report))
    return directory / "report.md"


def csv_row(pair: Pair) -> dict[str, object]:
    """A pair's fields in one level; its ranks are in the report alone."""
    row = flat_row(pair)
    for of_ranks in ("activity.ranks", "calls.ranks"):
        row.pop(of_ranks, None)
    return row


def print_report(report: Report, path: Path, *, as_json: bool) -> None:
    """The tables, what stands out, and where the report is; or the report as JSON."""
    if as_json:
        write_output("-", encode_pretty(report))
        return
    console = open_console()
    tables = {"Predicted against measured": _runs(report), "Accuracy": _scores(report)}
    if report.reruns:
        tables["What repeating a run predicts of it"] = _reruns(report)
    if report.repeated:
        tables["Median of a configuration's runs"] = _repeated(report)
        tables["Accuracy over configurations"] = _configurations(report)
    if report.scaling_factors:
        tables["Scaling factor"] = _scaling(report)
    if any(pair.calls for pair in report.pairs):
        tables["Calls timed one by one"] = _calls(report)
    for title, (titles, rows) in tables.items():
        console.print(table(titles, rows, title=title))
    for line in findings(report):
        console.print(line, highlight=False)
    tell(f"Report: {path}")


def markdown(report: Report) -> str:
    """The whole report for a person."""
    lines = [
        "# Predicted against measured",
        "",
        f"Profile: {in_code(report.profile)}. Every run is predicted by `{PREDICTOR}`;"
        f" {', '.join(_baselines(report))} are baselines from the same profile,"
        " where they have something to say. Error is (predicted - measured) / measured "
        "and accuracy 1 - |error|; measured is the median over iterations of the slowest rank, the noise floor its "
        "run-to-run spread; memory is the error of the predicted peak, marked "
        "where the profile's memory factors were fitted to the run or a repetition of it.",
        "",
        *_markdown_table(_runs(report)),
        "",
        "## Accuracy",
        "",
        "Phases: accuracy of forward, backward, what is left of the gradient exchange after it, and weight update.",
        "",
        *_markdown_table(_scores(report)),
        "",
        *_markdown_reruns(report),
        *_markdown_scaling(report),
        "## Findings",
        "",
        *(f"- {in_markdown(line)}" for line in findings(report)),
        "",
        "## Phases",
        "",
        *_markdown_table(_phases(report)),
        "",
        *_markdown_activity(report),
        *_markdown_calls(report),
    ]
    return "\n".join(lines)


def _markdown_activity(report: Report) -> list[str]:
    activity = _activity(report)
    if not activity.rows:
        return []
    return [
        "## Activity",
        "",
        "By rank, how far begin and end of each unit of work (forward and backward of a micro-batch or of a stage, "
        "exchange, weight update) are off their prediction, relative to the measured iteration.",
        "",
        *_markdown_table(activity),
        "",
        *(line for pair in pairs_of(report.pairs, PREDICTOR) for line in _markdown_turns(pair)),
    ]


def _markdown_turns(pair: Pair) -> list[str]:
    """Of a run in several turns, every unit's error: a line each rank, a column each unit."""
    ranks = pair.activity.ranks if pair.activity else ()
    if not any("FW2" in rank.by_unit for rank in ranks):
        return []
    units = tuple(dict.fromkeys(name for rank in ranks for name in rank.by_unit))
    rows = [
        [str(rank.rank), *(f"{rank.by_unit[name]:.1%}" if name in rank.by_unit else "" for name in units)]
        for rank in ranks
    ]
    title = f"{in_markdown(f'{pair.model} {_configured(pair)} {pair.batch}')}, mean of begin and end of each unit:"
    return [title, "", *_markdown_table(_Table(("rank", *units), rows)), ""]


def _activity(report: Report) -> _Table:
    """A row each rank of a run."""
    rows = [
        [
            f"{pair.model} {_configured(pair)} {pair.batch}",
            str(rank.rank),
            str(rank.units),
            f"{rank.mean_error:.1%}",
            f"{rank.worst_error:.1%}",
            rank.worst_unit,
        ]
        for pair in pairs_of(report.pairs, PREDICTOR)
        if pair.activity is not None
        for rank in pair.activity.ranks
    ]
    return _Table(("run", "rank", "units", "mean", "worst", "of"), rows)


def _markdown_calls(report: Report) -> list[str]:
    timed = [pair for pair in report.pairs if pair.calls]
    if not timed:
        return []
    return [
        "## Calls timed one by one",
        "",
        "What a rank spends an iteration with: waiting in calls for the last rank, where Horovod would negotiate; "
        "transferring; between calls, until the next bucket is full (OSF's WAIT); copying gradients out of the last "
        "buckets; and the rest, which is compute beside no call. Predictions are of the mean rank.",
        "",
        *_markdown_table(_calls(report)),
        "",
        *(f"- {in_markdown(f'{pair.run}: {pair.calls.timing.line()}')}" for pair in timed if pair.calls),
        "",
    ]


def _calls(report: Report) -> _Table:
    """A row each rank of a run, and one that is predicted."""
    rows = []
    for pair in report.pairs:
        if pair.calls is None:
            continue
        name = f"{pair.model} {_configured(pair)} {pair.batch}"
        for rank in pair.calls.ranks:
            parts = (getattr(rank, part) for part in PARTS)
            rows.append([name, str(rank.rank), *map(format_seconds, parts)])
        predicted = pair.calls.predicted
        seconds = map(format_seconds, (predicted.waiting_s, predicted.transferring_s))
        rows.append([name, "predicted", *seconds, *[""] * (len(PARTS) - 2)])
    return _Table(("run", "rank", *(part.removesuffix("_s") for part in PARTS)), rows)


def _markdown_table(cells: _Table) -> list[str]:
    def line(row: Sequence[str]) -> str:
        return f"| {' | '.join(in_markdown(cell) for cell in row)} |"

    return [line(cells.titles), line(["---"] * len(cells.titles)), *map(line, cells.rows)]


def _baselines(report: Report) -> list[str]:
    return [name for name in EVALUATORS[1:] if name in report.overall]


def _markdown_reruns(report: Report) -> list[str]:
    if not report.reruns:
        return []
    return [
        "## Repeated runs",
        "",
        "How well the other real runs of a configuration predict each run of it; a prediction can hardly do better.",
        "",
        *_markdown_table(_reruns(report)),
        "",
        "Where the machine's speed changes from run to run, one prediction can't meet every run. Below, the median of "
        "a configuration's runs, between the fastest and the slowest of them, stands for it.",
        "",
        *_markdown_table(_repeated(report)),
        "",
        *_markdown_table(_configurations(report)),
        "",
    ]


def _markdown_scaling(report: Report) -> list[str]:
    if not report.scaling_factors:
        return []
    return [
        "## Scaling factor",
        "",
        "Seconds of one rank over those of the run, at the same mini-batch a rank: as measured, where a serial run is "
        "there, and as each evaluator predicts both.",
        "",
        *_markdown_table(_scaling(report)),
        "",
    ]


def _scaling(report: Report) -> _Table:
    names = [name for name in EVALUATORS if any(name in one.by_evaluator for one in report.scaling_factors)]
    rows = [
        [
            one.model,
            one.strategy,
            str(one.local_batch),
            str(len(one.serial_runs)),
            f"{one.measured:.3f}",
            *(_factor_cell(one.by_evaluator.get(name)) for name in names),
        ]
        for one in report.scaling_factors
    ]
    return _Table(("model", "strategy", "batch a rank", "serial runs", "measured", *names), rows)


def _factor_cell(factor: PredictedFactor | None) -> str:
    return "" if factor is None else f"{factor.predicted:.3f} ({format_difference(factor.error)})"


def _reruns(report: Report) -> _Table:
    rows = [
        [strategy, str(rerun.runs), format_accuracy(rerun.mean_accuracy), f"{rerun.half_width_85:.1%}"]
        for strategy, rerun in report.reruns.items()
    ]
    return _Table(("strategy", "runs", "accuracy of the other runs' median", "half-width that holds 85%"), rows)


def _repeated(report: Report) -> _Table:
    names = _baselines(report)
    titles = ["model", "strategy", "batch", "runs", "fastest", "median", "slowest", "predicted", "error", "inside"]
    titles += [f"{name} error" for name in names]
    rows = [
        [
            one.model,
            _configured(one),
            str(one.batch),
            str(one.runs),
            format_seconds(one.measured_range_s[0]),
            format_seconds(one.measured_median_s),
            format_seconds(one.measured_range_s[1]),
            format_seconds(predicted.predicted_s),
            format_difference(predicted.error),
            "yes" if predicted.covered else "no",
            *(format_difference(one.by_evaluator[name].error) if name in one.by_evaluator else "" for name in names),
        ]
        for one in report.repeated
        for predicted in (one.by_evaluator[PREDICTOR],)
    ]
    return _Table(titles, rows)


def _configurations(report: Report) -> _Table:
    """Accuracy of every evaluator over the configurations of a strategy that ran more than once, and over all."""
    groups: dict[tuple[str, str], list[RepeatedPrediction]] = {}
    for strategy in (*dict.fromkeys(one.strategy for one in report.repeated), _ALL):
        of_strategy = [one.by_evaluator for one in report.repeated if strategy in (one.strategy, _ALL)]
        for name in (PREDICTOR, *_baselines(report)):
            groups[strategy, name] = [predicted[name] for predicted in of_strategy if name in predicted]
    rows = [
        [
            strategy,
            name,
            str(len(predicted)),
            format_accuracy(1 - sum(abs(one.error) for one in predicted) / len(predicted)),
            format_accuracy(1 - max(abs(one.error) for one in predicted)),
            f"{sum(one.covered for one in predicted) / len(predicted):.0%}",
        ]
        for (strategy, name), predicted in groups.items()
        if predicted
    ]
    return _Table(("strategy", "evaluator", "configurations", "mean accuracy", "worst", "interval holds"), rows)


def _runs(report: Report) -> _Table:
    by_run: dict[str, dict[str, Pair]] = {}
    for pair in report.pairs:
        by_run.setdefault(pair.run, {})[pair.evaluator] = pair
    names = _baselines(report)
    titles = ["model", "strategy", "batch", "measured", "iqr", "noise floor", "predicted", "90% interval", "error"]
    titles += ["inside", "memory", *(f"{name} error" for name in names)]
    rows = [
        [
            pair.model,
            _configured(pair),
            str(pair.batch),
            format_seconds(pair.measured_median_s),
            format_seconds(pair.measured_iqr_s),
            f"{pair.noise_floor:.1%}",
            format_seconds(pair.predicted_s),
            " to ".join(map(format_seconds, pair.interval_s)),
            format_difference(pair.error),
            "yes" if pair.covered else "no",
            _memory_cell(pair),
            *(format_difference(of_run[name].error) if name in of_run else "" for name in names),
        ]
        for of_run in by_run.values()
        for pair in (of_run[PREDICTOR],)
    ]
    return _Table(titles, rows)


def _configured(pair: Pair | Repeated) -> str:
    return configured(pair.strategy, pair.options, emulated=bool(pair.emulated))


def configured(strategy: str, options: Mapping[str, str], *, emulated: bool) -> str:
    """The strategy, with what tells runs of it apart."""
    told = [f"{name.replace('_', '-')} {options[name]}" for name in _TOLD if name in options]
    told += ["emulated"] if emulated else []
    return strategy + (f" ({'; '.join(told)})" if told else "")


def _memory_cell(pair: Pair) -> str:
    if pair.memory is None:
        return ""
    return format_difference(pair.memory.error) + (" (fitted)" if pair.memory.fitted_to else "")


def _scores(report: Report) -> _Table:
    titles = ["strategy", "evaluator", "runs", "mean accuracy", "worst", "mean error", "interval holds", "half-width"]
    titles += ["noise floor", *PHASES]
    scores = [*report.strategies.items(), (_ALL, {name: overall.score for name, overall in report.overall.items()})]
    rows = [
        [
            strategy,
            name,
            str(score.runs),
            format_accuracy(score.mean_accuracy),
            format_accuracy(score.worst_accuracy),
            format_difference(score.mean_error),
            f"{score.interval_coverage:.0%}",
            f"{score.median_half_width:.1%}",
            f"{score.median_noise_floor:.1%}",
            *(
                format_accuracy(score.phase_accuracy[phase], 0) if phase in score.phase_accuracy else ""
                for phase in PHASES
            ),
        ]
        for strategy, by_evaluator in scores
        for name, score in by_evaluator.items()
    ]
    return _Table(titles, rows)


def _phases(report: Report) -> _Table:
    rows = [
        [
            f"{pair.model} {_configured(pair)} {pair.batch}",
            name,
            format_seconds(phase.predicted_s),
            format_seconds(phase.measured_s),
            "" if phase.error is None else format_difference(phase.error),
        ]
        for pair in pairs_of(report.pairs, PREDICTOR)
        for name, phase in pair.parts.items()
    ]
    return _Table(("run", "phase", "predicted", "measured", "error"), rows)
