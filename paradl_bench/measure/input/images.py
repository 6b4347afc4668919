"""Images on disk: a synthetic folder of them; reading, decoding and transforming one.

Files are read past the page cache where the kernel allows it.

Decoding and transforms are Pillow's and torch's own calls, those that torchvision's ImageNet pipeline makes
(``RandomResizedCrop``, ``RandomHorizontalFlip``, ``ToTensor``, ``Normalize``), with its defaults.
"""

from __future__ import annotations

import errno
import io
import math
import os
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from paradl_bench.core.files.storage import MOST_BYTES, open_regular, write_bytes_atomically
from paradl_bench.records.input_record import Condition

_MEAN, _SD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_CROP_AREA, _CROP_RATIO, _CROP_TRIES = (0.08, 1.0), (3 / 4, 4 / 3), 10
_SYNTHETIC_CLASSES = 10
_PAGE = 4096


def make_images(folder: Path, count: int, seed: int) -> Iterator[Path]:
    """Write JPEGs with sizes spread as ImageNet's, in class folders; those that are there already are kept.

    ImageNet's training images have a median of about 500 x 375 pixels and 110 kB, a few are ten times as large: the
    longer side is drawn log-normal round 500 (sigma 0.35, from 100 to 3000), the ratio of sides mostly 4:3, one in four
    upright, one in ten square. Content is noise smoothed at several scales, of which JPEG at quality 90 makes about as
    many bytes a pixel as of photographs (0.5 to 0.7); pure noise would be three times as large and as slow to decode.
    Raises WorkError where they can't be written.
    """
    for index in range(count):
        path = folder / f"class{index % _SYNTHETIC_CLASSES}" / f"{index:06d}.jpg"
        if not path.exists():
            _write_image(path, np.random.default_rng([seed, index]))
        yield path


def _write_image(path: Path, generator: np.random.Generator) -> None:
    width, height = size = _drawn_size(generator)
    total = np.zeros((height, width, 3), np.float32)
    for cell, weight in ((64, 50.0), (16, 25.0), (4, 23.0), (1, 17.0)):
        coarse = generator.standard_normal((height // cell + 2, width // cell + 2, 3), np.float32)
        scaled = [Image.fromarray(coarse[..., channel]).resize(size, Image.Resampling.BICUBIC) for channel in range(3)]
        total += weight * np.stack([np.asarray(channel) for channel in scaled], axis=-1)
    encoded = io.BytesIO()
    Image.fromarray(np.clip(128 + total, 0, 255).astype(np.uint8)).save(encoded, "JPEG", quality=90)
    # It is on the disk then: pages that still have to be written there can't be dropped from the cache.
    write_bytes_atomically(path, encoded.getvalue())


def _drawn_size(generator: np.random.Generator) -> tuple[int, int]:
    longer = int(np.clip(500 * math.exp(0.35 * generator.standard_normal()), 100, 3000))
    kind = generator.random()
    if kind < 0.1:
        return longer, longer
    shorter = int(longer * np.clip(generator.normal(0.74, 0.07), 0.4, 1.0))
    return (shorter, longer) if kind < 0.35 else (longer, shorter)


def read_file(path: Path) -> bytes:
    """The whole file; raises OSError as :func:`~paradl_bench.core.files.storage.open_regular`."""
    with open_regular(path, most_bytes=MOST_BYTES) as stream:
        return stream.readall()


def drop_from_cache(path: Path) -> Condition:
    """Ask the kernel to drop a file from the page cache, and look whether it did.

    A read that may not wait (RWF_NOWAIT) succeeds only where the page is in memory. File systems in memory, and
    layers that keep copies of their own, do not tell.
    """
    with open_regular(path) as stream:
        descriptor = stream.fileno()
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            os.preadv(descriptor, [bytearray(_PAGE)], 0, os.RWF_NOWAIT)
        except OSError as error:
            return "cold" if error.errno == errno.EAGAIN else "not known"
        return "not dropped"


def decode(content: bytes) -> Image.Image:
    """An image in RGB; raises OSError, ValueError or SyntaxError, as Pillow does, where it is broken or no image."""
    with Image.open(io.BytesIO(content)) as image:
        return image.convert("RGB")


def transform(image: Image.Image, crop: int, generator: random.Random) -> torch.Tensor:
    """A random part of the image, resized to a square of ``crop`` pixels, flipped or not, as a normalised tensor."""
    scaled = image.resize((crop, crop), Image.Resampling.BILINEAR, box=_random_box(image, generator))
    if generator.random() < 0.5:
        scaled = scaled.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    pixels = torch.from_numpy(np.array(scaled)).permute(2, 0, 1).contiguous()
    tensor = pixels.to(torch.float32).div_(255)
    mean, sd = (torch.tensor(values).view(3, 1, 1) for values in (_MEAN, _SD))
    return tensor.sub_(mean).div_(sd)


def _random_box(image: Image.Image, generator: random.Random) -> tuple[int, int, int, int]:
    """torchvision's RandomResizedCrop: 8% to 100% of the area, sides 3:4 to 4:3; after ten tries the middle."""
    width, height = image.size
    for _ in range(_CROP_TRIES):
        area = width * height * generator.uniform(*_CROP_AREA)
        ratio = math.exp(generator.uniform(*map(math.log, _CROP_RATIO)))
        wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < high <= height:
            left, top = generator.randint(0, width - wide), generator.randint(0, height - high)
            return left, top, left + wide, top + high
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side


def remove_images(paths: list[Path], folder: Path) -> None:
    """Remove the images that were made, and the folders that are empty then."""
    for path in paths:
        path.unlink(missing_ok=True)
    for parent in (*{path.parent for path in paths}, folder):
        with suppress(OSError):
            parent.rmdir()
