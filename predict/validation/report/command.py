"""``predict report``. Imports click alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from paradl_bench.core.terminal.help import GroupedCommand
from predict.prediction.command_options import point_options, refuse_missing
from predict.search.command import SEARCHED, search_options

_BESIDE_RUNS = ("profile", "cluster", "layers", "memory", "remedies", "output", "force")
"""Options that go with runs alone: the runs say the rest."""


@click.command("report", cls=GroupedCommand, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("runs", nargs=-1, metavar="[RUN_DIR...]", type=click.Path(path_type=Path))
@point_options
@search_options
@click.option(
    "--remedies/--no-remedies", default=True, show_default=True, help="Try other settings and strategies as remedies."
)
@click.option("-o", "--output", metavar="FILE", required=True, help="The page, report.html; - for standard output.")
@click.option("--force", is_flag=True, help="Replace an existing page, and accept runs from another environment.")
@click.pass_context
def report(ctx: click.Context, /, runs: tuple[Path, ...], **options: Any) -> None:
    """Write one HTML file that explains a prediction: which strategy, how long, why, and what would help.

    Without --strategy the fastest is searched for. Runs (directories of paradl-bench train) are shown beside their
    predictions; without --model the page is about them alone. It needs no network.

    \b
    predict report --from-profile p.json --model resnet50 --ranks 64 --batch 2048 -o report.html
    predict report --from-profile p.json --model resnet50 --strategy d8,d4f2 --batch 256 runs/d8 -o report.html
    predict report --from-profile p.json runs/d2 runs/f2 -o report.html
    """
    from paradl_bench.core.errors import UserError
    from paradl_bench.core.terminal.command_line import progress, refuse_overwrite, tell
    from paradl_bench.core.terminal.forms import check_page
    from predict.prediction.utilisation import check_price
    from predict.validation.report.gather import gather
    from predict.validation.report.page import write_page

    given = {name for name in ctx.params if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE}
    refuse_missing(options, "profile")
    if options["evaluator"] != "simulate":
        raise UserError(
            f"--evaluator {options['evaluator']}: predict report uses --evaluator simulate; leave --evaluator out"
        )
    of_runs = bool(runs) and options["model"] is None
    unused = dict.fromkeys(
        options.keys() - set(_BESIDE_RUNS), "this is known from the runs; leave it out, or give --model too"
    )
    if not of_runs:
        refuse_missing(options, "model", "batch", *(() if options["strategy"] else ("ranks",)))
        unused = {} if options["strategy"] else SEARCHED
    for name in (str(parameter.name) for parameter in ctx.command.params):
        if name in given and name in unused:
            raise UserError(f"--{name.replace('_', '-')}: {unused[name]}")
    check_price(options["price"])
    check_page(options["output"])
    refuse_overwrite(options["output"], force=options["force"])
    with progress("candidates predicted", options["predictions"]) as bar:
        content = gather(options, runs, bar.advance)
    write_page(content, options["output"], force=options["force"])
    if options["output"] != "-":
        tell(f"Report: {options['output']}")


def options_unset() -> dict[str, Any]:
    """Every option of ``predict report`` as it is where it is not given, by name."""
    return dict(report.make_context("report", [], resilient_parsing=True).params)
