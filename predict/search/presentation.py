"""What a search found, as tables for a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paradl_bench.core.terminal.command_line import open_console
from paradl_bench.core.terminal.tables import table_of
from paradl_bench.core.units import counted, format_bytes, format_difference, format_seconds
from paradl_bench.plan.settings import SIMULATED_ALONE
from paradl_bench.strategies.exchange.options import bucket_limits
from predict.prediction.presentation import interval_cell
from predict.search.contrast import Contrasted
from predict.search.ranking import Searched
from predict.search.search import Answer, Row

_REASONS = 8
_SURE = 0.0005


def print_answer(answer: Answer) -> None:
    """A table of strategies, their commands, and what became of all other candidates; on standard output."""

    console = open_console()
    limit = answer.memory_bytes_per_rank
    within = f", {format_bytes(limit)} a rank" if limit is not None else ", memory not known"

    def line(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    for text in _not_compared(answer.searched):
        line(text)
    evaluator = answer.rows[0].prediction.evaluator
    title = f"{answer.model}, batch {answer.batch}{within}" + (f": {evaluator}" if evaluator != "simulate" else "")
    console.print(table_of([_cells(row) for row in answer.rows], title=title))
    line(
        "best: probability that the strategy is the fastest of those predicted, each with its fastest settings; errors"
        f" that they share do not count. Of strategies in no row: {_percent(answer.probability_of_others)}."
    )
    line("*: in the Pareto set of time, memory and rank-hours. Rows are in order of time.")
    for row in answer.rows:
        line(f"{row.place}  {row.predict_command}")
    if answer.rows[0].train_command is not None:
        line(f"to run the first: {answer.rows[0].train_command}")
    for searched in answer.searched:
        for text in _account(searched):
            line(text)
    beyond = dict.fromkeys(text for row in answer.rows for text in row.prediction.provenance.extrapolated)
    if beyond:
        line(f"extrapolated, in some row ({len(beyond)} ways; --json says which): {next(iter(beyond))}")


def _not_compared(searched: Sequence[Searched]) -> list[str]:
    """What "best" leaves out, and what would mend it."""
    kinds = {kind: operation for each in searched for kind, operation in each.not_compared.items()}
    if not kinds:
        return []
    named = ", ".join(f"{kind} ({operation})" for kind, operation in kinds.items())
    command = next(each.measure_command for each in searched if each.measure_command)
    return [
        f"Not compared, since the profile lacks their collectives: {named}. The best below is the others' best.",
        f"To compare them: {command}, then calibrate fit with the other directories.",
    ]


def _account(searched: Searched) -> list[str]:
    """What became of the candidates of one number of ranks, in words."""
    low, high = map(format_difference, searched.estimates_off)
    lines = [
        f"{searched.ranks} ranks: {searched.candidates:,} candidates (a strategy with its settings):"
        f" {searched.predicted:,} predicted ({low} to {high} of their estimates), {searched.too_slow:,} no"
        f" faster than the best even by an estimate from below, {searched.too_large:,} too large for the memory,"
        f" {searched.open:,} left open"
    ]
    if searched.open and searched.open_from_s is not None:
        soonest = format_seconds(searched.open_from_s)
        lines.append(f"  those left open may be faster, by estimates from {soonest} on: give more --predictions")
    lines += _contrasts(searched)
    reasons = sorted(searched.impossible.items(), key=lambda item: -item[1])
    lines += [f"  ruled out in {counted(count, 'strategy')}: {reason}" for reason, count in reasons[:_REASONS]]
    if len(reasons) > _REASONS:
        lines.append(f"  ruled out for {counted(len(reasons) - _REASONS, 'other reason')}: in --json")
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


def _cells(row: Row) -> Mapping[str, str]:
    found = row.prediction
    settings = [f"{found.options['schedule']}"] if "schedule" in found.options else []
    if (count := found.options.get("micro_batches")) is not None:
        settings.append("1 micro-batch" if count == "1" else f"{count} micro-batches")
    settings += [f"{name} {found.options[name]}" for name in SIMULATED_ALONE if name in found.options]
    cap = found.bucket_cap_bytes
    settings += [f"cap {cap / 1024**2:g} MiB"] if cap != bucket_limits(None)[1] else []
    cost = found.use.cost_per_epoch if found.use.cost_per_epoch is not None else found.use.cost_per_million_samples
    return {
        "": str(row.place),
        "strategy": found.strategy,
        "settings": ", ".join(settings),
        "iteration": format_seconds(found.iteration_s),
        "90%": interval_cell(found),
        "best": "" if row.probability_best is None else _percent(row.probability_best),
        "memory": format_bytes(found.memory.memory_bytes),
        "fits": {True: "yes", False: "no", None: ""}[found.memory.fits],
        "samples/s": f"{found.time.samples_per_s:.4g}",
        "efficiency": f"{found.use.efficiency:.0%}",
        "rank-h/M": f"{found.use.rank_hours_per_million_samples:.4g}",
        "cost": "" if cost is None else f"{cost:.4g}",
        "*": "*" if row.pareto else "",
    }


def _percent(chance: float) -> str:
    return "<0.1%" if 0 < chance < _SURE else f"{chance:.1%}"
