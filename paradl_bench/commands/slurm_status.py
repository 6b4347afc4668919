"""``paradl-bench slurm-status``: how far a calibration on a cluster has come."""

from __future__ import annotations

from pathlib import Path

import click

from paradl_bench.core.frames import print_rows
from paradl_bench.core.terminal.command_line import tell
from paradl_bench.core.terminal.forms import summary_format


@click.command("slurm-status")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("-o", "--output", metavar="FILE", help="File for the summary, as Markdown. Default: standard output.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@click.option("--exit-code", is_flag=True, help="Exit with code 3 if something is missing.")
@summary_format("json holds all; csv and parquet hold the commands and their states.")
def COMMAND(directory: Path, output: str | None, force: bool, exit_code: bool, as_json: bool) -> None:  # noqa: N802
    """Say what was measured of the calibration in DIR, what is missing and what that costs, and how to go on."""
    import msgspec

    from paradl_bench.core.errors import WorkError
    from paradl_bench.core.terminal.command_line import refuse_overwrite, write_output
    from paradl_bench.slurm.jobs.plan import read_plan
    from paradl_bench.slurm.progress import TaskState
    from paradl_bench.slurm.summary import markdown, summarise

    if output:
        refuse_overwrite(output, force=force)
    plan = read_plan(directory)
    summary = summarise(directory, plan)
    text = markdown(directory, plan, summary)
    if output:
        write_output(output, text.encode(), force=force)
    if print_rows(TaskState, summary.tasks):
        pass
    elif as_json:
        click.echo(msgspec.json.encode(summary).decode())
    elif not output:
        tell(text.rstrip(), lines=True)
    if exit_code and not summary.complete:
        lacking = ", ".join(summary.missing)
        raise WorkError(f"{summary.commands - summary.done} commands of {lacking} are not done; {summary.go_on}")
