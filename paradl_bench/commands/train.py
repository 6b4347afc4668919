"""``paradl-bench train``: real training of a strategy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from paradl_bench.core.units import parse_recompute, parse_sample_shape
from paradl_bench.plan.options import (
    accumulate_option,
    axis_options,
    batch_norm_option,
    dtype_option,
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

if TYPE_CHECKING:
    from paradl_bench.measure.training.request import TrainingRequest


class Limits(NamedTuple):
    """Seconds that a run may take, and that a rank of it may get nowhere."""

    run_s: float
    hang_s: float


@click.command("train")
@click.argument("model")
@click.option("--strategy", required=True, metavar="S", help=f"serial, {axis_examples()}, or nested: d2f2, d2p2f2.")
@click.option("--batch", required=True, type=click.IntRange(1), help="Global mini-batch.")
@click.option("--iterations", default=30, show_default=True, type=click.IntRange(1), help="Timed iterations.")
@click.option(
    "--warmup",
    default=5,
    show_default=True,
    type=click.IntRange(1),
    help="Iterations before them; in the first three collectives are recorded.",
)
@sample_options
@click.option("--optimizer", type=click.Choice(["sgd", "adam"]), default="sgd", show_default=True)
@accumulate_option
@memory_options
@batch_norm_option
@axis_options(
    {
        "ranks_per_node": {
            "help": "Ranks that count as a node in --exchange. Default: those of a host, as the launcher tells; with"
            " --nodes, which it lays them on, all ranks shared out."
        }
    }
)
@nodes_option
@link_option
@click.option(
    "--balance",
    metavar="DIR",
    help="Cut a pipeline's stages so that the seconds balance that paradl-bench layers measured into DIR.",
)
@emulation_options
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@dtype_option
@kernel_options
@verify_option
@click.option("--backend", help="gloo, nccl or mpi. Default: nccl between GPUs, gloo otherwise.")
@click.option("--launcher", help="Who starts the ranks: own, torchrun or srun. Default: torchrun inside it, else own.")
@click.option(
    "--timeout",
    "timeout_s",
    default=3600.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="Seconds that the whole run may take.",
)
@hang_option
@click.option("-o", "--output", required=True, metavar="DIR", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def COMMAND(  # noqa: N802
    model: str,
    strategy: str,
    iterations: int,
    warmup: int,
    input_shape: str | None,
    sequence: int | None,
    recompute: str | None,
    nodes: int | None,
    link_bandwidth: str | None,
    balance: str | None,
    device: str,
    dtype: str,
    channels_last: bool | None,
    compile: bool | None,
    tf32: bool | None,
    cudnn_benchmark: bool | None,
    backend: str | None,
    launcher: str | None,
    timeout_s: float,
    hang_timeout_s: float,
    output: Path,
    as_json: bool,
    verify: bool | None,
    **others: Any,
) -> None:
    """Train MODEL on synthetic data and time forward, backward, exposed gradient exchange and weight update.

    Strategies: d data (z1d, z2d, z3d with a stage of ZeRO), s spatial (s2x2 over two dims), f filter, c channel,
    t tensor, p pipeline parallelism, nested from the outermost.

    Every collective and message that is issued is recorded and compared with the plan that predictions read. An
    interrupted run goes on when the same command is given again.

    Before anything is timed, one small mini-batch proves that the strategy trains MODEL as serial training does.

    With --emulate nothing is computed: layers sleep for their profiled time, and communication is real.
    """
    from paradl_bench.measure.training.request import TrainingRequest
    from paradl_bench.plan.axes.registry import read_options
    from paradl_bench.ranks.emulated_nodes.layout import layout_of_options
    from paradl_bench.ranks.rank_place import ranks_of_node
    from paradl_bench.records.kernel_settings import settings_given

    parsed = parse_strategy(strategy)
    layout = layout_of_options(nodes, others["ranks_per_node"], link_bandwidth, ranks=parsed.ranks)
    # With nodes laid out by it, the option says no more.
    axes, rest = read_options(others if layout is None else {**others, "ranks_per_node": None})

    def on_node() -> int | None:
        return ranks_of_node(launcher, parsed.ranks) if layout is None else layout.ranks_per_node

    request = TrainingRequest(
        model=model,
        input_shape=parse_sample_shape(input_shape, sequence),
        strategy=parsed,
        device=device,
        dtype=dtype,
        kernel_settings=settings_given(
            channels_last=channels_last, compile=compile, tf32=tf32, cudnn_benchmark=cudnn_benchmark
        ),
        recompute=parse_recompute(recompute),
        axes=tuple(own.placed(on_node) for own in axes),
        layout=layout,
        balance=balance,
        iterations=iterations,
        warmup=warmup,
        verify=verify,
        **_as_given(rest),
    )
    request.check()
    limits = Limits(run_s=timeout_s, hang_s=hang_timeout_s)
    if not _run(request, backend or ("nccl" if device == "cuda" else "gloo"), launcher, limits, output):
        return
    from paradl_bench.measure.training.summary import print_training_summary

    print_training_summary(output, as_json=as_json)


def _as_given(options: dict[str, Any]) -> dict[str, Any]:
    """Options that a request takes by their names; it has defaults for what nobody gives."""
    from paradl_bench.records.slow_rank import parse_slow_rank

    given = {name: value for name, value in options.items() if value is not None}
    return given | ({"slow_rank": parse_slow_rank(given["slow_rank"])} if "slow_rank" in given else {})


def _run(request: TrainingRequest, backend: str, launcher: str | None, limits: Limits, output: Path) -> bool:
    """Start the ranks of a run, or be one of them; returns whether this process then shows what was measured."""
    from paradl_bench.ranks.directories.directory import refuse_unusable
    from paradl_bench.ranks.emulated_nodes.cluster import emulated_cluster
    from paradl_bench.ranks.groups.process_groups import join_ranks
    from paradl_bench.ranks.launcher import check_ranks_fit, launch_ranks, same_command
    from paradl_bench.ranks.rank_place import (
        NO_BACKEND,
        check_backend,
        launcher_of_environment,
        refuse_emulation,
    )

    check_backend(backend, request.device)
    place = launcher_of_environment(launcher)
    if request.layout is not None:
        refuse_emulation(place)
    if place is None:
        refuse_unusable(output)
        if request.shares_layers:
            from paradl_bench.measure.training.run import check_limits

            check_limits(request)
        check_ranks_fit(request.strategy.ranks, request.device)
        with emulated_cluster(request.layout) as cluster:
            launch_ranks(
                same_command(),
                ranks=request.strategy.ranks,
                device=request.device,
                timeout_s=limits.run_s,
                hang_timeout_s=limits.hang_s,
                cluster=cluster,
            )
        return True
    from paradl_bench.measure.training.run import measure_training

    used = backend if request.strategy.axes else NO_BACKEND
    with join_ranks(
        used, request.device, timeout_s=limits.run_s, hang_timeout_s=limits.hang_s, launcher=launcher
    ) as context:
        measure_training(request, context, output, ("paradl-bench", *sys.argv[1:]))
    return place.launcher != "own" and place.rank == 0
