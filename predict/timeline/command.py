"""``predict timeline``: when every task of an iteration runs, as a trace for Perfetto and a picture in the terminal."""

from __future__ import annotations

from typing import Any

import click

from paradl_bench.core.terminal.forms import check_form, table_format
from paradl_bench.core.terminal.help import GroupedCommand, option_group
from predict.prediction.command_options import point_options, refuse_missing, why_option

_SLOW_HELP = (
    "One rank (0 unless given) computes FACTOR times as long as measured. The trace shows it and the ranks that"
    " wait for it."
)


@click.command("timeline", cls=GroupedCommand, context_settings={"help_option_names": ["-h", "--help"]})
@point_options
@option_group(
    "Timeline",
    click.option("--slow-rank", metavar="FACTOR[@RANK]", help=_SLOW_HELP),
    why_option,
    folded=False,
)
@option_group(
    "Output",
    click.option("-o", "--output", metavar="FILE", help="Write the trace, as JSON; - for standard output."),
    click.option(
        "--ranks-shown",
        type=click.Choice(["roles", "all"]),
        default="roles",
        show_default=True,
        help="Show ranks that do the same once in the trace (roles), or show each rank (all).",
    ),
    table_format,
    click.option("--force", is_flag=True, help="Replace an existing output file."),
    folded=False,
)
def timeline(**options: Any) -> None:
    """Show when each rank computes and communicates in one predicted iteration.

    \b
    predict timeline --from-profile p.json --model resnet50 --strategy p4 --batch 64 -o trace.json
    """
    from paradl_bench.core.terminal.command_line import refuse_overwrite
    from predict.timeline.timeline_run import show_timeline

    refuse_missing(options, "profile", "model", "strategy", "batch")
    check_form(options["form"])
    if options["output"]:
        refuse_overwrite(options["output"], force=options["force"])
    show_timeline(options)
