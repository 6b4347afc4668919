"""``predict diagnose``. Imports click alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from predict.prediction.command_options import point_options, refuse_missing

if TYPE_CHECKING:
    from predict.prediction.prediction import Prediction
    from predict.validation.diagnosis.findings import Diagnosis
    from predict.validation.runs import Run


@click.command("diagnose", context_settings={"help_option_names": ["-h", "--help"]})
@point_options
@click.option("--run", type=click.Path(path_type=Path), metavar="RUN_DIR", help="Of paradl-bench train; says the rest.")
@click.option("--memory", metavar="16GiB", help="Of a rank. Default: the cluster's.")
@click.option(
    "--at-least",
    default=0.05,
    show_default=True,
    type=click.FloatRange(0, 1, min_open=True),
    metavar="F",
    help="Share of an iteration from which on a limitation is present.",
)
@click.option("--remedies/--no-remedies", default=True, show_default=True, help="Try settings and strategies.")
@click.option("-o", "--output", metavar="FILE", help="Write JSON to a file; - for standard output.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--force", is_flag=True, help="Replace an output file, and take a run of another environment.")
def diagnose(**options: Any) -> None:
    """Say which limitations and bottlenecks a configuration has, and what would help.

    The rows are those of ParaDL's Table 6. With --run, what was measured takes the place of what is predicted.

    \b
    predict diagnose --from-profile p.json --model resnet50 --strategy d8 --batch 256
    predict diagnose --from-profile p.json --run runs/d2
    """
    from paradl_bench.core.files.storage import encode_pretty
    from paradl_bench.core.terminal.command_line import refuse_overwrite, write_output
    from predict.validation.diagnosis.presentation import print_diagnosis

    refuse_missing(options, "profile", *(() if options["run"] else ("model", "strategy", "batch")))
    output = options["output"]
    if output:
        refuse_overwrite(output, force=options["force"])
    found = _diagnoses(options)
    content = encode_pretty(found)
    if output:
        write_output(output, content, force=options["force"])
    if options["as_json"]:
        if output is None:
            write_output("-", content)
    elif output != "-":
        for diagnosis in found:
            print_diagnosis(diagnosis)


def _diagnoses(options: dict[str, Any]) -> list[Diagnosis]:
    """A diagnosis of every strategy and batch, or of the run."""
    from predict.prediction.prediction import Predictor
    from predict.prediction.request import limit_memory, read_request
    from predict.validation.diagnosis.against_run import held_against
    from predict.validation.diagnosis.diagnosis import Diagnostician
    from predict.validation.diagnosis.of_run import options_of_run, read_run_to_diagnose
    from predict.validation.diagnosis.remedies import with_remedies

    run: Run | None = None
    if options["run"]:
        run = read_run_to_diagnose(options["run"], options["profile"], force=options["force"])
        options = options_of_run(run, options)
    request = read_request(options)
    limit_memory(request.costs, options["memory"])
    doctor = Diagnostician(Predictor(request.costs, request.evaluator), at_least=options["at_least"])
    found = []
    for point in request.points:
        case = doctor.case_of(point)
        diagnosis = doctor.diagnose(case)
        if run is not None:
            diagnosis = held_against(diagnosis, case, run)
        if options["remedies"]:
            diagnosis = with_remedies(diagnosis, doctor, case, {**options, **_of_point(case.prediction)})
        found.append(diagnosis)
    return found


def _of_point(prediction: Prediction) -> dict[str, Any]:
    """One point of several that options ask for."""
    return {"strategy": prediction.strategy, "batch": str(prediction.batch), "ranks": None}
