"""Statistics of layer profiles: times of operations, of whole iterations, and what the device reached.

Nothing is fitted here: a profile holds medians of what was measured, so that a model's layers add up, and spreads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from calibrate.fitting.reading import Placed
from calibrate.profile.entries import IDENTITIES
from calibrate.profile.profile import SHORTEST_KERNEL_S, Dispatch, LayerTime, ModelTime
from calibrate.statistics.blocks import between_block_sd, block_sd, split_half_difference
from paradl_bench.core.errors import UserError
from paradl_bench.core.statistics import (
    IQR_TO_SD,
    Floats,
    Summary,
    bootstrap_interval,
    grouped,
    middle_half,
    summarise,
)
from paradl_bench.measure.layers.summary import remainders
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.kinds.autocast import as_held, widths_of
from paradl_bench.records.samples import IterationSamples, LayerSamples

_FEWEST_MEASUREMENTS = 3
QUANTILES = 21
"""Evenly spaced probabilities at which the spread of single iterations is kept."""
DISPATCH_SAMPLES = ("fw_dispatch_s", "bw_dispatch_s")
_OF_LAYER, _OF_MODEL = IDENTITIES["layer_times"], IDENTITIES["model_times"]
"""What decides a time; records use the names of the profile."""
Key = tuple[Any, ...]
"""Values of these."""


class Block(NamedTuple):
    """One block on one rank, of a strategy the rank whose part was measured; blocks of two directories are two."""

    directory: int
    block: int
    rank: int
    position: int


class Aligned(NamedTuple):
    """Samples of one layer in one block, and which of them are of typical iterations (None where measured alone)."""

    samples: Floats
    typical: NDArray[np.bool_] | None


Place = tuple[str, str]
"""(model, layer): where an operation occurs."""
Alike = tuple[str, int, str, int, str, int, str]
"""(model, batch, dtype, ranks on host, shard, position, kernel settings)."""
IterationKey = tuple[Alike, int, int, int]
"""(what was measured, directory, block, rank): where a record's samples were taken."""


def typical_iterations(records: Iterable[Placed[IterationSamples]]) -> dict[IterationKey, NDArray[np.bool_]]:
    """Which probed iterations of each record are typical: their total lies in the middle half of all like them.

    Layers of one iteration share its spells, so that the mean over typical iterations adds up over layers.
    """
    typical: dict[IterationKey, NDArray[np.bool_]] = {}
    for like, placed in grouped(records, lambda placed: _alike(placed.record)).items():
        totals = [_probed_total(record) for _, record in placed]
        chosen = middle_half(np.concatenate(totals))
        ends = np.cumsum([len(total) for total in totals])
        for (directory, record), total, end in zip(placed, totals, ends, strict=True):
            typical[like, directory, record.block, record.rank] = chosen[end - len(total) : end]
    return typical


def _alike(record: LayerSamples | IterationSamples) -> Alike:
    where = record.ranks_on_host, record.shard, record.position
    return record.model, record.batch, record.dtype, *where, record.kernel_settings


def _probed_total(record: IterationSamples) -> Floats:
    parts = (record.fw_layers_s, record.bw_layers_s, record.fw_between_s, record.bw_between_s)
    return np.asarray(np.sum([np.asarray(part, float) for part in parts], axis=0))


def layer_times(
    records: Iterable[Placed[LayerSamples]],
    iterations: Iterable[Placed[IterationSamples]],
    *,
    imported: frozenset[int] = frozenset(),
) -> tuple[LayerTime, ...]:
    """Times per operation, phase, mode, local batch, dtype, kernel settings and number of ranks on the host.

    Samples in situ whose iterations' record is missing, because the measurement was interrupted between the two, are
    left out; those of ``imported`` directories never have one, and count all alike.
    """
    typical = typical_iterations(iterations)
    groups: dict[Key, dict[Place, dict[Block, Aligned]]] = {}
    for directory, record in records:
        samples = np.array(record.samples_s)
        chosen = None
        if record.mode == "in_situ":
            chosen = typical.get((_alike(record), directory, record.block, record.rank))
            if chosen is None and directory not in imported:
                continue
            if chosen is not None and len(samples) != len(chosen):
                raise UserError(
                    f"{record.phase} of {record.layer} of {record.model}, block {record.block}: {len(samples)}"
                    f" samples for {len(chosen)} iterations; there has to be one for each"
                )
        key = tuple(getattr(record, field) for field in _OF_LAYER)
        place = groups.setdefault(key, {}).setdefault((record.model, record.layer), {})
        # A block that was interrupted before its iterations were written was measured again: the later one counts.
        place[Block(directory, record.block, record.rank, record.position)] = Aligned(samples, chosen)
    return tuple(_layer_time(key, groups[key]) for key in sorted(groups))


def _summary_of(blocks: Mapping[Block, Aligned]) -> Summary:
    samples = np.concatenate([aligned.samples for aligned in blocks.values()])
    chosen = [aligned.typical for aligned in blocks.values() if aligned.typical is not None]
    return summarise(samples, typical=np.concatenate(chosen) if chosen else None)


def _layer_time(key: Key, places: Mapping[Place, Mapping[Block, Aligned]]) -> LayerTime:
    summaries = {place: _summary_of(blocks) for place, blocks in places.items()}
    return LayerTime(
        **dict(zip(_OF_LAYER, key, strict=True)),
        time=Summary(
            median_s=float(np.mean([summary.median_s for summary in summaries.values()])),
            typical_s=float(np.mean([summary.typical_s for summary in summaries.values()])),
            iqr_s=float(np.mean([summary.iqr_s for summary in summaries.values()])),
            minimum_s=min(summary.minimum_s for summary in summaries.values()),
            samples=sum(summary.samples for summary in summaries.values()),
        ),
        block_relative_sd=_block_sd(places, {place: summary.median_s for place, summary in summaries.items()}),
        blocks=_counted((block.directory, block.block) for blocks in places.values() for block in blocks),
    )


def _counted(blocks: Iterable[tuple[int, int]]) -> int:
    """How many independent values of (directory, block) there are: of three or more measurements those count."""
    distinct = set(blocks)
    directories = {directory for directory, _ in distinct}
    return len(directories) if len(directories) >= _FEWEST_MEASUREMENTS else max(len(distinct), 2)


def _block_sd(places: Mapping[Place, Mapping[Block, Aligned]], medians_s: Mapping[Place, float]) -> float:
    """Spread between blocks of what the places that each has take together, relative to their medians."""
    measured: dict[Block, float] = defaultdict(float)
    expected: dict[Block, float] = defaultdict(float)
    for place, blocks in places.items():
        for block, aligned in blocks.items():
            measured[block] += float(np.median(aligned.samples))
            expected[block] += medians_s[place]
    if len(measured) == 1:
        return float(np.mean([between_block_sd([a.samples]) for blocks in places.values() for a in blocks.values()]))
    return block_sd([measured[block] / expected[block] for block in measured if expected[block] > 0])


def model_times(
    records: Iterable[Placed[IterationSamples]],
    layers: Iterable[Placed[LayerSamples]] = (),
    *,
    shards: bool = False,
) -> tuple[ModelTime, ...]:
    """Whole iterations, the time between operations, weight update and closure of each model and local batch.

    Args:
        layers: the operations of these iterations, which say how many of them a GPU's host dispatches.
        shards: those of models as one rank of a strategy runs them, over all positions; else those of whole models.

    Raises:
        UserError: an iteration of 0 seconds, or one without the time between operations.
    """
    asked = [placed for placed in records if bool(placed.record.shard) == shards]
    for _, record in asked:
        _check_timed(record)
    groups = grouped(asked, lambda placed: tuple(getattr(placed.record, field) for field in _OF_MODEL))
    dispatched = [placed for placed in asked if placed.record.fw_dispatch_s]
    kernels = kernels_of(layers) if dispatched else {}
    return tuple(_model_time(key, groups[key], kernels) for key in sorted(groups))


def _check_timed(record: IterationSamples) -> None:
    where = f"iterations of {record.model}, batch {record.batch}, block {record.block}"
    if not record.fw_between_s or not record.bw_between_s:
        raise UserError(f"{where}: the time between operations was not measured")
    if min(f + b + w for f, b, w in zip(record.fw_s, record.bw_s, record.wu_s, strict=True)) <= 0:
        raise UserError(f"{where}: an iteration took 0 seconds, which no iteration does")


def kernels_of(layers: Iterable[Placed[LayerSamples]]) -> dict[tuple[Alike, str], int]:
    """By what was measured and phase, how many operations run a kernel: those that take long enough."""
    samples: dict[tuple[Alike, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _, record in layers:
        if record.mode == "in_situ":
            samples[_alike(record), record.phase][record.layer] += record.samples_s
    return {
        key: sum(float(np.median(of_layer)) >= SHORTEST_KERNEL_S for of_layer in of_layers.values())
        for key, of_layers in samples.items()
    }


def _dispatch(
    records: Sequence[IterationSamples], kernels: Mapping[tuple[Alike, str], int]
) -> Dispatch | msgspec.UnsetType:
    """A host's seconds for each operation with a kernel; unset where it was not timed."""
    timed = [record for record in records if record.fw_dispatch_s]
    if not timed:
        return msgspec.UNSET
    alike = _alike(timed[0])
    phases_s = [np.concatenate([getattr(record, name) for record in timed]) for name in DISPATCH_SAMPLES]
    whole_s = phases_s[0] + phases_s[1]
    forward_s, backward_s = (
        float(np.median(phase_s)) / max(kernels.get((alike, phase), 0), 1)
        for phase, phase_s in zip(("FW", "BW"), phases_s, strict=True)
    )
    spread = float(np.subtract(*np.percentile(whole_s, [75, 25]))) * IQR_TO_SD / float(np.median(whole_s))
    return Dispatch(forward_s=forward_s, backward_s=backward_s, relative_sd=spread, timed=True)


def _model_time(
    key: Key, placed: Sequence[Placed[IterationSamples]], kernels: Mapping[tuple[Alike, str], int]
) -> ModelTime:
    records = [record for _, record in placed]
    directories = [directory for directory, _ in placed]
    iterations = [np.array(r.fw_s) + np.array(r.bw_s) + np.array(r.wu_s) for r in records]
    probed = middle_half(np.concatenate([_probed_total(record) for record in records]))
    plain = middle_half(np.concatenate(iterations))

    def pooled(field: str, typical: NDArray[np.bool_] = plain) -> Summary:
        # Time between operations has the probes' own cost taken off, which noise can turn negative.
        values = np.maximum(np.concatenate([getattr(record, field) for record in records]), 0.0)
        return summarise(values, typical=typical)

    remainder = [remainders([record]) for record in records]
    return ModelTime(
        **dict(zip(_OF_MODEL, key, strict=True)),
        fw=pooled("fw_s"),
        bw=pooled("bw_s"),
        wu=pooled("wu_s"),
        iteration=summarise(np.concatenate(iterations)),
        fw_between=pooled("fw_between_s", probed),
        bw_between=pooled("bw_between_s", probed),
        remainder_relative=float(np.median(np.concatenate(remainder))),
        remainder_interval=bootstrap_interval(remainder),
        noise_floor_relative=split_half_difference(iterations),
        common_relative_sd=between_block_sd(_stretches(directories, iterations)),
        iteration_relative_quantiles=_relative_quantiles(directories, iterations),
        blocks=_counted((directory, record.block) for directory, record in placed),
        dispatch=_dispatch(records, kernels),
    )


def _stretches(directories: Sequence[int], blocks: Sequence[Floats]) -> list[Floats]:
    """Samples of each stretch of time whose medians vary as those of runs do, which last as long as a measurement."""
    measurements = _by_directory(directories, blocks)
    return list(blocks) if len(measurements) < _FEWEST_MEASUREMENTS else measurements


def _by_directory(directories: Sequence[int], blocks: Sequence[Floats]) -> list[Floats]:
    parts = grouped(sorted(zip(directories, blocks, strict=True), key=itemgetter(0)), itemgetter(0))
    return [np.concatenate([block for _, block in placed]) for placed in parts.values()]


def _relative_quantiles(directories: Sequence[int], iterations: Sequence[Floats]) -> tuple[float, ...]:
    """Quantiles of single iterations over the median of their own directory."""
    relative = [samples / np.median(samples) for samples in _by_directory(directories, iterations)]
    probabilities = np.linspace(0, 1, QUANTILES)
    return tuple(float(value) for value in np.quantile(np.concatenate(relative), probabilities))


class Reached(NamedTuple):
    """Rates that measured layers reached: lower bounds of what the device can do."""

    peak_flops: float | None = None
    memory_bandwidth_bytes_per_s: float | None = None


def rates_reached(times: Sequence[LayerTime], networks: Mapping[str, ModelGraph], device: str = "cpu") -> Reached:
    """Best FLOP/s of any operation, and best bytes/s of operations that compute next to nothing.

    Bandwidth is read off forward of the operations with at most one FLOP a byte that move at least half of what the
    largest of them moves: small ones live in a cache and say nothing of memory.

    Args:
        device: kind of the device, which decides how wide the numbers are that an operation reads in lower precision.
    """
    layers = {layer.operation: layer for network in networks.values() for layer in network.layers}
    # The basis of rooflines is of fp32, where any was measured.
    times = [time for time in times if time.dtype == "fp32" and "tf32" not in time.kernel_settings] or times
    narrowed = {dtype: _narrowed(networks, dtype, device) for dtype in {time.dtype for time in times} - {"fp32"}}
    flops: list[float] = []
    moved: list[tuple[float, float]] = []
    for time in times:
        layer = layers.get(time.operation)
        if layer is None or time.shard or time.time.typical_s <= 0:
            continue
        work = {
            "FW": layer.fw_flops,
            "BW": layer.bw_input_flops + layer.bw_weight_flops,
            "BW_input": layer.bw_input_flops,
            "BW_weight": layer.bw_weight_flops,
        }.get(time.phase, 0)
        samples = 1 if layer.batchless else time.batch
        if layer.parameters and work:
            flops.append(work * samples / time.time.typical_s)
        if time.phase == "FW" and not layer.parameters and 0 < layer.fw_bytes >= layer.fw_flops:
            share = narrowed[time.dtype][time.operation] if time.dtype in narrowed else 1.0
            moved.append((layer.fw_bytes * share * samples, time.time.typical_s))
    largest = max((size for size, _ in moved), default=0.0)
    rates = [size / seconds for size, seconds in moved if size >= largest / 2]
    return Reached(max(flops, default=None), max(rates, default=None))


def _narrowed(networks: Mapping[str, ModelGraph], dtype: str, device: str) -> dict[str, float]:
    """By operation, bytes of its elements in a dtype over those in fp32, which networks count."""
    return {
        layer.operation: lower.runs / whole.runs
        for network in networks.values()
        for layer, lower, whole in zip(
            network.layers,
            widths_of(as_held(network, dtype), dtype, device),
            widths_of(network, "fp32", device),
            strict=True,
        )
    }
