"""What a search found, as tables for a person."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence

from paradl_bench.core.errors import nearest_multiples
from paradl_bench.core.terminal.command_line import open_console
from paradl_bench.core.terminal.tables import table_of
from paradl_bench.core.units import counted, format_bytes, format_difference, format_seconds
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.axes.registry import kinds_with
from paradl_bench.plan.settings import SIMULATED_ALONE
from paradl_bench.strategies.exchange.options import bucket_limits
from predict.prediction.confidence import confidence_in
from predict.prediction.prediction import PredictedUse, Prediction
from predict.prediction.presentation import interval_cell
from predict.search.account import Searched
from predict.search.contrast import Contrasted
from predict.search.search import Answer, Row

_SURE = 0.0005


def print_answer(answer: Answer, *, why: bool = False) -> None:
    """A table of strategies, their commands, and what became of all other candidates; on standard output.

    Args:
        why: list every remark.
    """
    console = open_console()
    limit = answer.memory_bytes_per_rank
    within = f", {format_bytes(limit)} a rank" if limit is not None else ", memory not known"

    def line(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    for text in (*uneven_lines(answer), *_not_compared(answer.searched)):
        line(text)
    evaluator = answer.rows[0].prediction.evaluator
    title = f"{answer.model}, batch {answer.batch}{within}" + (f": {evaluator}" if evaluator != "simulate" else "")
    several = len({row.prediction.ranks for row in answer.rows}) > 1
    settings = [settings_of_row(row.prediction, _differing(answer.rows)) for row in answer.rows]
    of_all = in_all(settings)
    title += f"; all rows: {', '.join(of_all)}" if of_all else ""
    own = [[text for text in texts if text not in of_all] for texts in settings]
    cells = [_cells(row, ", ".join(texts), several=several) for row, texts in zip(answer.rows, own, strict=True)]
    console.print(table_of(cells, title=title, keys=3, words=("settings",)))
    line(
        "best: the probability that the strategy is the fastest of those predicted, each with its fastest"
        " settings. Errors that strategies share do not count. Strategies in no row together:"
        f" {_percent(answer.probability_of_others)}."
    )
    line("*: no other prediction is better in time, memory and rank-hours at once. Rows are sorted by time.")
    if answer.further:
        line(f"In no row: {counted(answer.further, 'other prediction')} with a * (--pareto shows them).")
    if several:
        line("rank-hours: hours of all ranks together, for a million samples.")
    for row in answer.rows:
        line(f"{row.place}  {row.predict_command}")
    if answer.rows[0].train_command is not None:
        line(f"to run the first: {answer.rows[0].train_command}")
    for searched in answer.searched:
        for text in _account(searched, why=why):
            line(text)
    for text in confidence_in([(f"row {row.place}", row.prediction.provenance) for row in answer.rows]).lines(why=why):
        line(text)


def uneven_lines(answer: Answer) -> list[str]:
    """What has no candidate since ranks would see unequal parts of the mini-batch, and what would mend it."""
    return [
        f"Not searched on {counted(one.ranks, 'rank')}: {kinds_with(Trait.DIVIDES_BATCH)[0].name} parallelism of degree"
        f" {', '.join(map(str, one.uneven_replicas))}. Batch {answer.batch} does not split evenly over so many"
        f" replicas; {nearest_multiples(answer.batch, math.lcm(*one.uneven_replicas))}."
        for one in answer.searched
        if one.uneven_replicas
    ]


def _not_compared(searched: Sequence[Searched]) -> list[str]:
    """What "best" leaves out, and what would mend it."""
    kinds = {kind: operation for result in searched for kind, operation in result.not_compared.items()}
    if not kinds:
        return []
    named = ", ".join(f"{kind} ({operation})" for kind, operation in kinds.items())
    command = next(result.measure_command for result in searched if result.measure_command)
    return [
        f"Not compared, because the profile lacks their collectives: {named}. The best below is the best of the"
        " others.",
        f"To compare them, run {command}, then calibrate fit with the other directories.",
    ]


def _account(searched: Searched, *, why: bool) -> list[str]:
    """What became of the candidates of one number of ranks, in words; ``why`` they were ruled out as well."""
    low, high = map(format_difference, searched.estimates_off)
    lines = [
        f"{searched.ranks} ranks: {searched.candidates:,} candidates (a strategy with its settings):"
        f" {searched.predicted:,} predicted ({low} to {high} of their estimates), {searched.too_slow:,} no faster"
        f" than the best even by a lower bound, {searched.too_large:,} too large for the memory,"
        f" {searched.open:,} left open"
    ]
    if searched.open and searched.open_from_s is not None:
        soonest = format_seconds(searched.open_from_s)
        lines.append(f"  those left open may be faster (lower bounds from {soonest} on): give more --predictions")
    lines += _contrasts(searched)[: None if why else 1]
    if not why:
        return lines
    reasons = sorted(searched.impossible.items(), key=lambda item: -item[1])
    lines += [f"  ruled out in {counted(count, 'strategy')}: {reason}" for reason, count in reasons]
    if searched.not_searched:
        lines.append(f"  not searched: {'; '.join(searched.not_searched)}")
    return lines


def _contrasts(searched: Searched) -> list[str]:
    """What the best is worth: beside the median and the worst of what was predicted, and of all candidates."""
    few, every = searched.of_predicted, searched.of_all
    lines = [
        f"  best {format_seconds(searched.best_s)} ({searched.best}); of {counted(few.candidates, 'candidate')}"
        f" predicted, median {_contrasted(few.median)}, worst {_contrasted(few.worst)}"
    ]
    if every.candidates > few.candidates:
        lines.append(
            f"  of all {every.candidates:,} that memory does not rule out, by their estimates where not predicted:"
            f" median {_contrasted(every.median)}, worst {_contrasted(every.worst)}"
        )
    return lines


def _contrasted(one: Contrasted) -> str:
    return f"{format_seconds(one.iteration_s)} ({one.candidate}; the best is {one.best_is_faster:.3g} times as fast)"


def _differing(rows: Sequence[Row]) -> set[str]:
    """Options that some rows have and others lack, or have otherwise."""
    options = [row.prediction.options for row in rows]
    return {name for own in options for name in own if len({other.get(name) for other in options}) > 1}


def settings_of_row(prediction: Prediction, named: Container[str]) -> list[str]:
    """What a strategy runs with, in the words of the table.

    Args:
        named: options that a row is told apart by.
    """
    options = dict(prediction.options)
    settings = [schedule] if (schedule := options.pop("schedule", "")) else []
    if (count := options.pop("micro_batches", None)) is not None:
        settings.append("1 micro-batch" if count == "1" else f"{count} micro-batches")
    settings += [
        f"{name.replace('_', '-')} {text}" for name, text in options.items() if name in SIMULATED_ALONE or name in named
    ]
    cap = prediction.bucket_cap_bytes
    return [*settings, f"cap {cap / 1024**2:g} MiB"] if cap != bucket_limits(None)[1] else settings


def in_all(settings: Sequence[Sequence[str]]) -> list[str]:
    """What each of several rows has: it stands over the table, and leaves its width to what tells rows apart."""
    first, *others = settings
    return [text for text in first if others and all(text in other for other in others)]


def _cells(row: Row, settings: str, *, several: bool) -> Mapping[str, str]:
    """By column; ``several`` numbers of ranks are told apart by their rank-hours."""
    prediction = row.prediction
    return {
        "": f"{row.place}{'*' if row.pareto else ''}",
        "strategy": prediction.strategy,
        "settings": settings,
        "iteration": format_seconds(prediction.iteration_s),
        "90%": interval_cell(prediction),
        "best": "" if row.probability_best is None else _percent(row.probability_best),
        "memory": format_bytes(prediction.memory.memory_bytes)
        + (" too much" if prediction.memory.fits is False else ""),
        **_worth(prediction.use, several=several),
    }


def _worth(use: PredictedUse, *, several: bool) -> dict[str, str]:
    """What a strategy makes of its ranks, in one column."""
    cost = use.cost_per_epoch if use.cost_per_epoch is not None else use.cost_per_million_samples
    if cost is not None:
        return {"cost": f"{cost:.4g}"}
    if several:
        return {"rank-hours": f"{use.rank_hours_per_million_samples:.4g}"}
    return {"efficiency": f"{use.efficiency:.0%}"}


def _percent(chance: float) -> str:
    return "<0.1%" if 0 < chance < _SURE else f"{chance:.1%}"
