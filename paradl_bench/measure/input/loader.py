"""Batches from torch's DataLoader, nobody computing beside it: how fast so many workers can be."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from paradl_bench.core.errors import WorkError
from paradl_bench.measure.input.image_batches import ImageBatches, readable
from paradl_bench.records.input_record import LoaderSamples


def measure_loader(
    paths: Sequence[Path],
    *,
    workers: int,
    batch: int,
    crop: int,
    least_batches: int,
    start: Literal["fork", "spawn"],
    pinned: bool,
    block: int,
    seed: int,
) -> LoaderSamples:
    """Take batches as fast as they come; raises WorkError where a worker died, UserError where a file is broken.

    With w workers, batches come in rounds of w. Behind the first batch whole rounds are taken, so that the time from
    the first batch to the last is that of as many rounds.
    """
    rounds = -(-least_batches // max(workers, 1))
    count = 1 + rounds * max(workers, 1)
    loader = torch.utils.data.DataLoader(
        ImageBatches(paths, crop, seed + block),
        batch_size=None,
        sampler=[range(first, first + batch) for first in range(0, count * batch, batch)],
        num_workers=workers,
        pin_memory=pinned,
        multiprocessing_context=start if workers else None,
    )
    begin = time.perf_counter()
    arrivals = []
    try:
        for item in loader:
            readable(item)
            arrivals.append(time.perf_counter())
    except RuntimeError as error:
        raise WorkError(f"the loader with {workers} workers failed: {' '.join(str(error).split())}") from error
    return LoaderSamples(
        block=block,
        workers=workers,
        batch=batch,
        start=start if workers else "",
        first_s=arrivals[0] - begin,
        gaps_s=tuple(after - before for before, after in itertools.pairwise(arrivals)),
    )
