"""``predict validate-layers``. Imports click alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from paradl_bench.core.terminal.forms import table_format
from paradl_bench.core.terminal.help import GroupedCommand
from paradl_bench.plan.options import measured_dtype_option
from predict.prediction.command_options import OutputOptions, refuse_missing


@click.command("validate-layers", cls=GroupedCommand, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--from-profile", "profile", type=click.Path(path_type=Path), help="Profile that calibrate fit wrote.")
@click.option("--model", metavar="M", help="A model whose layers the profile holds.")
@click.option(
    "--layers",
    metavar="regressed[:NAME]|roofline",
    default="regressed",
    show_default=True,
    help="What to compare with measured layers: regressors of kernels (NAME: mlp, trees, ...), or the roofline.",
)
@click.option("--batch", type=click.IntRange(1), metavar="N", help="Local batch. Default: the largest measured one.")
@measured_dtype_option
@click.option("--optimizer", help="sgd or adam. Default: the one that was measured.")
@click.option("--depth", default=2, show_default=True, type=click.IntRange(1), help="The most names in one block.")
@click.option("--plot", metavar="FILE", help="Draw box plots of the errors into a .png, .svg or .html.")
@click.option("-o", "--output", metavar="FILE", help="Write to a file; - for standard output.")
@table_format
@click.option("--force", is_flag=True, help="Replace existing output files.")
def validate_layers_command(**options: Any) -> None:
    """Hold regressed layers against measured ones: errors by layer, stage and block, and of the network.

    Nothing is estimated from measured layers. Layers of shapes that regressors were fitted on are counted apart.

    \b
    predict validate-layers --from-profile p.json --model vgg11
    predict validate-layers --from-profile p.json --model vgg11 --layers regressed:mlp --plot errors.png
    """
    refuse_missing(options, "profile", "model")
    from calibrate.profile.profile import read_profile
    from paradl_bench.core.frames import frame_of
    from paradl_bench.core.terminal.command_line import refuse_overwrite
    from paradl_bench.core.terminal.pictures import refuse_undrawable
    from predict.costs.compute.layer_source import parse_layers
    from predict.costs.files import choose_network
    from predict.prediction.request import measured_choices
    from predict.validation.layers.comparison import Compared, LayerError, validate_layers
    from predict.validation.layers.drawing import draw_layers
    from predict.validation.layers.presentation import print_layers

    written = OutputOptions(output=options["output"], form=options["form"], force=options["force"])
    written.check()
    plot: str | None = options["plot"]
    if plot:
        refuse_undrawable(plot, written.output)
        refuse_overwrite(plot, force=written.force)
    layers_from = parse_layers(options["layers"])
    profile = read_profile(options["profile"])
    network = choose_network(profile, options["model"], None, options["profile"])
    compared = Compared(profile, network, *measured_choices(profile, network, options))
    validation = validate_layers(
        compared,
        layers_from,
        batch=options["batch"],
        depth=options["depth"],
        profile_path=str(options["profile"]),
    )
    if plot:
        draw_layers(validation, plot, force=written.force)
    if written.write(validation, lambda: frame_of(LayerError, validation.layers)):
        print_layers(validation)
