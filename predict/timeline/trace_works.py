"""What a trace says of a plan's works: name, category, bytes, group, and where their seconds come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from paradl_bench.core.statistics import Z90
from paradl_bench.plan.mesh import members_of
from paradl_bench.plan.tasks import Communication, Phase, Plan, Transfer, Work
from predict.costs.priced import PricedPlan
from predict.costs.sourced import Source
from predict.ledger.ledger import details_of
from predict.simulation.role_straggler import straggler_of

_MEMBERS_NAMED = 8


def task_category(works: Sequence[Work]) -> tuple[tuple[str, ...], ...]:
    """Per work and phase: the phase's name, or what communication for a layer, between stages or of buffers is called.

    The exchange of gradients is GE, whatever it is made of.
    """
    return tuple(
        tuple((work.category if phase in (Phase.FW, Phase.BW) else "") or phase.name for phase in Phase)
        for work in works
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkDescriptions:
    """What is said of each work.

    Attributes:
        arguments: per work, the beginning of a JSON object, without its closing brace.
        is_transfer: per work, whether it is sent or received between stages.
    """

    plan: Plan
    names: tuple[str, ...]
    categories: tuple[tuple[str, ...], ...]
    arguments: tuple[bytes, ...]
    is_transfer: NDArray[np.bool_]

    def named(self, work: int, phase: int) -> tuple[str, str]:
        """Name and category of a task."""
        return self.names[work], self.categories[work][phase]

    def arguments_at(self, rank: int, works: Sequence[int]) -> dict[int, bytes]:
        """Arguments of works on a rank: with the ranks that it communicates among."""
        groups: dict[object, bytes] = {}
        arguments = {}
        for index in works:
            work = self.plan.works[index]
            arguments[index] = self.arguments[index]
            if isinstance(work, Communication) and work.meets:
                if work.group not in groups:
                    members = _named(members_of(self.plan.strategy, work, rank))
                    groups[work.group] = b',"members":' + msgspec.json.encode(members)
                arguments[index] += groups[work.group]
        return arguments


def describe_works(priced: PricedPlan) -> WorkDescriptions:
    """Descriptions of all works of a plan."""
    plan, costs = priced.plan, priced.costs
    straggler = straggler_of(priced)
    errors = Z90 * costs.sd_s
    low, high = np.maximum(costs.seconds - errors, 0.0), costs.seconds + errors
    times = np.column_stack([costs.seconds, low, high]) * straggler[:, None] * 1e6
    sources = np.argmax(costs.source, axis=1)
    arguments = []
    for work, (alone_us, low_us, high_us), source in zip(plan.works, times.tolist(), sources.tolist(), strict=True):
        about = details_of(work, plan.strategy) | {"alone_us": alone_us, "interval_us": (low_us, high_us)}
        arguments.append(msgspec.json.encode(about | {"source": Source(source).name.lower()})[:-1])
    return WorkDescriptions(
        plan=plan,
        names=tuple(work.label for work in plan.works),
        categories=task_category(plan.works),
        arguments=tuple(arguments),
        is_transfer=np.isin(np.arange(len(plan.works)), list(plan.of_kind(Transfer))),
    )


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) <= _MEMBERS_NAMED:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[: _MEMBERS_NAMED - 1]))}, ... {ranks[-1]}"
