"""What ``predict timeline`` prints beside the trace: how every role uses its streams, and a picture."""

from __future__ import annotations

import msgspec

from paradl_bench.core.terminal.command_line import open_console
from paradl_bench.core.terminal.tables import table
from paradl_bench.core.units import format_seconds
from predict.prediction.confidence import confidence_in
from predict.prediction.prediction import Prediction
from predict.timeline.timeline import IterationTimeline
from predict.timeline.timeline_picture import draw
from predict.timeline.timeline_use import Use


class RoleUse(Use, frozen=True, kw_only=True):
    """How each of the ranks of a role spends the iteration; ``finish_s`` is when its last task ends."""

    role: str
    ranks: int
    finish_s: float


class TimelineSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A predicted iteration in numbers; seconds.

    Attributes:
        tasks: of all roles, each role counted once.
        utilisation, bubble: means over all ranks.
        trace: the file that was written, or null.
    """

    model: str
    strategy: str
    ranks: int
    batch: int
    options: dict[str, str]
    iteration_s: float
    interval_s: tuple[float, float]
    tasks: int
    utilisation: float
    bubble: float
    roles: tuple[RoleUse, ...]
    trace: str | None
    extrapolated: tuple[str, ...]
    notes: tuple[str, ...]


def summarise(timeline: IterationTimeline, prediction: Prediction, trace: str | None) -> TimelineSummary:
    """The numbers of a timeline."""
    roles = tuple(
        RoleUse(
            role=role.name,
            ranks=role.ranks,
            finish_s=role.finish_s,
            **msgspec.structs.asdict(role.use(timeline.iteration_s)),
        )
        for role in timeline.roles
    )
    shared = ("model", "strategy", "ranks", "batch", "options")
    return TimelineSummary(
        **{field: getattr(prediction, field) for field in shared},
        iteration_s=timeline.iteration_s,
        interval_s=prediction.time.interval_s,
        tasks=sum(role.of_plan.tasks for role in timeline.roles),
        utilisation=sum(role.utilisation * role.ranks for role in roles) / prediction.ranks,
        bubble=sum(role.bubble * role.ranks for role in roles) / prediction.ranks,
        roles=roles,
        trace=trace,
        extrapolated=prediction.provenance.extrapolated,
        notes=prediction.provenance.notes,
    )


def print_summary(
    timeline: IterationTimeline, prediction: Prediction, summary: TimelineSummary, *, why: bool = False
) -> None:
    """A table and a picture on standard output, then how far they can be trusted.

    Args:
        why: list what was extrapolated, and all else that has to be said.
    """
    title = f"{summary.model}, {summary.strategy} on batch {summary.batch}: {format_seconds(summary.iteration_s)}"
    idle = "bubble" if timeline.is_pipeline else "idle"
    rows = []
    for role in summary.roles:
        times = (role.exposed_communication_s, role.overlap_s)
        cells = (format_seconds(role.finish_s), f"{role.utilisation:.1%}", *map(format_seconds, times))
        rows.append((role.role, str(role.ranks), *cells, f"{role.bubble:.1%}"))
    if len(summary.roles) > 1:
        mean = f"{summary.utilisation:.1%}", "", "", f"{summary.bubble:.1%}"
        rows.append(("mean", str(summary.ranks), "", *mean))
    console = open_console()
    columns = ("role", "ranks", "ends", "utilisation", "exposed", "overlap", idle)
    console.print(table(columns, rows, title=title))
    picture = draw(timeline, console.width)
    for line in (*picture.rows, picture.legend):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(
        "\nutilisation: share of the iteration in which compute is active. exposed: communication without"
        f" compute; overlap: communication beside compute. {idle}: neither.",
        highlight=False,
    )
    for line in confidence_in([(summary.strategy, prediction.provenance)]).lines(why=why):
        console.print(line, highlight=False)
