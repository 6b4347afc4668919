"""``predict ghost``: how long every layer of every rank would sleep in an emulated run."""

from __future__ import annotations

from typing import Any

import click

from paradl_bench.core.terminal.help import GroupedCommand, option_group
from predict.prediction.command_options import point_options, refuse_missing


@click.command("ghost", cls=GroupedCommand, context_settings={"help_option_names": ["-h", "--help"]})
@point_options
@option_group(
    "Sleeping layers",
    click.option(
        "--spread",
        is_flag=True,
        help="Add the distributions from which paradl-bench train --emulate --spread draws every sleep.",
    ),
    folded=False,
)
@option_group(
    "Output",
    click.option(
        "-o", "--output", required=True, metavar="FILE", help="Write the table, as JSON; - for standard output."
    ),
    click.option("--force", is_flag=True, help="Replace an existing output file."),
    folded=False,
)
def ghost(**options: Any) -> None:
    """Write the seconds that layers sleep in an emulated run of one strategy and batch.

    paradl-bench train --emulate takes the file. Where it is given the profile, it makes the file itself.

    \b
    predict ghost --from-profile p.json --model resnet50 --strategy d4 --batch 64 -o -
    """
    from paradl_bench.core.files.storage import encode_pretty
    from paradl_bench.core.terminal.command_line import refuse_overwrite, write_output
    from predict.emulation.ghost import ghost_table

    refuse_missing(options, "profile", "model", "strategy", "batch")
    refuse_overwrite(options["output"], force=options["force"])
    write_output(options["output"], encode_pretty(ghost_table(options)), force=options["force"])
