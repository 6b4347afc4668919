"""The input side of a profile in tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from calibrate.profile.input_side import InputSide, PartTime, io_seconds
from paradl_bench.core.terminal.tables import table
from paradl_bench.core.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

_COPIES = {"memcpy": "copy in host memory; a CPU copies to no device"}


def print_input_side(sides: Sequence[InputSide], console: Console) -> None:
    """Each source: seconds a sample by part, samples a second of the loader, the copy to the device."""
    for side in sides:
        _print_one(side, console)


def _print_one(side: InputSide, console: Console) -> None:
    sizes = f", files of {format_bytes(side.file_bytes)} on average" if side.file_bytes else ""
    left_out = f", {side.unreadable} files left out that can't be decoded" if side.unreadable else ""
    rows = [
        (f"{label}, a sample", format_seconds(part.mean_s), f"±{part.relative_sd:.1%}", "")
        for label, part in _parts(side)
    ]
    for rate in side.loader:
        what = f"loader, {rate.workers} workers, batch {rate.batch}, a sample"
        speed = f"{1 / rate.sample_s:.4g} samples/s" if rate.sample_s else ""
        rows.append((what, format_seconds(rate.sample_s), f"±{rate.relative_sd:.1%}", speed))
    for copy in side.copies:
        what = _COPIES.get(copy.how, f"copy from {copy.how} memory")
        speed = f"{1e-9 / copy.beta_s_per_byte:.4g} GB/s" if copy.beta_s_per_byte else ""
        rows.append((f"{what}, start-up", format_seconds(copy.alpha_s), f"±{copy.relative_sd:.1%}", speed))
    for batch in side.batches:
        what = f"all input of a batch of {batch.batch}, as traced"
        rows.append((what, format_seconds(batch.median_s), f"±{batch.relative_sd:.1%}", ""))
    title = f"Input: {side.source}{sizes}{left_out}"
    console.print(table(("part", "seconds", "between blocks", "rate"), rows, title=title))
    whole = io_seconds(side, 1, None, cold=True)
    if whole is not None and whole.seconds and not side.batches:
        console.print(f"At best {1 / whole.seconds:.4g} samples/s: {whole.words}")


def _parts(side: InputSide) -> list[tuple[str, PartTime]]:
    parts = {
        "read from disk": side.read_cold,
        "read from the page cache": side.read_warm,
        "decode": side.decode,
        "transform": side.transform,
        "collate": side.collate,
    }
    return [(label, part) for label, part in parts.items() if part is not None]
