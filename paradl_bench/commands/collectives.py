"""``paradl-bench collectives``: sweeps of collective operations, and interference with compute."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from paradl_bench.collectives.catalog import operations
from paradl_bench.spec.errors import UserError
from paradl_bench.spec.units import parse_size_sweep

_DEVICE_OF_BACKEND = {"gloo": "cpu", "nccl": "cuda"}
# How long one collective may wait: a rank that hangs is noticed by the others long before the whole run's limit.
_COLLECTIVE_TIMEOUT_S = 300.0


@click.command("collectives")
@click.option("--ranks", type=click.IntRange(2), help="How many ranks. Needed unless torchrun or srun says.")
@click.option("--backend", type=click.Choice(sorted(_DEVICE_OF_BACKEND)), default="gloo", show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Default: cpu for gloo, cuda for nccl.")
@click.option("--tool", type=click.Choice(["torch"]), default="torch", show_default=True, help="Who runs the sweep.")
@click.option("--ops", default=",".join(operations()), show_default=True, metavar="OP[,OP...]")
@click.option(
    "--sizes",
    default="1K:64M:2",
    show_default=True,
    metavar="FIRST:LAST:FACTOR",
    help="Message sizes, or a list 1K,4K,1M: the whole buffer of all_reduce and broadcast, what each rank contributes"
    " to all_gather, what each keeps of reduce_scatter.",
)
@click.option("--beside-compute", is_flag=True, help="Measure too how compute and all_reduce slow each other.")
@click.option("--blocks", default=5, show_default=True, type=click.IntRange(1), help="Sweeps spread over time.")
@click.option(
    "--point-seconds",
    default=0.1,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds of repetitions for one operation and size in one block: small messages get many, large ones few.",
)
@click.option("--seed", default=0, show_default=True, help="Of the order of sizes in a block.")
@click.option("--launcher", type=click.Choice(["own", "torchrun", "srun"]), help="Who starts the ranks.")
@click.option(
    "--timeout", "timeout_s", default=3600.0, show_default=True, help="Seconds until a hanging rank is ended."
)
@click.option("-o", "--output", required=True, metavar="DIR", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def COMMAND(  # noqa: N802
    ranks: int | None,
    backend: str,
    device: str | None,
    tool: str,
    ops: str,
    sizes: str,
    beside_compute: bool,
    blocks: int,
    point_seconds: float,
    seed: int,
    launcher: str | None,
    timeout_s: float,
    output: Path,
    as_json: bool,
) -> None:
    """Time collective operations at many sizes; every result is verified, every rank's time is kept.

    An interrupted measurement goes on when the same command is given again.
    """
    from paradl_bench.measure.collective_request import CollectivesRequest
    from paradl_bench.measure.collective_summary import print_collectives
    from paradl_bench.measure.launcher import check_ranks_fit, launch_ranks
    from paradl_bench.measure.process_groups import join_ranks
    from paradl_bench.measure.rank_place import launcher_of_environment

    place = launcher_of_environment(launcher)
    if place is not None and ranks not in (None, place.ranks):
        raise UserError(f"--ranks {ranks}: {place.launcher} started {place.ranks} ranks")
    started = ranks if place is None else place.ranks
    if started is None:
        raise UserError("--ranks is missing: say how many ranks to start, at least 2")
    device = device or _DEVICE_OF_BACKEND[backend]
    request = CollectivesRequest(
        ranks=started,
        backend=backend,
        device=device,
        operations=tuple(dict.fromkeys(name.strip() for name in ops.split(","))),
        sizes=parse_size_sweep(sizes),
        blocks=blocks,
        point_s=point_seconds,
        seed=seed,
        beside_compute=beside_compute,
    )
    if place is None:
        _check_gpus(device, started)
        check_ranks_fit(started, device)
        command = [sys.executable, "-m", "paradl_bench", *sys.argv[1:]]
        launch_ranks(command, ranks=started, device=device, timeout_s=timeout_s)
        print_collectives(output, as_json=as_json)
        return
    from paradl_bench.measure.collectives import measure_collectives

    limit_s = min(timeout_s, _COLLECTIVE_TIMEOUT_S)
    with join_ranks(backend, device, timeout_s=limit_s, launcher=launcher) as context:
        measure_collectives(request, context, output, ("paradl-bench", *sys.argv[1:]))
    if place.launcher != "own" and place.rank == 0:
        print_collectives(output, as_json=as_json)


def _check_gpus(device: str, ranks: int) -> None:
    """Refuse ranks that would have no GPU, before any starts.

    Raises:
        UserError: fewer GPUs than ranks.
    """
    if device != "cuda":
        return
    import torch

    gpus = torch.cuda.device_count()
    if gpus < ranks:
        raise UserError(
            f"--device cuda: {ranks} ranks need a GPU each, and torch {torch.__version__} sees {gpus} here;"
            " use --backend gloo on a CPU, or a host with more GPUs"
        )
