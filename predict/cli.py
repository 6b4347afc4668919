"""``predict``: predictions from a profile, and their validation against real runs.

Loads numpy, and neither torch nor pandas nor scipy: a prediction takes milliseconds, so starting is what one waits for.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click
import msgspec

from paradl_bench.core.terminal.collected import collected
from paradl_bench.core.terminal.command_line import run_command, say
from paradl_bench.core.terminal.forms import CSV, PARQUET, check_form, check_page, form_of, table_format
from paradl_bench.core.terminal.help import GroupedGroup, option_group
from paradl_bench.core.units import counted
from predict.emulation.ghost_command import ghost
from predict.prediction.buckets.command import buckets
from predict.prediction.command_options import (
    ExportOptions,
    OutputOptions,
    export_options,
    layers_option,
    output_options,
    point_options,
    refuse_missing,
    why_option,
)
from predict.prediction.first_steps import init
from predict.search.command import search_command
from predict.timeline.command import timeline
from predict.validation.diagnosis.command import diagnose
from predict.validation.layers.command import validate_layers_command
from predict.validation.report.command import report
from predict.validation.report.explore.command import explore
from predict.what_if.command import what_if_command
from predict.what_if.devices_command import devices
from predict.what_if.profiles_command import profiles

if TYPE_CHECKING:
    from calibrate.profile.profile import Profile
    from predict.costs.compute.layer_source import LayersFrom
    from predict.validation.validation_report import Report

_KNEE_HELP = (
    "Show the knee of a sweep: the most ranks at which efficiency is at least F times the efficiency at the fewest"
    " ranks."
)
_EXPLAIN_HELP = (
    "Show what every second is made of: the largest entries below the table, or all entries with --format json or -o."
)
_SLOW_HELP = "With --evaluator simulate: one rank (0 unless given) computes FACTOR times as long as measured."
_DILATE_HELP = "Predict an emulated run (paradl-bench train --emulate --dilate K), whose layers sleep K times as long."
_SPREAD_HELP = (
    "Predict an emulated run (paradl-bench train --emulate --spread), whose sleeps are drawn from the profile's spread."
)
_FUSION_OUT_HELP = (
    "Write the messages of --fusion for paradl-bench train --fusion FILE. It takes one strategy and batch."
)
_ALLOCATIONS_BETWEEN_COLLECTIONS = 400_000
_CONTEXT = {"help_option_names": ["-h", "--help"]}


class ShownOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is said of predictions."""

    wide: bool
    why: bool
    explain: bool
    fusion_out: str | None


@click.group(
    cls=GroupedGroup,
    invoke_without_command=True,
    context_settings=_CONTEXT,
    subcommand_metavar="[COMMAND ...]",
)
@click.version_option(package_name="paradl", prog_name="predict")
@point_options
@option_group(
    "What is shown",
    click.option(
        "--price", type=float, metavar="P", help="Price of one rank-hour, in any currency: adds the cost of training."
    ),
    click.option(
        "--wide",
        is_flag=True,
        help="Add a second table: FLOPs utilisation, samples and tokens of each rank, rank-hours.",
    ),
    why_option,
    click.option("--explain", is_flag=True, help=_EXPLAIN_HELP),
    click.option("--knee", type=float, default=0.8, show_default=True, metavar="F", help=_KNEE_HELP),
    folded=False,
)
@option_group(
    "Slow and sleeping ranks",
    click.option("--slow-rank", metavar="FACTOR[@RANK]", help=_SLOW_HELP),
    click.option("--dilate", type=float, metavar="K", help=_DILATE_HELP),
    click.option("--spread", is_flag=True, help=_SPREAD_HELP),
)
@option_group(
    "Fusion of gradients",
    click.option("--fusion-out", metavar="FILE", help=_FUSION_OUT_HELP),
)
@export_options
@output_options
@click.pass_context
@collected(shown=ShownOptions, written=OutputOptions, exported=ExportOptions)
def group(
    ctx: click.Context, /, shown: ShownOptions, written: OutputOptions, exported: ExportOptions, **asked: Any
) -> None:
    """Predict iteration time, memory and scaling from a profile. Add --debug to any command for tracebacks.

    \b
    predict --from-profile p.json --model resnet50 --strategy data --ranks 2:1024:x2 --batch 64
    predict --from-profile p.json --model resnet50 --strategy serial,d2,d4 --batch 64 --evaluator paradl
    """
    given = [name for name in ctx.params if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE]
    if ctx.invoked_subcommand is not None:
        if given:
            raise click.UsageError(f"give options after the command {ctx.invoked_subcommand}, not before it")
        return
    if not given:
        raise click.exceptions.NoArgsIsHelpError(ctx)
    refuse_missing(asked, "profile", "model", "strategy")
    chosen = asked["batch"]
    if chosen is None:
        asked["batch"] = _batch_of_published(asked)
    refuse_missing(asked, "batch")
    _predict(asked, shown, written, exported)
    if chosen is None:
        say(f"predict: no --batch was given; taken: a mini-batch of {counted(int(asked['batch']), 'sample')}")


def _batch_of_published(asked: dict[str, Any]) -> str | None:
    """As many samples as the fewest ranks, where the profile's measurements were published.

    None with a profile of one's own: its batches were chosen, and so is this one to be.
    """
    from calibrate.profile.profile import read_profile
    from predict.prediction.points import fewest_ranks

    if not read_profile(asked["profile"]).published:
        return None
    return str(fewest_ranks(asked["strategy"], asked["ranks"]))


def _predict(asked: dict[str, Any], shown: ShownOptions, written: OutputOptions, exported: ExportOptions) -> None:
    """Run a prediction and write it where the options say."""
    from paradl_bench.core.errors import UserError
    from predict.ledger.presentation import print_ledger
    from predict.prediction.presentation import predictions_frame, print_table, print_use
    from predict.prediction.request import check_request, predict_request

    check_request(asked)
    written.check()
    exported.check(force=written.force)
    if shown.explain and form_of(written.output, written.form) in (CSV, PARQUET):
        raise UserError("--explain writes a table or JSON: give --format table or json, not csv or parquet")
    if shown.fusion_out is not None:
        _write_messages(shown.fusion_out, asked, force=written.force)
    predicted = predict_request(asked, explain=shown.explain)
    for line in predicted.left_out:
        say(f"predict: left out: {line}")
    predictions = predicted.predictions
    exported.write(predictions, force=written.force)
    if exported.alone:
        return
    content = predicted.ledgers if shown.explain else [prediction.record() for prediction in predictions]
    if not written.write(content, lambda: predictions_frame(predictions)):
        return
    print_table(predictions, predicted.sweeps, why=shown.why)
    if shown.wide or asked["price"] is not None:
        print_use(predictions)
    for ledger in predicted.ledgers:
        print_ledger(ledger)


def _write_messages(output: str, asked: dict[str, Any], *, force: bool) -> None:
    """Write the messages of a rule of fusion to a file."""
    from paradl_bench.core.errors import UserError
    from paradl_bench.core.files.storage import encode_pretty
    from paradl_bench.core.terminal.command_line import refuse_overwrite, write_output
    from predict.prediction.buckets.fusion_messages import fusion_file

    if output == "-":
        raise UserError("--fusion-out -: standard output is taken by the predictions; give a file")
    refuse_overwrite(output, force=force)
    write_output(output, encode_pretty(fusion_file(asked)), force=force)


@group.command("validate", context_settings=_CONTEXT)
@click.argument("runs", nargs=-1, required=True, metavar="RUN_DIR...", type=click.Path(path_type=Path))
@click.option(
    "--from-profile", "profile", required=True, type=click.Path(path_type=Path), help="Profile to predict from."
)
@click.option("-o", "--output", required=True, metavar="REPORT_DIR", type=click.Path(path_type=Path))
@click.option("--cluster", type=click.Path(path_type=Path), help="Cluster file. Default: the measured cluster.")
@layers_option
@table_format
@click.option(
    "--plot", metavar="FILE", help="Draw predicted and measured phases and memory into a file: .png, .svg or .html."
)
@click.option(
    "--html", metavar="FILE", help="Write a page that explains all runs, and in detail the run with the largest error."
)
@click.option(
    "--profile-out",
    metavar="FILE",
    help="Write the profile with these runs: its intervals then count how far runs were from their predictions.",
)
@click.option("--force", is_flag=True, help="Replace existing files, and compare runs from another environment.")
def validate(
    runs: tuple[Path, ...],
    profile: Path,
    output: Path,
    cluster: Path | None,
    layers: str,
    form: str,
    plot: str | None,
    html: str | None,
    profile_out: str | None,
    force: bool,
) -> None:
    """Hold predictions against training runs (directories of paradl-bench train), with the baselines beside them."""
    from paradl_bench.core.terminal.command_line import refuse_overwrite, say
    from paradl_bench.core.terminal.pictures import refuse_undrawable
    from predict.costs.compute.layer_source import parse_layers
    from predict.validation.shown.report import print_report, refuse_existing, write_report
    from predict.validation.validation import validate_runs

    check_form(form)
    refuse_existing(output, force=force)
    if plot:
        refuse_undrawable(plot)
        refuse_overwrite(plot, force=force)
    if html:
        check_page(html)
        refuse_overwrite(html, force=force)
    source = parse_layers(layers)
    bare = _before_comparing(profile, profile_out, source, force=force) if profile_out else None
    report = validate_runs(profile, runs, cluster_path=cluster, force=force, layers_from=source, profile=bare)
    paths = write_report(output, report)
    if profile_out:
        _write_compared(profile, report, profile_out, force=force)
    print_report(report, paths, form)
    if profile_out:
        say(f"Profile whose intervals count these runs: {profile_out}")
    if plot:
        from predict.validation.shown.drawing import draw_validation

        draw_validation(report, plot, force=force)
    if html and not report.pairs:
        say(f"predict: {html} is not written, because no run has times to explain")
    elif html:
        from predict.validation.report.command import options_unset
        from predict.validation.report.gather import gather_runs
        from predict.validation.report.page import write_page

        asked = {"profile": profile, "cluster": cluster, "layers": layers, "force": force}
        write_page(gather_runs({**options_unset(), **asked}, report), html, force=force)


def _before_comparing(path: Path, output: str, layers: LayersFrom, *, force: bool) -> Profile:
    """The profile without compared runs: their errors are of predictions that know none."""
    from calibrate.profile.profile import read_profile
    from paradl_bench.core.errors import UserError
    from paradl_bench.core.terminal.command_line import refuse_overwrite

    if output == "-":
        raise UserError("--profile-out -: standard output is taken by the report; give a file")
    if not layers.measured:
        raise UserError(
            f"--profile-out with {layers.asked}: the profile keeps errors of predictions from its measurements; leave"
            " --layers out"
        )
    refuse_overwrite(output, force=force)
    return msgspec.structs.replace(read_profile(path), compared_runs=msgspec.UNSET)


def _write_compared(path: Path, report: Report, output: str, *, force: bool) -> None:
    """Write the profile with the runs of a report, and its regressors' archives beside it."""
    from calibrate.fitting.merging.merge import with_archives_beside
    from calibrate.profile.profile import encode_profile, read_profile
    from paradl_bench.core.terminal.command_line import write_output
    from predict.validation.validation_scores import with_compared_runs

    compared = with_compared_runs(read_profile(path), report)
    if compared.kernel_models:
        compared = with_archives_beside(compared, output)
    write_output(output, encode_profile(compared), force=force)


group.add_command(init)
group.add_command(diagnose)
group.add_command(validate_layers_command)
group.add_command(what_if_command)
group.add_command(timeline)
group.add_command(buckets)
group.add_command(search_command)
group.add_command(ghost)
group.add_command(report)
group.add_command(devices)
group.add_command(profiles)
group.add_command(explore)


def main() -> None:
    """Entry point of ``predict``."""
    # A large prediction makes millions of objects and drops few in circles before it ends: at Python's own threshold,
    # looking for circles among them takes a tenth of it.
    gc.set_threshold(_ALLOCATIONS_BETWEEN_COLLECTIONS)
    run_command(cast(click.Command, group), "predict")
