"""Which forward or backward of which micro-batch a pipeline's tasks belong to.

A plan numbers the actions that its tasks belong to; the schedule says which forward or backward each of them is.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paradl_bench.plan.schedules.catalog import schedule_of
from paradl_bench.plan.schedules.schedule import Action
from paradl_bench.plan.tasks import Ints, Phase, Plan, Role


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
    if role.action is None:
        raise ValueError(f"role {role.name!r}: its tasks belong to no schedule")
    # The exchange of gradients runs beside actions and after them.
    of_task = np.where((role.phase == Phase.FW) | (role.phase == Phase.BW), role.action, np.int32(-1))
    found, first = np.unique(of_task[of_task >= 0], return_index=True)
    phases = role.phase[of_task >= 0][first]
    if len(found) != len(actions) or phases.tolist() != [Phase[action.way] for action in actions]:
        raise ValueError(f"role {role.name!r}: its tasks are not those of schedule {schedule!r}")
    return PlacedActions(actions, of_task)
