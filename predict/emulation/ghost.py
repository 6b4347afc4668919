"""What ghost layers sleep, as ``paradl-bench train --emulate`` asks for it: a plan's compute by the cost model.

It is that of a prediction, so that what is predicted of the run holds its communication against the real one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from calibrate.profile.profile import read_profile
from paradl_bench.core.errors import UserError
from paradl_bench.core.files.storage import hash_of_file
from paradl_bench.emulation.table import TableRequest, options_of
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.tasks import Compute, FrameworkOverhead, Plan, Role, WeightUpdate
from paradl_bench.records.slow_rank import SlowRank
from paradl_bench.records.training.ghost_record import GhostPhase, GhostRole, GhostSpread, GhostTable
from paradl_bench.strategies.nesting.catalog import planner_for
from predict.costs.cost_model import CostModel
from predict.costs.sourced import Cost, Remarks, Source
from predict.prediction.request import read_request


def ghost_table(options: Mapping[str, Any]) -> GhostTable:
    """The seconds of every rank of the one point that the options ask for.

    Args:
        options: of the command line, as :func:`~predict.prediction.request.read_request` takes them.

    Raises:
        UserError: whatever of the options or files is wrong, several points, no time for a layer, or no spread where
            it is asked for.
    """
    request = read_request(options)
    if len(request.points) != 1:
        raise UserError(
            f"predict ghost takes one strategy and batch, not {len(request.points)}: give --strategy with its"
            " degrees (d4) and one --batch"
        )
    (point,) = request.points
    model = request.costs
    plan = planner_for(point.strategy).plan(model.network, point.strategy, point.settings)
    return _written(model, plan, point.settings, options["profile"], spread=bool(options.get("spread")))


def make_table(asked: TableRequest) -> GhostTable:
    """The seconds of every rank of a run that is to sleep for those of a profile.

    ``paradl-bench train --emulate PROFILE`` finds this function by its entry point (pyproject.toml).

    Raises:
        UserError: no profile, one that has nothing for a layer, or no spread where it is asked for.
    """
    path, settings = Path(asked.file), asked.settings
    model = CostModel(
        profile=read_profile(path),
        network=asked.network,
        optimizer=settings.optimizer,
        dtype=asked.dtype,
        backend=asked.backend,
    )
    plan = planner_for(asked.strategy).plan(asked.network, asked.strategy, settings)
    return _written(model, plan, settings, path, spread=asked.spread)


def _written(model: CostModel, plan: Plan, settings: PlanSettings, profile: Path, *, spread: bool) -> GhostTable:
    if settings.offload != "none":
        raise UserError(f"sleeping layers have no optimizer state to copy: leave out --offload {settings.offload}")
    table = table_of(model, plan, settings, profile=str(profile), sha256=hash_of_file(profile, what="profile"))
    return with_spread(table, model, plan) if spread else table


def table_of(model: CostModel, plan: Plan, settings: PlanSettings, *, profile: str, sha256: str) -> GhostTable:
    """The seconds of every rank of a plan; ``profile`` and ``sha256`` name the file that the model's costs are of.

    Raises:
        UserError: the profile has no time for a layer, nor anything that tells of one.
    """
    costs = model.compute_costs(plan)
    remarks = Remarks()
    remarks.add(*model.missing_layers)
    remarks.add(*(remark for cost in costs.values() for remark in cost.remarks))
    return GhostTable(
        profile=profile,
        profile_sha256=sha256,
        network_digest=model.network.digest,
        strategy=str(plan.strategy),
        batch=settings.batch,
        options=options_of(settings),
        roles=tuple(_role(plan, role, costs) for role in plan.roles),
        role_of_rank=tuple(plan.role_of(rank) for rank in range(plan.strategy.ranks)),
        sources=_sources(plan, costs),
        extrapolated=remarks.extrapolated(),
    )


def with_spread(table: GhostTable, model: CostModel, plan: Plan) -> GhostTable:
    """The table with what single sleeps are drawn from: the spread that predicts how late the last rank is.

    Raises:
        UserError: the profile holds no iterations, or a single one, so that nothing tells how they spread.
    """
    spread, of_works = model.own_deviations(plan)
    if spread.samples < 2 or not spread.relative_sd:
        raise UserError(
            f"--spread draws from several measured iterations of {model.network.name}, and the profile holds"
            f" none; measure some: paradl-bench layers {model.network.name} --batch {plan.local_batch} -o DIR,"
            " then calibrate fit"
        )
    costs = model.compute_costs(plan)
    roles = [
        _with_deviations(role, plan, of_plan, costs, of_works)
        for role, of_plan in zip(table.roles, plan.roles, strict=True)
    ]
    tied = spread.common_deviation(np.linspace(0.0, 1.0, len(spread.quantiles)))
    drawn = GhostSpread(tied_quantiles=tuple(map(float, tied)), samples=spread.samples)
    return msgspec.structs.replace(table, roles=tuple(roles), spread=drawn)


def _with_deviations(
    role: GhostRole, plan: Plan, of_plan: Role, costs: Mapping[int, Cost], of_works: Mapping[int, float]
) -> GhostRole:
    """A role with how each of its sleeps spreads; a layer's share of the time between operations is an event apart."""
    between = {"FW": (0.0, 0.0), "BW": (0.0, 0.0)}
    for index, overhead in plan.of_kind(FrameworkOverhead, of_plan).items():
        between[overhead.phase] = costs[index].seconds, of_works[index]
    update = [of_works[index] for index in plan.of_kind(WeightUpdate, of_plan)][-1:] or [0.0]
    deviations: dict[str, dict[GhostPhase, float]] = {}
    for index, work in plan.of_kind(Compute, of_plan).items():
        whole_s = role.seconds(work.layer, work.phase)
        parts = ((costs[index].seconds, of_works[index]), between[work.way])
        deviation_s = math.hypot(*(seconds * relative for seconds, relative in parts))
        deviations.setdefault(work.layer, {})[work.phase] = deviation_s / whole_s if whole_s else 0.0
    return msgspec.structs.replace(role, own_relative_sd=deviations, update_own_relative_sd=update[0])


def _role(plan: Plan, role: Role, costs: Mapping[int, Cost]) -> GhostRole:
    layers: dict[str, dict[GhostPhase, float]] = {}
    for index, work in plan.of_kind(Compute, role).items():
        layers.setdefault(work.layer, {})[work.phase] = costs[index].seconds
    overheads = plan.of_kind(FrameworkOverhead, role).items()
    return GhostRole(
        layers=layers,
        between={work.phase: costs[index].seconds for index, work in overheads},
        update_s=_slept(plan, role, costs)["WU"],
    )


def _sources(plan: Plan, costs: Mapping[int, Cost]) -> dict[str, float]:
    """Share of all that ranks sleep by where its seconds come from."""
    seconds_of = dict.fromkeys(Source, 0.0)
    for role in plan.roles:
        for index in role.work.tolist():
            if index in costs:
                seconds_of[costs[index].source] += role.multiplicity * costs[index].seconds
    whole = sum(seconds_of.values())
    return {source.name.lower(): seconds / whole if whole else 0.0 for source, seconds in seconds_of.items()}


def slept_seconds(plan: Plan, costs: Mapping[int, Cost], slow: SlowRank | None = None) -> dict[str, float]:
    """Seconds that the rank which sleeps most, the slow one if any, sleeps in an iteration, by phase (FW, BW, WU)."""
    of_ranks = [_slept(plan, role, costs) for role in plan.roles]
    if slow is not None:
        of_ranks.append({phase: slow.factor * seconds for phase, seconds in of_ranks[slow.role_in(plan)].items()})
    return max(of_ranks, key=lambda phases: sum(phases.values()))


def _slept(plan: Plan, role: Role, costs: Mapping[int, Cost]) -> dict[str, float]:
    phases = {"FW": 0.0, "BW": 0.0, "WU": 0.0}
    for index in role.work.tolist():
        if way := plan.works[index].way:
            phases[way] += costs[index].seconds
    return phases
