"""``predict what-if``."""

from __future__ import annotations

from typing import Any

import click

from paradl_bench.core.terminal.collected import collected
from paradl_bench.core.terminal.help import GroupedCommand, option_group
from predict.prediction.command_options import OutputOptions, output_options, point_options, refuse_missing, why_option


@click.command("what-if", cls=GroupedCommand, context_settings={"help_option_names": ["-h", "--help"]})
@point_options
@option_group(
    "What is changed",
    click.option(
        "--vary",
        multiple=True,
        metavar="QUANTITY=VALUES",
        help="bandwidth, latency (bandwidth@LEVEL for one level), peak-flops, memory-bandwidth: factors on the"
        " measured value; ranks, batch: numbers; device: names that predict devices lists. VALUES: 0.1:10:log (9"
        " points), 0.1:10:log:21, 1:64:x2, or 1,2,4. Repeatable.",
    ),
    click.option(
        "--replace",
        multiple=True,
        metavar="PATTERN=MODULE[+MODULE...]",
        help="Replace the layers whose names match PATTERN by none, or by modules such as linear(4096,512),"
        " conv2d(512,512,1), relu, flatten. * stands for the width of the input. Repeatable.",
    ),
    click.option(
        "--grid", is_flag=True, help="Predict all combinations of --vary. Default: vary one quantity at a time."
    ),
    why_option,
    folded=False,
)
@output_options
@option_group(
    "Output",
    click.option("--plot", metavar="FILE", help="Draw into a file: .png, .svg or .html (needs paradl[plots])."),
    folded=False,
)
@collected(written=OutputOptions)
def what_if_command(written: OutputOptions, **given: Any) -> None:
    """Predict other links, another device, other rank counts, batches or layers, beside what was measured.

    Without --vary and --replace, try twice as much of everything, and say what helps most.

    \b
    predict what-if --from-profile p.json --model resnet50 --strategy d8 --batch 256
    predict what-if --from-profile p.json --model resnet50 --strategy d8 --batch 256 --vary bandwidth=0.1:10:log
    predict what-if ... --vary peak-flops=1,2,4 --vary memory-bandwidth=1,2,4 --grid
    predict what-if ... --vary batch=16:256:x2 --layers regressed:mlp,roofline --plot sources.png
    predict what-if ... --model vgg16 --strategy data --ranks 2:32:x2 --replace 'classifier.*=none' \\
      --replace 'avgpool=conv2d(512,512,1)+conv2d(512,1000,1)+adaptive_avg_pool2d(1)'
    """
    options = {**given, "output": written.output, "force": written.force}
    refuse_missing(options, "profile", "model", "strategy", "batch")
    from paradl_bench.core.terminal.command_line import refuse_overwrite

    refuse_unlike_changes(options)
    if options["plot"]:
        from paradl_bench.core.terminal.pictures import refuse_undrawable

        refuse_undrawable(options["plot"], options["output"])
        refuse_overwrite(options["plot"], force=options["force"])
    written.check()
    (_replace if options["replace"] else _vary)(options, written)


def refuse_unlike_changes(options: dict[str, Any]) -> None:
    """Raise a UserError of ``--replace``, ``--vary`` and ``--grid`` that don't go together."""
    from paradl_bench.core.errors import UserError

    if options["replace"] and options["vary"]:
        raise UserError("--replace and --vary exclude each other: change either the layers or the hardware")
    if options["grid"] and options["replace"]:
        raise UserError("--grid is for --vary, not for --replace")
    if options["grid"] and not options["vary"]:
        raise UserError("--grid needs --vary: say what to vary, as --vary bandwidth=1,2,4")


def _vary(options: dict[str, Any], written: OutputOptions) -> None:
    from paradl_bench.core.frames import frame_of
    from paradl_bench.core.terminal.command_line import say
    from predict.what_if.presentation import draw_what_if, print_what_if
    from predict.what_if.rows import WhatIfRow, what_if_row
    from predict.what_if.what_if import vary

    predicted = vary(options)
    for line in predicted.left_out:
        say(f"predict: left out: {line}")
    if written.write(list(predicted.rows), lambda: frame_of(WhatIfRow, map(what_if_row, predicted.rows))):
        print_what_if(predicted.rows, grid=options["grid"], ranked=not options["vary"], why=options["why"])
    if options["plot"]:
        draw_what_if(predicted.rows, options["plot"], force=options["force"])


def _replace(options: dict[str, Any], written: OutputOptions) -> None:
    from paradl_bench.core.frames import frame_of
    from paradl_bench.core.terminal.command_line import say
    from predict.what_if.replacing import predict_replaced
    from predict.what_if.replacing_table import draw_replacing, print_replacing
    from predict.what_if.rows import ReplacedRow, replaced_row

    predicted = predict_replaced(options)
    for line in predicted.left_out:
        say(f"predict: left out: {line}")
    if written.write(list(predicted.rows), lambda: frame_of(ReplacedRow, map(replaced_row, predicted.rows))):
        print_replacing(predicted.rows, why=options["why"])
    if options["plot"]:
        strong = options["scaling"] == "strong"
        draw_replacing(predicted.rows, options["plot"], strong_scaling=strong, force=options["force"])
