"""``paradl-bench kernels``: sweeps that regressors are trained on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paradl_bench.core.checks import refuse_fp8
from paradl_bench.core.errors import UserError
from paradl_bench.core.terminal.forms import summary_format
from paradl_bench.core.units import parse_counts, parse_duration, parse_sample_shape, parse_size
from paradl_bench.plan.options import hang_option, sample_options

if TYPE_CHECKING:
    from paradl_bench.measure.kernels.request import KernelsRequest
    from paradl_bench.ranks.groups.process_groups import RankContext

_DTYPES = ("fp32", "bf16")
_DEFAULT_BUDGET_S = 600.0
# Of given models whole layers are wanted; ranges are filled with what is quicker to measure.
_KERNEL_LIMIT_S = {False: 0.1, True: 1.0}


@click.command("kernels")
@click.option(
    "--for",
    "models",
    metavar="MODEL[,MODEL...]",
    help="Sweep the shapes of these models, of their shards, and shapes near those. Default: the ranges of the"
    " KernelMLP paper.",
)
@click.option("--batch", metavar="N[,N...]", help="Local batches of the models. Default with --for: 8,16.")
@sample_options
@click.option(
    "--kinds",
    metavar="KIND[,KIND...]",
    help="Kinds of kernels. Default: the paper's; with --for: all kinds in the models.",
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option(
    "--dtype",
    "dtypes",
    default="fp32",
    show_default=True,
    metavar="fp32|bf16[,...]",
    help="Dtype; both sweeps one after the other.",
)
@click.option("--budget", metavar="TIME", help="Stop after 90s, 10m, 1h. Default: 10m, without --samples.")
@click.option("--samples", type=click.IntRange(1), metavar="N", help="Measure N kernels without a time limit.")
@click.option(
    "--kernel-limit",
    metavar="TIME",
    help="Skip kernels whose call would take longer. Default: 0.1s, with --for 1s.",
)
@click.option(
    "--memory", metavar="SIZE", help="Skip kernels whose tensors take more memory. Default: half of the free memory."
)
@click.option(
    "--blocks",
    default=3,
    show_default=True,
    type=click.IntRange(1),
    help="How often a kernel is visited, spread over time.",
)
@click.option(
    "--repetitions",
    default=4,
    show_default=True,
    type=click.IntRange(1),
    help="The most samples in a visit. Long kernels get fewer.",
)
@click.option(
    "--caches",
    type=click.Choice(["training", "warm"]),
    default="training",
    show_default=True,
    help="What a timed call finds in the caches: the output of the layer before it, or everything that the last call"
    " left.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of the shapes that are drawn.")
@click.option("--plan", "plan_only", is_flag=True, help="Show what would be measured, and how long it would take.")
@click.option(
    "--timeout",
    "timeout_s",
    type=float,
    metavar="SECONDS",
    help="Seconds after which a hanging sweep is ended. Default: no limit.",
)
@hang_option
@click.option("-o", "--output", metavar="DIR", type=click.Path(path_type=Path))
@summary_format("All but table hold the summary, or the plan.")
def COMMAND(  # noqa: N802
    output: Path | None,
    as_json: bool,
    plan_only: bool,
    timeout_s: float | None,
    hang_timeout_s: float,
    **options: Any,
) -> None:
    """Measure kernels over ranges of sizes, or those of given models: what regressors are trained on.

    Few kernels are chosen that teach much, in an order of which any first part is a good choice: a sweep that is
    interrupted, or has a small budget, is a smaller sweep, not a broken one. The same command goes on where it stopped.
    """
    request = _request(**options)
    if output is None and not plan_only:
        raise UserError("-o DIR is missing: say where the samples go, or give --plan")
    from paradl_bench.ranks.groups.process_groups import join_ranks
    from paradl_bench.ranks.launcher import launch_ranks, same_command
    from paradl_bench.ranks.rank_place import NO_BACKEND, launcher_of_environment

    place = launcher_of_environment(None)
    if place is None:
        launch_ranks(same_command(), ranks=1, device=request.device, timeout_s=timeout_s, hang_timeout_s=hang_timeout_s)
        if output is not None and not plan_only:
            from paradl_bench.measure.kernels.summary import print_sweep

            print_sweep(output, as_json=as_json)
        return
    with join_ranks(NO_BACKEND, request.device, timeout_s=timeout_s or 0.0) as context:
        if plan_only:
            _show_plan(request, context, as_json=as_json)
            return
        from paradl_bench.measure.kernels.sweep import sweep_kernels

        assert output is not None
        sweep_kernels(request, context, output, ("paradl-bench", *sys.argv[1:]))


def _request(
    *,
    models: str | None,
    batch: str | None,
    input_shape: str | None,
    sequence: int | None,
    kinds: str | None,
    device: str,
    dtypes: str,
    budget: str | None,
    samples: int | None,
    kernel_limit: str | None,
    memory: str | None,
    **settings: Any,
) -> KernelsRequest:
    from paradl_bench.measure.kernels.request import KernelsRequest

    names = _names(models, "--for")
    for option, value in (("--batch", batch), ("--input-shape", input_shape), ("--sequence", sequence)):
        if value and not names:
            raise UserError(f"{option} is for --for: without models their ranges decide")
    budget_s = parse_duration(budget, "--budget") if budget else None if samples else _DEFAULT_BUDGET_S
    return KernelsRequest(
        kinds=_kinds(kinds, of_models=bool(names)),
        device=device,
        dtypes=_checked_dtypes(dtypes),
        models=names,
        batches=parse_counts(batch or "8,16", "--batch") if names else (),
        input_shape=parse_sample_shape(input_shape, sequence),
        budget_s=budget_s,
        samples=samples,
        kernel_s=parse_duration(kernel_limit, "--kernel-limit") if kernel_limit else _KERNEL_LIMIT_S[bool(names)],
        memory_bytes=parse_size(memory) if memory else None,
        **settings,
    )


def _names(text: str | None, where: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",")) if text else ()
    if not all(names):
        raise UserError(f"{where} {text!r}: a name is empty; separate names by single commas")
    return tuple(dict.fromkeys(names))


def _kinds(text: str | None, *, of_models: bool) -> tuple[str, ...]:
    from paradl_bench.measure.kernels.design import check_kinds, sweepable_kinds
    from paradl_bench.measure.kernels.ranges import PAPER_KINDS, RANGES

    if not text:
        return sweepable_kinds() if of_models else PAPER_KINDS
    kinds = _names(text, "--kinds")
    check_kinds(kinds)
    without = [kind for kind in kinds if kind not in RANGES]
    if without and not of_models:
        raise UserError(f"--kinds {without[0]} has no ranges; give --for MODEL, whose shapes it then sweeps")
    return kinds


def _checked_dtypes(text: str) -> tuple[str, ...]:
    names = _names(text, "--dtype")
    for name in names:
        refuse_fp8(name)
    unknown = [name for name in names if name not in _DTYPES]
    if unknown:
        raise UserError(f"--dtype {unknown[0]!r}: choices are {', '.join(_DTYPES)}, or both")
    return names


def _show_plan(request: KernelsRequest, context: RankContext, *, as_json: bool) -> None:
    from paradl_bench.measure.kernels.design import shapes_of
    from paradl_bench.measure.kernels.runs import Caches
    from paradl_bench.measure.kernels.summary import print_plan
    from paradl_bench.measure.kernels.sweep import effort_of, plan_sweep
    from paradl_bench.ranks.clocks import clock_for

    caches = Caches("warm" if request.caches == "warm" else "training", context.device)
    design = plan_sweep(request, context.device, clock_for(context.device), caches)
    effort = effort_of(request, caches, next(iter(design.speeds.values())).bytes_per_s)
    shapes = [shapes_of(kernel, request.device) for kernel in design.kernels]
    costs = [
        effort.cost_s(kernel, own_shapes, design.speeds[kernel.dtype])
        for kernel, own_shapes in zip(design.kernels, shapes, strict=True)
    ]
    print_plan(design, costs, request.device, request.budget_s, as_json=as_json)
