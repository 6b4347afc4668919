"""Activity error: when every rank was predicted to begin and end each unit of its work, against when it did.

A unit is forward or backward of a micro-batch on a stage of a pipeline (or of all the samples, where there are no
stages), what is left of the gradient exchange after the last backward, and the weight update. Begin and end are seconds
from the start of the iteration; errors are relative to the measured iteration (DistSim, section 5.3, figure 9, of
computation events).

Where stamps of all ranks lie on one clock, an iteration starts when the ranks start that are predicted to end last, in
the mean: the others were done with the one before earlier, or later. Else (GPUs, hosts whose clocks were not compared)
it starts on each rank by itself, and is predicted to start as much earlier as that rank ends before the last one.
Times are medians over iterations.

Without a pipeline forward and backward follow each other without a gap, as they are stamped: what a rank waits for is
part of them. A stage's units begin and end with its own compute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from paradl_bench.core.errors import UserError
from paradl_bench.plan.schedules.catalog import schedule_of
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Phase, Stream
from paradl_bench.records.hosts.host_clocks import HostClocks
from paradl_bench.records.hosts.host_record import read_host_records
from paradl_bench.records.measurement import read_records
from paradl_bench.records.training.training_record import TRAINING_FILE, TrainingIterations, without_timed_calls
from paradl_bench.strategies.pipeline.axis import PipelineOptions
from predict.costs.cost_model import CostModel
from predict.costs.sourced import Floats
from predict.simulation.phases import phase_ends
from predict.simulation.prepared import price
from predict.timeline.timeline import IterationTimeline, RoleTimeline, timeline_of
from predict.validation.runs import Run
from predict.workload import Configuration


class RankActivity(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's units of work; errors are relative to the measured iteration.

    Attributes:
        units: how many.
        mean_error: of begins and ends, without their sign. worst_error: the largest. worst_unit: whose it is, as FW3.
        by_unit: each unit's mean of begin and end, in the order of the units (DistSim, section 5.4, figure 10).
    """

    rank: int
    units: int
    mean_error: float
    worst_error: float
    worst_unit: str
    by_unit: dict[str, float] = {}


class Activity(msgspec.Struct, frozen=True, kw_only=True):
    """Activity errors of a run.

    Attributes:
        ranks: all of them, in order.
        mean_error: over ranks, of theirs. worst_error: of any begin or end on any rank. worst_rank_error: the largest
            of the ranks' means.
        one_clock: whether iterations start at one moment for all ranks; else on each rank by itself.
    """

    ranks: tuple[RankActivity, ...]
    mean_error: float
    worst_rank_error: float
    worst_error: float
    one_clock: bool


class Unit(NamedTuple):
    """A unit of work: its name, and seconds (of one iteration, or of each)."""

    name: str
    begin_s: Floats
    end_s: Floats


def activity_of(run: Run, model: CostModel) -> Activity | str:
    """Activity errors of a run; or in words why there are none.

    Args:
        model: of the run's configuration.

    Raises:
        UserError: the profile lacks what the run needs.
    """
    about = run.description
    point = Configuration(strategy=parse_strategy(about.strategy), settings=about.settings)
    priced, schedule = price(model, point), about.settings.of(PipelineOptions).schedule
    try:
        timeline = timeline_of(priced, schedule, model.slow_rank)
    except UserError as error:
        return str(error)
    records = without_timed_calls(read_records(run.path, TRAINING_FILE, TrainingIterations))
    ordered = sorted(records, key=lambda record: record.first_iteration)
    measured = {rank: [record for record in ordered if record.rank == rank] for rank in range(about.ranks)}
    roles = [_role_of(timeline, rank) for rank in measured]
    predicted = [simulated_units(role) for role in roles]
    stamped: list[list[Unit]] = []
    for of_rank, units, role in zip(measured.values(), predicted, roles, strict=True):
        known = _as_predicted(measured_units(of_rank), units, _losses(timeline, role, schedule))
        if known is None:
            return "the run did not record begin and end of every planned forward and backward"
        stamped.append(known)
    starts = _starts(measured, HostClocks(read_host_records(run.path)))
    last_s = max(role.finish_s for role in roles)
    reference = [rank for rank, role in enumerate(roles) if role.finish_s == last_s]
    ranks = []
    for rank, units in enumerate(stamped):
        if starts is None:
            shift_s, early_s = np.zeros(1), timeline.iteration_s - roles[rank].finish_s
        else:
            shift_s, early_s = starts[rank] - np.mean([starts[other] for other in reference], axis=0), 0.0
        ranks.append(_rank_activity(rank, units, predicted[rank], shift_s, early_s, run.median_s))
    means = [activity.mean_error for activity in ranks]
    return Activity(
        ranks=tuple(ranks),
        mean_error=float(np.mean(means)),
        worst_rank_error=max(means),
        worst_error=max(activity.worst_error for activity in ranks),
        one_clock=starts is not None,
    )


def _rank_activity(
    rank: int, measured: Sequence[Unit], predicted: Sequence[Unit], shift_s: Floats, early_s: float, iteration_s: float
) -> RankActivity:
    errors = [
        abs(float(np.median(stamps + shift_s)) - float(said) - early_s) / iteration_s
        for unit, wanted in zip(measured, predicted, strict=True)
        for stamps, said in ((unit.begin_s, wanted.begin_s), (unit.end_s, wanted.end_s))
    ]
    names = _numbered([unit.name for unit in measured])
    worst = int(np.argmax(errors))
    by_unit = np.reshape(errors, (-1, 2)).mean(axis=1).tolist()
    return RankActivity(
        rank=rank,
        units=len(measured),
        mean_error=float(np.mean(errors)),
        worst_error=errors[worst],
        worst_unit=names[worst // 2],
        by_unit=dict(zip(names, by_unit, strict=True)),
    )


def _numbered(names: Sequence[str]) -> list[str]:
    """Names with their place among those alike, where there are several: FW1, FW2, GE."""
    counts, seen = Counter(names), Counter[str]()
    numbered = []
    for name in names:
        seen[name] += 1
        numbered.append(f"{name}{seen[name]}" if counts[name] > 1 else name)
    return numbered


def _role_of(timeline: IterationTimeline, rank: int) -> RoleTimeline:
    """The timeline that a rank follows: the slow rank its own."""
    of_rank = [role for role in timeline.roles if role.role == timeline.plan.role_of(rank)]
    return next((role for role in of_rank if role.rank == rank), of_rank[-1])


def _losses(timeline: IterationTimeline, role: RoleTimeline, schedule: str) -> list[bool]:
    """Of a stage's forwards and backwards in order, whether the loss was stamped by itself behind it."""
    if role.actions is None:
        return []
    stages = len(timeline.lines[0].roles) * schedule_of(schedule).placement.stages_per_rank
    return [action.way == "FW" and action.stage == stages - 1 for action in role.actions.actions]


def measured_units(records: Sequence[TrainingIterations]) -> list[Unit] | None:
    """Units of a rank as stamped, from the start of each of its iterations; None where turns were not recorded."""

    def column(name: str) -> Floats:
        return np.concatenate([np.asarray(getattr(record, name), float) for record in records])

    fw, bw, exchange, update, whole = map(column, ("fw_s", "bw_s", "exposed_ge_s", "wu_s", "iteration_s"))
    in_turns = all(record.turns for record in records) and len({len(record.turns) for record in records}) == 1
    if in_turns:
        turns = [
            Unit(
                several[0].way,
                np.concatenate([np.asarray(turn.begin_s) for turn in several]),
                np.concatenate([np.asarray(turn.end_s) for turn in several]),
            )
            for several in zip(*(record.turns for record in records), strict=True)
        ]
        turns[-1] = turns[-1]._replace(end_s=turns[-1].end_s - exchange)
    elif any(record.turns or record.pipeline_idle_s for record in records):
        return None
    else:
        # What a rank waits for is part of forward.
        waited = np.concatenate(
            [record.input.waited_s if record.input else [0.0] * len(record.fw_s) for record in records]
        )
        turns = [Unit("FW", np.zeros(len(fw)), waited + fw), Unit("BW", waited + fw, waited + fw + bw)]
    done = turns[-1].end_s
    return [*turns, Unit("GE", done, done + exchange), Unit("WU", whole - update, whole)]


def _as_predicted(measured: list[Unit] | None, predicted: Sequence[Unit], losses: Sequence[bool]) -> list[Unit] | None:
    """Measured units one by one beside predicted ones, losses joined to their turns; None where they are others."""
    if measured is None:
        return None
    turns, rest = measured[:-2], measured[-2:]
    if sum(losses) and len(turns) == len(losses) + sum(losses):
        stamped = iter(turns)
        turns = []
        for has_loss in losses:
            turn = next(stamped)
            turns.append(turn._replace(end_s=next(stamped).end_s) if has_loss else turn)
    names = [unit.name for unit in predicted]
    units = [*turns, *(unit for unit in rest if unit.name in names)]
    return units if [unit.name for unit in units] == names else None


def simulated_units(role: RoleTimeline) -> list[Unit]:
    """Units of a role as simulated; the exchange alone where the role has one."""
    of_plan = role.of_plan
    computes = of_plan.stream == Stream.COMPUTE
    turns = _of_actions(role, computes) if role.actions is not None else _of_phases(role, computes)
    done, ended = phase_ends(of_plan.phase, computes, role.end_s)
    exchange = [Unit("GE", np.asarray(done), np.asarray(ended))] if (of_plan.phase == Phase.GE).any() else []
    updating = of_plan.phase == Phase.WU
    return [*turns, *exchange, Unit("WU", np.asarray(ended), role.end_s[updating].max(initial=ended))]


def _of_actions(role: RoleTimeline, computes: NDArray[np.bool_]) -> list[Unit]:
    """Of a stage: from the first to the last that an action computes."""
    assert role.actions is not None
    units = []
    for number, action in enumerate(role.actions.actions):
        tasks = computes & (role.actions.of_task == number)
        units.append(Unit(action.way, role.start_s[tasks].min(), role.end_s[tasks].max()))
    return units


def _of_phases(role: RoleTimeline, computes: NDArray[np.bool_]) -> list[Unit]:
    """Without stages: forward and backward in turns, each from the end of the one before."""
    tasks = computes & np.isin(role.of_plan.phase, (Phase.FW, Phase.BW))
    phases, ends = role.of_plan.phase[tasks], role.end_s[tasks]
    units, begin = [], np.asarray(0.0)
    for last in np.flatnonzero(np.diff(phases, append=-1)).tolist():
        units.append(Unit(Phase(int(phases[last])).name, begin, ends[last]))
        begin = ends[last]
    return units


def _starts(measured: Mapping[int, Sequence[TrainingIterations]], clocks: HostClocks) -> dict[int, Floats] | None:
    """When every iteration began on each rank, on one clock; None where that is not known of all."""
    starts: dict[int, Floats] = {}
    for rank, records in measured.items():
        parts = [
            clocks.on_one_clock(record.attempt, rank, record.host_begin_s) if record.host_begin_s else None
            for record in records
        ]
        known = [part.stamps_s for part in parts if part is not None]
        if len(known) < len(parts) or not known:
            return None
        starts[rank] = np.concatenate(known)
    return starts if len(set(map(len, starts.values()))) == 1 else None
