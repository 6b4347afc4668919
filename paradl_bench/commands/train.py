"""``paradl-bench train``: real training of a strategy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
import msgspec

from paradl_bench.core.terminal.collected import collected
from paradl_bench.core.terminal.help import GroupedCommand, option_group
from paradl_bench.core.units import parse_recompute
from paradl_bench.network.optimizers import OPTIMIZERS
from paradl_bench.plan.options import (
    SampleOptions,
    accumulate_option,
    axis_options,
    batch_norm_option,
    clip_option,
    device_options,
    directory_options,
    emulation_options,
    hang_option,
    kernel_options,
    link_option,
    memory_options,
    nodes_option,
    sample_options,
    verify_option,
)
from paradl_bench.plan.strategy import axis_examples, parse_strategy
from paradl_bench.records.kernel_settings import KernelFlags

if TYPE_CHECKING:
    from paradl_bench.measure.training.request import TrainingRequest


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is run and how often; strategy and options of its axes apart."""

    batch: int
    iterations: int
    warmup: int
    optimizer: str
    accumulate: int
    batch_norm: Literal["local", "sync"]
    clip_norm: float | None
    offload: Literal["none", "optimizer"] | None
    balance: str | None
    fusion: str | None
    fusion_buffer: str | None
    device: str
    dtype: str
    verify: bool | None
    time_collectives: bool


class InputOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Images that are trained on, and how reading them and the exchange overlap."""

    input: str | None
    io_workers: int | None
    preset: str | None


class EmulationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What sleeps, and how long."""

    emulate: str | None
    dilate: float | None
    slow_rank: str | None
    spread: bool
    seed: int | None


class LaunchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Who starts the ranks, on which emulated nodes; seconds for the run, and for a rank of it to get nowhere."""

    backend: str | None
    launcher: str | None
    timeout_s: float
    hang_timeout_s: float
    nodes: str | None
    link_bandwidth: str | None


@click.command("train", cls=GroupedCommand)
@click.argument("model")
@option_group(
    "What is trained",
    click.option("--strategy", required=True, metavar="S", help=f"serial, {axis_examples()}, or nested: d2f2, d2p2f2."),
    click.option("--batch", required=True, type=click.IntRange(1), help="Global mini-batch."),
    click.option("--iterations", default=30, show_default=True, type=click.IntRange(1), help="Timed iterations."),
    click.option(
        "--warmup",
        default=5,
        show_default=True,
        type=click.IntRange(1),
        help="Iterations before the timed ones. In the first three, collectives are recorded.",
    ),
    sample_options,
    click.option("--optimizer", type=click.Choice(list(OPTIMIZERS)), default="sgd", show_default=True),
    folded=False,
)
@option_group(
    "Training",
    accumulate_option,
    clip_option,
    memory_options,
    batch_norm_option,
)
@axis_options(
    {
        "ranks_per_node": {
            "help": "Ranks of one node, for --exchange. Default: the ranks of a host, as the launcher says; with"
            " --nodes: all ranks, spread evenly."
        }
    }
)
@option_group(
    "Emulated nodes",
    nodes_option,
    link_option,
)
@option_group(
    "Stages of a pipeline",
    click.option(
        "--balance",
        metavar="DIR",
        help="Cut a pipeline so that the times balance that paradl-bench layers wrote into DIR.",
    ),
)
@option_group(
    "Fusion of gradients",
    click.option(
        "--fusion",
        metavar="none|buffer|FILE",
        help="With data parallelism: which gradients share an all-reduce. none: those of a layer. buffer: those that"
        " fit in a buffer. FILE: as predict --fusion-out wrote. Default: DDP's buckets.",
    ),
    click.option(
        "--fusion-buffer", metavar="64MiB", help="With --fusion buffer: the size of the buffer. Default: 64 MiB."
    ),
)
@option_group(
    "Input",
    click.option(
        "--input",
        metavar="FOLDER|synthetic",
        help="Read, decode and collate images in every iteration. synthetic makes images of ImageNet's sizes. Default:"
        " random samples, drawn once in memory.",
    ),
    click.option(
        "--io-workers",
        type=click.IntRange(0, 1024),
        help="With --input: loader processes of each rank. Default: 0, the rank itself reads.",
    ),
    click.option(
        "--preset",
        metavar="P",
        help="With --input: the framework whose overlap of input and exchange is run: naive, caffe-mpi, mxnet,"
        " tensorflow, cntk, pytorch (the default). All except pytorch exchange each layer separately, naive and"
        " cntk after backward.",
    ),
)
@emulation_options
@device_options
@kernel_options
@option_group(
    "Proof and times of single calls",
    verify_option,
    click.option(
        "--time-collectives",
        is_flag=True,
        help="Time each collective and message separately on every rank, in half of the iterations. CPU only.",
    ),
)
@option_group(
    "Who starts the ranks",
    click.option("--backend", help="gloo, nccl or mpi. Default: nccl between GPUs, gloo otherwise."),
    click.option(
        "--launcher",
        help="What starts the ranks: own, torchrun or srun. Default: torchrun inside of torchrun, else own.",
    ),
    click.option(
        "--timeout",
        "timeout_s",
        default=3600.0,
        show_default=True,
        type=click.FloatRange(0, min_open=True),
        help="Seconds that the whole run may take.",
    ),
    hang_option,
)
@directory_options
@collected(
    run=RunOptions,
    sample=SampleOptions,
    kernels=KernelFlags,
    reading=InputOptions,
    emulation=EmulationOptions,
    launch=LaunchOptions,
)
def COMMAND(  # noqa: N802
    model: str,
    strategy: str,
    run: RunOptions,
    sample: SampleOptions,
    recompute: str | None,
    kernels: KernelFlags,
    reading: InputOptions,
    emulation: EmulationOptions,
    launch: LaunchOptions,
    output: Path,
    as_json: bool,
    **of_axes: Any,
) -> None:
    """Train MODEL on synthetic data or images, and time forward, backward, exposed gradient exchange, weight update.

    Strategies: d data (z1d, z2d, z3d with a stage of ZeRO), s spatial (s2x2 over two dims), f filter, c channel,
    t tensor, x context, e expert, p pipeline parallelism, nested from the outermost.

    Every collective and message that is issued is recorded and compared with the plan that predictions read. An
    interrupted run goes on when the same command is given again.

    Before anything is timed, one small mini-batch proves that the strategy trains MODEL as serial training does.

    With --emulate nothing is computed: layers sleep for their profiled time, and communication is real.
    """
    from paradl_bench.measure.training.request import TrainingRequest
    from paradl_bench.plan.axes.registry import read_options
    from paradl_bench.ranks.emulated_nodes.layout import layout_of_options
    from paradl_bench.ranks.rank_place import ranks_of_node
    from paradl_bench.records.slow_rank import parse_slow_rank
    from paradl_bench.strategies.data.fusion.fusion_file import parse_fusion

    parsed = parse_strategy(strategy)
    layout = layout_of_options(launch.nodes, of_axes["ranks_per_node"], launch.link_bandwidth, ranks=parsed.ranks)
    # With nodes laid out by it, the option says no more.
    axes, _ = read_options(of_axes if layout is None else {**of_axes, "ranks_per_node": None})

    def on_node() -> int | None:
        return ranks_of_node(launch.launcher, parsed.ranks) if layout is None else layout.ranks_per_node

    settings = msgspec.structs.asdict(run)
    settings["fusion"] = parse_fusion(run.fusion, settings.pop("fusion_buffer"))
    slept = msgspec.structs.asdict(emulation)
    if emulation.slow_rank is not None:
        slept["slow_rank"] = parse_slow_rank(emulation.slow_rank)
    request = TrainingRequest(
        model=model,
        input_shape=sample.shape,
        strategy=parsed,
        kernel_settings=kernels.settings,
        recompute=parse_recompute(recompute),
        axes=tuple(options.placed(on_node) for options in axes),
        layout=layout,
        **{name: value for name, value in settings.items() if value is not None},
        **slept,
        **msgspec.structs.asdict(reading),
    )
    request.check()
    if not _run(request, launch, output):
        return
    from paradl_bench.measure.training.summary import print_training_summary

    print_training_summary(output, as_json=as_json)


def _run(request: TrainingRequest, launch: LaunchOptions, output: Path) -> bool:
    """Start the ranks of a run, or be one of them; returns whether this process then shows what was measured."""
    from paradl_bench.plan.axis_planner import samples_at_once
    from paradl_bench.ranks.directories.directory import refuse_unusable
    from paradl_bench.ranks.emulated_nodes.cluster import emulated_cluster
    from paradl_bench.ranks.groups.process_groups import join_ranks
    from paradl_bench.ranks.launcher import check_ranks_fit, launch_ranks, same_command
    from paradl_bench.ranks.rank_place import NO_BACKEND, check_backend, launcher_of_environment, refuse_emulation

    backend = launch.backend or ("nccl" if request.device == "cuda" else "gloo")
    check_backend(backend, request.device)
    place = launcher_of_environment(launch.launcher)
    if request.layout is not None:
        refuse_emulation(place)
    if place is None:
        refuse_unusable(output, "training")
        if request.shares_layers or samples_at_once(request.strategy, request.settings) == 1:
            from paradl_bench.measure.training.run import check_limits

            check_limits(request)
        check_ranks_fit(request.strategy.ranks, request.device)
        with emulated_cluster(request.layout) as cluster:
            launch_ranks(
                same_command(),
                ranks=request.strategy.ranks,
                device=request.device,
                timeout_s=launch.timeout_s,
                hang_timeout_s=launch.hang_timeout_s,
                cluster=cluster,
            )
        return True
    from paradl_bench.measure.training.run import measure_training

    used = backend if request.strategy.axes else NO_BACKEND
    with join_ranks(
        used, request.device, timeout_s=launch.timeout_s, hang_timeout_s=launch.hang_timeout_s, launcher=launch.launcher
    ) as context:
        measure_training(request, context, output, ("paradl-bench", *sys.argv[1:]))
        # Whoever starts ranks reads what they measured once they have ended: no rank ends before rank 0 wrote it.
        context.barrier()
    return place.launcher != "own" and place.rank == 0
