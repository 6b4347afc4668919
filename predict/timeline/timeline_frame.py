"""One predicted iteration as a DataFrame: a row a task of each role."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paradl_bench.plan.tasks import Stream
from predict.simulation.simulator import BLOCKING
from predict.timeline.timeline import IterationTimeline, RoleTimeline
from predict.timeline.trace_works import WorkDescriptions, describe_works

if TYPE_CHECKING:
    from pandas import DataFrame

_DTYPES = {
    "role": "string", "role_ranks": "int64", "stream": "string", "name": "string", "phase": "string",
    "start_s": "float64", "end_s": "float64", "stage": "Int64", "micro_batch": "Int64", "action": "string",
}  # fmt: skip
_Placed = tuple[int | None, int | None, str | None]
_STREAMS = {**{stream.value: stream.name.lower() for stream in Stream}, BLOCKING: "blocking communication"}


def timeline_frame(timeline: IterationTimeline) -> DataFrame:
    """One task of a role in each row, in the order of the plan; columns are always the same."""
    from pandas import DataFrame, concat

    described = describe_works(timeline.priced)
    return concat([DataFrame(_columns(role, described)).astype(_DTYPES) for role in timeline.roles], ignore_index=True)


def _columns(role: RoleTimeline, described: WorkDescriptions) -> dict[str, object]:
    """Of one role, as long as it has tasks."""
    tasks = role.of_plan
    names, categories = np.array(described.names, object), np.array(described.categories, object)
    streams = [_STREAMS[number] for number in role.threads.tolist()]
    placed: list[_Placed] = [(None, None, None)] * tasks.tasks
    if role.actions is not None:
        # The last stands for tasks of no action, whose index is -1.
        known: list[_Placed] = [(action.stage, action.micro_batch, action.direction) for action in role.actions.actions]
        known.append((None, None, None))
        placed = [known[index] for index in role.actions.of_task.tolist()]
    return {
        "role": [role.name] * tasks.tasks,
        "role_ranks": role.ranks,
        "stream": streams,
        "name": names[tasks.work],
        "phase": categories[tasks.work, tasks.phase],
        "start_s": role.start_s,
        "end_s": role.end_s,
        **{
            name: [of_task[place] for of_task in placed]
            for place, name in enumerate(("stage", "micro_batch", "action"))
        },
    }
