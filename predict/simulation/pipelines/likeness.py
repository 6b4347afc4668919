"""Pipelines that are simulated alike: the same tasks at the same costs, wherever their axes stand.

Many orders of a mesh's axes have every group on links of one kind. A search predicts each of them, and simulates one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import msgspec

from paradl_bench.plan.strategy import Strategy
from paradl_bench.plan.tasks import Role, Work
from predict.costs.priced import PricedPlan
from predict.costs.sourced import Costs
from predict.simulation.pipelines.pipeline_simulation import lines_of_stages


def likeness(priced: PricedPlan) -> bytes:
    """A digest of all that decides when tasks of a priced pipeline end, and within which interval."""
    digest = hashlib.blake2b()
    for part in _parts(priced):
        digest.update(part)
    return digest.digest()


def _parts(priced: PricedPlan) -> Iterator[bytes]:
    plan = priced.plan
    told = priced.straggler, priced.slower, priced.slow_copies, sorted(priced.blocking), priced.spread
    yield repr((told, lines_of_stages(plan), plan.micro_batches, [role.multiplicity for role in plan.roles])).encode()
    yield msgspec.msgpack.encode([_told(work, plan.strategy) for work in plan.works])
    for role in plan.roles:
        yield from _of_role(role)
    yield from _of_costs(priced.costs)


def _told(work: Work, strategy: Strategy) -> tuple[object, ...]:
    """All of a work, with its axes by what they are in the place of where they stand."""
    fields = {name: getattr(work, name) for name in work.__struct_fields__}
    if "axes" in fields:
        fields["axes"] = [str(strategy.axes[index]) for index in fields["axes"]]
    return type(work).__name__, fields


def _of_role(role: Role) -> Iterator[bytes]:
    brief = role.arrays.brief
    tasks = brief.tasks
    arrays = tasks.phase, tasks.stream, tasks.work, tasks.dependency_start, tasks.dependencies
    # Lengths part what stands one behind the other.
    for array in (*arrays, brief.action, brief.like, brief.forward, brief.forward_here):
        yield b"%d" % len(array)
        yield array.tobytes()


def _of_costs(costs: Costs) -> Iterator[bytes]:
    arrays = costs.seconds, costs.compute_slowdown, costs.communication_slowdown, costs.independent_sd_s
    for array in (*arrays, costs.measurement, costs.is_communication):
        yield array.tobytes()
    for mode in costs.modes:
        yield mode.name.encode()
        for shift in mode[1:]:
            yield shift.tobytes()
