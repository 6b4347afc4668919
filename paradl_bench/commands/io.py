"""``paradl-bench io``: reading, decoding, and the copy to the device."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Literal

import click
import msgspec

from paradl_bench.core.errors import UserError
from paradl_bench.core.terminal.collected import collected
from paradl_bench.core.terminal.forms import summary_format
from paradl_bench.core.units import parse_counts


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is read and loaded, how often and how."""

    samples: int
    crop: int
    blocks: int
    loader_batches: int
    start: Literal["fork", "spawn"]
    seed: int
    keep: bool


@click.command("io")
@click.argument("source", metavar="PATH|synthetic")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option(
    "--batch", default="32", show_default=True, metavar="N[,N...]", help="Batch sizes for collating and loading."
)
@click.option(
    "--workers",
    default="0,1,2",
    show_default=True,
    metavar="W[,W...]",
    help="Numbers of loader processes; 0: no loader process.",
)
@click.option("--samples", default=128, show_default=True, type=click.IntRange(1), help="Number of files to time.")
@click.option("--crop", default=224, show_default=True, type=click.IntRange(1), help="Pixels of a sample's sides.")
@click.option(
    "--blocks", default=5, show_default=True, type=click.IntRange(2), help="Number of blocks, spread over time."
)
@click.option(
    "--loader-batches", default=6, show_default=True, type=click.IntRange(1), help="Batches of each loader in a block."
)
@click.option(
    "--start-method",
    "start",
    type=click.Choice(["fork", "spawn"]),
    default="fork",
    show_default=True,
    help="How the loader starts its workers.",
)
@click.option("--seed", default=0, show_default=True, help="Seed for the choice of files, their order and their crops.")
@click.option("--keep", is_flag=True, help="Keep the images that synthetic made, in DIR/.images.")
@click.option(
    "--timeout", "timeout_s", default=3600.0, show_default=True, help="Seconds after which the command is ended."
)
@click.option("-o", "--output", required=True, metavar="DIR", type=click.Path(path_type=Path))
@summary_format("All but table hold a summary with numbers.")
@collected(loading=LoadOptions)
def COMMAND(  # noqa: N802
    source: str,
    device: str,
    batch: str,
    workers: str,
    loading: LoadOptions,
    timeout_s: float,
    output: Path,
    as_json: bool,
) -> None:
    """Measure what feeding a model with images takes: reading (from disk, from the page cache), decoding, the usual
    ImageNet transforms, collation, the copy to the device; and samples a second of torch's DataLoader.

    PATH is a folder of images, nested however deep; synthetic makes JPEGs of ImageNet's sizes in DIR, and removes them
    afterwards. Files that can't be decoded are counted and named. An interrupted measurement goes on when the same
    command is given again.
    """
    batches, counts = parse_counts(batch, "--batch"), _worker_counts(workers)
    from paradl_bench.measure.input.summary import print_input
    from paradl_bench.ranks.groups.process_groups import join_ranks
    from paradl_bench.ranks.launcher import launch_ranks, same_command
    from paradl_bench.ranks.rank_place import NO_BACKEND, launcher_of_environment

    if launcher_of_environment(None) is None:
        launch_ranks(same_command(), ranks=1, device=device, timeout_s=timeout_s)
        print_input(output, as_json=as_json)
        return
    from paradl_bench.measure.input.measuring import InputRequest, measure_input

    cores = frozenset(os.sched_getaffinity(0))
    request = InputRequest(
        source=source, device=device, batches=batches, workers=counts, **msgspec.structs.asdict(loading)
    )
    with join_ranks(NO_BACKEND, device, timeout_s=timeout_s) as context:
        measure_input(request, context, cores, output, ("paradl-bench", *sys.argv[1:]))


def _worker_counts(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) <= 1024 for part in parts):
        raise UserError(f"--workers {text}: give whole numbers from 0 on, as 0,1,2")
    return tuple(sorted({int(part) for part in parts}))
