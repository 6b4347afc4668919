"""Writes a validation as Markdown, CSV and JSON, and prints its table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paradl_bench.core.files.storage import encode_pretty, write_bytes_atomically, write_text_atomically
from paradl_bench.core.frames import frame_of
from paradl_bench.core.terminal.command_line import open_console, refuse_overwrite, tell, write_output
from paradl_bench.core.terminal.forms import CSV, JSON, PARQUET, frame_bytes
from paradl_bench.core.terminal.printed import in_code, in_markdown
from paradl_bench.core.terminal.tables import table
from paradl_bench.core.units import format_accuracy, format_around, format_difference, format_seconds
from predict.prediction.confidence import Rests, confidence_in
from predict.prediction.presentation import flat_row, rows_csv
from predict.validation.runs import PHASES
from predict.validation.shown.cells import Table, configured_pair, markdown_table
from predict.validation.shown.findings import beyond_measurement, findings
from predict.validation.shown.of_ranks import calls_table, markdown_activity, markdown_calls
from predict.validation.shown.rows import PairRow, pair_row
from predict.validation.validation_report import (
    EVALUATORS,
    PREDICTOR,
    Pair,
    PredictedFactor,
    RepeatedPrediction,
    Report,
    pairs_of,
)

FILES = ("report.md", "pairs.csv", "report.json")

_ALL = "all"
_NAMES = ("model", "strategy", "batch", "evaluator")
_OF_RUNS = ("model", "strategy", "batch", "measured", "predicted", "90% interval", "error", "inside")
_OF_SCORES = ("strategy", "evaluator", "runs", "mean accuracy", "worst", "interval holds", "noise floor")
_OF_REPEATED = ("model", "strategy", "batch", "runs", "median", "predicted", "error", "inside")
"""What a terminal shows; report.md has all columns."""


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


def print_report(report: Report, path: Path, form: str) -> None:
    """The tables, what stands out, and where the report is; or the report in another form."""
    if form in (CSV, PARQUET):
        write_output("-", frame_bytes(frame_of(PairRow, map(pair_row, report.pairs)), form))
        return
    if form == JSON:
        write_output("-", encode_pretty(report))
        return
    console = open_console()
    tables = {
        "Predicted against measured": _shown(_runs(report, relative=True), _OF_RUNS),
        "Accuracy": _shown(_scores(report), _OF_SCORES),
    }
    if report.reruns:
        tables["How well a repeated run predicts a run"] = _reruns(report)
    if report.repeated:
        tables["Median of a configuration's runs"] = _shown(_repeated(report), _OF_REPEATED)
        tables["Accuracy over configurations"] = _configurations(report)
    if report.scaling_factors:
        tables["Scaling factor"] = _scaling(report)
    if any(pair.calls for pair in report.pairs):
        tables["Calls timed one by one"] = calls_table(report)
    for title, (titles, rows) in tables.items():
        console.print(table(titles, rows, title=title, keys=sum(name in _NAMES for name in titles)))
    for line in findings(report):
        console.print(line, highlight=False)
    simulated = [(pair.run, Rests(pair.sources, pair.extrapolated)) for pair in pairs_of(report.pairs, PREDICTOR)]
    for line in confidence_in(simulated, option=f"{path.name} lists").lines(why=False) if simulated else ():
        console.print(line, highlight=False)
    tell(f"Report, with baselines and phases: {path}")


def _shown(whole: Table, titles: Sequence[str]) -> Table:
    """Some columns of a table of the report."""
    places = [list(whole.titles).index(title) for title in titles]
    return Table(titles, [[row[place] for place in places] for row in whole.rows])


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
        *markdown_table(_runs(report)),
        "",
        "## Accuracy",
        "",
        "Phases: accuracy of forward, backward, the gradient exchange after backward, and the weight update.",
        "",
        *markdown_table(_scores(report)),
        "",
        *_markdown_reruns(report),
        *_markdown_scaling(report),
        "## Findings",
        "",
        *(f"- {in_markdown(line)}" for line in (*findings(report), *beyond_measurement(report))),
        "",
        "## Phases",
        "",
        *markdown_table(_phases(report)),
        "",
        *_markdown_limitations(report),
        *markdown_activity(report),
        *markdown_calls(report),
    ]
    return "\n".join(lines)


def _baselines(report: Report) -> list[str]:
    return [name for name in EVALUATORS[1:] if name in report.overall]


def _markdown_reruns(report: Report) -> list[str]:
    if not report.reruns:
        return []
    return [
        "## Repeated runs",
        "",
        "How well the other runs of a configuration predict each of its runs. A prediction can hardly do better.",
        "",
        *markdown_table(_reruns(report)),
        "",
        "If the machine's speed changes from run to run, one prediction can't match every run. Below, each"
        " configuration has the median of its runs, with the fastest and the slowest of them.",
        "",
        *markdown_table(_repeated(report)),
        "",
        *markdown_table(_configurations(report)),
        "",
    ]


def _markdown_scaling(report: Report) -> list[str]:
    if not report.scaling_factors:
        return []
    return [
        "## Scaling factor",
        "",
        "Seconds of one rank over seconds of the run, at the same mini-batch a rank: measured (where a serial run"
        " exists), and predicted by each evaluator.",
        "",
        *markdown_table(_scaling(report)),
        "",
    ]


def _markdown_limitations(report: Report) -> list[str]:
    if not report.limitations:
        return []
    rows = [
        [
            one.run,
            f"{one.model} {one.strategy} {one.batch}",
            one.limitation,
            one.category,
            one.comes_of,
            one.state,
            "" if one.share is None else f"{one.share:.1%}",
            " to ".join(f"{end:.1%}" for end in one.share_interval or ()),
            one.evidence,
        ]
        for one in report.limitations
    ]
    titles = ("run", "of", "limitation or bottleneck", "category", "comes of", "state", "share", "90%", "evidence")
    return [
        "## What limits the runs",
        "",
        "Shares of the measured iteration, as `predict diagnose --run` says them. It also says what would help.",
        "",
        *markdown_table(Table(titles, rows)),
        "",
    ]


def _scaling(report: Report) -> Table:
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
    return Table(("model", "strategy", "batch a rank", "serial runs", "measured", *names), rows)


def _factor_cell(factor: PredictedFactor | None) -> str:
    return "" if factor is None else f"{factor.predicted:.3f} ({format_difference(factor.error)})"


def _reruns(report: Report) -> Table:
    rows = [
        [strategy, str(rerun.runs), format_accuracy(rerun.mean_accuracy), f"{rerun.half_width_85:.1%}"]
        for strategy, rerun in report.reruns.items()
    ]
    return Table(("strategy", "runs", "accuracy of the other runs' median", "half-width that holds 85%"), rows)


def _repeated(report: Report) -> Table:
    names = _baselines(report)
    titles = ["model", "strategy", "batch", "runs", "fastest", "median", "slowest", "predicted", "error", "inside"]
    titles += [f"{name} error" for name in names]
    rows = [
        [
            one.model,
            configured_pair(one),
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
    return Table(titles, rows)


def _configurations(report: Report) -> Table:
    """Accuracy of every evaluator over the configurations of a strategy that ran more than once, and of several."""
    groups: dict[tuple[str, str], list[RepeatedPrediction]] = {}
    strategies = dict.fromkeys(one.strategy for one in report.repeated)
    for strategy in (*strategies, *((_ALL,) if len(strategies) > 1 else ())):
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
    return Table(("strategy", "evaluator", "configurations", "mean accuracy", "worst", "interval holds"), rows)


def _runs(report: Report, *, relative: bool = False) -> Table:
    """Every run; intervals in seconds, or ``relative`` to what they are of."""
    by_run: dict[str, dict[str, Pair]] = {}
    for pair in report.pairs:
        by_run.setdefault(pair.run, {})[pair.evaluator] = pair
    names = _baselines(report)
    titles = ["model", "strategy", "batch", "measured", "iqr", "noise floor", "predicted", "90% interval", "error"]
    titles += ["inside", "memory", *(f"{name} error" for name in names)]
    rows = [
        [
            pair.model,
            configured_pair(pair),
            str(pair.batch),
            format_seconds(pair.measured_median_s),
            format_seconds(pair.measured_iqr_s),
            f"{pair.noise_floor:.1%}",
            format_seconds(pair.predicted_s),
            format_around(pair.interval_s, pair.predicted_s)
            if relative
            else " to ".join(map(format_seconds, pair.interval_s)),
            format_difference(pair.error),
            "yes" if pair.covered else "no",
            _memory_cell(pair),
            *(format_difference(of_run[name].error) if name in of_run else "" for name in names),
        ]
        for of_run in by_run.values()
        for pair in (of_run[PREDICTOR],)
    ]
    return Table(titles, rows)


def _memory_cell(pair: Pair) -> str:
    if pair.memory is None:
        return ""
    return format_difference(pair.memory.error) + (" (fitted)" if pair.memory.fitted_to else "")


def _scores(report: Report) -> Table:
    titles = ["strategy", "evaluator", "runs", "mean accuracy", "worst", "mean error", "interval holds", "half-width"]
    titles += ["noise floor", *PHASES]
    scores = [*report.strategies.items()]
    if len(scores) > 1:
        scores.append((_ALL, {name: overall.score for name, overall in report.overall.items()}))
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
    return Table(titles, rows)


def _phases(report: Report) -> Table:
    rows = [
        [
            f"{pair.model} {configured_pair(pair)} {pair.batch}",
            name,
            format_seconds(phase.predicted_s),
            format_seconds(phase.measured_s),
            "" if phase.error is None else format_difference(phase.error),
        ]
        for pair in pairs_of(report.pairs, PREDICTOR)
        for name, phase in pair.parts.items()
    ]
    return Table(("run", "phase", "predicted", "measured", "error"), rows)
