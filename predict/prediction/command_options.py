"""Options that ``predict`` and its commands share: what is predicted, and where it is written. Imports little."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from paradl_bench.core.errors import UserError
from paradl_bench.core.files.storage import encode_pretty
from paradl_bench.core.terminal.command_line import refuse_overwrite, write_output
from paradl_bench.core.terminal.forms import JSON, MARKDOWN, TABLE, check_form, form_of, frame_bytes, table_format
from paradl_bench.core.terminal.help import option_group
from paradl_bench.network.optimizers import OPTIMIZERS
from paradl_bench.plan.options import (
    accumulate_option,
    axis_options,
    batch_norm_option,
    clip_option,
    input_options,
    kernel_options,
    measured_dtype_option,
    memory_options,
)

if TYPE_CHECKING:
    from pandas import DataFrame

    from predict.prediction.prediction import Prediction

fusion_options = option_group(
    "Fusion of gradients",
    click.option(
        "--fusion",
        metavar="none|buffer|ada|mg-wfbp|ddp",
        help="With --evaluator simulate or osf: which gradients share an all-reduce. Default: ddp for simulate, none"
        " for osf. The next two options imply buffer.",
    ),
    click.option(
        "--fusion-buffer",
        metavar="64MiB",
        help="With --fusion buffer: the size of the buffer, as in Horovod. Default: 64 MiB.",
    ),
    click.option(
        "--fusion-timeout",
        metavar="5ms",
        help="With --fusion buffer: how long the buffer waits for a gradient. Default: 5 ms.",
    ),
)
"""Tensor fusion as in Horovod and in OSF's paper."""

layers_option = click.option(
    "--layers",
    metavar="measured|regressed[:NAME]|roofline",
    default="measured",
    show_default=True,
    help="Where the times of layers and weight update come from: measurements where there are any; only regressors of"
    " kernels (NAME: mlp, trees, ...); or only the roofline.",
)


def _take_file(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Where ``--strategy`` names a file, its strategy; what else it says is the default of the other options.

    It is called for ``--ranks`` too, which some files need, and acts on the later of the two.
    """
    given = {**ctx.params, parameter.name: value}
    text = given.get("strategy")
    if ctx.resilient_parsing or not {"strategy", "ranks"} <= given.keys() or not str(text).startswith("@"):
        return value
    from paradl_bench.core.terminal.command_line import say
    from paradl_bench.core.units import parse_ranks
    from paradl_bench.importers.training_programs.program import read_launch

    ranks = parse_ranks(given["ranks"]) if given["ranks"] is not None else ()
    if len(ranks) > 1:
        raise UserError(
            f"--ranks {given['ranks']}: the settings in {text} are for one number of ranks; give one number"
        )
    read = read_launch(Path(str(text)[1:]), *ranks)
    options = read.launch.as_options
    words = " ".join(f"--{name.replace('_', '-')} {word}" for name, word in options.items())
    say(f"predict: {text}, of {read.program.title}: {words}")
    for note in read.notes:
        say(f"predict: {note}")
    ctx.default_map = {**(ctx.default_map or {}), **options}
    taken = {"strategy": options["strategy"], "ranks": None}
    ctx.params.update(taken)
    return taken[str(parameter.name)]


point_options = option_group(
    "What is predicted",
    click.option(
        "--from-profile",
        "profile",
        type=click.Path(path_type=Path),
        help="Profile that calibrate fit wrote, or a name that predict profiles lists.",
    ),
    click.option(
        "--model",
        metavar="M",
        help="A model of the profile, the one that --network describes, a Hugging Face config.json, or a language model"
        " that paradl-bench models lists.",
    ),
    click.option(
        "--sequence",
        metavar="N",
        type=click.IntRange(2),
        help="Tokens in a sample of a language model. Default: as measured, else the model's own.",
    ),
    click.option(
        "--strategy",
        metavar="S[,S...]|@FILE",
        is_eager=True,
        callback=_take_file,
        help="Strategies with degrees (serial, d4), or kinds (data) whose degrees --ranks sets. Or @ and a settings"
        " file of torchtitan, Megatron-LM, DeepSpeed or accelerate; options given here override the file.",
    ),
    click.option(
        "--batch",
        metavar="N[,N...]",
        help="Samples in the global mini-batch. With a shipped profile, predict takes one a rank unless told.",
    ),
    click.option(
        "--ranks",
        metavar="2:1024:x2",
        is_eager=True,
        callback=_take_file,
        help="Numbers of ranks, for strategies given as kinds (data). For a settings file that does not say it: one"
        " number.",
    ),
    click.option(
        "--scaling",
        type=click.Choice(["weak", "strong"]),
        default="weak",
        show_default=True,
        help="weak: --batch is that of the fewest ranks, and grows with them. strong: it stays.",
    ),
    click.option("--network", type=click.Path(path_type=Path), help="network.json that paradl-bench describe wrote."),
    click.option("--dataset-samples", type=click.IntRange(1), metavar="D", help="Samples in an epoch."),
    click.option("--cluster", type=click.Path(path_type=Path), help="Cluster file. Default: the measured cluster."),
    click.option(
        "--device",
        metavar="NAME",
        help="Predict for another GPU, of those that predict devices lists. Compute is scaled by the roofline.",
    ),
    option_group(
        "Method",
        click.option(
            "--evaluator",
            default="simulate",
            show_default=True,
            help="simulate, paradl, osf, csf, dag or flops. predict search takes simulate or flops, predict buckets"
            " simulate or osf, predict timeline and diagnose only simulate.",
        ),
        layers_option,
    ),
    option_group(
        "Training",
        click.option("--optimizer", help=f"{', '.join(OPTIMIZERS)}. Default: the one that was measured."),
        measured_dtype_option,
        click.option(
            "--backend", help="gloo, nccl, ... Default: the one measured; of several, nccl for GPUs and gloo for CPUs."
        ),
        accumulate_option,
        clip_option,
        batch_norm_option,
    ),
    kernel_options,
    memory_options,
    axis_options(
        {
            "ranks_per_node": {
                "help": "Ranks of one node, for --exchange. Default: the ranks of the cluster's innermost level."
            },
            "stages": {
                "metavar": "measured|LAYER[,...]",
                "help": "Where a pipeline is cut: so that measured seconds balance, or before these layers. Default: so"
                " that FLOPs balance.",
            },
        }
    ),
    input_options,
    fusion_options,
    folded=False,
)
"""A profile, a model, and the strategies, rank counts and batches to predict; all optional to the parser."""

why_option = click.option("--why", is_flag=True, help="List all remarks: what was extrapolated, and how.")

output_options = option_group(
    "Output",
    click.option(
        "-o",
        "--output",
        metavar="FILE",
        help="Write to a file; - for standard output.",
    ),
    table_format,
    click.option("--force", is_flag=True, help="Replace an existing output file."),
    folded=False,
)


export_options = option_group(
    "For a program that trains",
    click.option(
        "--export",
        metavar="PROGRAM",
        help="Write the predicted configuration as settings of torchtitan, megatron, deepspeed or accelerate.",
    ),
    click.option(
        "--export-to",
        metavar="FILE",
        help="File for the settings; - for standard output, instead of the table. Default: PROGRAM.args, .json or"
        " .yaml.",
    ),
)


class ExportOptions(msgspec.Struct, frozen=True, kw_only=True):
    """For which program the settings of a prediction are written, and where."""

    export: str | None
    export_to: str | None

    def check(self, *, force: bool) -> None:
        """Refuse, by a UserError before any work is done, an unknown program and a file that may not be replaced."""
        if self.export is None:
            if self.export_to is not None:
                raise UserError("--export-to needs --export PROGRAM, which says for which program")
            return
        from paradl_bench.importers.training_programs.program import program_named

        program = program_named(self.export)
        program.format_of(self.export_to or program.file)
        refuse_overwrite(self.export_to or program.file, force=force)

    @property
    def alone(self) -> bool:
        """Whether standard output is for the settings alone."""
        return self.export_to == "-"

    def write(self, predictions: Sequence[Prediction], *, force: bool) -> None:
        """Write the settings of the one prediction there is, if they were asked for, and say what they leave out.

        Raises:
            UserError: several predictions, or one that the program has no settings for.
        """
        if self.export is None:
            return
        from paradl_bench.core.terminal.command_line import say
        from paradl_bench.importers.training_programs.program import export_launch, program_named

        if len(predictions) > 1:
            raise UserError(
                f"--export takes one configuration, and {len(predictions)} were predicted: give one strategy, one"
                " number of ranks and one batch"
            )
        program = program_named(self.export)
        target = self.export_to or program.file
        told = predictions[0].launch
        predicted = f"{predictions[0].model}, {told.strategy}, batch {told.batch}, as predicted by ParaDL"
        written = export_launch(told, program, target, predicted)
        write_output(target, written.content, force=force)
        for note in written.notes:
            say(f"predict: {note}")
        where = "were printed" if target == "-" else f"are in {target}"
        say(f"predict: settings of {program.title} {where}; to run: {written.start}")


class OutputOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where a command writes what it found, and as what."""

    output: str | None
    form: str
    force: bool

    def check(self) -> None:
        """Refuse, by a UserError before any work is done, what cannot be written, or a file not be replaced."""
        check_form(self.form, self.output)
        if self.output:
            refuse_overwrite(self.output, force=self.force)

    def write(self, result: object, frame: Callable[[], DataFrame] | None = None) -> bool:
        """Write what was asked for; whether a person is to be shown tables beside it.

        Args:
            result: what JSON holds. frame: makes what CSV and Parquet hold; None of a command that has neither.
        """
        of_person = self.form in (TABLE, MARKDOWN)
        if self.output or not of_person:
            form = form_of(self.output, self.form)
            content = encode_pretty(result) if frame is None or form == JSON else frame_bytes(frame(), form)
            write_output(self.output or "-", content, force=self.force)
        return of_person and self.output != "-"


def refuse_missing(options: Mapping[str, Any], *names: str) -> None:
    """Raise a UsageError of the first of these options that is missing."""
    for name in names:
        if options[name] is None:
            context = click.get_current_context()
            parameter = next(candidate for candidate in context.command.params if candidate.name == name)
            raise click.MissingParameter(ctx=context, param=parameter)
