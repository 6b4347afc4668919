"""``calibrate``: fit a profile, show it, compare two."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from paradl_bench.core.files.storage import encode_pretty
from paradl_bench.core.terminal.command_line import open_console, refuse_overwrite, run_command, say, tell, write_output
from paradl_bench.core.terminal.forms import (
    CSV,
    JSON,
    PARQUET,
    asked_form,
    check_form,
    frame_bytes,
    summary_format,
    table_format,
)
from paradl_bench.core.terminal.help import GroupedGroup

if TYPE_CHECKING:
    from calibrate.profile.profile import Profile

_PATH = click.Path(path_type=Path)
_SHOWN_MOVEMENTS = 25


@click.group(cls=GroupedGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="paradl", prog_name="calibrate")
def group() -> None:
    """Fit measurements to one profile, explain it, compare two. Add --debug to any command for tracebacks."""


@group.command()
@click.argument("directories", metavar="DIR...", nargs=-1, required=True, type=_PATH)
@click.option("-o", "--output", required=True, metavar="PROFILE", help="Where to write the profile; - for stdout.")
@click.option(
    "--memory-runs",
    metavar="RUN_DIR",
    type=_PATH,
    multiple=True,
    help="Fit memory factors to the peaks of this training run, or of all runs in this directory. Repeatable.",
)
@click.option(
    "--force", is_flag=True, help="Merge measurements from different environments, and replace an existing profile."
)
@summary_format("json holds the fits; csv and parquet those of collectives.")
def fit(directories: tuple[Path, ...], output: str, memory_runs: tuple[Path, ...], force: bool, as_json: bool) -> None:
    """Fit measurement directories of paradl-bench layers, collectives and kernels to one profile.

    Directories measured in different environments are refused, training runs always: predictions are checked against
    those. Of --memory-runs nothing is taken but how much memory they held, and a validation leaves their memory out.
    """
    form = asked_form()
    if form in (JSON, CSV, PARQUET) and output == "-":
        raise click.UsageError(f"-o - and --format {form} both write to standard output; give one of them")
    refuse_overwrite(output, force=force)
    from calibrate.fitting.fit import fit_profile

    profile = fit_profile(
        directories,
        command_line=("calibrate", *sys.argv[1:]),
        force=force,
        memory_runs=memory_runs,
        beside=None if output == "-" else Path(output),
    )
    write_output(output, encode_pretty(profile), force=force)
    for note in profile.notes:
        say(f"note: {note}")
    if form in (CSV, PARQUET):
        from calibrate.api import table_of

        write_output("-", frame_bytes(table_of(profile, "communication"), form))
    elif as_json:
        from calibrate.report.show import explanation

        write_output("-", encode_pretty({"profile": output, **explanation(profile)}))
    elif output != "-":
        from calibrate.report.sections.kernel_show import kernel_lines

        for line in kernel_lines(profile.kernel_models):
            say(line)
        collectives = sorted({f"{f.library} {f.operation}" for f in profile.communication})
        held = f"{_layers_in_words(profile)}; {', '.join(collectives) or 'no collectives'}"
        say(f"wrote {output}: {held}; next: calibrate show {output}")


def _layers_in_words(profile: Profile) -> str:
    """How many layer times a profile holds, and of which models."""
    timed = {time.operation for time in profile.layer_times}
    if not timed:
        return "no layer times"
    # Imported layers come without iterations of their model: its network tells whose they are.
    models = {time.model for time in profile.model_times}
    models |= {
        name for name, network in profile.network.items() if timed & {layer.operation for layer in network.layers}
    }
    from paradl_bench.core.units import counted

    count = counted(len(profile.layer_times), "layer time")
    # Operators of a profiler's trace, say, which name no layers that a network could have.
    return (
        f"{count} of {', '.join(sorted(models))}"
        if models
        else f"{count} without a network file, so they predict nothing"
    )


@group.command()
@click.argument("profile", metavar="PROFILE", type=_PATH)
@click.option(
    "-o",
    "--output",
    metavar="DIR",
    type=_PATH,
    help="Draw measured points, fit, interval and residuals of every collective into DIR, as PNG (paradl[plots]).",
)
@click.option("--plot", is_flag=True, help="Draw the same in the terminal, in 80 columns, with or without colour.")
@click.option("--all", "everything", is_flag=True, help="Print all tables. Default: one screen.")
@click.option(
    "--table",
    "name",
    default="communication",
    show_default=True,
    metavar="NAME",
    help="The table of the profile that csv and parquet hold: communication, layer_times, model_times, ...",
)
@table_format
def show(profile: Path, output: Path | None, plot: bool, everything: bool, name: str, form: str) -> None:
    """Explain a profile: where it is from, what it holds, how well the fits hold, and where it is weak."""
    check_form(form)
    if form in (CSV, PARQUET):
        from calibrate.api import CalibratedProfile

        write_output("-", frame_bytes(CalibratedProfile(profile).to_frame(name), form))
        return
    from calibrate.profile.profile import read_profile
    from calibrate.report.overview import print_overview
    from calibrate.report.show import explanation, print_profile

    shown = read_profile(profile)
    if output is not None:
        from calibrate.report.drawing import draw_profile

        for path in draw_profile(shown, output):
            say(f"drew {path}")
    if form == JSON:
        write_output("-", encode_pretty(explanation(shown)))
    else:
        (print_profile if everything else print_overview)(shown, open_console(), profile)
        if plot:
            from calibrate.report.terminal_plot import plots

            for text in plots(shown):
                tell(f"\n{text}", lines=True)


@group.command()
@click.argument("profiles", metavar="PROFILE...", nargs=-1, required=True, type=_PATH)
@click.option("-o", "--output", required=True, metavar="PROFILE", help="Where to write the profile; - for stdout.")
@click.option(
    "--force",
    is_flag=True,
    help="Merge profiles from different environments. Where two profiles hold the same entry, take the first.",
)
def merge(profiles: tuple[Path, ...], output: str, force: bool) -> None:
    """Put partial calibrations together to one profile, which keeps where each number comes from.

    Where the measurement directories are at hand, calibrate fit takes them together and pools what several measured.
    """
    from calibrate.fitting.merging.merge import merge_files

    merged = merge_files(profiles, output, command_line=("calibrate", *sys.argv[1:]), force=force)
    for note in merged.notes:
        say(f"note: {note}")
    if output != "-":
        from paradl_bench.core.units import counted

        held = f"{counted(len(merged.sources), 'measurement')} of {counted(len(profiles), 'profile')}"
        say(f"wrote {output}: {held}")


@group.command()
@click.argument("first", metavar="A", type=_PATH)
@click.argument("second", metavar="B", type=_PATH)
@click.option(
    "--sort",
    "order",
    type=click.Choice(["sd", "relative"]),
    default="sd",
    show_default=True,
    help="Sort by the change in standard deviations, or by the relative change.",
)
@click.option("--exit-code", is_flag=True, help="Exit with code 1 if a number stands out, as diff and git diff do.")
@table_format
def diff(first: Path, second: Path, order: Literal["sd", "relative"], exit_code: bool, form: str) -> None:
    """What moved from profile A to profile B beyond its 90% interval, worst first.

    Of hundreds of numbers some move by chance: a number stands out if it moved farther than that. What differs between
    both environments (day, driver, versions, settings) is said first. Exits with 0 whatever moved, unless --exit-code
    is given; 2 if a profile can't be read.
    """
    from calibrate.profile.profile import read_profile
    from calibrate.report.diff import compare
    from calibrate.report.difference_table import print_difference

    check_form(form)
    difference = compare(read_profile(first), read_profile(second), order=order)
    if form == JSON:
        write_output("-", encode_pretty(difference))
    elif form in (CSV, PARQUET):
        from calibrate.api import ProfileDifference

        write_output("-", frame_bytes(ProfileDifference(difference).to_frame(), form))
    else:
        print_difference(difference, open_console(), shown=_SHOWN_MOVEMENTS)
    if exit_code and difference.stand_out:
        raise SystemExit(1)


@group.command()
@click.argument("name", metavar="FORMAT")
def schema(name: str) -> None:
    """Print the JSON Schema of FORMAT: profile, manifest, or a file of a measurement directory (layers, ...)."""
    from calibrate.profile.schema import schema_of

    write_output("-", encode_pretty(schema_of(name)))


def main() -> None:
    """Entry point of ``calibrate``."""
    run_command(group, "calibrate")
