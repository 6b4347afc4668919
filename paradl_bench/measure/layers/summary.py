"""What a layer profile shows at once: phases, closure, and the layers that cost most."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from paradl_bench.core.frames import print_rows
from paradl_bench.core.statistics import Floats, bootstrap_interval, sorted_groups
from paradl_bench.core.terminal.tables import table
from paradl_bench.core.units import format_difference, format_input, format_seconds
from paradl_bench.network.graph import TARGET_DTYPE, read_network
from paradl_bench.records.measurement import ITERATIONS_FILE, LAYERS_FILE, read_records
from paradl_bench.records.samples import IterationSamples, LayerSamples
from paradl_bench.records.training.verification import read_verified_shards

if TYPE_CHECKING:
    from rich.console import Console


class Closure(msgspec.Struct, frozen=True, kw_only=True):
    """How a model's layers add up against iterations that nobody probed; medians over pairs, in seconds.

    Attributes:
        remainder_relative: 1 - (layers + between + WU) / iteration, median over pairs. The time between operations is
            taken from another pair than the layers, so that stamps of one iteration can't telescope into its length. On
            a GPU a phase takes what its host takes to dispatch it, where that is longer.
        remainder_interval: 90% bootstrap interval of that median.
        noise_floor_relative: the same quantity for uninstrumented iterations against those of the next pair: half the
            width of the 90% interval of their median relative difference.
        shard, position: of iterations of one rank's part of the model, without communication.
    """

    model: str
    batch: int
    ranks_on_host: int
    fw_s: float
    bw_s: float
    wu_s: float
    iteration_s: float
    iteration_iqr_s: float
    layers_s: float
    between_s: float
    remainder_relative: float
    remainder_interval: tuple[float, float]
    noise_floor_relative: float
    pairs: int
    shard: str = ""
    position: int = 0

    @property
    def what(self) -> str:
        """The model, or which rank's part of it."""
        return f"{self.model}, {self.shard} rank {self.position}" if self.shard else self.model


def _closure_of(records: list[IterationSamples]) -> Closure:
    """Closure over all blocks and ranks of one model, batch and number of ranks on the host."""
    first = records[0]

    def stacked(field: str) -> Floats:
        return np.concatenate([np.asarray(getattr(record, field)) for record in records])

    iterations = list(map(_iterations_s, records))
    iteration = np.concatenate(iterations)
    instrumented = all(record.wu_instrumented_s for record in records)
    remainder = remainders(records)
    noise = np.concatenate([1 - iteration_s[1:] / iteration_s[:-1] for iteration_s in iterations])
    low, high = bootstrap_interval([noise])
    return Closure(
        model=first.model,
        batch=first.batch,
        ranks_on_host=first.ranks_on_host,
        fw_s=float(np.median(stacked("fw_s"))),
        bw_s=float(np.median(stacked("bw_s"))),
        wu_s=float(np.median(stacked("wu_instrumented_s" if instrumented else "wu_s"))),
        iteration_s=float(np.median(iteration)),
        iteration_iqr_s=float(np.subtract(*np.percentile(iteration, [75, 25]))),
        layers_s=float(np.median(stacked("fw_layers_s") + stacked("bw_layers_s"))),
        between_s=float(np.median(stacked("fw_between_s") + stacked("bw_between_s"))),
        remainder_relative=float(np.median(remainder)),
        remainder_interval=bootstrap_interval([remainder]),
        noise_floor_relative=(high - low) / 2,
        pairs=len(iteration),
        shard=first.shard,
        position=first.position,
    )


def remainders(records: list[IterationSamples]) -> Floats:
    """Relative remainder of every pair: what the parts leave of the uninstrumented iteration."""
    parts: list[Floats] = []
    for record in records:
        forward, backward = (
            _phase_s(*(np.asarray(getattr(record, f"{way}_{part}_s")) for part in ("layers", "between", "dispatch")))
            for way in ("fw", "bw")
        )
        # With several ranks the uninstrumented update starts behind a barrier, and the instrumented one does not.
        alone = record.ranks_on_host == 1 and record.wu_instrumented_s
        wu = np.asarray(record.wu_instrumented_s if alone else record.wu_s)
        parts.append(1 - (forward + backward + wu) / _iterations_s(record))
    return np.concatenate(parts)


def _phase_s(layers: Floats, between: Floats, dispatch: Floats) -> Floats:
    """The longer of a device and its host; of a device that is its own host no dispatch was timed."""
    device = layers + np.roll(between, 1)
    return np.maximum(device, np.roll(dispatch, 1)) if len(dispatch) else device


def _iterations_s(record: IterationSamples) -> Floats:
    return np.asarray(np.add(record.fw_s, record.bw_s) + record.wu_s)


def closures(directory: Path) -> list[Closure]:
    """Closure of everything that a layers directory holds, by model, shard, batch and ranks on the host."""
    records = read_records(directory, ITERATIONS_FILE, IterationSamples)
    groups = sorted_groups(records, lambda r: (r.model, r.shard, r.position, r.batch, r.ranks_on_host))
    return list(map(_closure_of, groups.values()))


def print_layer_summary(directory: Path, *, as_json: bool) -> None:
    """Print closure and the costliest layers on standard output."""
    measured = closures(directory)
    if print_rows(Closure, measured):
        return
    if as_json:
        sys.stdout.write(msgspec.json.encode(measured).decode() + "\n")
        return
    from paradl_bench.core.terminal.command_line import open_console

    columns = ["model", "batch", "ranks on host", "FW", "BW", "WU", "iteration (IQR)", "layers", "between", "remainder"]
    console = open_console()
    title = f"Layers against uninstrumented iterations (medians), {_inputs(directory)}"
    console.print(table(columns, map(_cells, measured), title=title))
    for parts in read_verified_shards(directory):
        said = f"{parts.model} as {parts.shards}: {parts.verified.line()}"
        console.print(said, soft_wrap=True, markup=False)
    _print_costliest(console, directory)
    console.print(f"Raw samples are in {directory}; next: calibrate fit {directory} ... -o profile.json")


def _inputs(directory: Path) -> str:
    """The shape of a sample, of each model where they differ."""
    networks = [read_network(path) for path in sorted(directory.glob("network*.json"))]
    shapes = {
        network.name: format_input(network.input_shape, tokens=network.input_dtype == TARGET_DTYPE)
        for network in networks
    }
    if len(set(shapes.values())) == 1:
        return f"input {next(iter(shapes.values()))}"
    return "input " + ", ".join(f"{shape} ({name})" for name, shape in shapes.items())


def _cells(closure: Closure) -> tuple[str, ...]:
    low, high = closure.remainder_interval
    return (
        closure.what,
        str(closure.batch),
        str(closure.ranks_on_host),
        *(format_seconds(value) for value in (closure.fw_s, closure.bw_s, closure.wu_s)),
        f"{format_seconds(closure.iteration_s)} ({closure.iteration_iqr_s / closure.iteration_s:.0%})",
        format_seconds(closure.layers_s),
        format_seconds(closure.between_s),
        f"{format_difference(closure.remainder_relative)} [{format_difference(low)}, {format_difference(high)}]",
    )


def _print_costliest(console: Console, directory: Path, *, shown: int = 5) -> None:
    records = read_records(directory, LAYERS_FILE, LayerSamples)
    in_situ = [record for record in records if record.mode == "in_situ" and not record.shard]
    for (model, batch, ranks), of_model in sorted_groups(
        in_situ, lambda r: (r.model, r.batch, r.ranks_on_host)
    ).items():
        samples_s: dict[tuple[str, str], list[float]] = defaultdict(list)
        for record in of_model:
            samples_s[record.layer, record.phase] += record.samples_s
        cost: dict[str, float] = defaultdict(float)
        for (layer, _), samples in samples_s.items():
            cost[layer] += float(np.median(samples))
        whole = sum(cost.values())
        costliest = sorted(cost, key=lambda layer: -cost[layer])[:shown]
        listed = ", ".join(f"{layer} {cost[layer] / whole:.0%}" for layer in costliest)
        console.print(f"{model} batch {batch} on {ranks}: {listed} of FW+BW")
