"""Reading, decoding and transforming single files, one after the other in one process."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from paradl_bench.measure.input.images import decode, drop_from_cache, read_file, transform
from paradl_bench.records.input_record import Condition, FileSamples

UNREADABLE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)
"""What reading and decoding a file raise where it is broken."""


@dataclass(slots=True)
class TimedFiles:
    """One pass over files: of each its bytes, pixels, seconds of reading, decoding and transforms, or why it fails."""

    condition: Condition
    times: list[tuple[int, int, float, float, float]] = field(default_factory=list)
    unreadable: dict[Path, str] = field(default_factory=dict)

    def record(self, block: int) -> FileSamples:
        """The pass as a record, of at least one file."""
        size, pixels, read_s, decode_s, transform_s = zip(*self.times, strict=True)
        return FileSamples(
            block=block,
            condition=self.condition,
            bytes=size,
            pixels=pixels,
            read_s=read_s,
            decode_s=decode_s,
            transform_s=transform_s,
        )


def time_files(paths: Sequence[Path], *, cold: bool, crop: int, seed: int) -> TimedFiles:
    """Time one pass; a file that fails is named and left out, whatever fails in it.

    Args:
        cold: drop the files from the page cache first; directories and inodes stay in the kernel's memory.
    """
    timed = TimedFiles(_dropped(paths) if cold else "warm")
    generator = random.Random(seed)
    clock = time.perf_counter
    for path in paths:
        content = None
        try:
            begin = clock()
            content = read_file(path)
            read = clock()
            image = decode(content)
            decoded = clock()
            transform(image, crop, generator)
            end = clock()
        except UNREADABLE as error:
            timed.unreadable[path] = why_unreadable(error, content)
            continue
        pixels = image.width * image.height
        timed.times.append((len(content), pixels, read - begin, decoded - read, end - decoded))
    return timed


def why_unreadable(error: Exception, content: bytes | None) -> str:
    """Why a file can't be read or decoded, in one line; ``content`` None where it was not read."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if content == b"":
        return "the file is empty"
    if isinstance(error, UnidentifiedImageError):
        # Pillow names the object that it read from, with its address, which tells the reader nothing.
        return "no image, or of a format that Pillow does not read"
    return " ".join(str(error).split()) or type(error).__name__


def _dropped(paths: Sequence[Path]) -> Condition:
    """Condition of a pass whose files were to be dropped: cold only if all of them were."""
    seen: Counter[Condition] = Counter()
    for path in paths:
        try:
            seen[drop_from_cache(path)] += 1
        except OSError:
            continue  # it is named when it is read
    if seen["not dropped"]:
        return "not dropped"
    return "not known" if seen["not known"] else "cold"
