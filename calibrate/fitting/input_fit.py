"""From raw times of the input side to its statistics and fits, one entry a source of samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from calibrate.profile.input_side import BatchInput, HostCopy, InputSide, LoaderRate, PartTime
from calibrate.statistics.blocks import block_sd
from calibrate.statistics.regression import deviation, fit_line
from paradl_bench.core.statistics import Floats, grouped
from paradl_bench.records.input_record import BatchSamples, FileSamples, LoaderSamples, UnreadableFile


class InputRecords(NamedTuple):
    """Everything that was measured of one source; blocks of several directories are blocks of their own."""

    files: Sequence[FileSamples]
    batches: Sequence[BatchSamples]
    loader: Sequence[LoaderSamples]
    unreadable: Sequence[UnreadableFile]


def fit_input(sources: Mapping[str, InputRecords]) -> tuple[InputSide, ...]:
    """The input side of every source, in the order of their names; those of traces apart by model."""
    sides: list[InputSide] = []
    for source, records in sorted(sources.items()):
        traced = [record for record in records.batches if record.stage == "io"]
        by_model = grouped(traced, lambda record: record.model)
        sides += [_traced(model, by_model[model]) for model in sorted(by_model)]
        if records.files or records.loader or len(traced) < len(records.batches):
            sides.append(_measured(source, records))
    return tuple(sides)


def _traced(model: str, records: Sequence[BatchSamples]) -> InputSide:
    groups = grouped(records, lambda record: record.batch)
    by_batch = {batch: [np.array(record.samples_s) for record in groups[batch]] for batch in sorted(groups)}
    return InputSide(
        source=model,
        model=model,
        batches=tuple(
            BatchInput(
                batch=batch,
                median_s=float(np.median(np.concatenate(blocks))),
                relative_sd=_relative_sd([float(np.median(block)) for block in _halved(blocks)]),
                samples=sum(len(block) for block in blocks),
            )
            for batch, blocks in by_batch.items()
        ),
    )


def _halved(blocks: Sequence[Floats]) -> Sequence[Floats]:
    """A single block as its two halves: the little that it knows of drift."""
    if len(blocks) > 1 or len(blocks[0]) < 2:
        return blocks
    half = len(blocks[0]) // 2
    return [blocks[0][:half], blocks[0][half:]]


def _relative_sd(values: Sequence[float]) -> float:
    """Of one value a block."""
    middle = float(np.median(values))
    return block_sd(values) / middle if middle > 0 else 0.0


def _measured(source: str, records: InputRecords) -> InputSide:
    files = records.files
    sizes = [size for record in files for size in record.bytes]
    collated = [record for record in records.batches if record.stage == "collate"]
    return InputSide(
        source=source,
        file_bytes=float(np.mean(sizes)) if sizes else 0.0,
        sample_bytes=next((record.bytes // record.batch for record in collated), 0),
        unreadable=len({item.path for item in records.unreadable}),
        read_cold=_part([record.read_s for record in files if record.condition == "cold"]),
        read_warm=_part([record.read_s for record in files if record.condition == "warm"]),
        decode=_part([record.decode_s for record in files]),
        transform=_part([record.transform_s for record in files]),
        collate=_part([[value / record.batch for value in record.samples_s] for record in collated]),
        loader=_loader(records.loader),
        copies=_copies([record for record in records.batches if record.stage == "copy"]),
    )


def _part(blocks: Sequence[Sequence[float]]) -> PartTime | None:
    if not blocks:
        return None
    arrays = [np.asarray(block, float) for block in blocks]
    means = [float(array.mean()) for array in arrays]
    low, high = np.percentile(np.concatenate(arrays), [25, 75])
    return PartTime(
        mean_s=float(np.median(means)),
        relative_sd=_relative_sd(means),
        iqr_s=float(high - low),
        samples=sum(len(array) for array in arrays),
    )


def _loader(records: Iterable[LoaderSamples]) -> tuple[LoaderRate, ...]:
    rates = []
    for (workers, batch), blocks in sorted(grouped(records, lambda record: (record.workers, record.batch)).items()):
        seconds = [sum(record.gaps_s) / (len(record.gaps_s) * batch) for record in blocks]
        middle, spread = float(np.median(seconds)), _relative_sd(seconds)
        rates.append(LoaderRate(workers=workers, batch=batch, sample_s=middle, relative_sd=spread))
    return tuple(rates)


def _copies(records: Sequence[BatchSamples]) -> tuple[HostCopy, ...]:
    """alpha + bytes beta by relative errors for each kind of host memory; all of it beta where one size is known."""
    fits = []
    timed = [record for record in records if record.bytes and min(record.samples_s) > 0]
    for how, of_memory in sorted(grouped(timed, lambda record: record.how).items()):
        by_size = grouped(of_memory, lambda record: record.bytes)
        blocks = {size: [float(np.median(r.samples_s)) for r in of_size] for size, of_size in by_size.items()}
        sizes = np.array(sorted(blocks), float)
        seconds = np.array([np.median(blocks[int(size)]) for size in sizes])
        alpha, beta, parameters = fit_line(np.column_stack([np.ones_like(sizes), sizes]), seconds)
        misses = [value / (alpha + beta * size) - 1 for size, values in blocks.items() for value in values]
        fits.append(
            HostCopy(
                how=how,
                alpha_s=alpha,
                beta_s_per_byte=beta,
                relative_sd=deviation(np.array(misses), len(misses) - parameters),
                bytes_range=(int(sizes[0]), int(sizes[-1])),
            )
        )
    return tuple(fits)
