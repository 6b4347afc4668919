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
    """When every task of one predicted iteration runs. Ranks that do the same appear once, as a role.

    The columns of the frame are:
        role, role_ranks: the name of the role, and how many ranks it stands for.
        stream: compute, communication, ...
        name: the layer or message. phase: FW, BW, GE, WU, or the name of communication for layers.
        start_s, end_s: seconds from the start of the iteration.
        stage, micro_batch, action: the task's place in a pipeline; missing without one.

    Attributes:
        summary: how every role uses its streams.
        command: the command that prints the same.
    """

    def __init__(self, predicted: PredictedTimeline, command: str, profile: str) -> None:
        self._found, self.command, self._profile = predicted, command, profile
        self.summary: TimelineSummary = summarise(predicted.timeline, predicted.prediction, None)

    def to_frame(self) -> DataFrame:
        """The tasks of each role, one in each row, in the order of the plan."""
        return timeline_frame(self._found.timeline)

    @property
    def title(self) -> str:
        """Model, strategy, batch and how long the iteration takes."""
        about = self.summary
        return f"{about.model}, {about.strategy} on batch {about.batch}: {format_seconds(about.iteration_s)}"

    @property
    def notes(self) -> tuple[str, ...]:
        """What was extrapolated, and other notes."""
        return (*(f"extrapolated: {line}" for line in self.summary.extrapolated), *self.summary.notes)

    def write(self, target: str | Path, *, every_rank: bool = False, force: bool = False) -> None:
        """Write the trace, which Perfetto opens.

        Args:
            every_rank: show each rank; otherwise ranks that do the same appear once.

        Raises:
            UserError: the file exists and ``force`` is not given, or the trace has too many tasks for a viewer.
        """
        pieces = trace_pieces(self._found, self.command, self._profile, every_rank=every_rank)
        write_pieces(str(target), pieces, force=force)

    def _figure(self) -> Figure:
        from predict.api.figures import timeline_figure

        return timeline_figure(self._found.timeline, self.title)
