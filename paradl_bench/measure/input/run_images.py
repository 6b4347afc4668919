"""Images of a training run: found or made before it, proved to be those of serial training, removed after it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from paradl_bench.core.errors import UserError, WorkError
from paradl_bench.measure.input.feed import RunImages, digest
from paradl_bench.measure.input.folder import IMAGES_FOLDER, SYNTHETIC, cropped_to, find_images, labels_of
from paradl_bench.measure.input.image_batches import readable
from paradl_bench.measure.input.images import make_images, remove_images
from paradl_bench.network.models.catalog import LoadedModel
from paradl_bench.ranks.groups.process_groups import RankContext
from paradl_bench.ranks.pulse import beat

_MADE = 64
"""Images that ``synthetic`` makes."""
_SEED = 0


def check_images(source: str, model: LoadedModel) -> int:
    """Refuse what the model can't be fed with; returns the pixels of a sample's sides.

    Raises:
        UserError: no images, a model that reads something else, or more classes than it tells apart.
    """
    crop = cropped_to(model.input_shape, model.name, tokens=model.task is not None)
    if source != SYNTHETIC:
        labels_of(find_images(Path(source)), model.classes, Path(source))
    return crop


def open_images(
    source: str,
    model: LoadedModel,
    context: RankContext,
    output: Path,
    *,
    batch: int,
    own: slice,
    workers: int,
    copies_ahead: bool,
) -> RunImages:
    """Find the images, or make them in the measurement directory; a collective.

    Args:
        batch, own, workers, copies_ahead: as of :class:`RunImages`.

    Raises:
        UserError: as of :func:`check_images`, or a rank that does not see those that were made.
        WorkError: they can't be written.
    """
    folder = output / IMAGES_FOLDER if source == SYNTHETIC else Path(source)
    if source == SYNTHETIC and context.rank == 0:
        for _ in make_images(folder, _MADE, _SEED):
            beat()
    context.barrier()
    images = find_images(folder)
    seen = context.gather(len(images), int)
    if len(set(seen)) > 1:
        raise UserError(f"{folder} holds other images on other hosts: ranks see {min(seen)} to {max(seen)}")
    # Classes follow each other in a sorted list, and are mixed in training.
    order = random.Random(_SEED).sample(range(len(images)), len(images))
    # Folders of images that were made stand for nothing: any class will do.
    labels = [label % model.classes for label in labels_of(images, len(images), folder)]
    return RunImages(
        paths=[images[at] for at in order],
        labels=[labels[at] for at in order],
        crop=cropped_to(model.input_shape, model.name, tokens=model.task is not None),
        batch=batch,
        own=own,
        workers=workers,
        cores=context.cores,
        copies_ahead=copies_ahead,
    )


def check_samples(images: RunImages, first: Sequence[str], context: RankContext) -> None:
    """Hold what ranks read for the first mini-batch to what one process reads for all of it; a collective.

    Args:
        first: digests of this rank's samples; none where a later stage of a pipeline reads nothing.

    Raises:
        WorkError: a rank read others, or in another order.
    """
    read = context.gather((images.own.start, list(first)), tuple[int, list[str]])
    wrong = ""
    if context.rank == 0 and context.ranks > 1:
        batch = readable(images.batches[images.numbers(0, slice(None))])
        serial = list(map(digest, batch.inputs))
        unlike = (rank for rank, (start, seen) in enumerate(read) if seen != serial[start : start + len(seen)])
        wrong = "".join(f"rank {rank} got other samples than serial training" for rank in list(unlike)[:1])
    wrong = context.share(wrong, str)
    if wrong:
        raise WorkError(wrong)


def close_images(images: RunImages, source: str, context: RankContext, output: Path) -> None:
    """Remove what was made, when no rank reads it any more; a collective."""
    context.barrier()
    if source == SYNTHETIC and context.rank == 0:
        remove_images(list(images.paths), output / IMAGES_FOLDER)
