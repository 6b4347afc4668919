"""What a trace says of a plan's works: name, category, bytes, group, and where their seconds come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from paradl_bench.core.statistics import Z90
from paradl_bench.plan.mesh import members_of
from paradl_bench.plan.tasks import (
    BucketCopy,
    Collective,
    Compute,
    FrameworkOverhead,
    HaloExchange,
    InputCopy,
    InputRead,
    Phase,
    Plan,
    Transfer,
    Wait,
    WeightUpdate,
    Work,
)
from predict.costs.priced import PricedPlan
from predict.costs.sourced import Costs, Floats, Source
from predict.evaluators.simulate import lag_of
from predict.simulation.exposure import names_of_layer_communication

_MEMBERS_NAMED = 8


def task_category(works: Sequence[Work]) -> tuple[tuple[str, ...], ...]:
    """Per work and phase: the phase's name, or what communication for a layer, between stages or of buffers is called.

    The exchange of gradients is GE, whatever it is made of.
    """
    of_layers = names_of_layer_communication(works)
    return tuple(
        tuple(_special(work, name) or phase.name if phase in (Phase.FW, Phase.BW) else phase.name for phase in Phase)
        for work, name in zip(works, of_layers, strict=True)
    )


def _special(work: Work, name: str) -> str:
    if isinstance(work, Transfer):
        return "transfer"
    return name or (work.operation if isinstance(work, Collective) else "")


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
        """Arguments of works as a rank has them: with the ranks that it communicates among."""
        groups: dict[object, bytes] = {}
        found = {}
        for work in works:
            own = self.plan.works[work]
            found[work] = self.arguments[work]
            if isinstance(own, Collective | HaloExchange):
                key = (own.axes, own.reach, own.per_node) if isinstance(own, Collective) else own.axes
                if key not in groups:
                    groups[key] = b',"members":' + msgspec.json.encode(
                        _named(members_of(self.plan.strategy, own, rank))
                    )
                found[work] += groups[key]
        return found


def describe_works(priced: PricedPlan) -> WorkDescriptions:
    """Descriptions of all works of a plan."""
    plan, costs = priced.plan, priced.costs
    lag = lag_of(priced)
    errors = Z90 * _sd_s(costs)
    low, high = np.maximum(costs.seconds - errors, 0.0), costs.seconds + errors
    times = np.column_stack([costs.seconds, low, high]) * lag[:, None] * 1e6
    sources = np.argmax(costs.source, axis=1)
    arguments = []
    for work, (alone_us, low_us, high_us), source in zip(plan.works, times.tolist(), sources.tolist(), strict=True):
        about = _about(work, plan) | {"alone_us": alone_us, "interval_us": (low_us, high_us)}
        arguments.append(msgspec.json.encode(about | {"source": Source(source).name.lower()})[:-1])
    return WorkDescriptions(
        plan=plan,
        names=tuple(map(_name, plan.works)),
        categories=task_category(plan.works),
        arguments=tuple(arguments),
        is_transfer=np.array([isinstance(work, Transfer) for work in plan.works], bool),
    )


def _sd_s(costs: Costs) -> Floats:
    """Standard deviation of one occurrence of each work, its own and what it shares with others."""
    shared = sum((mode.seconds**2 for mode in costs.modes), start=np.zeros(len(costs.seconds)))
    return np.asarray(np.sqrt(costs.independent_sd_s**2 + shared))


def _name(work: Work) -> str:
    if isinstance(work, Compute):
        return f"{work.layer} {work.phase}"
    if isinstance(work, FrameworkOverhead):
        return f"between operations {work.phase}"
    if isinstance(work, WeightUpdate):
        return f"weight update ({work.optimizer})"
    if isinstance(work, BucketCopy):
        return {"into": "copy into bucket", "out": "copy out of bucket", "add": "add gradients up"}[work.direction]
    if isinstance(work, Wait):
        return "wait for a gradient"
    if isinstance(work, InputRead):
        return "read a mini-batch"
    if isinstance(work, InputCopy):
        return "copy a mini-batch to the device"
    if isinstance(work, HaloExchange):
        return "halo exchange"
    if isinstance(work, Transfer):
        return f"{work.direction} {'activations' if work.phase == 'FW' else 'gradients'}"
    return work.operation


def _about(work: Work, plan: Plan) -> dict[str, Any]:
    """What a person asks of a work: its shapes, bytes and group."""
    if isinstance(work, Compute):
        return {"operation": work.operation, **({"shard": work.shard} if work.shard else {})}
    if isinstance(work, WeightUpdate):
        return {"elements": work.elements, "tensors": work.tensors}
    if isinstance(work, BucketCopy):
        return {"bytes": work.bytes, "tensors": work.tensors}
    if isinstance(work, InputRead):
        return {"samples_of_host": work.samples}
    if isinstance(work, InputCopy):
        return {"bytes": work.bytes}
    if isinstance(work, FrameworkOverhead | Wait):
        return {}
    group = {"group": "".join(str(plan.strategy.axes[axis]) for axis in work.axes)}
    if isinstance(work, Collective):
        reach = {} if work.reach == "group" else {"reach": work.reach}
        return {"bytes": work.message_bytes, "ranks": work.ranks, **group, **reach}
    if isinstance(work, HaloExchange):
        return {"bytes": sum(work.sends_bytes), "received_bytes": sum(work.receives_bytes), **group}
    return {"bytes": sum(work.message_bytes), "cut": work.cut, **group}


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) <= _MEMBERS_NAMED:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[: _MEMBERS_NAMED - 1]))}, ... {ranks[-1]}"
