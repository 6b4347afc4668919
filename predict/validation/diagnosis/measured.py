"""What each limitation takes of a measured run, as far as its stamps tell.

Ranks that are early wait inside a call for the last one. So a call takes what the rank spends in it that comes last;
what the others spend beyond that is imbalance. Stages of a pipeline are looked at by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from paradl_bench.core.statistics import Floats, bootstrap_interval
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.mesh import degree_of, group_axes
from paradl_bench.plan.strategy import parse_strategy
from predict.validation.diagnosis import limitations as of
from predict.validation.diagnosis.shares import Seconds
from predict.validation.runs import Run, communication_of, copies_of

_BLOCKS = 8
"""Parts of a run that are drawn whole, since neighbouring iterations are alike."""
_HALO = "halo"
"""What runs call the exchange of halos among communication for layers."""


class MeasuredSeconds(NamedTuple):
    """What a run spent.

    Attributes:
        seconds: of an iteration, by limitation.
        computed: the layers' own compute, on the rank of each stage that computes least, in the mean over stages.
            Cutting tensors and putting them together does not count.
    """

    seconds: Mapping[str, Seconds]
    computed: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stamps:
    """Seconds of shape (iterations, ranks), ranks of one stage.

    Attributes:
        compute: forward and backward without communication for layers.
        copies: what cutting tensors and putting them together takes of it.
        calls: communication for layers, by the limitation that it is of.
    """

    compute: Floats
    copies: Floats
    exchange: Floats
    update: Floats
    idle: Floats
    calls: Mapping[str, Floats]


def seconds_of_run(run: Run) -> MeasuredSeconds:
    """What a run spent with each limitation; those that its stamps don't tell apart are left out."""
    strategy, copies = parse_strategy(run.description.strategy), copies_of(run)
    stages = _by_stage(run, np.zeros(run.rank_times_s.shape[:2]) if copies is None else copies)
    weights = [stage.compute.shape[1] / strategy.ranks for stage in stages]

    def mean(values: Sequence[Floats]) -> Floats:
        return np.asarray(sum(weight * of_stage for weight, of_stage in zip(weights, values, strict=True)))

    exchange = mean([stage.exchange.min(axis=1) for stage in stages])
    calls = {name: mean([stage.calls[name].min(axis=1) for stage in stages]) for name in stages[0].calls}
    waiting = mean(
        [
            sum((_beyond_least(waits) for waits in stage.calls.values()), _beyond_least(stage.exchange))
            for stage in stages
        ]
    )
    computed = [stage.compute.mean(axis=1) for stage in stages]
    seconds = {of.WEIGHT_UPDATE: mean([stage.update.mean(axis=1) for stage in stages])}
    if copies is not None:
        seconds[of.SPLIT_AND_CONCATENATE] = mean([stage.copies.mean(axis=1) for stage in stages])
    if degree_of(strategy, Trait.STAGES) > 1:
        idle = mean([stage.idle.mean(axis=1) for stage in stages])
        uneven = np.minimum(np.max(computed, axis=0) - mean(computed), idle)
        seconds[of.BUBBLES] = idle - uneven
        waiting = waiting + uneven
    elif run.description.input is not None:
        seconds[of.INPUT] = mean([stage.idle.mean(axis=1) for stage in stages])
    if strategy.ranks > 1:
        seconds[of.IMBALANCE] = waiting
    if degree_of(strategy, Trait.REPLICATES) > 1:
        seconds[of.GRADIENT_EXCHANGE] = exchange
    measured = {name: _with_interval(values) for name, values in (seconds | calls).items()}
    if strategy.ranks > 1:
        communication = exchange + sum(calls.values())
        measured[of.CONGESTION] = _with_interval(communication - np.median(communication), np.mean)
    least = mean([(stage.compute - stage.copies).min(axis=1) for stage in stages])
    return MeasuredSeconds(measured, _with_interval(least))


def _beyond_least(values: Floats) -> Floats:
    """What ranks spend beyond the one that spends least, in the mean over ranks."""
    return np.asarray(values.mean(axis=1) - values.min(axis=1))


def _with_interval(values: Floats, statistic: Callable[..., Floats] = np.median) -> Seconds:
    """The median or the mean over iterations; none below 0."""
    blocks = [part for part in np.array_split(values, _BLOCKS) if len(part)]
    ends = bootstrap_interval(blocks, statistic=statistic)
    return Seconds(*(max(float(value), 0.0) for value in (statistic(values), *ends)))


def _by_stage(run: Run, copies: Floats) -> list[_Stamps]:
    """Of every stage of a pipeline; of all ranks without one."""
    strategy, kinds = parse_strategy(run.description.strategy), communication_of(run)
    along = group_axes(strategy, Trait.STAGES)
    ranks_of: dict[tuple[int, ...], list[int]] = {}
    for rank in range(strategy.ranks):
        stage = tuple(strategy.coordinates(rank)[axis] for axis in along)
        ranks_of.setdefault(stage, []).append(rank)
    return [
        _stamps(
            run.rank_times_s[:, ranks],
            copies[:, ranks],
            {kind: seconds[:, ranks] for kind, seconds in kinds.items()},
        )
        for ranks in ranks_of.values()
    ]


def _stamps(times_s: Floats, copies: Floats, kinds: Mapping[str, Floats]) -> _Stamps:
    """Of the whole iteration, FW, BW, GE and WU, and of communication for layers by kind."""
    whole, fw, bw, exchange, update = np.moveaxis(times_s, 2, 0)
    calls: dict[str, Floats] = {}
    for kind, seconds in kinds.items():
        name = of.HALO if kind == _HALO else of.LAYER_WISE
        calls[name] = calls[name] + seconds if name in calls else seconds
    return _Stamps(
        compute=fw + bw - sum(calls.values()),
        copies=copies,
        exchange=exchange,
        update=update,
        idle=whole - fw - bw - exchange - update,
        calls=calls,
    )
