"""Tables of what single ranks did: activity, and calls that were timed one by one."""

from __future__ import annotations

from paradl_bench.core.terminal.printed import in_markdown
from paradl_bench.core.units import format_seconds
from paradl_bench.records.training.call_times import PARTS
from predict.validation.shown.cells import Table, configured_pair, markdown_table
from predict.validation.validation_report import PREDICTOR, Pair, Report, pairs_of


def markdown_activity(report: Report) -> list[str]:
    """The part on activity; nothing where no run tells."""
    activity = _activity(report)
    if not activity.rows:
        return []
    return [
        "## Activity",
        "",
        "By rank, how far begin and end of each unit of work (forward and backward of a micro-batch or of a stage, "
        "exchange, weight update) are off their prediction, relative to the measured iteration.",
        "",
        *markdown_table(activity),
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
    title = f"{in_markdown(f'{pair.model} {configured_pair(pair)} {pair.batch}')}, mean of begin and end of each unit:"
    return [title, "", *markdown_table(Table(("rank", *units), rows)), ""]


def _activity(report: Report) -> Table:
    """A row each rank of a run."""
    rows = [
        [
            f"{pair.model} {configured_pair(pair)} {pair.batch}",
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
    return Table(("run", "rank", "units", "mean", "worst", "of"), rows)


def markdown_calls(report: Report) -> list[str]:
    """The part on timed calls; nothing where none were."""
    timed = [pair for pair in report.pairs if pair.calls]
    if not timed:
        return []
    return [
        "## Calls timed one by one",
        "",
        "How a rank spends an iteration: waiting in calls for the last rank, where Horovod would negotiate;"
        " transferring; waiting between calls until the next bucket is full (OSF's WAIT); copying gradients out"
        " of the last buckets; and the rest, which is compute without calls. Predictions are for the mean rank.",
        "",
        *markdown_table(calls_table(report)),
        "",
        *(f"- {in_markdown(f'{pair.run}: {pair.calls.timing.line()}')}" for pair in timed if pair.calls),
        "",
    ]


def calls_table(report: Report) -> Table:
    """A row each rank of a run, and one that is predicted."""
    rows = []
    for pair in report.pairs:
        if pair.calls is None:
            continue
        name = f"{pair.model} {configured_pair(pair)} {pair.batch}"
        for rank in pair.calls.ranks:
            parts = (getattr(rank, part) for part in PARTS)
            rows.append([name, str(rank.rank), *map(format_seconds, parts)])
        predicted = pair.calls.predicted
        seconds = map(format_seconds, (predicted.waiting_s, predicted.transferring_s))
        rows.append([name, "predicted", *seconds, *[""] * (len(PARTS) - 2)])
    return Table(("run", "rank", *(part.removesuffix("_s") for part in PARTS)), rows)
