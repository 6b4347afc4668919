"""``paradl-bench collectives``: sweeps of collective operations, idle and in contexts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from paradl_bench.core.errors import UserError
from paradl_bench.core.terminal.collected import collected
from paradl_bench.core.terminal.command_line import say
from paradl_bench.core.terminal.help import GroupedCommand, option_group
from paradl_bench.core.terminal.usage import given_flags
from paradl_bench.core.units import parse_size_sweep
from paradl_bench.plan.collectives.catalog import operations
from paradl_bench.plan.options import (
    directory_options,
    hang_option,
    link_option,
    nodes_option,
    ranks_per_node_option,
)
from paradl_bench.tools.catalog import tools
from paradl_bench.tools.request import ToolRequest, launcher_of_tool, level_of_job

if TYPE_CHECKING:
    from paradl_bench.ranks.emulated_nodes.layout import NodeLayout
    from paradl_bench.ranks.rank_place import RankPlace
    from paradl_bench.records.contexts.context import OfGroup

_DEVICE_OF_BACKEND = {"gloo": "cpu", "nccl": "cuda"}
_TORCH = "torch"
_OVER_MPI = "mpi4py"
# Settings of torch's sweep, which the programs of other tools know nothing of.
_OF_TORCH = (
    *("device", "side_by_side", "point_seconds", "seed"),
    *("hang_timeout_s", "nodes", "ranks_per_node", "link_bandwidth"),
)
_OF_TOOLS = ("tool_path", "launcher_arguments", "level")
_OLDER = {
    "beside_compute": "with-compute",
    "behind_compute": "after-compute",
    "beside_all_reduce": "with-all-reduce",
}
"""Hidden options of the version before, by the context that they ask for."""


class ToolOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Who runs the sweep."""

    tool: str
    tool_path: Path | None
    launcher_arguments: tuple[str, ...]
    level: str | None


class SweepOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is swept, how often and by how many groups at once."""

    ops: str | None
    sizes: str
    contexts: str | None
    concurrent: int | None
    blocks: int
    point_seconds: float
    seed: int


class LaunchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Who starts how many ranks where, and when they are ended."""

    ranks: int | None
    launcher: str | None
    timeout_s: float
    hang_timeout_s: float
    nodes: str | None
    ranks_per_node: int | None
    link_bandwidth: str | None


@click.command("collectives", cls=GroupedCommand)
@option_group(
    "On what",
    click.option(
        "--ranks",
        type=click.IntRange(1),
        help="Number of ranks, at least 2 (with --tool nccl-tests also 1, to try it on one GPU). Not needed under"
        " torchrun or srun, or with --nodes and --ranks-per-node.",
    ),
    click.option(
        "--backend", type=click.Choice([*sorted(_DEVICE_OF_BACKEND), "mpi"]), default="gloo", show_default=True
    ),
    click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Default: cpu for gloo, cuda for nccl."),
    folded=False,
)
@option_group(
    "Tools beside torch",
    click.option(
        "--tool",
        type=click.Choice([_TORCH, *sorted(tools())]),
        default=_TORCH,
        show_default=True,
        help="What runs the sweep: torch.distributed, or an installed benchmark program.",
    ),
    click.option(
        "--tool-path",
        metavar="DIR",
        type=click.Path(path_type=Path),
        help="Folder of the tool's programs. Default: they are looked up on PATH.",
    ),
    click.option(
        "--launcher-arg",
        "launcher_arguments",
        metavar="ARG",
        multiple=True,
        help="Argument for mpirun or srun, passed on unchanged (--launcher-arg=--hostfile=hosts). Repeatable.",
    ),
    click.option(
        "--level",
        metavar="NAME",
        help="Level that the ranks of OSU and IMB span, which these do not print. Default: node, or system in a Slurm"
        " job of several nodes.",
    ),
)
@option_group(
    "What is swept",
    click.option("--ops", metavar="OP[,OP...]", help=f"Of {', '.join(operations())}.  [default: all]"),
    click.option(
        "--sizes",
        default="1K:64M:2",
        show_default=True,
        metavar="FIRST:LAST:FACTOR",
        help="Message sizes, as a range or a list (1K,4K,1M). all_reduce, broadcast, reduce: the whole buffer."
        " all_gather: the part of each rank. reduce_scatter: the part that each rank keeps. send_recv, exchange:"
        " one message.",
    ),
    click.option(
        "--contexts",
        metavar="CONTEXT[,CONTEXT...]",
        help="Also measure calls in the context of a training run, in turn with idle calls. after-compute: from the"
        " arrival of the last rank on. with-compute: all_reduce beside compute, and how much each slows the"
        " other. with-all-reduce: beside an all-reduce. groups=K: K disjoint groups of --ranks ranks at once"
        " (rank r is in group r modulo K).",
    ),
    click.option("--beside-compute", is_flag=True, hidden=True),
    click.option("--behind-compute", is_flag=True, hidden=True),
    click.option("--beside-all-reduce", is_flag=True, hidden=True),
    click.option("--concurrent", hidden=True, type=click.IntRange(1)),
    click.option(
        "--side-by-side",
        metavar="R",
        type=click.IntRange(2),
        help="Sweep in all groups of R neighbouring ranks at once, such as the ranks of a node. The all-reduces of"
        " with-all-reduce then go over all ranks, as for replicas whose layers a node shares.",
    ),
    folded=False,
)
@option_group(
    "How often",
    click.option(
        "--blocks", default=5, show_default=True, type=click.IntRange(1), help="Number of sweeps, spread over time."
    ),
    click.option(
        "--point-seconds",
        default=0.1,
        show_default=True,
        type=click.FloatRange(min=0, min_open=True),
        help="Seconds of repetitions for one operation and size in one block. Small messages get many repetitions,"
        " large messages few.",
    ),
    click.option("--seed", default=0, show_default=True, help="Seed of the order of sizes in a block."),
)
@option_group(
    "Who starts the ranks",
    click.option(
        "--launcher",
        type=click.Choice(["own", "torchrun", "mpirun", "srun"]),
        help="What starts the ranks; mpirun is for tools other than torch.",
    ),
    click.option(
        "--timeout", "timeout_s", default=3600.0, show_default=True, help="Seconds after which a hanging rank is ended."
    ),
    nodes_option,
    ranks_per_node_option,
    link_option,
    hang_option,
)
@directory_options
@click.pass_context
@collected(by=ToolOptions, sweep=SweepOptions, launch=LaunchOptions)
def COMMAND(  # noqa: N802
    context: click.Context,
    /,
    backend: str,
    device: str | None,
    by: ToolOptions,
    sweep: SweepOptions,
    launch: LaunchOptions,
    output: Path,
    as_json: bool,
    **as_given: Any,
) -> None:
    """Time collective operations at many sizes; every result is verified, every rank's time is kept.

    An interrupted measurement goes on when the same command is given again.
    """
    # torch as it is installed by pip knows no MPI; a sweep of our own over mpi4py stands in for it.
    tool = _OVER_MPI if by.tool == _TORCH and backend == "mpi" else by.tool
    swept = [name for name in operations() if tool == _TORCH or name in tools()[tool].programs]
    names = tuple(dict.fromkeys(name.strip() for name in sweep.ops.split(",")) if sweep.ops is not None else swept)
    older = [_OLDER[name] for name in _OLDER if as_given.pop(name)]
    of_group, groups = _asked_contexts(sweep.contexts, older, sweep.concurrent)
    if tool != _TORCH:
        _refuse_torch_options(context, tool, of_group)
        _sweep_with_tool(
            ToolRequest(
                tool=tools()[tool],
                tool_path=by.tool_path,
                launcher=launcher_of_tool(tools()[tool], launch.launcher),
                launcher_arguments=by.launcher_arguments,
                ranks=_required(launch.ranks),
                concurrent=groups,
                operations=names,
                sizes=parse_size_sweep(sweep.sizes),
                blocks=sweep.blocks,
                level=by.level or level_of_job(),
                timeout_s=launch.timeout_s,
                point_s=sweep.point_seconds,
            ),
            output,
            as_json=as_json,
        )
        return
    _refuse_tool_options(context)
    _sweep_with_torch(
        output,
        launch,
        as_json=as_json,
        backend=backend,
        device=device or _DEVICE_OF_BACKEND[backend],
        operations=names,
        sizes=parse_size_sweep(sweep.sizes),
        blocks=sweep.blocks,
        point_s=sweep.point_seconds,
        seed=sweep.seed,
        concurrent=groups,
        contexts=of_group,
        **as_given,
    )


def _sweep_with_torch(
    output: Path,
    launch: LaunchOptions,
    *,
    as_json: bool,
    backend: str,
    device: str,
    concurrent: int,
    **settings: Any,
) -> None:
    from paradl_bench.measure.collectives.request import CollectivesRequest
    from paradl_bench.measure.collectives.summary import print_collectives
    from paradl_bench.ranks.directories.directory import refuse_unusable
    from paradl_bench.ranks.emulated_nodes.cluster import emulated_cluster
    from paradl_bench.ranks.groups.process_groups import join_ranks
    from paradl_bench.ranks.launcher import check_ranks_fit, launch_ranks, same_command
    from paradl_bench.ranks.rank_place import launcher_of_environment

    place = launcher_of_environment(launch.launcher)
    layout = _layout(launch, concurrent, place)
    if place is None:
        ranks = _required(launch.ranks if layout is None else layout.ranks // concurrent)
    else:
        ranks = place.ranks // concurrent if launch.ranks is None else launch.ranks
        if ranks * concurrent != place.ranks:
            wanted = f"--ranks {ranks}" if concurrent == 1 else f"--contexts groups={concurrent} of {ranks} ranks"
            raise UserError(f"{wanted}: {place.launcher} started {place.ranks} ranks")
    request = CollectivesRequest(
        ranks=ranks, backend=backend, device=device, concurrent=concurrent, layout=layout, **settings
    )
    started = request.all_ranks
    if place is None:
        _check_gpus(device, started)
        check_ranks_fit(started, device)
        refuse_unusable(output, "collectives", request.arguments())
        with emulated_cluster(layout) as cluster:
            launch_ranks(
                same_command(),
                ranks=started,
                device=device,
                timeout_s=launch.timeout_s,
                hang_timeout_s=launch.hang_timeout_s,
                cluster=cluster,
            )
        print_collectives(output, as_json=as_json)
        return
    from paradl_bench.measure.collectives.sweep import measure_collectives

    with join_ranks(
        backend, device, timeout_s=launch.timeout_s, hang_timeout_s=launch.hang_timeout_s, launcher=launch.launcher
    ) as context:
        measure_collectives(request, context, output, ("paradl-bench", *sys.argv[1:]))
    if place.launcher != "own" and place.rank == 0:
        print_collectives(output, as_json=as_json)


def _layout(launch: LaunchOptions, concurrent: int, place: RankPlace | None) -> NodeLayout | None:
    """Emulated nodes that ``--nodes``, ``--ranks-per-node`` and ``--link-bandwidth`` ask for."""
    from paradl_bench.ranks.emulated_nodes.layout import layout_of_options
    from paradl_bench.ranks.rank_place import refuse_emulation

    nodes, per_node, rate = launch.nodes, launch.ranks_per_node, launch.link_bandwidth
    if nodes is None and per_node is not None:
        raise UserError("--ranks-per-node is for emulated nodes: give --nodes too, at least 1")
    layout = layout_of_options(nodes, per_node, rate, ranks=None if launch.ranks is None else launch.ranks * concurrent)
    if layout is not None:
        refuse_emulation(place)
        if concurrent > 1 and (layout.ranks % concurrent or layout.ranks == concurrent):
            raise UserError(
                f"--contexts groups={concurrent}: {layout.ranks} ranks cannot form so many equal groups of 2 or more"
            )
    return layout


def _required(ranks: int | None) -> int:
    if ranks is None:
        raise UserError("--ranks is missing: say how many ranks to start, at least 2")
    return ranks


def _asked_contexts(contexts: str | None, older: list[str], concurrent: int | None) -> tuple[tuple[OfGroup, ...], int]:
    """Contexts of one group, and how many groups run at once; in the words of today and of older versions."""
    from paradl_bench.measure.collectives.request import parse_contexts

    words = [contexts] if contexts is not None else []
    words += [*older, *([f"groups={concurrent}"] if (concurrent or 1) > 1 else [])]
    return parse_contexts(",".join(words)) if words else ((), 1)


def _refuse_torch_options(context: click.Context, tool: str, of_group: tuple[OfGroup, ...]) -> None:
    """Refuse what only torch's sweep does; ``--backend`` may say again what the tool runs on."""
    if of_group:
        raise UserError(
            f"--contexts {','.join(of_group)} is for --tool {_TORCH}; {tool} does not have it: leave it out"
        )
    for option in given_flags(context, *_OF_TORCH):
        if tool != _OVER_MPI or option != "--point-seconds":
            raise UserError(f"{option} is for --tool {_TORCH}; {tool} does not have it: leave it out")
    backend = context.params["backend"]
    if given_flags(context, "backend") and backend != tools()[tool].backend:
        raise UserError(f"--backend {backend}: {tool} runs on {tools()[tool].backend}")


def _refuse_tool_options(context: click.Context) -> None:
    for option in given_flags(context, *_OF_TOOLS):
        raise UserError(f"{option} is for --tool {' or '.join(sorted(tools()))}, not for {_TORCH}")
    if context.params["launcher"] == "mpirun":
        raise UserError(f"--launcher mpirun is for --tool {' or '.join(sorted(tools()))}; torch starts its own ranks")


def _sweep_with_tool(request: ToolRequest, output: Path, *, as_json: bool) -> None:
    from paradl_bench.measure.collectives.summary import print_collectives
    from paradl_bench.tools.sweep import raise_failures, sweep_with_tool

    failures = sweep_with_tool(request, output, ("paradl-bench", *sys.argv[1:]))
    for failure in failures:
        say(f"{failure.words}; its last lines:")
        for line in failure.ended.last_lines:
            say(f"  {line}")
    print_collectives(output, as_json=as_json)
    raise_failures(failures, output)


def _check_gpus(device: str, ranks: int) -> None:
    """Refuse ranks that would have no GPU, before any starts."""
    if device != "cuda":
        return
    import torch

    gpus = torch.cuda.device_count()
    if gpus < ranks:
        raise UserError(
            f"--device cuda: {ranks} ranks need one GPU each, and torch {torch.__version__} sees {gpus} here; use"
            " --backend gloo on a CPU, or a host with more GPUs"
        )
