"""The answer first: the fastest configuration, its time, whether it fits, and what it was compared with."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from paradl_bench.core.units import counted, format_accuracy, format_bytes, format_seconds, format_share
from predict.costs.sourced import MEANINGS, Source
from predict.prediction.prediction import Prediction
from predict.prediction.presentation import interval_cell, lacks_parts, memory_cell
from predict.validation.report.content import Content, Figure, Section, called
from predict.validation.shown.cells import Table
from predict.validation.validation_report import PREDICTOR, pairs_of

SHOWN = 15
"""Configurations that are drawn."""
_SLOWEST_DRAWN = 5
"""Times as long as the fastest: beside one that takes longer, all others would be a mark at the left edge."""
_SHARE_TOLD = 0.0005
"""Less is 0.0%."""
_COUNTS = "candidates", "predicted", "open"
"""Of a search: what says how sure its answer is."""


def section(content: Content) -> Section:
    """The first thing that a reader sees."""
    best = content.predictions[0]
    beyond, notes = best.provenance.extrapolated, (*best.provenance.notes, *content.left_out)
    further = {
        "What the sources of seconds are": _sources_in_words(_shares_of(best)),
        f"What is extrapolated ({len(beyond)})": beyond,
        f"Notes ({len(notes)})": notes,
    }
    shown = content.predictions[:SHOWN]
    # Who names configurations wants to see them; a search adds what needs least memory, however long that takes.
    drawn, left_out = (shown, "") if content.answer is None else near_fastest(shown)
    return Section(
        name="answer",
        title="Answer",
        lines=[*_verdict(content), *_numbers(content, best)],
        figures=(ranking(shown, drawn, left_out), made_of(shown, drawn, left_out)),
        commands=_commands(content),
        further={title: lines for title, lines in further.items() if lines},
        documents={
            "predictions": [prediction.record() for prediction in content.predictions],
            **({"search": content.answer.record()} if content.answer else {}),
        },
    )


def _verdict(content: Content) -> list[str]:
    """Of strategies which is the fastest; of runs how far predictions are off."""
    best, whole = content.predictions[0], content.validation
    if content.run is not None and whole is not None:
        score = whole.overall[PREDICTOR].score
        (pair,) = (pair for pair in pairs_of(whole.pairs, PREDICTOR) if pair.run == content.run)
        return [
            f"The mean accuracy of {counted(score.runs, 'predicted run')} is"
            f" {format_accuracy(score.mean_accuracy)}. The 90% intervals hold {score.interval_coverage:.0%} of"
            " the runs.",
            f"The prediction of {content.run} has the largest error. The rest of this page is about that run:"
            f" {best.model}, {called(best)}.",
            f"Its iterations took {format_seconds(pair.measured_median_s)} in the median.",
        ]
    count = len(content.predictions)
    compared = f", the {'most samples a second' if _batches_differ(content.predictions) else 'fastest'} of {count}"
    compared = compared if count > 1 else ""
    if content.answer is not None:
        searched = content.answer.searched
        compared = f", {fastest_of(*(sum(getattr(one, name) for one in searched) for name in _COUNTS))}"
    return [f"{best.model}: {called(best)}{compared}."]


def fastest_of(candidates: int, predicted: int, left_open: int) -> str:
    """What the answer of a search was compared with; a candidate that was left open may be faster."""
    if not left_open:
        return f"the fastest of {candidates:,} candidates"
    return (
        f"the fastest of {predicted:,} that were predicted. Of {candidates:,} candidates, {left_open:,} are left open"
    )


def _numbers(content: Content, best: Prediction) -> list[str]:
    low, high = map(format_seconds, best.time.interval_s)
    around = "its interval is not known" if lacks_parts(best) else f"90% interval {low} to {high}"
    where = counted(best.ranks, "rank")
    lines = [
        f"An iteration is predicted to take {format_seconds(best.iteration_s)} ({around}) on {where}:"
        f" {best.time.samples_per_s:.4g} samples/s, {best.use.efficiency:.0%} of what as many single ranks would reach."
    ]
    if best.time.epoch_s is not None:
        lines.append(f"An epoch takes {format_seconds(best.time.epoch_s)}.")
    if best.use.cost_per_epoch is not None:
        lines.append(f"An epoch costs {best.use.cost_per_epoch:.4g}.")
    elif best.use.cost_per_million_samples is not None:
        lines.append(f"A million samples cost {best.use.cost_per_million_samples:.4g}.")
    lines.append(_fit(content, best))
    said = ", ".join(f"{format_share(share)} {name.replace('_', ' ')}" for name, share in _shares_of(best).items())
    lines.append(f"Where the seconds come from: {said}.")
    if content.answer is not None and (chance := content.answer.rows[0].probability_best) is not None:
        lines.append(f"It is the fastest of the strategies predicted with a probability of {chance:.0%}.")
    return lines


def _shares_of(prediction: Prediction) -> dict[str, float]:
    """Share of each source in the predicted seconds, where it is large enough to be told."""
    return {name: share for name, share in prediction.provenance.sources.items() if share >= _SHARE_TOLD}


def _sources_in_words(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{name.replace('_', ' ')}: {MEANINGS[Source[name.upper()]]}" for name in names)


def _fit(content: Content, best: Prediction) -> str:
    limit, peak = content.case.memory_limit_bytes, best.memory
    held = f"A rank's peak is {format_bytes(peak.memory_bytes)} of memory"
    if limit is None:
        return f"{held}. Whether it fits is not known: give --memory."
    _, high = peak.memory_interval_bytes or (0, peak.memory_bytes)
    if peak.fits is False:
        verdict = "It does not fit"
    elif high > limit:
        verdict = "It may not fit: the limit lies inside the interval"
    else:
        verdict = "It fits"
    return f"{verdict}. {held}; {format_bytes(limit)} are there."


def _commands(content: Content) -> list[str]:
    if content.answer is None:
        return []
    first = content.answer.rows[0]
    return [command for command in (first.predict_command, first.train_command) if command]


def _batches_differ(predictions: tuple[Prediction, ...]) -> bool:
    """Whether iterations are of so many samples that their times say nothing."""
    return len({prediction.batch for prediction in predictions}) > 1


def near_fastest(predictions: tuple[Prediction, ...]) -> tuple[tuple[Prediction, ...], str]:
    """Those that a chart of seconds draws, and what it says of the others, which its table holds."""
    longest_s = _SLOWEST_DRAWN * min(prediction.iteration_s for prediction in predictions)
    drawn = tuple(prediction for prediction in predictions if prediction.iteration_s <= longest_s)
    count = len(predictions) - len(drawn)
    said = f" {count} that take more than {_SLOWEST_DRAWN} times as long stand in the table alone." if count else ""
    return drawn, said


def ranking(
    predictions: tuple[Prediction, ...], drawn: tuple[Prediction, ...] | None = None, left_out: str = ""
) -> Figure:
    """Times of configurations with their intervals; samples a second where their batches differ.

    Args:
        drawn: those of the table that the chart draws; None for all. left_out: what is said of the others.
    """
    by_rate = _batches_differ(predictions)
    rows = [
        {
            "label": called(prediction),
            "batch": prediction.batch,
            "iteration_s": prediction.iteration_s,
            "interval_s": None if lacks_parts(prediction) else prediction.time.interval_s,
            "fits": prediction.memory.fits,
        }
        for prediction in (predictions if drawn is None else drawn)
    ]
    cells = [
        (
            called(prediction),
            str(prediction.ranks),
            format_seconds(prediction.iteration_s),
            interval_cell(prediction),
            f"{prediction.time.samples_per_s:.4g}",
            f"{prediction.use.efficiency:.0%}",
            memory_cell(
                prediction.memory.memory_bytes, prediction.memory.memory_interval_bytes, prediction.memory.fits
            ),
        )
        for prediction in predictions
    ]
    titles = ("configuration", "ranks", "iteration", "90%", "samples/s", "efficiency", "memory of a rank")
    return Figure(
        name="ranking",
        title="Samples a second" if by_rate else "Time of an iteration",
        shows="A mark is a prediction, its line the 90% interval. The star is the answer. A cross needs more memory"
        f" than there is.{left_out}",
        table=Table(titles, cells),
        data={"rows": rows, "by_rate": by_rate},
    )


def made_of(
    predictions: tuple[Prediction, ...], drawn: tuple[Prediction, ...] | None = None, left_out: str = ""
) -> Figure:
    """The parts of each configuration's iteration; arguments as of :func:`ranking`."""
    rows = [
        {"label": called(prediction), "part": part, "seconds": seconds}
        for prediction in (predictions if drawn is None else drawn)
        for part, seconds in prediction.time.breakdown_s.items()
        if part != "exposed_communication"
    ]
    breakdowns = [prediction.time.breakdown_s for prediction in predictions]
    parts = [part for part in dict.fromkeys(chain.from_iterable(breakdowns)) if part != "exposed_communication"]
    cells = [
        (called(prediction), *(format_seconds(prediction.time.breakdown_s.get(part, 0.0)) for part in parts))
        for prediction in predictions
    ]
    return Figure(
        name="breakdown",
        title="What an iteration is made of",
        shows="Parts add up to the iteration. FW and BW are forward and backward, GE is the gradient exchange that goes"
        " on after backward, WU the weight update. The other parts are communication for which layers wait, and"
        f" waiting.{left_out}",
        table=Table(("configuration", *parts), cells),
        data=rows,
    )
