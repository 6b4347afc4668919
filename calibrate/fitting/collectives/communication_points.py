"""From samples of sweeps to the points that a fit reads: one tool, dtype and way of buffers of each collective."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from calibrate.fitting.collectives.communication_curve import Point, noise_between_ways
from paradl_bench.core.registry import lookup
from paradl_bench.core.statistics import Floats, grouped
from paradl_bench.core.units import counted
from paradl_bench.plan.cost_terms.terms import CollectiveOperation
from paradl_bench.records.cluster import NODE
from paradl_bench.records.samples import CollectiveSamples

_TOOLS = ("torch", "mpi4py", "nccl-tests", "rccl-tests", "osu", "imb")

_TRACES = ("kineto",)
"""Tools that watch a run: a collective's time on a rank begins when that rank comes to it."""

Key = tuple[str, str, str]
"""(library, operation, level)."""


class Variant(NamedTuple):
    """What measurements of one collective may differ in besides ranks and size; unlike ones do not mix in a fit."""

    tool: str
    dtype: str
    buffers: str

    @property
    def words(self) -> str:
        """As a note names it."""
        return " ".join(part.replace("_", " ") for part in self if part)


class MeasuredPoints(NamedTuple):
    """Points by key, and what was left out and why."""

    points: dict[Key, list[Point]]
    notes: tuple[str, ...]


def read_points(samples: Iterable[CollectiveSamples], operations: Mapping[str, CollectiveOperation]) -> MeasuredPoints:
    """Points of every (library, operation, level), of groups that ran alone.

    Raises:
        UserError: an operation that has no cost terms; one that was imported is left out instead.
    """
    samples = tuple(samples)
    swept = (sample for sample in samples if sample.tool not in _TRACES and sample.ranks > 1 and sample.concurrent == 1)
    groups = grouped(swept, _key_of)
    of_runs = sorted({_key_of(sample) for sample in samples if sample.tool in _TRACES})
    notes = _of_one_rank(samples)
    notes += [
        f"{' '.join(key)}: left out, because times from traces of runs include the wait for other ranks"
        for key in of_runs
    ]
    points: dict[Key, list[Point]] = {}
    node_ranks: dict[str, int] = {}
    for (library, _, level), group in groups.items():
        if level == NODE:
            node_ranks[library] = max(node_ranks.get(library, 1), *(sample.ranks for sample in group))
    for key, group in sorted(groups.items()):
        if key[1] not in operations and all(sample.source for sample in group):
            notes.append(f"{' '.join(key)}: left out, because it was imported and no cost terms say how it scales")
            continue
        operation = lookup(dict(operations), key[1], "collective")
        points[key], more = _points(key, group, operation, node_ranks.get(key[0], 1))
        notes += more
    return MeasuredPoints(points, tuple(notes))


def _key_of(sample: CollectiveSamples) -> Key:
    return sample.library, sample.operation, sample.level


def _of_one_rank(samples: Iterable[CollectiveSamples]) -> list[str]:
    """What is left out since a rank by itself sends nothing, by what it is and where it was read."""
    counts: Counter[tuple[Key, str]] = Counter()
    for sample in samples:
        if sample.ranks <= 1:
            counts[_key_of(sample), sample.source.rpartition(":")[0]] += 1
    return [
        f"{' '.join(key)}: {counted(count, 'row')} of one rank, which sends nothing, {'is' if count == 1 else 'are'}"
        f" left out{f' ({file})' if file else ''}"
        for (key, file), count in sorted(counts.items())
    ]


def _points(
    key: Key, samples: list[CollectiveSamples], operation: CollectiveOperation, node_ranks: int
) -> tuple[list[Point], list[str]]:
    """Points of the preferred variant; ``node_ranks`` share a node where the samples do not say how many."""
    variants = grouped(samples, lambda sample: Variant(sample.tool, sample.dtype, sample.buffers))
    chosen = min(variants, key=lambda name: _preference(name, len(variants[name]), operation))
    notes = [
        f"{' '.join(key)}: fitted on {chosen.words}; what {other.words} measured is left out"
        for other in sorted(variants)
        if other != chosen
    ]
    notes += _means_noted(key, variants[chosen])
    calls: dict[tuple[int, int, int], list[Floats]] = {}
    for sample in variants[chosen]:
        per_node = sample.ranks if key[2] == NODE else sample.ranks_per_node or min(node_ranks, sample.ranks)
        place = sample.ranks, sample.message_bytes, per_node
        calls.setdefault(place, []).append(operation.call_seconds(sample.samples_s))
    other_way = _other_way(variants, chosen, operation)
    points = []
    for place in sorted(calls):
        point = Point(*place[:2], tuple(calls[place]), place[2])
        points.append(point._replace(other_way_s=other_way.get(place[:2], 0.0)) if point.alone else point)
    notes += _noise_noted(key, points)
    timed = [point for point in points if point.seconds > 0 and point.message_bytes > 0]
    if len(timed) < len(points):
        notes.append(f"{' '.join(key)}: {len(points) - len(timed)} sizes of no bytes or no time are left out")
    wrong = sum(not sample.verified for sample in variants[chosen])
    if wrong:
        notes.append(f"{' '.join(key)}: the results of {wrong} of {len(variants[chosen])} records were not verified")
    return timed, notes


def _other_way(
    variants: Mapping[Variant, list[CollectiveSamples]], chosen: Variant, operation: CollectiveOperation
) -> dict[tuple[int, int], float]:
    """By ranks and bytes, the one time of the same tool and dtype with the other way of buffers."""
    other = {"in_place": "out_of_place", "out_of_place": "in_place"}.get(chosen.buffers)
    seconds: dict[tuple[int, int], list[float]] = {}
    for sample in variants.get(chosen._replace(buffers=other), []) if other else ():
        seconds.setdefault((sample.ranks, sample.message_bytes), []).extend(operation.call_seconds(sample.samples_s))
    return {place: times[0] for place, times in seconds.items() if len(times) == 1}


def _noise_noted(key: Key, points: Sequence[Point]) -> list[str]:
    noise = noise_between_ways([point for point in points if point.seconds > 0])
    if noise is None:
        return []
    return [f"{' '.join(key)}: out-of-place and in-place times differ by a noise of {noise:.1%} within a run"]


def _preference(variant: Variant, samples: int, operation: CollectiveOperation) -> tuple[object, ...]:
    """What decides between variants, the smallest first: torch, whose collectives are a run's; its buffers; samples."""
    tool = _TOOLS.index(variant.tool) if variant.tool in _TOOLS else len(_TOOLS)
    usual = "in_place" if operation.in_place else "out_of_place"
    return tool, variant.buffers not in ("", usual), -samples, variant


def _means_noted(key: Key, samples: Sequence[CollectiveSamples]) -> list[str]:
    """What means over many calls can't say of a fit's interval."""
    means = [sample for sample in samples if sample.calls_per_sample > 1]
    if not means:
        return []
    points = {(sample.ranks, sample.message_bytes) for sample in means}
    calls = sorted({sample.calls_per_sample for sample in means})
    of = str(calls[0]) if len(calls) == 1 else f"{calls[0]} to {calls[-1]}"
    spread = (
        "spread between runs is known where several were imported"
        if len(points) < len(means)
        else "no spread between calls or runs is known"
    )
    return [
        f"{' '.join(key)}: {len(means)} of {len(samples)} times are means over {of} calls; {spread}, and the interval"
        " is that of the residuals"
    ]
