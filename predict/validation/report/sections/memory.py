"""What a rank's memory holds, beside what there is."""

from __future__ import annotations

from paradl_bench.core.units import format_bytes
from predict.prediction.prediction import Prediction
from predict.validation.report.content import Content, Figure, Section, called
from predict.validation.shown.cells import Table

_SHOWN = 8


def section(content: Content) -> Section:
    """Of the best configurations."""
    limit = content.case.memory_limit_bytes
    there = "not known: give --memory" if limit is None else format_bytes(limit)
    figure = peaks(content.predictions[:_SHOWN], limit)
    return Section(name="memory", title="Memory", lines=[f"Memory of a rank: {there}."], figures=(figure,))


def peaks(shown: tuple[Prediction, ...], limit_bytes: float | None) -> Figure:
    """Peaks of configurations by what they hold, beside the limit of a rank."""
    rows = [
        {
            "label": called(prediction),
            "parts_bytes": prediction.memory.memory_parts_bytes,
            "peak_bytes": prediction.memory.memory_bytes,
            "interval_bytes": prediction.memory.memory_interval_bytes,
        }
        for prediction in shown
    ]
    parts = list(dict.fromkeys(part for prediction in shown for part in prediction.memory.memory_parts_bytes))
    cells = [
        (
            called(prediction),
            format_bytes(prediction.memory.memory_bytes),
            " to ".join(map(format_bytes, prediction.memory.memory_interval_bytes or ())),
            *(format_bytes(prediction.memory.memory_parts_bytes.get(part, 0)) for part in parts),
        )
        for prediction in shown
    ]
    return Figure(
        name="memory",
        title="Memory of the rank that needs most",
        shows="Parts add up to the peak, which the mark shows with its 90% interval. The dashed line is the limit.",
        table=Table(("configuration", "peak", "90%", *(part.replace("_", " ") for part in parts)), cells),
        data={"rows": rows, "limit_bytes": limit_bytes},
    )
