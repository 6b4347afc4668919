"""Figures of predictions: what an iteration is made of, how it scales, which strategies are best, one iteration."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from paradl_bench.core.statistics import grouped
from paradl_bench.core.terminal.pictures import COLOURS, draw_line, new_figure
from paradl_bench.core.terminal.printed import in_drawing
from paradl_bench.plan.tasks import Phase, Stream
from predict.api.rows import prediction_row
from predict.prediction.prediction import Prediction
from predict.prediction.scaling import line_of
from predict.search.search import Answer
from predict.timeline.timeline import IterationTimeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PARTS = {
    "fw_s": "FW", "bw_s": "BW", "layer_communication_s": "communication for layers", "ge_s": "GE", "wu_s": "WU",
    "pipeline_idle_s": "idle", "input_s": "input", "h2d_s": "copy to the device",
}  # fmt: skip
_PART_COLOURS = (COLOURS[0], COLOURS[1], COLOURS[3], COLOURS[2], COLOURS[4], "0.75", COLOURS[5], "0.45")
_BYTES_OF_GIB = 2**30
_MOST_ROLES = 16
_DRAWN = {
    "FW": (Stream.COMPUTE, (Phase.FW,)),
    "BW": (Stream.COMPUTE, (Phase.BW,)),
    "GE copies": (Stream.COMPUTE, (Phase.GE,)),
    "WU": (Stream.COMPUTE, (Phase.WU,)),
    "communication": (Stream.COMMUNICATION, ()),
}


def parts_figure(predictions: Sequence[Prediction], title: str) -> Figure:
    """What iterations are made of: one bar for each, with its 90% interval."""
    rows = [prediction_row(prediction) for prediction in predictions]
    figure = new_figure(max(4.5, 2.5 + 0.9 * len(rows)), 4.2)
    axes = figure.subplots()
    bottoms = [0.0] * len(rows)
    for (name, label), colour in zip(_PARTS.items(), _PART_COLOURS, strict=True):
        seconds = [getattr(row, name) for row in rows]
        if any(seconds):
            axes.bar(range(len(rows)), seconds, 0.7, bottom=bottoms, color=colour, label=label, edgecolor="white")
            bottoms = [bottom + more for bottom, more in zip(bottoms, seconds, strict=True)]
    for index, row in enumerate(rows):
        axes.plot([index, index], row.interval_s, color="black", linewidth=1.2, marker="_", markersize=6)
    axes.set_xticks(range(len(rows)), [in_drawing(f"{row.strategy}, batch {row.batch}") for row in rows])
    return _finished(figure, title, axes)


def waterfall_figure(steps_s: Mapping[str, float], title: str) -> Figure:
    """What an iteration is made of, step by step: each bar begins where the one above it ends."""
    figure = new_figure(7, 1.2 + 0.5 * len(steps_s))
    axes = figure.subplots()
    ends_s = list(itertools.accumulate(steps_s.values()))
    axes.barh(range(len(steps_s)), list(steps_s.values()), 0.7, left=[0.0, *ends_s[:-1]], color=COLOURS[0])
    axes.set_yticks(range(len(steps_s)), list(steps_s))
    axes.invert_yaxis()
    axes.set_xlabel("time in the iteration [s]")
    figure.suptitle(in_drawing(title))
    return figure


def ranks_figure(predictions: Sequence[Prediction], title: str, *, strong_scaling: bool) -> Figure:
    """Iterations, and efficiency, over ranks with their 90% intervals: one line for each sweep.

    Args:
        strong_scaling: sweeps keep the global mini-batch; otherwise they keep the samples of each rank.
    """
    figure = new_figure(10, 4.2)
    of_time, of_efficiency = figure.subplots(1, 2)
    lines = grouped(predictions, lambda prediction: line_of(prediction, strong=strong_scaling))
    for (said, line), colour in zip(lines.items(), itertools.cycle(COLOURS), strict=False):
        line = sorted(line, key=lambda prediction: prediction.ranks)
        ranks, label = [prediction.ranks for prediction in line], ", ".join(said)
        seconds, intervals_s = [each.iteration_s for each in line], [each.time.interval_s for each in line]
        draw_line(of_time, ranks, seconds, intervals_s, colour, label)
        uses = [each.use for each in line]
        bands = [use.efficiency_interval for use in uses]
        draw_line(of_efficiency, ranks, [use.efficiency for use in uses], bands, colour, label)
    counts = sorted({prediction.ranks for prediction in predictions})
    for axes in (of_time, of_efficiency):
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.set_xlabel("ranks")
    of_efficiency.set_ylabel("efficiency, with 90% interval")
    of_efficiency.set_ylim(bottom=0)
    return _finished(figure, title, of_time)


def search_figure(answer: Answer) -> Figure:
    """Strategies by iteration and peak memory; those that nothing beats in time, memory and rank-hours are filled."""
    figure = new_figure(6.5, 4.5)
    axes = figure.subplots()
    for row in answer.rows:
        at = row.prediction.iteration_s, row.prediction.memory.memory_bytes / _BYTES_OF_GIB
        axes.plot(*at, "o", color=COLOURS[0], markerfacecolor=COLOURS[0] if row.pareto else "none")
        axes.annotate(in_drawing(row.prediction.strategy), at, xytext=(4, 4), textcoords="offset points", fontsize=8)
    limit, most = answer.memory_bytes_per_rank, max(row.prediction.memory.memory_bytes for row in answer.rows)
    # Far above all strategies, its line would press them to the ground.
    if limit is not None and limit < 2 * most:
        axes.axhline(limit / _BYTES_OF_GIB, color="0.5", linestyle="--", linewidth=1)
    axes.set_xlabel("iteration [s]")
    axes.set_ylabel("peak memory of a rank [GiB]")
    # Room for the names, which stand above and to the right of their marks.
    axes.margins(x=0.15, y=0.1)
    axes.set_ylim(bottom=0)
    figure.suptitle(in_drawing(f"{answer.model}, batch {answer.batch}"))
    return figure


def timeline_figure(timeline: IterationTimeline, title: str) -> Figure:
    """When every role computes and communicates: one row for each stream of a role."""
    roles = timeline.roles[:_MOST_ROLES]
    figure = new_figure(10, 1.4 + 0.7 * len(roles))
    axes = figure.subplots()
    marks = {}
    for row, role in enumerate(roles):
        for (label, (stream, phases)), colour in zip(_DRAWN.items(), COLOURS, strict=False):
            start_s, end_s = role.on(stream, *phases)
            if len(start_s):
                below = row + (0.42 if stream is Stream.COMMUNICATION else 0.0)
                spans = list(zip(start_s.tolist(), (end_s - start_s).tolist(), strict=True))
                marks[label] = axes.broken_barh(spans, (below - 0.4, 0.38), color=colour, linewidth=0)
    axes.set_yticks(range(len(roles)), [in_drawing(role.name) for role in roles])
    axes.invert_yaxis()
    axes.set_xlim(0, timeline.iteration_s)
    axes.set_xlabel("time [s]")
    figure.legend(list(marks.values()), list(marks), fontsize=8, ncols=len(marks), loc="outside lower center")
    more = len(timeline.roles) - len(roles)
    figure.suptitle(in_drawing(title + (f" ({more} more roles)" if more else "")))
    return figure


def _finished(figure: Figure, title: str, axes: Axes) -> Figure:
    axes.set_ylabel("iteration [s], with 90% interval")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    figure.suptitle(in_drawing(title))
    return figure
