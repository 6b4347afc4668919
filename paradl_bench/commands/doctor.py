"""``paradl-bench doctor``: what this machine can measure; with ``--measure``, the rates of its device."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from paradl_bench.core.errors import UserError
from paradl_bench.core.frames import print_rows
from paradl_bench.core.terminal.command_line import open_console
from paradl_bench.core.terminal.forms import summary_format
from paradl_bench.core.terminal.tables import table
from paradl_bench.core.terminal.usage import given_flags
from paradl_bench.plan.options import hang_option

_LAUNCHED = ("timeout_s", "hang_timeout_s", "output")
_OF_MEASURE = ("device", "dtype", "ranks", "blocks", "point_seconds", *_LAUNCHED)
"""Parameters that say how to measure; those of what is launched are of ``--launcher`` as well."""


@click.command("doctor")
@click.option(
    "--measure", is_flag=True, help="Measure peak FLOP/s and memory bandwidth, and write them into the directory of -o."
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option(
    "--dtype",
    metavar="D[,D...]",
    help="fp32, tf32 (GPUs only) or bf16. Default: fp32 on a CPU, all three on a GPU.",
)
@click.option(
    "--ranks",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="Measure one rank alone, then R ranks at once, which share the memory of this host.",
)
@click.option(
    "--blocks", default=5, show_default=True, type=click.IntRange(2), help="Number of blocks, spread over time."
)
@click.option(
    "--point-seconds",
    default=0.2,
    show_default=True,
    type=click.FloatRange(min=0.001),
    help="Seconds for a kernel in a block.",
)
@click.option(
    "--timeout", "timeout_s", default=3600.0, show_default=True, help="Seconds after which a hanging rank is ended."
)
@hang_option
@click.option(
    "--launcher",
    type=click.Choice(["srun", "torchrun"]),
    help="What started this command on the nodes of a job. The nodes are compared, and the offsets of their clocks are"
    " measured.",
)
@click.option(
    "-o",
    "--output",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Measurement directory; with --launcher, the directory for nodes.json.",
)
@summary_format("All but table hold the findings, or the rates.")
@click.pass_context
def COMMAND(  # noqa: N802
    context: click.Context,
    measure: bool,
    device: str,
    dtype: str | None,
    ranks: int,
    blocks: int,
    point_seconds: float,
    timeout_s: float,
    hang_timeout_s: float,
    launcher: str | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Show devices, backends, tools and versions, what is missing, and what that costs.

    With --measure: the best sustained FLOP/s of matrix products and convolutions in each dtype, and bytes/s of copies
    and triads beyond the caches and inside of them, which calibrate fit makes the roofline's basis. An interrupted
    measurement goes on when the same command is given again.

    With --launcher, on each node of a job: srun --ntasks-per-node=1 paradl-bench doctor --launcher srun
    """
    if measure and launcher is not None:
        raise UserError(
            "--launcher compares nodes, and --measure measures the ranks of one host: give only one of them"
        )
    if measure:
        if output is None:
            raise UserError("--measure needs -o DIR, the directory for the measurement")
        dtypes = dtype or ("fp32" if device == "cpu" else "fp32,tf32,bf16")
        request = {"device": device, "dtypes": tuple(dtypes.split(",")), "blocks": blocks, "point_s": point_seconds}
        _measure(output, request, ranks, timeout_s, hang_timeout_s, as_json=as_json)
        return
    taken = () if launcher is None else _LAUNCHED
    for option in given_flags(context, *(name for name in _OF_MEASURE if name not in taken)):
        raise UserError(f"{option} needs --measure")
    if launcher is not None:
        _compare(launcher, output, timeout_s, hang_timeout_s, as_json=as_json)
        return
    _examine(as_json=as_json)


def _compare(launcher: str, output: Path | None, timeout_s: float, hang_timeout_s: float, *, as_json: bool) -> None:
    from paradl_bench.measure.machine.node_doctor import (
        compare_nodes,
        node_of_findings,
        print_nodes,
        refuse_known_nodes,
        write_nodes,
    )
    from paradl_bench.ranks.environment import ALLOCATOR_VARIABLES
    from paradl_bench.ranks.groups.process_groups import join_ranks
    from paradl_bench.ranks.rank_place import NO_BACKEND, launcher_of_environment

    place = launcher_of_environment(launcher)
    if output is not None:
        refuse_known_nodes(output)
    findings = node_of_findings()
    # Nothing is timed that the thresholds change: joining need not begin this process anew to set them.
    os.environ.update(ALLOCATOR_VARIABLES)
    backend = NO_BACKEND if place is None or place.ranks == 1 else "gloo"
    with join_ranks(backend, "cpu", timeout_s=timeout_s, hang_timeout_s=hang_timeout_s, launcher=launcher) as context:
        job = compare_nodes(context, findings)
        if context.rank == 0:
            if output is not None:
                write_nodes(job, output)
            print_nodes(job, as_json=as_json)


def _measure(
    output: Path, settings: dict[str, Any], ranks: int, timeout_s: float, hang_timeout_s: float, *, as_json: bool
) -> None:
    from paradl_bench.measure.machine.roofline import RooflineRequest, measure_roofline
    from paradl_bench.measure.machine.roofline_summary import print_rates
    from paradl_bench.ranks.groups.process_groups import join_ranks
    from paradl_bench.ranks.launcher import check_ranks_fit, launch_ranks, same_command
    from paradl_bench.ranks.rank_place import NO_BACKEND, launcher_of_environment

    request, device = RooflineRequest(**settings), settings["device"]
    place = launcher_of_environment(None)
    if place is None:
        check_ranks_fit(ranks, device)
        launch_ranks(same_command(), ranks=ranks, device=device, timeout_s=timeout_s, hang_timeout_s=hang_timeout_s)
        print_rates(output, as_json=as_json)
        return
    backend = NO_BACKEND if place.ranks == 1 else "gloo"
    with join_ranks(backend, device, timeout_s=timeout_s, hang_timeout_s=hang_timeout_s) as context:
        measure_roofline(request, context, output, ("paradl-bench", *sys.argv[1:]))
    if place.launcher != "own" and place.rank == 0:
        print_rates(output, as_json=as_json)


def _examine(*, as_json: bool) -> None:
    import msgspec
    from rich.text import Text

    from paradl_bench.measure.machine.doctor import Finding, examine

    findings = examine()
    if print_rows(Finding, findings):
        return
    if as_json:
        click.echo(msgspec.json.encode(findings).decode())
        return
    missing = Text("missing", style="yellow")
    rows = [
        (finding.name, missing, _cost(finding.without)) if finding.found is None else (finding.name, finding.found, "")
        for finding in findings
    ]
    open_console().print(table(("", "found", "without it"), rows))


def _cost(without: str) -> str:
    return without if without.startswith(("only", "nothing")) else f"no {without}"
