"""How far layers are off that are scaled from like ones: measured layers, each taken out and scaled from the others.

    python benchmarks/accuracy/like_layers.py PROFILE... [--dtype bf16]

Taken out are single operations, and then whole networks. Layers with nothing like them left are not counted. Columns:
predicted over measured seconds of all, median |ln(predicted / measured)|, the same weighted by measured seconds, the
share of layers whose measured time lies within 1.645 standard deviations. Below the table stands how far calls of a
kind and phase are off, as a standard deviation over 1 plus the distance: the median of the kinds, and the largest.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

import click
import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from calibrate.profile.profile import LayerTime, Profile, read_profile
from paradl_bench.network.graph import ModelGraph
from paradl_bench.records.measurement import PhaseName
from predict.costs.compute.layer_costs import LayerCosts
from predict.costs.compute.layer_roofline import Call, LikeCalls, Roofline
from predict.costs.sourced import Cost, Source

WITHIN = 1.645
OPERATIONS = 3
Scaled = tuple[float, Cost, int]
"""Measured seconds, what is said without them, and how often the layer occurs."""


def scaled_without(
    profile: Profile, network: ModelGraph, dtype: str, times: Collection[LayerTime], counts: Counter[str]
) -> Iterator[Scaled]:
    """Times of a profile, by the same profile without any time of their operations."""
    held = {time.operation for time in times}
    rest = tuple(time for time in profile.layer_times if time.operation not in held)
    # What layers reached was read off all of them, and stays: it is the device's.
    costs = LayerCosts(msgspec.structs.replace(profile, layer_times=rest), network, dtype)
    for time in times:
        cost = costs.cost(time.operation, time.phase, "", time.batch, time.ranks_on_host)
        if cost.source is Source.SCALED and time.time.typical_s:
            yield time.time.typical_s, cost, counts[time.operation]


def row(title: str, found: list[Scaled]) -> str:
    """One line of the table."""
    measured, predicted, sd, count = (
        np.array(column)
        for column in zip(*((seconds, cost.seconds, cost.method_sd_s, n) for seconds, cost, n in found), strict=True)
    )
    errors = np.abs(np.log(np.maximum(predicted, 1e-9) / measured))
    ratio, weighted = (predicted * count).sum() / (measured * count).sum(), np.average(errors, weights=measured * count)
    within = np.mean(np.abs(measured - predicted) <= WITHIN * sd)
    return f"| {title} | {len(found)} | {ratio:.3f} | {np.median(errors):.3f} | {weighted:.3f} | {within:.1%} |"


def errors_of_kinds(profile: Profile, dtype: str, times: Collection[LayerTime]) -> list[float]:
    """Of each kind and phase with three measured operations or more, of as many ranks on the host."""
    roofline = Roofline(profile, next(iter(profile.network.values())), dtype)
    groups: dict[tuple[str, PhaseName, int], list[tuple[Call, float]]] = {}
    for time in times:
        layer = roofline.layers[time.operation]
        calls = groups.setdefault((layer.kind, time.phase, time.ranks_on_host), [])
        calls.append((Call(layer, time.batch), time.time.typical_s))
    return [
        LikeCalls(roofline, phase, ranks, calls).relative_sd(0)
        for (_, phase, ranks), calls in groups.items()
        if len({call.layer.operation for call, _ in calls}) >= OPERATIONS
    ]


def rows(profile: Profile, dtype: str, times: Collection[LayerTime], title: str) -> Iterator[str]:
    """Of times with as many ranks on the host: operations taken out, and networks."""
    network = next(iter(profile.network.values()))
    single = Counter({time.operation: 1 for time in times})
    each = ([time for time in times if time.operation == operation] for operation in single)
    yield row(
        f"{title}, an operation",
        [found for one in each for found in scaled_without(profile, network, dtype, one, single)],
    )
    for name, network in profile.network.items():
        others = (other for key, other in profile.network.items() if key != name)
        shared = {layer.operation for other in others for layer in other.layers}
        counts = Counter(layer.operation for layer in network.layers if layer.operation not in shared)
        own = [time for time in times if time.operation in counts]
        if found := list(scaled_without(profile, network, dtype, own, counts)):
            yield row(f"{title}, {name}", found)


@click.command()
@click.argument("profiles", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--dtype", default="fp32", show_default=True)
def main(profiles: tuple[str, ...], dtype: str) -> None:
    """Print a row of errors for each profile, ranks on the host and what was taken out."""
    click.echo("| profile, ranks, taken out | layers | predicted / measured | median | weighted | within 90% |")
    click.echo("| --- | ---: | ---: | ---: | ---: | ---: |")
    errors: list[float] = []
    for path in profiles:
        profile = read_profile(path)
        known = {layer.operation for network in profile.network.values() for layer in network.layers}
        asked = (dtype, "in_situ", "")
        times = [t for t in profile.layer_times if (t.dtype, t.mode, t.shard) == asked and t.operation in known]
        errors += errors_of_kinds(profile, dtype, times)
        for ranks in sorted({time.ranks_on_host for time in times}):
            here = [time for time in times if time.ranks_on_host == ranks]
            for line in rows(profile, dtype, here, f"{Path(path).stem}, {ranks}"):
                click.echo(line)
    click.echo(f"errors of {len(errors)} kinds and phases: median {np.median(errors):.3f}, largest {max(errors):.3f}")


if __name__ == "__main__":
    main()
