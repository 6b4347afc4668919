"""What a rank trains on in an iteration: read by workers ahead of it, or in its own process, and copied to its device.

Samples are numbered in the order of training: iteration i reads numbers i B to (i + 1) B - 1, of which each replica has
its own part, as it has of a mini-batch that serial training reads. So the same samples are trained on in the same
order, with the same crops, however many ranks and workers there are.

Workers read one mini-batch each ahead. Where the preset copies ahead, a thread copies the next one to the device, on a
stream of its own, while one is computed; else it is copied when the iteration begins.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from paradl_bench.core.errors import WorkError
from paradl_bench.measure.input.cores import settle
from paradl_bench.measure.input.image_batches import ImageBatches, ReadBatch, ReadTimes, Unreadable, readable
from paradl_bench.records.training.input_times import InputTimes

_SEED = 0
_STOPPED_S = 0.1
"""How often a thread that copies ahead looks whether it is to end."""


class Fed(NamedTuple):
    """A mini-batch on the device, and stamps at which it had been read, and copied.

    Attributes:
        times: of reading it; None for what read nothing.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    read: Any
    copied: Any
    times: ReadTimes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunImages:
    """Images of a run, as one rank reads them.

    Attributes:
        paths, labels: in the order of training.
        batch: global mini-batch. own: this rank's samples of it.
        workers: of this rank's loader, on these ``cores``. copies_ahead: to the device.
    """

    paths: Sequence[Path]
    labels: Sequence[int]
    crop: int
    batch: int
    own: slice
    workers: int
    cores: frozenset[int]
    copies_ahead: bool

    @property
    def batches(self) -> ImageBatches:
        """What reads them."""
        return ImageBatches(self.paths, self.crop, _SEED, self.labels)

    def numbers(self, iteration: int, part: slice | None = None) -> range:
        """Of this rank's samples in an iteration, or of a part of the mini-batch."""
        of_batch = range(iteration * self.batch, (iteration + 1) * self.batch)
        return of_batch[self.own if part is None else part]


class ImageFeed:
    """Mini-batches of one rank, one after the other from iteration 0 on.

    Args:
        lay_out: puts inputs in the layout that the model takes.
        reads: whether this rank computes on the samples; a later stage of a pipeline takes their labels alone.
    """

    def __init__(
        self,
        images: RunImages,
        device: torch.device,
        lay_out: Callable[[torch.Tensor], torch.Tensor],
        *,
        reads: bool,
    ) -> None:
        self._images, self._device, self._lay_out, self._reads = images, device, lay_out, reads
        self._taken = 0
        self._batches = images.batches
        self._read: Iterator[ReadBatch | Unreadable] = self._loader() if reads else iter(())
        ahead = reads and images.copies_ahead and images.workers > 0 and device.type == "cuda"
        self._ahead = _CopiesAhead(self._next, device) if ahead else None
        self.first_samples: tuple[str, ...] = ()

    def _loader(self) -> Iterator[ReadBatch | Unreadable]:
        images = self._images
        return iter(
            torch.utils.data.DataLoader(
                self._batches,
                batch_size=None,
                sampler=map(images.numbers, itertools.count()),
                num_workers=images.workers,
                prefetch_factor=1 if images.workers else None,
                pin_memory=self._device.type == "cuda",
                worker_init_fn=partial(_settle_worker, images.cores),
                multiprocessing_context="fork" if images.workers else None,
            )
        )

    def _next(self) -> ReadBatch:
        try:
            return readable(next(self._read))
        except RuntimeError as error:
            why = " ".join(str(error).split())
            raise WorkError(f"the loader with {self._images.workers} workers failed: {why}") from error

    def take(self, stamp: Callable[[], Any]) -> Fed:
        """Wait for the next mini-batch, and have it on the device.

        Raises:
            UserError: a file that can't be read or decoded.
            WorkError: a worker died.
        """
        numbers = self._images.numbers(self._taken)
        self._taken += 1
        if not self._reads:
            labels = self._batches.labels(numbers).to(self._device)
            return Fed(torch.empty(0, device=self._device), labels, stamp(), stamp(), None)
        if self._ahead is not None:
            batch, copied = self._ahead.take()
            read = stamp()
            copied.wait()
            inputs, targets = batch.inputs, batch.labels
        else:
            batch = self._next()
            read = stamp()
            inputs, targets = (part.to(self._device, non_blocking=True) for part in (batch.inputs, batch.labels))
        inputs = self._lay_out(inputs)
        copied_at = stamp()
        if self._taken == 1:
            self.first_samples = tuple(map(digest, inputs))
        return Fed(inputs, targets, read, copied_at, batch.times)

    def close(self) -> None:
        """End the workers."""
        if self._ahead is not None:
            self._ahead.close()
        self._read = iter(())


class _CopiesAhead:
    """Copies the next mini-batch to a GPU on a stream of its own, while one is computed."""

    def __init__(self, read: Callable[[], ReadBatch], device: torch.device) -> None:
        self._read, self._device = read, device
        self._copied: queue.Queue[tuple[ReadBatch, torch.cuda.Event] | Exception] = queue.Queue(maxsize=1)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        while not self._stopped.is_set():
            item: tuple[ReadBatch, torch.cuda.Event] | Exception
            try:
                batch = self._read()
                with torch.cuda.stream(stream):
                    inputs, labels = (part.to(self._device, non_blocking=True) for part in batch[:2])
                    item = ReadBatch(inputs, labels, batch.times), stream.record_event()
                # Pinned memory is given to another batch when nobody holds it any more.
                stream.synchronize()
            except Exception as error:
                item = error
            while not self._stopped.is_set():
                with contextlib.suppress(queue.Full):
                    self._copied.put(item, timeout=_STOPPED_S)
                    break

    def take(self) -> tuple[ReadBatch, torch.cuda.Event]:
        """The next mini-batch, and the event at which it is there; raises what reading it raised."""
        item = self._copied.get()
        if isinstance(item, Exception):
            raise item
        for part in item[0][:2]:
            part.record_stream(torch.cuda.current_stream(self._device))
        return item

    def close(self) -> None:
        """End the thread; its loader is nobody else's from then on."""
        self._stopped.set()
        self._thread.join()


def _settle_worker(cores: frozenset[int], _worker: int) -> None:
    settle(cores)


def digest(sample: torch.Tensor) -> str:
    """Of one sample's values."""
    return hashlib.sha256(sample.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


def input_times(
    iterations: Sequence[tuple[Any, Fed | None]], seconds: Callable[[Any, Any], float], device: torch.device
) -> InputTimes | None:
    """What is kept of iterations' inputs: of each the stamp at its start, and what it was fed; None for nothing."""
    fed = [(begin, item, item.times) for begin, item in iterations if item is not None and item.times is not None]
    if not fed:
        return None
    workers, *parts = zip(*(times for _, _, times in fed), strict=True)
    names = ("read_s", "decode_s", "transform_s", "collate_s")
    copies = device.type == "cuda"
    return InputTimes(
        waited_s=tuple(seconds(begin, item.copied) for begin, item, _ in fed),
        copied_s=tuple(seconds(item.read, item.copied) for _, item, _ in fed) if copies else (),
        worker=() if workers[0] < 0 else workers,
        **dict(zip(names, parts, strict=True)),
    )
