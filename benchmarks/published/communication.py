"""How well fits of collectives predict sweeps that they have not seen: public ones, each left out in turn.

    python benchmarks/published/communication.py [-o DIR] [--sizes] [--data ../shared/data]

Reads the ABCI sweeps (NCCL, MPI on GPU buffers and on host buffers; all-reduce and broadcast; 1, 2, 4 and 8 nodes of
four V100) and vTrain's all-reduce tables (2, 4 and 8 GPUs of an A100 and of a V100 node). Each sweep, one operation
through one library at one rank count, is left out; the others of its source are fitted, and ``predict``'s cost of the
collective, with its 90% interval, is held against it. Then all ABCI sweeps of 8 nodes at once; with --sizes every
fourth size as well, which takes twice as long as all the rest. Beside it: one straight line through all that remains,
and two extrapolations from the largest count that remains, as a ring scales, and by log p. A few minutes. Where the
data are absent it says so and ends.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from calibrate.fitting.collectives.communication_curve import Point
from calibrate.fitting.collectives.communication_fit import fit_points
from calibrate.fitting.collectives.communication_points import Key, read_points
from calibrate.fitting.collectives.communication_spread import with_comparable_scaling
from calibrate.profile.collectives.communication import CommunicationFit
from calibrate.profile.profile import SCHEMA_VERSION, Profile
from calibrate.statistics.regression import fit_relative
from paradl_bench.core.files.storage import write_bytes_atomically
from paradl_bench.core.statistics import Z90
from paradl_bench.importers.catalog import importers
from paradl_bench.importers.importer import ImportOptions, load_file
from paradl_bench.plan.collectives.catalog import operations
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Collective
from paradl_bench.records.cluster import NODE, Cluster, Level
from paradl_bench.records.samples import CollectiveSamples
from predict.costs.communication.communication_costs import CommunicationCosts

DATA = Path(__file__).parents[3] / "shared" / "data"
SIZE_FOLDS = 4
OPERATIONS = operations()

Place = tuple[Key, int]
"""A sweep: (library, operation, level) and its rank count."""
Wanted = Callable[[Key, Point], bool]


class Source(NamedTuple):
    """Sweeps of one machine.

    Attributes:
        unit: what a rank count is named by, and how many ranks that is.
    """

    name: str
    cluster: Cluster
    unit: tuple[str, int]
    points: dict[Key, list[Point]]


class Row(NamedTuple):
    """One sweep left out, and how far predictions of it are off (medians of relative errors).

    Attributes:
        in_sample: of the points that the fit was made of. coverage: share of points that the 90% interval holds.
        half_width: median, relative to the time measured.
        line, ring, log_p: errors of one straight line and of simple extrapolations.
        said: what the predictions say lies beyond measurement.
    """

    source: str
    library: str
    operation: str
    held_out: str
    points: int
    error: float
    in_sample: float
    coverage: float
    half_width: float
    line: float
    ring: float
    log_p: float
    form: str
    said: str


def abci(data: Path) -> Source:
    """All sweeps of ABCI: nccl-tests, and OSU on GPU buffers (library mpi) and on host buffers (mpi-host)."""
    samples: list[CollectiveSamples] = []
    for suffix, tool, library in (("nccl", "nccl-tests", None), ("mpi", "osu", "mpi"), ("mpi-cpu", "osu", "mpi-host")):
        for path in sorted((data / "abci-v100" / "nccl_osu").glob(f"*.{suffix}")):
            nodes = 1 if "intra" in path.name else int(path.name.split("job")[1][:2])
            told = {} if library is None else {"ranks": 4 * nodes, "level": NODE if nodes == 1 else "system"}
            samples += importers()[tool].read(load_file(path), ImportOptions(library=library, **told)).collectives
    levels = (Level(name=NODE, ranks=4), Level(name="system", ranks=32))
    return Source("ABCI", Cluster(name="abci", levels=levels), ("node", 4), read_points(samples, OPERATIONS).points)


def vtrain(data: Path, gpu: str) -> Source:
    """vTrain's all-reduce tables of one node, out of place and in place: nanoseconds, a file a GPU count."""
    samples = []
    for ranks in (2, 4, 8):
        with open(data / "vtrain-a100" / f"{gpu}__AR_GPU{ranks}_1M_1024M_LUT.csv", newline="") as stream:
            for size, _, _, out_of_place_ns, _, in_place_ns, *_ in list(csv.reader(stream))[1:]:
                samples.append(_sample(ranks, int(size), float(out_of_place_ns) * 1e-9, "out_of_place"))
                samples.append(_sample(ranks, int(size), float(in_place_ns) * 1e-9, "in_place"))
    cluster = Cluster(name=gpu, levels=(Level(name=NODE, ranks=8),))
    return Source(f"vTrain {gpu}", cluster, ("GPU", 1), read_points(samples, OPERATIONS).points)


def _sample(
    ranks: int, message_bytes: int, seconds: float, buffers: Literal["in_place", "out_of_place"]
) -> CollectiveSamples:
    return CollectiveSamples(
        library="nccl",
        tool="nccl-tests",
        operation="all_reduce",
        level=NODE,
        ranks=ranks,
        message_bytes=message_bytes,
        dtype="fp32",
        block=0,
        samples_s=((seconds,),) * ranks,
        verified=True,
        calls_per_sample=20,
        buffers=buffers,
    )


class Fits:
    """Fits of the sweeps that remain; those of one (library, operation, level) are the same for many left out."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._found: dict[tuple[Key, frozenset[tuple[int, int]]], tuple[list[CommunicationFit], str]] = {}

    def of(self, wanted: Wanted) -> tuple[tuple[CommunicationFit, ...], dict[Key, str]]:
        """Fits of all sweeps of the source, and the chosen forms."""
        fits: list[CommunicationFit] = []
        forms: dict[Key, str] = {}
        for key in self._source.points:
            own, inside = self._remaining(key, wanted)
            if own:
                places = frozenset((point.ranks, point.message_bytes) for point in (*own, *inside))
                if (key, places) not in self._found:
                    found, choice = fit_points(key, own, OPERATIONS[key[1]], inside)
                    self._found[key, places] = found, choice.candidates[0].form
                more, forms[key] = self._found[key, places]
                fits += more
        return with_comparable_scaling(fits), forms

    def _remaining(self, key: Key, wanted: Wanted) -> tuple[list[Point], list[Point]]:
        of_node = key[0], key[1], NODE
        inside = [] if key == of_node else self._source.points.get(of_node, [])
        return (
            [point for point in self._source.points[key] if wanted(key, point)],
            [point for point in inside if wanted(of_node, point)],
        )


def rows_of(source: Source, *, sizes_too: bool) -> Iterator[Row]:
    """Every sweep left out by itself; of ABCI all those of 8 nodes together; every fourth size where asked for."""
    fits = Fits(source)
    unit, ranks_of_unit = source.unit
    places = [(key, ranks) for key, points in source.points.items() for ranks in sorted({p.ranks for p in points})]
    most = max(ranks for _, ranks in places)

    def named(ranks: int) -> str:
        count = ranks // ranks_of_unit
        return f"{count} {unit}{'s' if count > 1 else ''}"

    for place in places:
        yield row_of(source, fits, place, named(place[1]), lambda key, point, out=place: (key, point.ranks) != out)
    if len(source.points) > 1:
        for place in places:
            if place[1] == most:
                said = f"{named(most)}, of all sweeps"
                yield row_of(source, fits, place, said, lambda _, point: point.ranks != most)
    for key, points in source.points.items() if sizes_too else ():
        sizes = np.unique([point.message_bytes for point in points])
        folds = [frozenset(sizes[fold::SIZE_FOLDS].tolist()) for fold in range(SIZE_FOLDS)]
        parts = [row_of(source, fits, (key, None), "", _without_sizes(key, fold)) for fold in folds]
        yield _together(parts, f"every fourth size, {key[2]}")


def _without_sizes(of: Key, out: frozenset[int]) -> Wanted:
    return lambda key, point: key != of or point.message_bytes not in out


def _together(parts: Sequence[Row], held_out: str) -> Row:
    """Folds of one sweep as one row: means, weighted by points."""
    weights = [part.points for part in parts]
    numbers = ("error", "in_sample", "coverage", "half_width", "line", "ring", "log_p")
    means = {name: float(np.average([getattr(part, name) for part in parts], weights=weights)) for name in numbers}
    return parts[0]._replace(held_out=held_out, points=sum(weights), **means)


def row_of(source: Source, fits: Fits, place: tuple[Key, int | None], said: str, wanted: Wanted) -> Row:
    """Predict what is left out at a place, of the rank count given or of all, from what is wanted."""
    key, ranks = place
    found, forms = fits.of(wanted)
    test = [point for point in source.points[key] if not wanted(key, point) and ranks in (None, point.ranks)]
    seconds = np.array([point.seconds for point in test])
    predicted, sd, remarks = _predicted(source, found, key, test)
    remaining = [
        point
        for other, points in source.points.items()
        for point in points
        if other[:2] == key[:2] and wanted(other, point)
    ]
    used = [fit for fit in found if (fit.library, fit.operation, fit.level) == key] or [
        fit for fit in found if (fit.library, fit.operation) == key[:2]
    ]
    residuals = [abs(point.fitted_s / point.measured_s - 1) for fit in used for point in fit.measured]
    simple = [_median_error(guess, seconds) for guess in simple_predictions(key[1], remaining, test)]
    return Row(
        source=source.name,
        library=key[0],
        operation=key[1],
        held_out=said,
        points=len(test),
        error=_median_error(predicted, seconds),
        in_sample=float(np.median(residuals)),
        coverage=float(np.mean(np.abs(predicted - seconds) <= Z90 * sd)),
        half_width=float(np.median(Z90 * sd / seconds)),
        line=simple[0],
        ring=simple[1],
        log_p=simple[2],
        form=forms.get(key, "fit of the other level"),
        said="; ".join(remarks),
    )


def costs_of(source: Source, fits: tuple[CommunicationFit, ...], library: str) -> CommunicationCosts:
    """Costs by fits alone, on the cluster that they are of."""
    profile = Profile(
        schema_version=SCHEMA_VERSION,
        created_utc="",
        command_line=(),
        environments=(),
        sources=(),
        devices=(),
        cluster=source.cluster,
        communication=fits,
    )
    return CommunicationCosts(profile, None, library)


def _predicted(
    source: Source, fits: tuple[CommunicationFit, ...], key: Key, test: Sequence[Point]
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Seconds and standard deviation of each point, and what the predictions say that lies beyond measurement."""
    costs = costs_of(source, fits, key[0])
    found = [
        costs.cost(
            Collective(operation=key[1], message_bytes=point.message_bytes, ranks=point.ranks),
            parse_strategy(f"d{point.ranks}"),
        )
        for point in test
    ]
    remarks = dict.fromkeys(remark.text for each in found for remark in each.cost.remarks if remark.extrapolated)
    sds = np.array([math.hypot(*(shift for _, shift in each.modes)) for each in found])
    return np.array([each.cost.seconds for each in found]), sds, list(remarks)


def simple_predictions(operation: str, remaining: Sequence[Point], test: Sequence[Point]) -> Iterator[np.ndarray]:
    """One line through all points; from the largest count that remains, as a ring scales, and by log p."""
    sizes, ranks = (np.array([getattr(p, name) for p in test], float) for name in ("message_bytes", "ranks"))
    alpha, beta = _line(remaining)
    yield alpha + beta * sizes
    most = max(point.ranks for point in remaining)
    alpha, beta = _line([point for point in remaining if point.ranks == most])
    bus = OPERATIONS[operation].bus_factor
    factor = np.array([bus(int(count)) for count in ranks]) / bus(most)
    yield alpha * (ranks - 1) / (most - 1) + beta * sizes * factor
    largest = sorted((point.message_bytes, point.seconds) for point in remaining if point.ranks == most)
    known, times = np.array(largest).T
    yield np.exp(np.interp(np.log(sizes), np.log(known), np.log(times))) * np.log2(ranks) / np.log2(most)


def _line(points: Sequence[Point]) -> np.ndarray:
    sizes, seconds = np.array([(point.message_bytes, point.seconds) for point in points]).T
    return fit_relative(np.stack([np.ones_like(sizes), sizes], axis=1), seconds)


def _median_error(predicted: np.ndarray, seconds: np.ndarray) -> float:
    return float(np.median(np.abs(predicted / seconds - 1)))


def summary(rows: Sequence[Row]) -> list[str]:
    """Errors and how often the interval holds, over all rows of a kind."""
    lines = []
    for name, chosen in (
        ("each sweep left out by itself", [r for r in rows if "of all" not in r.held_out and "size" not in r.held_out]),
        ("all sweeps of 8 nodes left out together", [r for r in rows if "of all" in r.held_out]),
        ("every fourth size left out", [r for r in rows if "size" in r.held_out]),
    ):
        if chosen:
            # Each sweep counts alike, whether it has 24 sizes or 1024.
            held, width = np.mean([r.coverage for r in chosen]), np.median([r.half_width for r in chosen])
            error = np.median([r.error for r in chosen])
            lines.append(
                f"- {name} ({len(chosen)} rows): median error {error:.1%}, the 90% interval holds {held:.1%} of the"
                f" points (mean of rows), median half-width {width:.1%}"
            )
    return lines


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    heads = (
        "source", "library", "operation", "held out", "error", "in sample", "interval holds", "half-width", "line",
        "ring", "log p", "form", "said",
    )  # fmt: skip
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in rows:
        numbers = (row.error, row.in_sample, row.coverage, row.half_width, row.line, row.ring, row.log_p)
        cells = [row.source, row.library, row.operation, row.held_out]
        cells += [f"{number:.0%}" if index == 2 else f"{number:.1%}" for index, number in enumerate(numbers)]
        lines.append("| " + " | ".join([*cells, row.form, row.said]) + " |")
    return "\n".join(lines)


def main() -> None:
    """Print the table; write it with -o."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, help="Folder for communication.md and communication.json.")
    parser.add_argument("--sizes", action="store_true", help="Leave every fourth size out as well.")
    parser.add_argument("--data", type=Path, default=DATA)
    options = parser.parse_args()
    if not (options.data / "abci-v100").is_dir() or not (options.data / "vtrain-a100").is_dir():
        print(f"skipped: no public measurements at {options.data} (abci-v100, vtrain-a100)")
        return
    rows = []
    for source in (abci(options.data), vtrain(options.data, "a100"), vtrain(options.data, "v100")):
        for row in rows_of(source, sizes_too=options.sizes):
            rows.append(row)
            print(
                f"{' '.join(row[:4])}: error {row.error:.1%}, holds {row.coverage:.0%}, +-{row.half_width:.0%}",
                flush=True,
            )
    text = "\n".join([*summary(rows), "", table(rows), ""])
    print(text)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        write_bytes_atomically(options.output / "communication.md", text.encode())
        told = json.dumps([row._asdict() for row in rows], indent=1)
        write_bytes_atomically(options.output / "communication.json", told.encode())


if __name__ == "__main__":
    main()
