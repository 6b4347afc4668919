"""Mini-batches of images as one process reads them: in a loader's worker, or in the process that trains."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from paradl_bench.core.errors import UserError
from paradl_bench.measure.input.files import UNREADABLE, why_unreadable
from paradl_bench.measure.input.images import decode, read_file, transform


class ReadTimes(NamedTuple):
    """Seconds that a mini-batch took the process that read it, by part; and which worker that was, -1 for none."""

    worker: int
    read_s: float
    decode_s: float
    transform_s: float
    collate_s: float


class ReadBatch(NamedTuple):
    """A mini-batch in host memory: inputs (batch, 3, crop, crop), fp32; labels (batch,), int64."""

    inputs: torch.Tensor
    labels: torch.Tensor
    times: ReadTimes


class Unreadable(NamedTuple):
    """In the place of a mini-batch: a file of it that can't be read or decoded, and why."""

    path: str
    why: str


class ImageBatches(torch.utils.data.Dataset[ReadBatch | Unreadable]):
    """Samples by their number in training, a list of numbers at a time; numbers go round the list of files.

    Args:
        labels: of the files; none for 0 throughout.
        seed: of crops and flips, each of which follows from it and from the sample's number alone.
    """

    def __init__(self, paths: Sequence[Path], crop: int, seed: int, labels: Sequence[int] = ()) -> None:
        self._paths, self._crop, self._seed = list(paths), crop, seed
        self._labels = list(labels) or [0] * len(self._paths)

    def __getitem__(self, numbers: Sequence[int]) -> ReadBatch | Unreadable:
        """The mini-batch of these samples."""
        clock = time.perf_counter
        read_s = decode_s = transform_s = 0.0
        samples = []
        for number in numbers:
            path, content = self._paths[number % len(self._paths)], None
            try:
                begin = clock()
                content = read_file(path)
                read = clock()
                image = decode(content)
                decoded = clock()
                samples.append(transform(image, self._crop, random.Random(self._seed * 1_000_003 + number)))
            except UNREADABLE as error:
                return Unreadable(str(path), why_unreadable(error, content))
            read_s += read - begin
            decode_s += decoded - read
            transform_s += clock() - decoded
        begin = clock()
        inputs = torch.utils.data.default_collate(samples)
        worker = torch.utils.data.get_worker_info()
        times = ReadTimes(-1 if worker is None else worker.id, read_s, decode_s, transform_s, clock() - begin)
        return ReadBatch(inputs, self.labels(numbers), times)

    def labels(self, numbers: Sequence[int]) -> torch.Tensor:
        """Labels of samples, for which nothing is read."""
        return torch.tensor([self._labels[number % len(self._paths)] for number in numbers])


def readable(item: ReadBatch | Unreadable) -> ReadBatch:
    """The mini-batch; a UserError, which names the file, where one of it can't be read."""
    if isinstance(item, Unreadable):
        raise UserError(f"{item.path}: {item.why}; take it out of the folder")
    return item
