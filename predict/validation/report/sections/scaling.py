"""Efficiency over ranks, with its band and the knee."""

from __future__ import annotations

from paradl_bench.core.units import format_seconds
from paradl_bench.plan.strategy import parse_strategy
from predict.prediction.scaling import growing
from predict.validation.report.content import Content, Figure, Section, called
from predict.validation.shown.cells import Table


def section(content: Content) -> Section | None:
    """Nothing where there is one number of ranks alone."""
    scaling = content.scaling
    if not scaling.sweeps:
        return None
    return Section(
        name="scaling",
        title="Scaling",
        lines=[
            *(f"Knee of {sweep}." for sweep in scaling.sweeps),
            "Efficiency is samples/s over the samples/s of as many single ranks. Each single rank has as many"
            " samples (strong scaling: one rank has all of them).",
        ],
        figures=(_efficiency(content),),
        further={"Left out": scaling.left_out} if scaling.left_out else {},
        documents={"scaling-predictions": [prediction.record() for prediction in scaling.predictions]},
    )


def _efficiency(content: Content) -> Figure:
    scaling = content.scaling
    rows = [
        {
            "label": called(prediction),
            "series": growing(parse_strategy(prediction.strategy)),
            "ranks": prediction.ranks,
            "efficiency": prediction.use.efficiency,
            "interval": prediction.use.efficiency_interval,
        }
        for prediction in scaling.predictions
    ]
    cells = [
        (
            called(prediction),
            str(prediction.ranks),
            format_seconds(prediction.iteration_s),
            f"{prediction.time.samples_per_s:.4g}",
            f"{prediction.use.efficiency:.1%}",
            " to ".join(f"{end:.0%}" for end in prediction.use.efficiency_interval),
        )
        for prediction in scaling.predictions
    ]
    knees = [{"series": sweep.strategy, "ranks": sweep.knee_ranks} for sweep in scaling.sweeps]
    return Figure(
        name="efficiency",
        title="Efficiency over ranks",
        shows="Marks are predictions, bands their 90% intervals. A dashed line is a knee: up to there efficiency is at"
        f" least {scaling.sweeps[0].fraction:.0%} of what it is at the fewest ranks.",
        table=Table(("configuration", "ranks", "iteration", "samples/s", "efficiency", "90%"), cells),
        data={"points": rows, "knees": knees},
    )
