"""``predict diagnose``. Imports click alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paradl_bench.core.terminal.forms import table_format
from paradl_bench.core.terminal.help import GroupedCommand, option_group
from predict.prediction.command_options import OutputOptions, point_options, refuse_missing, why_option

if TYPE_CHECKING:
    from predict.prediction.prediction import Prediction
    from predict.validation.diagnosis.diagnosis import Case, Diagnostician
    from predict.validation.diagnosis.findings import Diagnosis

_BESIDE_A_RUN = (
    "profile",
    "cluster",
    "layers",
    "run",
    "memory",
    "at_least",
    "remedies",
    "why",
    "output",
    "form",
    "as_json",
    "as_csv",
    "force",
)
"""Options that go with --run: the run says the rest."""


@click.command("diagnose", cls=GroupedCommand, context_settings={"help_option_names": ["-h", "--help"]})
@point_options
@option_group(
    "Diagnosis",
    click.option(
        "--run",
        type=click.Path(path_type=Path),
        metavar="RUN_DIR",
        help="Directory that paradl-bench train wrote: it says the model, strategy and batch.",
    ),
    click.option("--memory", metavar="16GiB", help="Memory of one rank. Default: the cluster's."),
    click.option(
        "--at-least",
        default=0.05,
        show_default=True,
        type=click.FloatRange(0, 1, min_open=True),
        metavar="F",
        help="A limitation is reported as present if it takes at least this share of an iteration.",
    ),
    click.option(
        "--remedies/--no-remedies",
        default=True,
        show_default=True,
        help="Try other settings and strategies as remedies.",
    ),
    why_option,
    folded=False,
)
@option_group(
    "Output",
    click.option("-o", "--output", metavar="FILE", help="Write to a file; - for standard output."),
    table_format,
    click.option(
        "--force", is_flag=True, help="Replace an existing output file, and accept a run from another environment."
    ),
    folded=False,
)
@click.pass_context
def diagnose(ctx: click.Context, /, **options: Any) -> None:
    """Say which limitations and bottlenecks a configuration has, and what would help.

    The rows are those of ParaDL's Table 6. With --run, what was measured takes the place of what is predicted.

    \b
    predict diagnose --from-profile p.json --model resnet50 --strategy d8 --batch 256
    predict diagnose --from-profile p.json --run runs/d2
    """
    from paradl_bench.core.frames import frame_of
    from predict.validation.diagnosis.finding_rows import FindingRow, finding_rows
    from predict.validation.diagnosis.presentation import print_diagnosis

    refuse_missing(options, "profile", *(() if options["run"] else ("model", "strategy", "batch")))
    _refuse_unused(ctx, options)
    written = OutputOptions(output=options["output"], form=options["form"], force=options["force"])
    written.check()
    diagnoses = _of_run(options) if options["run"] else _of_points(options)
    if written.write(diagnoses, lambda: frame_of(FindingRow, finding_rows(diagnoses))):
        for diagnosis in diagnoses:
            print_diagnosis(diagnosis, why=options["why"])


def _refuse_unused(ctx: click.Context, options: dict[str, Any]) -> None:
    """Refuse, by a UserError, what a diagnosis has no use for; of a run, what the run says itself."""
    from paradl_bench.core.errors import UserError

    if options["evaluator"] != "simulate":
        raise UserError(
            f"--evaluator {options['evaluator']}: predict diagnose uses --evaluator simulate; leave --evaluator out"
        )
    if options["dataset_samples"] is not None:
        raise UserError("--dataset-samples: predict diagnose looks at iterations, not at epochs: leave it out")
    if options["run"] is None:
        return
    for parameter in ctx.command.params:
        name = str(parameter.name)
        if name not in _BESIDE_A_RUN and ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise UserError(f"{parameter.opts[0]} is known from the run of --run; leave it out")


def _of_run(options: dict[str, Any]) -> list[Diagnosis]:
    """The diagnosis of a run."""
    import msgspec

    from paradl_bench.core.errors import UserError
    from predict.prediction.prediction import Predictor
    from predict.prediction.request import limit_memory
    from predict.validation.diagnosis.against_run import held_against
    from predict.validation.diagnosis.diagnosis import Diagnostician
    from predict.validation.diagnosis.of_run import options_of_run, read_run_to_diagnose
    from predict.workload import evaluator_named

    run, costs, point, notes = read_run_to_diagnose(options["run"], options)
    limit_memory(costs, options["memory"])
    diagnostician = Diagnostician(Predictor(costs, evaluator_named(options["evaluator"])), options["at_least"])
    case = diagnostician.case_of(point)
    diagnosis = held_against(diagnostician.diagnose(case), case, run)
    try:
        if options["remedies"]:
            asked = options_of_run(run, options, knows_input=bool(costs.profile.input_side))
            diagnosis = _tried(diagnosis, diagnostician, case, asked)
    except UserError as error:
        notes = (*notes, f"no remedies were tried: {error}")
    return [msgspec.structs.replace(diagnosis, said=(*diagnosis.said, *notes))]


def _of_points(options: dict[str, Any]) -> list[Diagnosis]:
    """A diagnosis of every strategy and batch that is possible."""
    from paradl_bench.core.errors import UserError
    from paradl_bench.core.terminal.command_line import say
    from predict.prediction.points import left_out_lines
    from predict.prediction.prediction import Predictor
    from predict.prediction.request import limit_memory, read_request
    from predict.validation.diagnosis.diagnosis import Diagnostician

    request = read_request(options)
    limit_memory(request.costs, options["memory"])
    diagnostician = Diagnostician(Predictor(request.costs, request.evaluator), options["at_least"])
    diagnoses: list[Diagnosis] = []
    refused = []
    for point in request.points:
        try:
            case = diagnostician.case_of(point)
        except UserError as error:
            refused.append((point.strategy, error))
            continue
        diagnosis = diagnostician.diagnose(case)
        if options["remedies"]:
            diagnosis = _tried(diagnosis, diagnostician, case, {**options, **_of_point(case.prediction)})
        diagnoses.append(diagnosis)
    if not diagnoses:
        raise refused[0][1]
    for line in dict.fromkeys((*request.left_out, *left_out_lines(refused))):
        say(f"predict: left out: {line}")
    return diagnoses


def _tried(diagnosis: Diagnosis, diagnostician: Diagnostician, case: Case, options: dict[str, Any]) -> Diagnosis:
    """The diagnosis with remedies; a bar counts what is predicted for them."""
    from paradl_bench.core.terminal.command_line import progress
    from predict.validation.diagnosis.remedies import most_tries, with_remedies

    with progress("remedies predicted", most_tries(case)) as bar:
        return with_remedies(diagnosis, diagnostician, case, options, bar.advance)


def _of_point(prediction: Prediction) -> dict[str, Any]:
    """One point of several that options ask for."""
    return {"strategy": prediction.strategy, "batch": str(prediction.batch), "ranks": None}
