"""Points a second of the closed forms over arrays, and how far they are from single points.

    python benchmarks/speed/closed_forms.py
    python benchmarks/speed/closed_forms.py --from-profile p.json --model resnet50 --points 400000

Without a profile a synthetic one of the model is made, which needs torch once, to trace it. Points of every row of
ParaDL's Table 3 are drawn at random: groups and ranks of 1 to 64, local batches of 1 to 256, up to 1,024 micro-batches.
The first call of each row fills tables (each layer's seconds once a local batch and number of ranks on the host), later
ones read them; both are printed. The figure to reach is 200,000 points a second over all rows together.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np

if TYPE_CHECKING:
    from closed_form_tables import ClosedFormTables

    from predict.costs.cost_model import CostModel

ROWS = ("serial", "data", "filter", "channel", "spatial", "data+filter", "data+channel", "data+spatial", "pipeline")
SHARED = (2, 4, 8, 16, 32, 64)


def draw(row: str, points: int, generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Arguments of so many points of a row."""
    local = generator.integers(1, 257, points)
    groups = generator.integers(2, 65, points) if row.startswith("data") else np.ones(points, int)
    kind = row.removeprefix("data").removeprefix("+")
    ranks = generator.choice(SHARED, points) if kind not in ("", "serial") else np.ones(points, int)
    if row == "pipeline":
        # Every pair of stages and samples of a micro-batch is a plan of its own.
        micro_batches = generator.integers(1, 1025, points)
        samples = generator.choice([1, 2, 4, 8], points)
        ranks = generator.choice(SHARED[:3], points)
        return {"batch": micro_batches * samples, "ranks": ranks, "micro_batches": micro_batches}
    return {"batch": local * groups, "groups": groups, "ranks": ranks}


def kind_of(row: str) -> str:
    """The axis that shares layers."""
    return "data" if row in ("serial", "data") else row.removeprefix("data+")


def difference(
    model: CostModel, tables: ClosedFormTables, row: str, points: dict[str, np.ndarray], checked: int
) -> tuple[float, int]:
    """Largest relative difference from the evaluator ``paradl`` over so many of the points, and of how many it is.

    A row goes on where the network's limits end the strategy: such points are passed over.
    """
    from paradl_bench.core.errors import UserError
    from paradl_bench.plan.settings import plan_settings
    from paradl_bench.plan.strategy import Axis, Strategy
    from predict.workload import Configuration, evaluator_named

    kind, differences = kind_of(row), []
    for index in range(checked):
        at = {name: int(values[index]) for name, values in points.items()}
        axes = [Axis(kind="data", extents=(at["groups"],))] if at.get("groups", 1) > 1 else []
        axes += [Axis(kind=kind, extents=(at["ranks"],))] if kind != "data" else []
        settings = plan_settings(batch=at["batch"], micro_batches=at.get("micro_batches"))
        point = Configuration(strategy=Strategy(axes=tuple(axes)), settings=settings)
        try:
            alone_s = evaluator_named("paradl").prepare(model, point).timing().iteration_s
        except UserError:
            continue
        differences.append(abs(float(tables.iteration_s(kind, **at)) / alone_s - 1))
    return max(differences, default=0.0), len(differences)


@click.command()
@click.option("--from-profile", "profile", type=click.Path(path_type=Path), help="Default: a synthetic one.")
@click.option("--model", default="resnet50", show_default=True)
@click.option("--points", default=200_000, show_default=True, help="Of every row.")
@click.option("--checked", default=10, show_default=True, help="Points of every row to hold against single ones.")
def main(profile: Path | None, model: str, points: int, checked: int) -> None:
    """Time rows of the closed forms over arrays."""
    from closed_form_tables import ClosedFormTables

    from calibrate.profile.profile import read_profile
    from predict.costs.cost_model import CostModel

    with tempfile.TemporaryDirectory() as folder:
        if profile is None:
            from predict_speed import synthetic_profile

            profile = Path(folder) / "profile.json"
            synthetic_profile(profile, model, 32, ("all_gather", "send_recv", "broadcast"))
        stored = read_profile(profile)
    costs = CostModel(profile=stored, network=stored.network[model])
    tables = ClosedFormTables(costs)
    generator = np.random.default_rng(0)
    drawn = {row: draw(row, points, generator) for row in ROWS}
    seconds: dict[str, list[float]] = {}
    for row, arguments in drawn.items():
        for _ in range(4):
            begin = time.perf_counter()
            tables.iteration_s(kind_of(row), **arguments)
            seconds.setdefault(row, []).append(time.perf_counter() - begin)
        off, compared = difference(costs, tables, row, arguments, checked)
        first, later = seconds[row][0], sorted(seconds[row][1:])[1]
        click.echo(
            f"{row:13} {points / later:12,.0f} points a second; {points / first:12,.0f} with its tables;"
            f" off by {off:.1e} at most in {compared}"
        )
    count = points * len(ROWS)
    later = sum(sorted(times[1:])[1] for times in seconds.values())
    first = sum(times[0] for times in seconds.values())
    click.echo(f"all rows      {count / later:12,.0f} points a second; {count / first:12,.0f} with all tables")


if __name__ == "__main__":
    main()
