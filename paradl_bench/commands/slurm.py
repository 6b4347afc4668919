"""``paradl-bench slurm``: a calibration as a chain of Slurm jobs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from paradl_bench.core.errors import UserError
from paradl_bench.core.files.storage import encode_pretty
from paradl_bench.core.frames import print_rows
from paradl_bench.core.terminal.collected import collected
from paradl_bench.core.terminal.command_line import say, write_output
from paradl_bench.core.terminal.forms import summary_format
from paradl_bench.core.units import parse_counts
from paradl_bench.network.optimizers import OPTIMIZERS
from paradl_bench.plan.options import SampleOptions, dtype_option, kernel_options
from paradl_bench.records.kernel_settings import KernelFlags

if TYPE_CHECKING:
    from paradl_bench.slurm.jobs.plan import Plan
    from paradl_bench.slurm.jobs.request import CalibrationRequest


class ChainOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What jobs there are: of which models, strategies and numbers of nodes, and which collectives are swept."""

    models: str
    nodes: str
    strategies: str
    operations: str | None


class MeasuringOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How each of them measures, by the names of a request."""

    batch: int
    dtype: str
    optimizer: str
    iterations: int
    warmup: int
    blocks: int
    sizes: str
    point_s: float


@click.command("slurm")
@click.option(
    "--site",
    "site_path",
    required=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Site file: the cluster's partitions, limits and modules.",
)
@click.option("--nodes", required=True, metavar="N[,N...]", help="Numbers of nodes to measure on, such as 1,2,4,8.")
@click.option("--models", required=True, metavar="MODEL[,MODEL...]")
@click.option("--batch", default=8, show_default=True, type=click.IntRange(1), help="Samples for one replica.")
@click.option(
    "--strategies",
    default="serial,data",
    show_default=True,
    metavar="S[,S...]",
    help="Strategies to run: kinds (data, filter), which take all ranks of each number of nodes, or strategies with"
    " degrees (d2f2).",
)
@click.option("--input-shape", metavar="CxHxW", help="Shape of one sample. Default: the model's own.")
@click.option("--sequence", metavar="N", type=click.IntRange(1), help="Tokens in a sample of a language model.")
@dtype_option
@kernel_options
@click.option("--optimizer", type=click.Choice(list(OPTIMIZERS)), default="sgd", show_default=True)
@click.option("--iterations", default=30, show_default=True, type=click.IntRange(5), help="Timed iterations of a run.")
@click.option(
    "--warmup", default=5, show_default=True, type=click.IntRange(3), help="Iterations before the timed ones."
)
@click.option("--blocks", default=5, show_default=True, type=click.IntRange(2), help="Blocks of layers and sweeps.")
@click.option(
    "--ops",
    "operations",
    metavar="OP[,OP...]",
    help="Operations to sweep. Default: all_reduce,broadcast,all_gather,reduce_scatter,send_recv; for spatial"
    " strategies also exchange.",
)
@click.option("--sizes", default="1K:256M:4", show_default=True, metavar="FIRST:LAST:FACTOR", help="Of messages.")
@click.option(
    "--point-seconds",
    "point_s",
    default=0.1,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds for one operation and size in one block of a sweep.",
)
@click.option(
    "--submit", "submitting", is_flag=True, help="Hand the jobs to sbatch. Run again, it goes on with what is missing."
)
@click.option("--wait", is_flag=True, help="With --submit: wait until the last job has ended.")
@click.option("--dry-run", is_flag=True, help="Print the node-minutes and the purpose of each job; write nothing.")
@click.option("--force", is_flag=True, help="Overwrite scripts that were edited by hand.")
@summary_format("json is the plan; csv and parquet hold its jobs.")
@click.option("-o", "--output", required=True, metavar="DIR", type=click.Path(path_type=Path))
@collected(chain=ChainOptions, sample=SampleOptions, kernels=KernelFlags, settings=MeasuringOptions)
def COMMAND(  # noqa: N802
    site_path: Path,
    chain: ChainOptions,
    sample: SampleOptions,
    kernels: KernelFlags,
    settings: MeasuringOptions,
    submitting: bool,
    wait: bool,
    dry_run: bool,
    force: bool,
    as_json: bool,
    output: Path,
) -> None:
    """Write, and with --submit start, the Slurm jobs of a calibration: layers, sweeps, runs, profile, validation.

    The site file says what the cluster wants of a job (account, partition, modules, container, ...; docs/cluster.md).
    What was submitted goes on when the same command is given again: nothing that is done is repeated.
    """
    if submitting and dry_run:
        raise UserError("--submit and --dry-run exclude each other: give one")
    if wait and not submitting:
        raise UserError("--wait needs --submit")
    from paradl_bench.ranks.directories.directory import now_utc
    from paradl_bench.slurm.jobs.plan import PlannedJob, script_path, write_plan

    output = output.absolute()
    plan, scripts = _planned(_request(chain, sample, kernels, settings), site_path, output)
    # Before anything is shown: what can't be written is no plan.
    edited = () if dry_run else write_plan(output, plan, scripts, force=force)
    drawn = not as_json and not print_rows(PlannedJob, plan.jobs)
    if as_json:
        write_output("-", encode_pretty(plan))
    if drawn:
        _print_table(plan)
    if dry_run:
        if drawn:
            say(
                f"without --dry-run, {len(scripts)} scripts would be written to {output / 'scripts'}, and nothing"
                " started"
            )
        return
    for name in edited:
        say(f"{script_path(output, name)} was edited by hand and is kept (--force overwrites it)")
    if submitting:
        from paradl_bench.slurm.submission import submit

        for step in submit(output, plan, now_utc=now_utc(), wait=wait):
            number = f" as {step.job_id}" if step.job_id is not None else ""
            say(f"{step.job} {step.words}{number}")
        say(f"progress: paradl-bench slurm-status {output}")
    else:
        say(f"wrote {len(scripts)} scripts to {output / 'scripts'}; the same command with --submit starts them all")


def _request(
    chain: ChainOptions, sample: SampleOptions, kernels: KernelFlags, settings: MeasuringOptions
) -> CalibrationRequest:
    from paradl_bench.slurm.jobs.request import CalibrationRequest, operations_of

    sample.shape  # noqa: B018 raises where it is none
    strategies = _parts(chain.strategies)
    return CalibrationRequest(
        models=_parts(chain.models),
        nodes=tuple(sorted(parse_counts(chain.nodes, "--nodes"))),
        strategies=strategies,
        input_shape=sample.input_shape or "",
        sequence=sample.sequence or 0,
        kernel_settings=kernels.settings.label,
        operations=chain.operations or operations_of(strategies),
        **msgspec.structs.asdict(settings),
    )


def _parts(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))


def _what_it_asks(words: Sequence[str]) -> list[str]:
    """Words of a command without those that say how it prints and replaces."""
    shown = {at + step for at, word in enumerate(words) if word == "--format" for step in (0, 1)}
    passed_over = ("--force", "--json", "--csv", "--debug")
    return [
        word
        for at, word in enumerate(words)
        if at not in shown and word not in passed_over and not word.startswith("--format=")
    ]


def _planned(request: CalibrationRequest, site_path: Path, output: Path) -> tuple[Plan, dict[str, str]]:
    """The plan, and the script of each job by its name."""
    from paradl_bench.slurm.chain import chain_of
    from paradl_bench.slurm.estimate import Estimate, trace_works
    from paradl_bench.slurm.jobs.plan import plan_of
    from paradl_bench.slurm.jobs.script import Folders, script_of
    from paradl_bench.slurm.jobs.site import read_site
    from paradl_bench.slurm.starts import load_torch, start_of

    site = read_site(site_path)
    folders = Folders(output=output, work=Path.cwd())
    start = start_of(site, output, load_torch())
    estimate = Estimate(request=request, site=site, works=trace_works(request), start=start)
    jobs = chain_of(estimate)
    scripts = {job.name: script_of(job, site, folders) for job in jobs}
    command_line = ("paradl-bench", *_what_it_asks(sys.argv[1:]))
    plan = plan_of(
        request,
        site,
        jobs,
        scripts,
        work=folders.work,
        command_line=command_line,
        basis=estimate.basis,
        start_s=start.seconds,
    )
    return plan, scripts


def _print_table(plan: Plan) -> None:
    from paradl_bench.core.terminal.command_line import open_console
    from paradl_bench.core.terminal.tables import table

    rows = []
    total, bound = 0.0, 0.0
    for job in plan.jobs:
        estimate = job.estimate_node_s
        total += job.bound_node_s if estimate is None else estimate
        bound += job.bound_node_s
        shown = "unknown" if estimate is None else f"{estimate / 60:.1f}"
        rows.append((job.name, str(len(job.tasks)), str(job.nodes), shown, f"{job.bound_node_s / 60:.0f}", job.adds))
    rows.append(("all", "", "", f"{total / 60:.1f}", f"{bound / 60:.0f}", ""))
    open_console().print(table(("job", "tasks", "nodes", "node-minutes", "at most", "it gives"), rows))
    say(f"estimated {plan.basis}. at most: the sum of the time limits")
    for job in plan.jobs:
        known = [task.estimate_s for task in job.tasks if task.estimate_s is not None]
        longest = max(known, default=0.0) if job.array else sum(known)
        if longest > job.limit_s:
            say(
                f"note: {job.name} is estimated at {longest / 60:.0f} minutes, its limit is {job.limit_s / 60:.0f}:"
                f" raise time_limits.{job.use} in the site file; a job that is cut short resumes when submitted again"
            )
