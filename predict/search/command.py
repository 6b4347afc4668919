"""``predict search``. Imports click alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from paradl_bench.core.terminal.collected import collected
from paradl_bench.core.terminal.help import GroupedCommand, option_group
from paradl_bench.plan.axes.registry import option_types
from predict.prediction.command_options import (
    ExportOptions,
    OutputOptions,
    export_options,
    output_options,
    point_options,
    refuse_missing,
    why_option,
)

if TYPE_CHECKING:
    from predict.search.search import Answer

SEARCHED = {
    **dict.fromkeys(("strategy", "accumulate"), "predict search tries all of them"),
    **{
        shown.name: f"predict search {shown.searched}"
        for kind in option_types()
        for shown in kind.shown
        if shown.searched
    },
    "scaling": "predict search keeps --batch at every number of ranks",
    **dict.fromkeys(("fusion", "fusion_buffer", "fusion_timeout"), "this is for --evaluator osf"),
}
"""Options of a point that a search chooses itself, or has no use for, and why."""


search_options = option_group(
    "Search",
    click.option("--memory", metavar="16GiB", help="Memory of one rank. Default: the cluster's."),
    click.option(
        "--top", default=10, show_default=True, type=click.IntRange(1), metavar="K", help="How many strategies to show."
    ),
    click.option(
        "--predictions",
        type=click.IntRange(1),
        metavar="N",
        help="The most candidates to predict exactly, besides a few that need little memory. More leave fewer"
        " candidates open. Default: 60, and fewer for networks of over 1,000 layers.",
    ),
    click.option(
        "--caps",
        metavar="MiB[,MiB...]",
        default="1,2,4,8,16,32,64,128,256",
        show_default=True,
        help="Values of bucket_cap_mb to try, besides torch's default.",
    ),
    click.option(
        "--price", type=float, metavar="P", help="Price of one rank-hour, in any currency: adds the cost of training."
    ),
    folded=False,
)
"""What bounds a search, and what of it is shown."""


@click.command("search", cls=GroupedCommand, context_settings={"help_option_names": ["-h", "--help"]})
@point_options
@search_options
@option_group(
    "Search",
    click.option(
        "--pareto",
        is_flag=True,
        help="Also show every other prediction that none beats in time, memory and rank-hours at once.",
    ),
    why_option,
    folded=False,
)
@export_options
@click.option(
    "--row", type=click.IntRange(1), default=1, show_default=True, metavar="N", help="With --export: the row to export."
)
@output_options
@click.pass_context
@collected(written=OutputOptions, exported=ExportOptions)
def search_command(
    ctx: click.Context, /, written: OutputOptions, exported: ExportOptions, row: int, **options: Any
) -> None:
    """Find the fastest strategies for a number of ranks that fit in their memory.

    Every strategy that the network and the batch allow is tried, in every order of its axes, with every number of
    micro-batches, schedule and bucket size, with all activations kept and with blocks' computed again: all by an
    estimate from below, those that may be the best exactly.

    \b
    predict search --from-profile p.json --model resnet50 --ranks 64 --batch 2048 --memory 16GiB
    predict search --from-profile p.json --model resnet50 --ranks 16:64:x2 --batch 2048 --cluster site.yaml
    """
    refuse_missing(options, "profile", "model", "ranks", "batch")
    given = click.core.ParameterSource.COMMANDLINE
    refuse_searched(name for name in ctx.params if ctx.get_parameter_source(name) is given)
    _run(options, written, exported, row)


_OWN_WORDS = {
    "batch": ("N", "Samples in the global mini-batch, the same at every number of ranks."),
    "ranks": ("N|2:1024:x2", "Numbers of ranks; each is searched separately."),
}
"""What a search takes of options that predict takes more of."""
for parameter in search_command.params:
    if isinstance(parameter, click.Option) and parameter.name in _OWN_WORDS:
        parameter.metavar, parameter.help = _OWN_WORDS[parameter.name]


def refuse_searched(given: Iterable[str]) -> None:
    """Raise a UserError of the first of these options that a search chooses itself."""
    from paradl_bench.core.errors import UserError

    for name in given:
        if name in SEARCHED:
            raise UserError(f"--{name.replace('_', '-')}: {SEARCHED[name]}")


def _run(options: dict[str, Any], written: OutputOptions, exported: ExportOptions, row: int) -> None:
    from paradl_bench.core.frames import frame_of
    from paradl_bench.core.terminal.command_line import progress
    from predict.prediction.utilisation import check_price
    from predict.search.presentation import print_answer
    from predict.search.rows import RankedRow, ranked_row
    from predict.search.search import MOST_PREDICTIONS, search

    check_price(options["price"])
    written.check()
    exported.check(force=written.force)
    with progress("candidates predicted", options["predictions"] or MOST_PREDICTIONS) as bar:
        answer = search(options, bar.advance)
    if exported.export is not None:
        _export(answer, exported, row, force=written.force)
        if exported.alone:
            return
    if written.write(answer.record(), lambda: frame_of(RankedRow, map(ranked_row, answer.rows))):
        print_answer(answer, why=options["why"])


def _export(answer: Answer, exported: ExportOptions, place: int, *, force: bool) -> None:
    """Write the settings of a row, and say how ``paradl-bench`` runs it."""
    from paradl_bench.core.errors import UserError
    from paradl_bench.core.terminal.command_line import say

    if place > len(answer.rows):
        raise UserError(f"--row {place}: the search has {len(answer.rows)} rows; give one of them")
    row = answer.rows[place - 1]
    exported.write([row.prediction], force=force)
    if row.train_command is not None:
        say(f"predict: to run row {place} by ParaDL: {row.train_command}")


for _parameter in search_command.params:
    if isinstance(_parameter, click.Option) and _parameter.name in SEARCHED:
        _parameter.hidden = True
    elif _parameter.name == "recompute" and isinstance(_parameter, click.Option):
        _parameter.help = (
            "Try only this choice of activations to recompute: none, all blocks, or modules given by name,"
            " pattern or range of a Sequential. Default: try none and all."
        )
