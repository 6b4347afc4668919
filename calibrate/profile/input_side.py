"""The input side in a profile: what reading, decoding, collating and copying a batch take, and how they add up.

S-SGD DAG's terms (Shi et al. 2018): t_io reads for the ranks of one machine, t_h2d copies a batch to a device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from paradl_bench.core.bounds import Bytes, Count, EstimatedBytes, PositiveCount, Relative, Seconds, SecondsPerByte
from paradl_bench.core.checks import check_rises


class PartTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds a sample of one part of the input side.

    Attributes:
        mean_s: median over blocks of the block's mean: samples of unlike size add up to a batch by their mean.
        relative_sd: of that mean between blocks. iqr_s: over single samples.
    """

    mean_s: Seconds
    relative_sd: Relative
    iqr_s: Seconds
    samples: PositiveCount


class LoaderRate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds a sample of torch's DataLoader once it is under way, files in the page cache, nobody computing beside."""

    workers: Count
    batch: PositiveCount
    sample_s: Seconds
    relative_sd: Relative


class HostCopy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Copy of a batch to the device: alpha + bytes beta.

    Attributes:
        how: from ``pageable`` or ``pinned`` memory; ``memcpy`` stands for it where there is no device.
        relative_sd: of one block of one size round the fit.
    """

    how: str
    alpha_s: Seconds
    beta_s_per_byte: SecondsPerByte
    relative_sd: Relative
    bytes_range: tuple[Bytes, Bytes]

    def __post_init__(self) -> None:
        check_rises(self, "bytes_range")


class BatchInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of a framework's input for one mini-batch of one rank, as another tool timed it inside of training."""

    batch: PositiveCount
    median_s: Seconds
    relative_sd: Relative
    samples: PositiveCount


class InputSide(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One source of samples.

    Attributes:
        source: folder that was read, ``synthetic``, or the model whose trace was imported.
        model: whose input this is; empty for what any model may be fed with.
        file_bytes: mean size of a file. sample_bytes: of a sample as tensors. unreadable: files left out.
        read_cold: past the page cache; None where the kernel did not drop it, or did not say.
        decode, transform, collate: None where not measured.
    """

    source: str
    model: str = ""
    file_bytes: EstimatedBytes = 0.0
    sample_bytes: Bytes = 0
    unreadable: Count = 0
    read_cold: PartTime | None = None
    read_warm: PartTime | None = None
    decode: PartTime | None = None
    transform: PartTime | None = None
    collate: PartTime | None = None
    loader: tuple[LoaderRate, ...] = ()
    copies: tuple[HostCopy, ...] = ()
    batches: tuple[BatchInput, ...] = ()


class InputTime(NamedTuple):
    """Seconds, their relative standard deviation, where they come from, and whether that lies beyond measurement.

    ``in_process``: whether the process that computes does it itself, so that nothing of it is done ahead.
    """

    seconds: float
    relative_sd: float
    words: str
    extrapolated: bool = False
    in_process: bool = False


def io_seconds(
    side: InputSide, samples: int, workers: int | None, *, cold: bool, ahead: bool = True
) -> InputTime | None:
    """t_io: reading, decoding and collating ``samples`` samples, all that the ranks of one machine need.

    What another tool timed inside of training counts as it is, scaled to the samples. Else the loader's rate with as
    many workers; with more than were measured the rate of the most (cores end somewhere). Reading past the page cache
    adds what it takes longer than reading from it, shared by the workers.

    Args:
        workers: of the whole machine; None for the number that was fastest.
        cold: files come from disk.
        ahead: whether it is to be read ahead: then, of loaders without workers, None chooses one only where no other
            was measured.

    Returns:
        None where nothing of it was measured.
    """
    if side.batches:
        return _of_trace(side.batches, samples)
    cost = _loaded(side.loader, workers, ahead=ahead) if side.loader else _in_parts(side)
    if cost is None:
        return None
    per_sample, used = cost
    seconds, spread, words = per_sample.seconds, per_sample.seconds * per_sample.relative_sd, per_sample.words
    beyond = per_sample.extrapolated
    if cold and side.loader:
        if side.read_cold is None or side.read_warm is None:
            words, beyond = words + "; reading from disk was not measured: files are taken from the page cache", True
        else:
            seconds += max(side.read_cold.mean_s - side.read_warm.mean_s, 0.0) / max(used, 1)
            spread += side.read_cold.mean_s * side.read_cold.relative_sd / max(used, 1)
            words += ", read from disk"
    return InputTime(samples * seconds, spread / seconds if seconds else 0.0, words, beyond, per_sample.in_process)


def process_seconds(side: InputSide, samples: int) -> float:
    """What reading so many samples takes one process on cores that ranks compute on as well.

    Returns:
        0 where no loader was measured, or where ranks compute on devices of their own.
    """
    fewest = min(side.loader, key=lambda rate: (rate.workers, rate.sample_s), default=None)
    if fewest is None or not side.copies or any(copy.how != "memcpy" for copy in side.copies):
        return 0.0
    return samples * fewest.sample_s * max(fewest.workers, 1)


def _of_trace(batches: Sequence[BatchInput], samples: int) -> InputTime:
    near = min(batches, key=lambda entry: (abs(math.log(entry.batch / samples)), entry.batch))
    words = f"input as traced, of {near.batch} samples"
    if near.batch == samples:
        return InputTime(near.median_s, near.relative_sd, words)
    return InputTime(near.median_s * samples / near.batch, near.relative_sd, f"{words}, scaled to {samples}", True)


def _loaded(loader: Sequence[LoaderRate], workers: int | None, *, ahead: bool) -> tuple[InputTime, int]:
    if workers is None:
        reading_ahead = [rate for rate in loader if rate.workers] if ahead else []
        best = min(reading_ahead or loader, key=lambda rate: rate.sample_s)
        passed_over = any(rate.sample_s < best.sample_s for rate in loader)
        words = f"a loader with {best.workers} workers, the fastest measured" + (" that reads ahead" * passed_over)
        return InputTime(best.sample_s, best.relative_sd, words, in_process=not best.workers), best.workers
    counts = sorted({rate.workers for rate in loader})
    used = max((count for count in counts if count <= workers), default=counts[0])
    rate = min((rate for rate in loader if rate.workers == used), key=lambda rate: rate.sample_s)
    beyond = used != workers
    words = f"a loader with {used} workers" + (f", which stands for {workers}" if beyond else "")
    return InputTime(rate.sample_s, rate.relative_sd, words, beyond, in_process=not workers), used


def _in_parts(side: InputSide) -> tuple[InputTime, int] | None:
    parts = [part for part in (side.read_cold or side.read_warm, side.decode, side.transform, side.collate) if part]
    seconds = sum(part.mean_s for part in parts)
    if not seconds:
        return None
    spread = math.hypot(*(part.mean_s * part.relative_sd for part in parts))
    return InputTime(seconds, spread / seconds, "the parts one after the other, as no loader was measured"), 1


def h2d_seconds(side: InputSide, message_bytes: float) -> InputTime | None:
    """t_h2d: copying so many bytes to the device, from pinned memory if that was measured.

    A CPU needs no copy: 0 where only a copy inside of host memory was measured. None where nothing was.
    """
    by_how = {copy.how: copy for copy in side.copies}
    copy = by_how.get("pinned") or by_how.get("pageable")
    if copy is None:
        return InputTime(0.0, 0.0, "no copy: a CPU reads the batch where it lies") if by_how else None
    beyond = message_bytes > copy.bytes_range[1]
    seconds = copy.alpha_s + message_bytes * copy.beta_s_per_byte
    return InputTime(seconds, copy.relative_sd, f"copy from {copy.how} memory", beyond)
