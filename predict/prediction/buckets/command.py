"""``predict buckets``: the ``bucket_cap_mb`` that makes an iteration shortest. Imports click alone."""

from __future__ import annotations

from typing import Any

import click

from paradl_bench.core.terminal.forms import table_format
from paradl_bench.core.terminal.help import GroupedCommand, option_group
from predict.prediction.command_options import OutputOptions, point_options, refuse_missing


@click.command("buckets", cls=GroupedCommand, context_settings={"help_option_names": ["-h", "--help"]})
@point_options
@option_group(
    "Of buckets",
    click.option(
        "--caps",
        metavar="MiB[,MiB...]",
        default="1,2,4,8,16,25,32,64,128,256",
        show_default=True,
        help="Values of bucket_cap_mb to try, besides torch's default.",
    ),
    folded=False,
)
@option_group(
    "Output",
    click.option("-o", "--output", metavar="FILE", help="Write to a file; - for standard output."),
    table_format,
    click.option("--force", is_flag=True, help="Replace an existing output file."),
    folded=False,
)
@click.pass_context
def buckets(ctx: click.Context, /, **options: Any) -> None:
    """Say which bucket_cap_mb of DistributedDataParallel to take, with adaFusion's grouping beside it.

    \b
    predict buckets --from-profile p.json --model resnet50 --strategy d8 --batch 256
    """
    from paradl_bench.core.errors import UserError
    from paradl_bench.core.frames import frame_of
    from paradl_bench.core.terminal.command_line import say
    from predict.prediction.buckets.advice import BucketAdvice, advise, print_advice

    refuse_missing(options, "profile", "model", "strategy", "batch")
    for name in ("bucket_cap_mb", "fusion", "fusion_buffer", "fusion_timeout"):
        if options[name] is not None:
            raise UserError(
                f"--{name.replace('_', '-')}: predict buckets tries several groupings; give their sizes by --caps"
            )
    if options["dataset_samples"] is not None:
        raise UserError("--dataset-samples: predict buckets compares iterations, not epochs: leave it out")
    scaled = ctx.get_parameter_source("scaling") is click.core.ParameterSource.COMMANDLINE
    if scaled and options["ranks"] is None:
        raise UserError("--scaling is for the rank counts of --ranks; predict buckets has no other use for it")
    written = OutputOptions(output=options["output"], form=options["form"], force=options["force"])
    written.check()
    advice, left_out = advise(options)
    for line in left_out:
        say(f"predict: left out: {line}")
    if written.write(list(advice), lambda: frame_of(BucketAdvice, advice)):
        print_advice(advice)
