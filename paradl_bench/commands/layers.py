"""``paradl-bench layers``: per-layer times of a model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from paradl_bench.core.errors import UserError
from paradl_bench.core.terminal.collected import collected
from paradl_bench.core.terminal.help import GroupedCommand, option_group
from paradl_bench.core.units import parse_counts
from paradl_bench.network.optimizers import OPTIMIZERS
from paradl_bench.plan.axes.registry import read_options
from paradl_bench.plan.options import (
    SampleOptions,
    axis_options,
    device_options,
    directory_options,
    hang_option,
    kernel_options,
    sample_options,
    verify_option,
)
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.records.kernel_settings import KernelFlags

if TYPE_CHECKING:
    from paradl_bench.ranks.rank_place import RankPlace


class TimingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is timed how often, in what and with which optimizer."""

    device: str
    dtype: str
    optimizer: str
    blocks: int
    iterations: int
    warmup: int
    isolated: str | None


class LaunchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Who starts how many ranks, and when they are ended."""

    ranks_on_host: str | None
    launcher: str | None
    timeout_s: float
    hang_timeout_s: float


@click.command("layers", cls=GroupedCommand)
@click.argument("model")
@option_group(
    "What is measured",
    click.option("--batch", required=True, metavar="N[,N...]", help="Local batches to measure."),
    sample_options,
    folded=False,
)
@device_options
@kernel_options
@option_group(
    "On how many ranks",
    click.option("--optimizer", type=click.Choice(list(OPTIMIZERS)), default="sgd", show_default=True),
    click.option(
        "--ranks-on-host",
        metavar="R[,R...]",
        help="Number of ranks that measure on this host at once, because cores that share memory bandwidth slow each"
        " other. Several numbers (1,2) are measured one after the other. Default: 1, or as many as torchrun or"
        " srun started.",
    ),
    folded=False,
)
@option_group(
    "How often",
    click.option(
        "--blocks", default=5, show_default=True, type=click.IntRange(2), help="Number of blocks, spread over time."
    ),
    click.option(
        "--iterations",
        default=4,
        show_default=True,
        type=click.IntRange(2),
        help="Pairs of iterations (plain, probed) in a block.",
    ),
    click.option(
        "--warmup", default=2, show_default=True, type=click.IntRange(1), help="Iterations before the first block."
    ),
    click.option(
        "--isolated",
        type=click.Choice(["none", "split", "all"]),
        help="Operations that are also measured alone: those whose backward has two parts (split), or all. Default:"
        " split, or none with --compile.",
    ),
)
@option_group(
    "Shards of layers",
    click.option(
        "--shards",
        default="",
        metavar="S[,S...]",
        help="Also measure the part of each layer that one rank of these strategies runs (f2,c2,s2), because its time"
        " is not 1/p; of z3d2 whole layers, behind gathers of their parameters.",
    ),
    axis_options(of_shards=True),
)
@option_group(
    "Who starts the ranks",
    verify_option,
    click.option("--launcher", type=click.Choice(["own", "torchrun", "srun"]), help="What starts the ranks."),
    click.option(
        "--timeout", "timeout_s", default=3600.0, show_default=True, help="Seconds after which a hanging rank is ended."
    ),
    hang_option,
)
@directory_options
@collected(sample=SampleOptions, kernels=KernelFlags, timing=TimingOptions, launch=LaunchOptions)
def COMMAND(  # noqa: N802
    model: str,
    batch: str,
    sample: SampleOptions,
    kernels: KernelFlags,
    timing: TimingOptions,
    shards: str,
    verify: bool | None,
    launch: LaunchOptions,
    output: Path,
    as_json: bool,
    **given: Any,
) -> None:
    """Measure forward, backward and weight update of every operation of MODEL (or of MODEL,MODEL,...) on one device.

    Forward and backward are timed in situ, inside real iterations; closure is checked against iterations that nobody
    probed. An interrupted measurement goes on when the same command is given again.
    """
    batches, shape = parse_counts(batch, "--batch"), sample.shape
    from paradl_bench.measure.layers.request import LayersRequest
    from paradl_bench.measure.layers.summary import print_layer_summary
    from paradl_bench.ranks.directories.directory import refuse_unusable
    from paradl_bench.ranks.groups.process_groups import join_ranks
    from paradl_bench.ranks.launcher import launch_ranks, same_command
    from paradl_bench.ranks.rank_place import NO_BACKEND, launcher_of_environment

    place = launcher_of_environment(launch.launcher)
    request = LayersRequest(
        models=tuple(model.split(",")),
        batches=batches,
        input_shape=shape,
        device=timing.device,
        dtype=timing.dtype,
        kernel_settings=kernels.settings,
        optimizer=timing.optimizer,
        ranks_on_host=_numbers_of_ranks(launch.ranks_on_host, place),
        blocks=timing.blocks,
        pairs=timing.iterations,
        warmup=timing.warmup,
        isolated=timing.isolated or ("none" if kernels.compile else "split"),
        shards=tuple(parse_strategy(text) for text in shards.split(",") if text.strip()),
        axes=read_options(given)[0],
        verify=verify,
    )
    request.check()
    run_s, hang_s = launch.timeout_s, launch.hang_timeout_s
    if place is None:
        refuse_unusable(output, "layers", request.arguments())
        same = same_command()
        launch_ranks(same, ranks=request.ranks, device=timing.device, timeout_s=run_s, hang_timeout_s=hang_s)
        print_layer_summary(output, as_json=as_json)
        return
    from paradl_bench.measure.layers.profiling import measure_layers

    backend = NO_BACKEND if place.ranks == 1 else "gloo"
    with join_ranks(
        backend, timing.device, timeout_s=run_s, hang_timeout_s=hang_s, launcher=launch.launcher
    ) as context:
        measure_layers(request, context, output, ("paradl-bench", *sys.argv[1:]))
        # Whoever starts ranks reads what they measured once they have ended: no rank ends before rank 0 wrote it.
        context.barrier()
    if place.launcher != "own" and place.rank == 0:
        print_layer_summary(output, as_json=as_json)


def _numbers_of_ranks(text: str | None, place: RankPlace | None) -> tuple[int, ...]:
    """How many ranks compute at once, each number in turn; what a launcher started where nothing is asked for."""
    started = 1 if place is None else place.ranks
    if text is None:
        return (started,)
    counts = parse_counts(text, "--ranks-on-host")
    if place is not None and max(counts) != started:
        raise UserError(
            f"--ranks-on-host {text}: {place.launcher} started {started} ranks; start {max(counts)}, or leave the"
            " option away"
        )
    return counts
