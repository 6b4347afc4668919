"""What ghost layers sleep, as ``paradl-bench train --emulate`` asks for it: a plan's compute by the cost model.

The same cost model as a prediction's, so that sharded shapes, other batches and devices are slept as they would be
predicted; and what is predicted of the run beside it holds its communication against the real one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from paradl_bench.spec.errors import UserError
from paradl_bench.spec.ghost_record import GhostPhase, GhostRole, GhostTable
from paradl_bench.spec.plan import Between, Compute, Plan, Role, WeightUpdate
from paradl_bench.spec.slow_rank import SlowRank
from paradl_bench.strategies.catalog import planner_for
from predict.cost_model import CostModel
from predict.costs import Cost, Remarks, Source
from predict.request import read_request


def ghost_table(options: Mapping[str, Any]) -> GhostTable:
    """The seconds of every rank of the one point that the options ask for.

    Args:
        options: of the command line, as :func:`~predict.request.read_request` takes them.

    Raises:
        UserError: whatever of the options or files is wrong, several points, or no time for a layer.
    """
    request = read_request(options)
    if len(request.points) != 1:
        raise UserError(
            f"ghosts sleep for one strategy and batch, and this asks for {len(request.points)}: give --strategy with"
            " its degrees (d4) and one --batch"
        )
    (point,) = request.points
    model = request.model
    plan = planner_for(point.strategy).plan(model.network, point.strategy, point.settings)
    profile: Path = options["profile"]
    return table_of(model, plan, profile=str(profile), sha256=profile_hash(profile), batch=point.settings.batch)


def profile_hash(path: Path) -> str:
    """SHA-256 of a profile's file.

    Raises:
        UserError: unreadable.
    """
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(f"cannot read profile {path}: {error.strerror or error}") from error


def table_of(model: CostModel, plan: Plan, *, profile: str, sha256: str, batch: int) -> GhostTable:
    """The seconds of every rank of a plan.

    Args:
        profile, sha256: that the model's costs are of.
        batch: global mini-batch.

    Raises:
        UserError: the profile has no time for a layer, nor anything that tells of one.
    """
    costs = model.compute_costs(plan)
    remarks = Remarks()
    remarks.add(*(remark for cost in costs.values() for remark in cost.remarks))
    return GhostTable(
        profile=profile,
        profile_sha256=sha256,
        network_digest=model.network.digest,
        strategy=str(plan.strategy),
        batch=batch,
        roles=tuple(_role(plan, role, costs) for role in plan.roles),
        role_of_rank=tuple(plan.role_of(rank) for rank in range(plan.strategy.ranks)),
        sources=_sources(plan, costs),
        extrapolated=remarks.extrapolated(),
    )


def _role(plan: Plan, role: Role, costs: Mapping[int, Cost]) -> GhostRole:
    layers: dict[str, dict[GhostPhase, float]] = {}
    between: dict[Literal["FW", "BW"], float] = {}
    update_s = 0.0
    for index in dict.fromkeys(role.work.tolist()):
        work = plan.works[index]
        if isinstance(work, Compute):
            layers.setdefault(work.layer, {})[work.phase] = costs[index].seconds
        elif isinstance(work, Between):
            between[work.phase] = costs[index].seconds
        elif isinstance(work, WeightUpdate):
            update_s += costs[index].seconds
    return GhostRole(layers=layers, between=between, update_s=update_s)


def _sources(plan: Plan, costs: Mapping[int, Cost]) -> dict[str, float]:
    """Share of all that ranks sleep by where its seconds come from."""
    found = dict.fromkeys(Source, 0.0)
    for role in plan.roles:
        for index in role.work.tolist():
            if index in costs:
                found[costs[index].source] += role.multiplicity * costs[index].seconds
    whole = sum(found.values())
    return {source.name.lower(): seconds / whole if whole else 0.0 for source, seconds in found.items()}


def slept_seconds(plan: Plan, costs: Mapping[int, Cost], slow: SlowRank | None = None) -> dict[str, float]:
    """Seconds that the rank which sleeps most sleeps in an iteration, by phase (FW, BW, WU).

    Args:
        costs: by index of the plan's works, of what computes.
        slow: a rank that sleeps longer than the others.
    """
    found = [_slept(plan, role, costs) for role in plan.roles]
    if slow is not None:
        own = found[slow.role_in(plan)]
        found.append({phase: slow.factor * seconds for phase, seconds in own.items()})
    return max(found, key=lambda phases: sum(phases.values()))


def _slept(plan: Plan, role: Role, costs: Mapping[int, Cost]) -> dict[str, float]:
    found = {"FW": 0.0, "BW": 0.0, "WU": 0.0}
    for index in role.work.tolist():
        work = plan.works[index]
        if isinstance(work, Compute):
            found[work.way] += costs[index].seconds
        elif isinstance(work, Between):
            found[work.phase] += costs[index].seconds
        elif isinstance(work, WeightUpdate):
            found["WU"] += costs[index].seconds
    return found
