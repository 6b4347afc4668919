"""What a profile's predictions give in Python: tables of points, of strategies, of what-ifs, of runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from paradl_bench.core.frames import Drawn, frame_of
from paradl_bench.core.terminal.keywords import Asked
from paradl_bench.core.units import format_bytes
from predict.api import rows
from predict.ledger.ledger import Ledger
from predict.prediction.prediction import Prediction
from predict.prediction.request import Predicted, predict_request
from predict.search.presentation import uneven_lines
from predict.search.search import Answer
from predict.validation.shown.findings import findings
from predict.validation.shown.report import refuse_existing, write_report
from predict.validation.validation_report import PREDICTOR, Report
from predict.what_if.replacing import Replacings
from predict.what_if.what_if import WhatIfs

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

_PARTS_OF_PATH = 2
"""Of a profile's path in a title: a file's own name is often the same."""
_SHORT = ("strategy", "ranks", "batch", "iteration_s", "interval_low_s", "interval_high_s")


class Predictions(Drawn):
    """Predicted configurations, one in each row (:class:`~predict.api.rows.PredictionRow`).

    Attributes:
        predictions: everything that is known of each configuration.
        sweeps: strategies over rank counts, with their knees.
        left_out: which parts of the request are not possible, and why.
        command: the command that prints the same.
    """

    _columns = (*_SHORT, "samples_per_s", "efficiency", "memory_bytes", "fits", "measured_share")

    def __init__(self, asked: Asked) -> None:
        self._options, self.command = asked.options, asked.command
        predicted: Predicted = predict_request(asked.options)
        self.predictions, self.sweeps, self.left_out = predicted.predictions, predicted.sweeps, predicted.left_out

    def to_frame(self) -> DataFrame:
        """The predictions, one in each row."""
        return frame_of(rows.PredictionRow, map(rows.prediction_row, self.predictions))

    @property
    def title(self) -> str:
        """Model, batch, profile, and the evaluator where it is not the usual one."""
        model, evaluator = self.predictions[0].model, self.predictions[0].evaluator
        batches = sorted({prediction.batch for prediction in self.predictions})
        batch = f"batch {batches[0]}" + (f" to {batches[-1]}" if len(batches) > 1 else "")
        profile = "/".join(Path(self._options["profile"]).parts[-_PARTS_OF_PATH:])
        return f"{model}, {batch}, {profile}" + (f": {evaluator}" if evaluator != "simulate" else "")

    @property
    def notes(self) -> tuple[str, ...]:
        """Knees, what was left out, what was extrapolated, and other notes; each once."""
        return tuple(
            dict.fromkeys(
                (
                    *(f"knee of {sweep}" for sweep in self.sweeps),
                    *(f"left out: {line}" for line in self.left_out),
                    *_said_of(self.predictions),
                )
            )
        )

    def _figure(self) -> Figure:
        from predict.api.figures import parts_figure, ranks_figure

        if not self.sweeps:
            return parts_figure(self.predictions, self.title)
        return ranks_figure(self.predictions, self.title, strong_scaling=self._options["scaling"] == "strong")


class OnePrediction(Predictions):
    """One predicted configuration; its attributes are those of :class:`Predictions`."""

    @property
    def prediction(self) -> Prediction:
        """Everything that is known of the configuration."""
        return self.predictions[0]

    @property
    def iteration_s(self) -> float:
        """Median time of an iteration on the slowest rank, in seconds."""
        return self.prediction.iteration_s

    @property
    def interval_s(self) -> tuple[float, float]:
        """90% interval of the iteration time, in seconds."""
        return self.prediction.time.interval_s

    @property
    def memory_bytes(self) -> int:
        """Peak memory of the rank that needs most, in bytes."""
        return self.prediction.memory.memory_bytes

    def explain(self) -> Explained:
        """What every second of the iteration is made of."""
        return Explained(predict_request(self._options, explain=True).ledgers[0])


class Explained(Drawn):
    """A ledger with one entry in each row (:class:`~predict.api.rows.LedgerRow`).

    The exposed seconds of a role add up to the iteration.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def to_frame(self) -> DataFrame:
        """The entries, one in each row, sorted by exposed seconds."""
        return frame_of(rows.LedgerRow, rows.ledger_rows(self.ledger))

    @property
    def title(self) -> str:
        """What is explained."""
        return f"{self.ledger.model}, {self.ledger.strategy} on batch {self.ledger.batch}: every second"

    def _figure(self) -> Figure:
        from predict.api.figures import waterfall_figure

        return waterfall_figure(self.ledger.waterfall_s, self.title)


class Search(Drawn):
    """Strategies worth running, fastest first (:class:`~predict.api.rows.RankedRow`).

    Attributes:
        answer: everything that the search found.
        command: the command that prints the same.
    """

    _columns = ("place", *_SHORT, "probability_best", "pareto", "options", "memory_bytes", "predict_command")

    def __init__(self, answer: Answer, command: str) -> None:
        self.answer, self.command = answer, command

    def to_frame(self) -> DataFrame:
        """The strategies with their settings, one in each row."""
        return frame_of(rows.RankedRow, map(rows.ranked_row, self.answer.rows))

    @property
    def title(self) -> str:
        """Model, batch and memory."""
        limit = self.answer.memory_bytes_per_rank
        within = "memory not known" if limit is None else f"{format_bytes(limit)} a rank"
        return f"{self.answer.model}, batch {self.answer.batch}, {within}"

    @property
    def notes(self) -> tuple[str, ...]:
        """How much was searched, which replicas the batch ruled out, and what was extrapolated."""
        searched = (
            f"{search.ranks} ranks: {search.candidates:,} candidates, {search.predicted:,} predicted,"
            f" {search.open:,} left open"
            for search in self.answer.searched
        )
        return (*searched, *uneven_lines(self.answer), *_said_of([row.prediction for row in self.answer.rows]))

    def _figure(self) -> Figure:
        from predict.api.figures import search_figure

        return search_figure(self.answer)


class WhatIf(Drawn):
    """Predictions with other hardware, ranks or batch, after their base (:class:`~predict.api.rows.WhatIfRow`).

    Attributes:
        rows: everything that is known of each. left_out: what is not possible, and why.
        command: the command that prints the same.
    """

    _columns = ("varied", *_SHORT, "speedup_over_base", "bound_by", "memory_bytes", "fits")

    def __init__(self, what_ifs: WhatIfs, command: str) -> None:
        self.rows, self.left_out, self.command = what_ifs.rows, what_ifs.left_out, command

    def to_frame(self) -> DataFrame:
        """The predictions, one in each row."""
        return frame_of(rows.WhatIfRow, map(rows.what_if_row, self.rows))

    @property
    def title(self) -> str:
        """Model and evaluator."""
        return f"{self.rows[0].model}: {self.rows[0].evaluator}, what if"

    @property
    def notes(self) -> tuple[str, ...]:
        """What was left out, and notes of predictions."""
        return _of_rows(self.left_out, self.rows)

    def _figure(self) -> Figure:
        from predict.what_if.presentation import what_if_figure

        return what_if_figure(self.rows)


class ReplacedLayers(Drawn):
    """Predictions with the original and the replaced layers, in turn (:class:`~predict.api.rows.ReplacedRow`).

    Attributes:
        rows, left_out, command: those of :class:`WhatIf`.
    """

    _columns = ("replaced", *_SHORT, "speedup_over_base", "scaling_factor", "parameters", "memory_bytes", "fits")

    def __init__(self, replacings: Replacings, command: str, *, strong_scaling: bool) -> None:
        self.rows, self.left_out, self.command = replacings.rows, replacings.left_out, command
        self._strong_scaling = strong_scaling

    def to_frame(self) -> DataFrame:
        """The predictions, one in each row."""
        return frame_of(rows.ReplacedRow, map(rows.replaced_row, self.rows))

    @property
    def title(self) -> str:
        """Model and what replaced its layers."""
        return f"{self.rows[0].model}: what if {' and '.join(self.rows[1].replaced)}"

    @property
    def notes(self) -> tuple[str, ...]:
        """What was left out, and notes of predictions."""
        return _of_rows(self.left_out, self.rows)

    def _figure(self) -> Figure:
        from predict.what_if.replacing_table import replacing_figure

        return replacing_figure(self.rows, strong_scaling=self._strong_scaling)


class Validation(Drawn):
    """Runs beside predictions, one run and evaluator in each row (:class:`~predict.api.rows.PairRow`).

    Attributes:
        report: the whole comparison.
    """

    _columns = ("run", "strategy", "batch", "evaluator", "measured_median_s", "predicted_s", "error", "covered")

    def __init__(self, report: Report) -> None:
        self.report = report

    def to_frame(self) -> DataFrame:
        """One run and evaluator in each row; ``simulate`` is under test, the others are baselines."""
        return frame_of(rows.PairRow, map(rows.pair_row, self.report.pairs))

    @property
    def title(self) -> str:
        """How good the predictions are."""
        overall = self.report.overall.get(PREDICTOR)
        if overall is None:
            return "Predicted against measured"
        return f"Predicted against measured: mean accuracy {overall.score.mean_accuracy:.1%}"

    @property
    def notes(self) -> tuple[str, ...]:
        """What stands out."""
        return tuple(findings(self.report))

    def write(self, directory: str | Path, *, force: bool = False) -> Path:
        """Write report.md, pairs.csv and report.json into a directory; returns the first.

        Raises:
            UserError: one of these files exists, and ``force`` is not given.
        """
        refuse_existing(Path(directory), force=force)
        return write_report(Path(directory), self.report)

    def _figure(self) -> Figure:
        from predict.validation.shown.drawing import bars_figure, bars_of_report

        return bars_figure(bars_of_report(self.report))


def _said_of(predictions: tuple[Prediction, ...] | list[Prediction]) -> tuple[str, ...]:
    provenances = [prediction.provenance for prediction in predictions]
    beyond = (f"extrapolated: {line}" for provenance in provenances for line in provenance.extrapolated)
    return tuple(dict.fromkeys((*beyond, *(line for provenance in provenances for line in provenance.notes))))


def _of_rows(left_out: tuple[str, ...], of: tuple[Any, ...]) -> tuple[str, ...]:
    said = (f"left out: {line}" for line in left_out)
    beyond = (f"extrapolated: {line}" for row in of for line in row.extrapolated)
    return tuple(dict.fromkeys((*said, *beyond, *(note for row in of for note in row.notes))))
