"""One predicted iteration in Python, task by task."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paradl_bench.core.frames import Drawn
from paradl_bench.core.terminal.command_line import write_pieces
from paradl_bench.core.units import format_seconds
from predict.timeline.timeline_frame import timeline_frame
from predict.timeline.timeline_report import TimelineSummary, summarise
from predict.timeline.timeline_run import PredictedTimeline, trace_pieces

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


class Timeline(Drawn):
    """When every task of one predicted iteration runs, ranks that do the same once.

    The columns of the frame are:
        role, role_ranks: what ranks do the same, and how many they are.
        stream: compute, communication, ...
        name: of the layer or message. phase: FW, BW, GE, WU, or what communication for layers is called.
        start_s, end_s: seconds from the start of the iteration.
        stage, micro_batch, action: of a pipeline; missing elsewhere.

    Attributes:
        summary: how every role uses its streams.
        command: that prints the same.
    """

    def __init__(self, predicted: PredictedTimeline, command: str, profile: str) -> None:
        self._found, self.command, self._profile = predicted, command, profile
        self.summary: TimelineSummary = summarise(predicted.timeline, predicted.prediction, None)

    def to_frame(self) -> DataFrame:
        """A row a task of each role, in the order in which the plan has them."""
        return timeline_frame(self._found.timeline)

    @property
    def title(self) -> str:
        """Model, strategy, batch and how long the iteration takes."""
        about = self.summary
        return f"{about.model}, {about.strategy} on batch {about.batch}: {format_seconds(about.iteration_s)}"

    @property
    def notes(self) -> tuple[str, ...]:
        """What lies beyond measurement, and other notes."""
        return (*(f"extrapolated: {line}" for line in self.summary.extrapolated), *self.summary.notes)

    def write(self, target: str | Path, *, every_rank: bool = False, force: bool = False) -> None:
        """Write the trace, which Perfetto opens.

        Args:
            every_rank: each rank by itself; else ranks that do the same once.

        Raises:
            UserError: the file is there, and ``force`` is not given; or there are too many tasks to open.
        """
        pieces = trace_pieces(self._found, self.command, self._profile, every_rank=every_rank)
        write_pieces(str(target), pieces, force=force)

    def _figure(self) -> Figure:
        from predict.api.figures import timeline_figure

        return timeline_figure(self._found.timeline, self.title)
