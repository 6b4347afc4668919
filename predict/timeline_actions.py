"""Which forward or backward of which micro-batch a pipeline's tasks belong to.

A plan holds tasks alone; the schedule holds the actions that they were made of, in the same order. What a rank receives
opens an action, what it sends to another stage closes one, and so does a turn from forward to backward.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paradl_bench.schedules.catalog import schedule_of
from paradl_bench.schedules.schedule import Action
from paradl_bench.spec.plan import Ints, Phase, Plan, Role, Transfer


class PlacedActions(NamedTuple):
    """Actions of a rank in order, and per task the index of its action; -1 where it belongs to none."""

    actions: tuple[Action, ...]
    of_task: Ints


def place_actions(plan: Plan, role: Role, rank: int, ranks: int, schedule: str) -> PlacedActions:
    """The actions of a rank of a pipeline, on the tasks of its role.

    Args:
        rank, ranks: place along the pipeline's axis, and how many there are.

    Raises:
        ValueError: the tasks are not those of the schedule.
    """
    actions = schedule_of(schedule).order(rank, ranks, plan.micro_batches)
    direction = np.array([_direction(work) for work in plan.works])
    passing = np.flatnonzero((role.phase == Phase.FW) | (role.phase == Phase.BW))
    crosses, phase = direction[role.work[passing]], role.phase[passing]
    opens = crosses < 0
    opens[1:] |= (crosses[:-1] > 0) | (phase[1:] != phase[:-1])
    opens[:1] = True
    expected = [Phase[action.direction] for action in actions]
    if phase[opens].tolist() != expected:
        raise ValueError(f"role {role.name!r}: its tasks are not those of schedule {schedule!r}")
    of_task = np.full(role.tasks, -1, np.int32)
    of_task[passing] = np.cumsum(opens) - 1
    return PlacedActions(actions, of_task)


def _direction(work: object) -> int:
    if not isinstance(work, Transfer):
        return 0
    return 1 if work.direction == "send" else -1
