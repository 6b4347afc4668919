"""From the options of ``predict timeline`` to its trace, its summary and its picture."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from paradl_bench.core.errors import UserError
from paradl_bench.core.files.storage import encode_pretty
from paradl_bench.core.terminal.command_line import write_output, write_pieces
from paradl_bench.core.terminal.forms import CSV, JSON, MARKDOWN, PARQUET, TABLE, frame_bytes
from paradl_bench.strategies.pipeline.axis import PipelineOptions
from predict.costs.cost_model import CostModel
from predict.evaluators import simulate
from predict.prediction.prediction import Prediction, Predictor
from predict.prediction.request import read_request
from predict.simulation import prepared
from predict.timeline.timeline import IterationTimeline, timeline_of
from predict.timeline.timeline_frame import timeline_frame
from predict.timeline.timeline_report import print_summary, summarise
from predict.timeline.trace_events import trace_json
from predict.workload import Configuration, PreparedEvaluation


class PredictedTimeline(NamedTuple):
    """One configuration: every task's times, and the prediction that they are the inside of."""

    timeline: IterationTimeline
    prediction: Prediction


def predict_timeline(
    model: CostModel, point: Configuration, *, dataset_samples: int | None = None, strong_scaling: bool = False
) -> PredictedTimeline:
    """Plan and price a point once; predict it and simulate its tasks.

    Args:
        dataset_samples, strong_scaling: as of :class:`~predict.prediction.prediction.Predictor`.

    Raises:
        UserError: the strategy has no plan, a limit is exceeded, or the profile lacks a part.
    """
    priced = prepared.price(model, point)
    workload = prepared.workload_of(model, point, priced)

    def prepare(of: CostModel, other: Configuration) -> PreparedEvaluation:
        return workload if other is point else prepared.prepare(of, other)

    evaluator = dataclasses.replace(simulate.EVALUATOR, prepare=prepare)
    predictor = Predictor(model, evaluator, dataset_samples=dataset_samples, strong_scaling=strong_scaling)
    schedule = point.settings.of(PipelineOptions).schedule
    return PredictedTimeline(timeline_of(priced, schedule, model.slow_rank), predictor.predict(point))


def read_timeline(options: Mapping[str, Any]) -> PredictedTimeline:
    """The timeline that the options ask for.

    Raises:
        UserError: whatever of the options, files or limits is wrong, in one line.
    """
    if options["evaluator"] != simulate.EVALUATOR.name:
        raise UserError(f"a timeline needs --evaluator simulate; {options['evaluator']} has no tasks to show")
    request = read_request(options)
    if len(request.points) != 1:
        asked = ", ".join(f"{point.strategy} on batch {point.settings.batch}" for point in request.points[:3])
        more = ", ..." if len(request.points) > 3 else ""
        raise UserError(f"a timeline shows one strategy and batch, not {len(request.points)} ({asked}{more})")
    return predict_timeline(
        request.costs,
        request.points[0],
        dataset_samples=options["dataset_samples"],
        strong_scaling=options["scaling"] == "strong",
    )


def trace_pieces(
    predicted: PredictedTimeline, command: str, profile: str, *, every_rank: bool = False
) -> Iterator[bytes]:
    """The trace of a timeline, with the command that made it and the profile's file; as :func:`trace_json`."""
    other = {
        "command": command,
        "profile": profile,
        "model": predicted.prediction.model,
        "strategy": predicted.prediction.strategy,
        "prediction": predicted.prediction.record(),
    }
    return trace_json(predicted.timeline, other, every_rank=every_rank)


def show_timeline(options: Mapping[str, Any]) -> None:
    """Write the trace where the options say, and print the summary.

    Raises:
        UserError: whatever of the options, files or limits is wrong, in one line.
    """
    output = options["output"]
    form = options["form"]
    if form not in (TABLE, MARKDOWN) and output == "-":
        raise UserError(f"--format {form} and -o - both write to standard output: give one of them, or a file to -o")
    if options["ranks_shown"] == "all" and not output:
        raise UserError("--ranks-shown all is for the trace: name its file by -o FILE")
    predicted = read_timeline(options)
    if output:
        command = shlex.join(["predict", *sys.argv[1:]])
        every_rank = options["ranks_shown"] == "all"
        pieces = trace_pieces(predicted, command, str(options["profile"]), every_rank=every_rank)
        write_pieces(output, pieces, force=options["force"])
    summary = summarise(predicted.timeline, predicted.prediction, output if output != "-" else None)
    if form in (CSV, PARQUET):
        write_output("-", frame_bytes(timeline_frame(predicted.timeline), form))
    elif form == JSON:
        write_output("-", encode_pretty(summary))
    elif output != "-":
        print_summary(predicted.timeline, predicted.prediction, summary, why=options["why"])
