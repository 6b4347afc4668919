"""S-SGD traces of measured layer times, for the tools that read them (Shi et al. 2018); torch-free.

One block an iteration, one line a layer: number, name, forward, backward and exchange in microseconds, bytes exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paradl_bench.core.errors import UserError
from paradl_bench.core.statistics import sorted_groups
from paradl_bench.importers.ssgd_trace import DATA_LAYER, HEADER, TRACED_KIND
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.mesh import degree_of
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.records.input_record import BATCHES_FILE, BatchSamples
from paradl_bench.records.measurement import COLLECTIVES_FILE, LAYERS_FILE, read_manifest, read_records
from paradl_bench.records.samples import CollectiveSamples, LayerSamples
from paradl_bench.records.training.training_record import TRAINING_FILE, TrainingIterations, read_run

_MICRO = 1e6
Times = dict[tuple[str, str], NDArray[np.float64]]
"""By (layer, phase): seconds, one an iteration."""


def trace_lines(
    directory: Path, network: ModelGraph, *, batch: int | None, sweep: Path | None, io_s: float, run: Path | None = None
) -> tuple[list[str], list[str]]:
    """The lines of a trace of a layers directory, in situ and on one rank, and notes on what it can't hold.

    Args:
        batch: which of its local batches; may be left out where it has one.
        sweep: a measurement of all_reduce, which gives the exchanges; without it they are what the directory's own
            trace had, else 0, as on one device.
        io_s: reading a mini-batch, the forward time of the layer ``data``; 0: what the directory's own trace had.
        run: a training run of the model and local batch that read images, whose iterations say that; None for ``io_s``.

    Raises:
        UserError: no such times, several batches, a gradient outside the sizes that were swept, or another run.
    """
    records = _records(directory, network.name, batch)
    times = _times(records)
    exchange = _Exchange(sweep, directory)
    rows, iterations = _rows(network, times, exchange)
    if run is not None and io_s:
        raise UserError("--run and --io-seconds both give the time of reading: give one of them")
    local = records[0].batch
    reading = _reading(directory, network.name, local, io_s) if run is None else _of_run(run, network, local)
    lines = [HEADER]
    for iteration in range(iterations):
        lines.append(f"0\t{DATA_LAYER}\t{reading[iteration % len(reading)] * _MICRO:.9g}\t0\t0\t0")
        lines += [
            f"{row.number}\t{row.name}\t{row.fw_s[iteration] * _MICRO:.9g}\t{row.bw_s[iteration] * _MICRO:.9g}"
            f"\t{row.exchange_s[iteration] * _MICRO:.9g}\t{row.size_bytes}"
            for row in rows
        ]
        lines.append("")
    return lines, _notes(any(row.exchange_s.any() for row in rows), max(reading))


def _reading(directory: Path, model: str, batch: int, io_s: float) -> list[float]:
    """Seconds of reading a mini-batch, one an iteration or one for all."""
    if io_s:
        return [io_s]
    held = [
        record
        for record in read_records(directory, BATCHES_FILE, BatchSamples)
        if (record.stage, record.model, record.batch) == ("io", model, batch)
    ]
    return [value for record in sorted(held, key=lambda record: record.block) for value in record.samples_s] or [io_s]


def _of_run(run: Path, network: ModelGraph, batch: int) -> list[float]:
    """Seconds that reading, decoding, transforms and collation took rank 0 of a run, one an iteration."""
    if read_manifest(run).kind != "training":
        raise UserError(f"--run {run} holds no training run")
    about = read_run(run)
    local = about.batch // degree_of(parse_strategy(about.strategy), Trait.DIVIDES_BATCH)
    if (about.network_digest, local) != (network.digest, batch):
        raise UserError(
            f"--run {run} trained {about.model} on {local} samples a rank; the layers are of {network.name} on {batch}"
        )
    records = read_records(run, TRAINING_FILE, TrainingIterations)
    ordered = sorted(records, key=lambda record: record.first_iteration)
    read = [record.input for record in ordered if record.rank == 0 and record.input is not None]
    if not read:
        raise UserError(f"--run {run} read no images: measure it with paradl-bench train --input")
    parts = ((item.read_s, item.decode_s, item.transform_s, item.collate_s) for item in read)
    return [sum(iteration) for of_chunk in parts for iteration in zip(*of_chunk, strict=True)]


def _records(directory: Path, model: str, batch: int | None) -> list[LayerSamples]:
    read_manifest(directory)
    records = [
        record
        for record in read_records(directory, LAYERS_FILE, LayerSamples)
        if record.model == model and record.mode == "in_situ" and not record.shard and record.rank == 0
    ]
    batches = sorted({record.batch for record in records})
    if not batches:
        raise UserError(f"{directory} holds no layer times in situ of {model}: measure with paradl-bench layers")
    held = ", ".join(map(str, batches))
    if batch is None and len(batches) > 1:
        raise UserError(f"{directory} holds batches {held}: say which with --batch")
    if batch is not None and batch not in batches:
        raise UserError(f"{directory} holds no batch {batch} of {model}, but {held}")
    return [record for record in records if batch in (None, record.batch)]


class _Row(NamedTuple):
    """A layer: seconds of each iteration and of its exchanges, and the bytes exchanged."""

    number: int
    name: str
    fw_s: NDArray[np.float64]
    bw_s: NDArray[np.float64]
    exchange_s: NDArray[np.float64]
    size_bytes: int


def _rows(network: ModelGraph, times: Times, exchange: _Exchange) -> tuple[list[_Row], int]:
    iterations = min(len(values) for values in times.values())
    sizes = {tensor.name: tensor.bytes for tensor in network.parameters}
    shared: set[str] = set()
    rows = []
    timed = (layer for layer in network.layers if (layer.name, "FW") in times)
    for number, layer in enumerate(timed, start=1):
        # A parameter that two layers read is exchanged once.
        size = sum(sizes.get(name, 0) for name in layer.parameters if name not in shared)
        shared |= set(layer.parameters)
        backward = times.get((layer.name, "BW"), np.zeros(iterations))
        name = "_".join(layer.name.split())
        place = number
        traced = layer.attributes.get("number")
        if layer.kind == TRACED_KIND and isinstance(traced, int):
            # Imported from a trace, where the number is a column of its own.
            name, place = str(layer.attributes.get("name", name)), traced
        exchanges = exchange.of(name, size, iterations)
        rows.append(_Row(place, name, times[layer.name, "FW"], backward, exchanges, size))
    return rows, iterations


def _times(records: Sequence[LayerSamples]) -> Times:
    parts = [record for record in sorted(records, key=lambda r: r.block) if record.phase in ("FW", "BW")]
    if not parts:
        raise UserError("the layer times are not of FW and BW apart; an S-SGD trace needs both")
    groups = sorted_groups(parts, lambda record: (record.layer, record.phase))
    return {key: np.concatenate([record.samples_s for record in group]) for key, group in groups.items()}


class _Exchange:
    """Seconds of exchanges: of a sweep by their bytes, straight between sizes and refused outside, else as traced."""

    def __init__(self, sweep: Path | None, directory: Path) -> None:
        self.sweep = sweep
        self.swept = {} if sweep is None else _swept(sweep)
        self.traced: dict[tuple[str, int], list[float]] = {}
        records = read_records(directory, COLLECTIVES_FILE, CollectiveSamples) if sweep is None else []
        for record in records:
            if record.tool == "ssgd-trace":
                layer = record.source.rpartition(":")[2]
                self.traced.setdefault((layer, record.message_bytes), []).extend(record.samples_s[0])

    def of(self, layer: str, message_bytes: int, iterations: int) -> NDArray[np.float64]:
        """Seconds of a layer's exchange, one an iteration."""
        traced = self.traced.get((layer, message_bytes), [])
        if message_bytes and len(traced) >= iterations:
            return np.array(traced[:iterations])
        if not self.swept or not message_bytes:
            return np.zeros(iterations)
        smallest, largest = min(self.swept), max(self.swept)
        if not smallest <= message_bytes <= largest:
            raise UserError(
                f"{self.sweep} holds all_reduce of {smallest} to {largest} bytes; a layer exchanges"
                f" {message_bytes}: sweep with --sizes that hold it"
            )
        return np.full(iterations, np.interp(message_bytes, list(self.swept), list(self.swept.values())))


def _swept(sweep: Path) -> dict[int, float]:
    """Seconds of all_reduce by bytes, ascending."""
    read_manifest(sweep)
    records = [
        record
        for record in read_records(sweep, COLLECTIVES_FILE, CollectiveSamples)
        if record.operation == "all_reduce" and record.buffers != "out_of_place"
    ]
    places = {(record.library, record.tool, record.level, record.ranks) for record in records}
    if len(places) != 1:
        raise UserError(
            f"{sweep} holds all_reduce of {len(places)} libraries, levels and rank counts; give a sweep of one"
            " library, level and rank count"
        )
    of_sizes = sorted_groups(records, lambda record: (record.message_bytes,))
    return {
        size: float(np.median(np.concatenate([np.max(record.samples_s, axis=0) for record in group])))
        for (size,), group in of_sizes.items()
    }


def _notes(exchanged: bool, io_s: float) -> list[str]:
    notes = ["the time between layers and the weight update cannot be written into a trace"]
    if not exchanged:
        notes.append("exchange times are 0, as on one device; --sweep DIR sets them")
    if io_s == 0:
        notes.append("the time to read a mini-batch is 0; --io-seconds sets it")
    return notes
