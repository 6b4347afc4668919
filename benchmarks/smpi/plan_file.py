"""A priced plan as the text that the judge reads: what predictions simulate, task by task, for real messages."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from paradl_bench.core.errors import UserError
from paradl_bench.plan.mesh import members_of
from paradl_bench.plan.tasks import Collective, Plan, Role, Sort, Stream, Work
from predict.costs.priced import PricedPlan
from predict.costs.sourced import Floats
from predict.simulation.role_straggler import straggler_tasks

_STREAMS = (Stream.COMPUTE, Stream.COMMUNICATION)
_Group = tuple[tuple[int, ...], str, int]


def plan_text(priced: PricedPlan) -> str:
    """The plan's groups, roles and tasks; seconds of compute alone, since messages take what they take.

    Compute takes what the prediction takes for it, the wait for a slow rank included: what is judged is communication
    and how it lies beside compute.

    Raises:
        UserError: the plan has messages that are no collective, or tasks on other streams.
    """
    plan = priced.plan
    groups = _groups(plan)
    lines = [f"{plan.strategy.ranks} {len(groups)} {len(plan.roles)}"]
    for work in groups.values():
        firsts = (members_of(plan.strategy, work, rank)[0] for rank in range(plan.strategy.ranks))
        lines.append(" ".join(map(str, firsts)))
    lines.append(" ".join(str(plan.role_of(rank)) for rank in range(plan.strategy.ranks)))
    numbers = {key: number for number, key in enumerate(groups)}
    for role, seconds in zip(plan.roles, straggler_tasks(priced), strict=True):
        lines.append(str(role.tasks))
        lines += _tasks(plan, role, seconds, numbers)
    return "\n".join(lines) + "\n"


def _groups(plan: Plan) -> dict[_Group, Collective]:
    found: dict[_Group, Collective] = {}
    for work in plan.works:
        if isinstance(work, Collective):
            found.setdefault(work.group, work)
        elif work.sort is Sort.COMMUNICATION:
            raise UserError(f"{plan.strategy}: its plan has messages between pairs; judged are plans of collectives")
    return found


def _tasks(plan: Plan, role: Role, seconds: Floats, groups: dict[_Group, int]) -> Iterator[str]:
    if not np.isin(role.stream, _STREAMS).all():
        raise UserError(f"{plan.strategy}: its plan reads or copies input; judged are compute and communication")
    for task in range(role.tasks):
        waits = role.dependencies[role.dependency_start[task] : role.dependency_start[task + 1]]
        across = waits[role.stream[waits] != role.stream[task]].tolist()
        what = _what(plan.works[role.work[task]], float(seconds[task]), groups)
        yield " ".join(map(str, (int(role.stream[task]), *what, len(across), *across)))


def _what(work: Work, seconds: float, groups: dict[_Group, int]) -> tuple[str, str, int, int]:
    """Name, seconds, bytes and group of a task; a collective of one rank is nothing."""
    if not isinstance(work, Collective):
        return "compute", f"{seconds:.12e}", 0, 0
    if work.ranks <= 1:
        return "compute", "0", 0, 0
    return work.operation, "0", work.message_bytes, groups[work.group]
