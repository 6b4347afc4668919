"""Collating samples to a batch, and copying it to the device."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from paradl_bench.measure.input.images import decode, read_file, transform
from paradl_bench.ranks.clocks import Clock
from paradl_bench.records.input_record import BatchSamples, CopyHow

_REPETITIONS = 10
_COPY_BYTES = (4 * 1024, 64 * 1024, 1024**2, 16 * 1024**2)
"""Sizes beside those of batches, that tell a copy's start-up from its bandwidth."""
_DISTINCT_SAMPLES = 32


def measure_batches(
    paths: Sequence[Path],
    batches: Sequence[int],
    crop: int,
    device: torch.device,
    clock: Clock,
    block: int,
    seed: int,
) -> list[BatchSamples]:
    """Collation of every batch size, and copies of every batch and of other sizes, from each kind of host memory.

    A CPU copies nothing to itself: a copy in host memory stands for it and is marked so.
    """
    generator = random.Random(seed)
    ways: tuple[CopyHow, ...] = ("pageable", "pinned") if device.type == "cuda" else ("memcpy",)
    samples = [transform(decode(read_file(path)), crop, generator) for path in paths[:_DISTINCT_SAMPLES]]
    records = []
    for batch in batches:
        parts = list(itertools.islice(itertools.cycle(samples), batch))
        times = [_collate_s(parts) for _ in range(_REPETITIONS)]
        size = batch * samples[0].numel() * samples[0].element_size()
        records.append(BatchSamples(block=block, stage="collate", batch=batch, bytes=size, samples_s=tuple(times)))
        records += [_copied(size, batch, how, device, clock, block) for how in ways]
    records += [_copied(size, 0, how, device, clock, block) for size in _COPY_BYTES for how in ways]
    return records


def _collate_s(parts: list[torch.Tensor]) -> float:
    begin = time.perf_counter()
    torch.utils.data.default_collate(parts)
    return time.perf_counter() - begin


def _copied(size: int, batch: int, how: CopyHow, device: torch.device, clock: Clock, block: int) -> BatchSamples:
    source = torch.ones(size // 4, pin_memory=how == "pinned")
    target = torch.empty(size // 4, device=device)
    times = []
    for repetition in range(_REPETITIONS + 1):
        clock.synchronise()
        begin = clock.stamp()
        target.copy_(source, non_blocking=how == "pinned")
        end = clock.stamp()
        clock.synchronise()
        if repetition:  # the first one touches memory that was never used
            times.append(clock.seconds(begin, end))
    return BatchSamples(block=block, stage="copy", batch=batch, bytes=size, samples_s=tuple(times), how=how)
