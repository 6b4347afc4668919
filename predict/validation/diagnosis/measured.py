"""What each limitation takes of a measured run, as far as its stamps tell.

Ranks that are early wait inside a call for the last one. So a call takes what the rank spends in it that comes last;
what the others spend beyond that is imbalance. Stages of a pipeline are looked at by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paradl_bench.core.errors import UserError
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.mesh import degree_of, group_axes
from paradl_bench.plan.strategy import Strategy, parse_strategy
from paradl_bench.records.measurement import read_records
from paradl_bench.records.training.training_record import TRAINING_FILE, TrainingIterations
from predict.costs.sourced import Floats
from predict.validation.diagnosis import limitations as of
from predict.validation.diagnosis.shares import Seconds
from predict.validation.runs import Run

_DRAWS = 400
_BLOCKS = 8
"""Parts of a run that are drawn whole, since neighbouring iterations are alike."""
_HALO = "halo"
"""What runs call the exchange of halos among communication for layers."""


class MeasuredSeconds(NamedTuple):
    """Seconds of an iteration by limitation, and the mean of the layers' own compute, over all ranks."""

    seconds: Mapping[str, Seconds]
    computed: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stamps:
    """Seconds of shape (iterations, ranks), ranks of one stage.

    Attributes:
        calls: communication for layers, by the limitation that it is of.
    """

    compute: Floats
    exchange: Floats
    update: Floats
    idle: Floats
    calls: Mapping[str, Floats]


def seconds_of_run(run: Run) -> MeasuredSeconds:
    """What a run spent with each limitation; those that its stamps don't tell apart are left out.

    Raises:
        UserError: the run's records don't hold the same iterations of all ranks.
    """
    strategy = parse_strategy(run.description.strategy)
    stages = _by_stage(run, strategy)
    weights = [stage.compute.shape[1] / strategy.ranks for stage in stages]

    def mean(values: Sequence[Floats]) -> Floats:
        return np.asarray(sum(weight * own for weight, own in zip(weights, values, strict=True)))

    exchange = mean([stage.exchange.min(axis=1) for stage in stages])
    calls = {
        name: mean([stage.calls[name].min(axis=1) for stage in stages if name in stage.calls])
        for name in dict.fromkeys(name for stage in stages for name in stage.calls)
    }
    waiting = mean(
        [sum((_beyond_least(own) for own in stage.calls.values()), _beyond_least(stage.exchange)) for stage in stages]
    )
    found = {of.WEIGHT_UPDATE: mean([stage.update.mean(axis=1) for stage in stages])}
    if degree_of(strategy, Trait.STAGES) > 1:
        computed = [stage.compute.mean(axis=1) for stage in stages]
        idle = mean([stage.idle.mean(axis=1) for stage in stages])
        uneven = np.minimum(np.max(computed, axis=0) - mean(computed), idle)
        found[of.BUBBLES] = idle - uneven
        waiting = waiting + uneven
    if strategy.ranks > 1:
        found[of.IMBALANCE] = waiting
        communication = exchange + sum(calls.values())
        found[of.CONGESTION] = communication - np.median(communication)
    if degree_of(strategy, Trait.REPLICATES) > 1:
        found[of.GRADIENT_EXCHANGE] = exchange
    found |= calls
    middle = {of.CONGESTION: np.mean}
    return MeasuredSeconds(
        {name: _with_interval(values, middle.get(name, np.median)) for name, values in found.items()},
        _with_interval(mean([stage.compute.mean(axis=1) for stage in stages]), np.median),
    )


def _beyond_least(values: Floats) -> Floats:
    """What ranks spend beyond the one that spends least, in the mean over ranks."""
    return np.asarray(values.mean(axis=1) - values.min(axis=1))


def _with_interval(values: Floats, middle: object) -> Seconds:
    """The median or mean over iterations; blocks of neighbours are drawn again and again for its 90% interval."""
    assert callable(middle)
    blocks: list[NDArray[np.float64]] = [part for part in np.array_split(values, _BLOCKS) if len(part)]
    generator = np.random.default_rng(0)
    drawn = [
        float(middle(np.concatenate([blocks[index] for index in generator.integers(len(blocks), size=len(blocks))])))
        for _ in range(_DRAWS)
    ]
    low, high = np.quantile(drawn, (0.05, 0.95))
    return Seconds(float(middle(values)), float(low), float(high))


def _by_stage(run: Run, strategy: Strategy) -> list[_Stamps]:
    records = read_records(run.path, TRAINING_FILE, TrainingIterations)
    columns = [_columns(records, rank) for rank in range(strategy.ranks)]
    if len({len(own["iteration_s"]) for own in columns}) != 1:
        raise UserError(f"{run.path} does not hold the same iterations of all ranks: let the run finish")
    along = group_axes(strategy, Trait.STAGES)
    stage_of = [tuple(strategy.coordinates(rank)[axis] for axis in along) for rank in range(strategy.ranks)]
    return [
        _stamps([own for own, place in zip(columns, stage_of, strict=True) if place == stage])
        for stage in sorted(set(stage_of))
    ]


def _columns(records: Sequence[TrainingIterations], rank: int) -> dict[str, Floats]:
    """All iterations of a rank, in order: its phases, and what each kind of communication for layers took."""
    own = sorted((record for record in records if record.rank == rank), key=lambda record: record.first_iteration)
    names = ("iteration_s", "fw_s", "bw_s", "exposed_ge_s", "wu_s")
    found = {name: np.concatenate([getattr(record, name) for record in own]) for name in names}
    for record in own:
        for kind in (*record.fw_communication_s, *record.bw_communication_s):
            found.setdefault(kind, np.zeros(len(found["iteration_s"])))
    begin = 0
    for record in own:
        part = slice(begin, begin + len(record.iteration_s))
        for calls in (record.fw_communication_s, record.bw_communication_s):
            for kind, values in calls.items():
                found[kind][part] += values
        begin = part.stop
    return found


def _stamps(columns: Sequence[Mapping[str, Floats]]) -> _Stamps:
    """Of the ranks of a stage."""

    def of_all(name: str) -> Floats:
        return np.stack([own[name] for own in columns], axis=1)

    phases = {"iteration_s", "fw_s", "bw_s", "exposed_ge_s", "wu_s"}
    kinds = set.intersection(*(set(own) for own in columns)) - phases
    calls: dict[str, Floats] = {}
    for kind in sorted(kinds):
        name = of.HALO if kind == _HALO else of.LAYER_WISE
        calls[name] = calls[name] + of_all(kind) if name in calls else of_all(kind)
    forward_and_backward, exchange, update = of_all("fw_s") + of_all("bw_s"), of_all("exposed_ge_s"), of_all("wu_s")
    return _Stamps(
        compute=forward_and_backward - sum(calls.values()),
        exchange=exchange,
        update=update,
        idle=of_all("iteration_s") - forward_and_backward - exchange - update,
        calls=calls,
    )
