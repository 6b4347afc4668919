"""Reading and copying a mini-batch as tasks of a plan, on an input pipeline and a copy engine of their own.

What a role does is one iteration of the steady state, from the moment at which the batch that it computes was read (and
copied, where that is done ahead) and the iteration before is over. So what is fetched ahead, for an iteration to come,
starts at once and nothing inside of the iteration waits for it; the iteration ends when both it and computing have.
With one batch ahead its copy waits until it was read; with more, one batch is copied while another one is read. What is
not fetched ahead comes first, and all that a rank computes and communicates waits for it.

Ranks read as they compute: every rank of a group that shares layers has the whole local mini-batch, of a pipeline those
of the first stage do (labels, which the last one reads, are not counted). Reading for the ranks of one host takes as
long as one loader needs for all of their samples. Neither readers nor copies slow compute or each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paradl_bench.core.errors import UserError
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.mesh import degree_of
from paradl_bench.plan.strategy import Strategy
from paradl_bench.plan.tasks import Phase, Plan, Role, Stream
from predict.costs.cost_model import CostModel
from predict.costs.input.input_closed_form import PRESETS, Fetch, InputWait
from predict.costs.input.input_terms import HostBatch, InputOptions, InputTerms, input_terms
from predict.costs.priced import PricedPlan
from predict.costs.sourced import Remark
from predict.costs.spread.assembly import join
from predict.simulation.simulator import Timeline
from predict.workload import Configuration

INPUT_PHASES = (Phase.IO, Phase.H2D)
"""Of tasks that fetch a mini-batch."""


def with_input(model: CostModel, point: Configuration, priced: PricedPlan) -> PricedPlan:
    """A priced plan with the tasks of its input, where that was measured or stated; else the plan as it is.

    Raises:
        UserError: options ask for an input that nothing is known of, or contradict each other.
    """
    options = model.input_options
    terms = terms_of(model, point.strategy, point.local_batch, priced.place.ranks_on_host)
    if not terms.known:
        refuse_unknown(options)
        return priced
    if not terms.costs.seconds.any():
        return priced
    priced.remarks.add(*terms.remarks)
    if not PRESETS[options.preset].wait_free:
        text = f"--preset {options.preset} is of the input alone: gradients are exchanged as the plan has it"
        priced.remarks.add(Remark(text, False))
    first = len(priced.plan.works)
    takes_time = (terms.costs.seconds > 0).tolist()
    read, copy = (first + index if takes_time[index] else None for index in range(2))
    tasks = _Tasks(read, copy, terms.fetch)
    reading = _reading_roles(priced.plan)
    roles = tuple(_fed(role, tasks) if reads else role for role, reads in zip(priced.plan.roles, reading, strict=True))
    return dataclasses.replace(
        priced,
        plan=dataclasses.replace(priced.plan, works=(*priced.plan.works, *terms.works), roles=roles),
        costs=join([priced.costs, terms.costs]),
        parts=[*priced.parts, *terms.parts],
        own_relative_sd=np.concatenate([priced.own_relative_sd, np.zeros(len(terms.works))]),
        batches_ahead_bytes=batches_ahead_bytes(terms),
    )


def terms_of(model: CostModel, strategy: Strategy, local_batch: int, ranks_on_host: int) -> InputTerms:
    """Seconds of a strategy's input, of a rank with so many samples, and what of it is done ahead."""
    batch = HostBatch(local_batch, _readers_on_host(strategy, ranks_on_host))
    return input_terms(model.profile, model.network, model.dtype, batch, model.input_options)


def batches_ahead_bytes(terms: InputTerms) -> int:
    """Bytes of the mini-batches that are copied to a device before the iteration that computes them."""
    fetch = terms.fetch
    return fetch.ahead * terms.works[1].bytes if fetch.to_device and terms.costs.seconds.any() else 0


def ahead_bytes(model: CostModel, point: Configuration) -> int:
    """The same of a point, without pricing its plan."""
    place = model.place(point.strategy, point.local_batch)
    return batches_ahead_bytes(terms_of(model, point.strategy, point.local_batch, place.ranks_on_host))


def waits_for_input(line: Timeline, phase: NDArray[np.integer], reads: NDArray[np.bool_]) -> tuple[float, InputWait]:
    """When computing begins, and what of a simulated iteration it waits for its input before that and at the end.

    Args:
        phase: per task. reads: per task, whether it is of a role that reads; (0, nothing) where none is fetched.
    """
    fetching = np.isin(phase, INPUT_PHASES)
    if not fetching.any():
        return 0.0, InputWait(0.0, 0.0)
    begin_s, end_s = float(line.start_s[~fetching & reads].min()), float(line.end_s[~fetching].max())
    copying = phase == Phase.H2D
    starts, ends = line.start_s[copying], line.end_s[copying]
    copied_s = float(np.sum(np.minimum(ends, begin_s) - np.minimum(starts, begin_s)))
    copied_s += float(np.sum(np.maximum(ends, end_s) - np.maximum(starts, end_s)))
    return begin_s, InputWait(begin_s + max(line.iteration_s - end_s, 0.0), copied_s)


class _Tasks(NamedTuple):
    """Works of a plan that read and copy, None where that takes no time, and what of it is done ahead."""

    read: int | None
    copy: int | None
    fetch: Fetch


def _fed(role: Role, tasks: _Tasks) -> Role:
    """A role with the tasks of its input before all others."""
    fetch = tasks.fetch
    added = [(work, *where) for work, where in zip(tasks[:2], _PLACES, strict=True) if work is not None]
    in_turn = len(added) == 2 and (not fetch.ahead or (fetch.to_device and fetch.ahead == 1))
    before = len(added)
    awaited = before - 1 if _is_awaited(tasks) else None
    # Streams run in order: where its first task waits, all of it does.
    first = np.unique(role.stream, return_index=True)[1]
    lengths = np.diff(role.dependency_start)
    held = first[lengths[first] == 0] if awaited is not None else first[:0]
    lengths[held] += 1
    own = np.insert(role.dependencies + before, role.dependency_start[held], awaited or 0)
    lengths = np.concatenate([[0, int(in_turn)][:before], lengths])
    works, phases, streams = zip(*added, strict=True)
    return dataclasses.replace(
        role,
        phase=_joined(phases, role.phase),
        stream=_joined(streams, role.stream),
        work=_joined(works, role.work),
        dependency_start=_joined([0], np.cumsum(lengths)),
        dependencies=_joined([0] if in_turn else [], own),
        action=None if role.action is None else _joined([-1] * before, role.action),
    )


_PLACES = ((Phase.IO, Stream.INPUT), (Phase.H2D, Stream.COPY_ENGINE))


def _is_awaited(tasks: _Tasks) -> bool:
    """Whether computing waits for the last of the tasks."""
    if not tasks.fetch.ahead:
        return True
    return tasks.copy is not None and not tasks.fetch.to_device


def _joined(before: Sequence[int], own: NDArray[np.integer]) -> NDArray[np.int32]:
    return np.concatenate([np.array(before, np.int32), own]).astype(np.int32)


def _reading_roles(plan: Plan) -> list[bool]:
    """Per role, whether its ranks read: in a pipeline those that receive no activations do."""
    if degree_of(plan.strategy, Trait.STAGES) <= 1:
        return [True] * len(plan.roles)
    axes = [axis for axis in plan.strategy.axes if not axis.has(Trait.DIVIDES_BATCH)]
    along = next(index for index, axis in enumerate(axes) if axis.has(Trait.STAGES))
    places = np.array(plan.positions).reshape([-1, *(axis.degree for axis in axes)])
    first = set(np.take(places, 0, axis=along + 1).ravel().tolist())
    return [index in first for index in range(len(plan.roles))]


def _readers_on_host(strategy: Strategy, ranks_on_host: int) -> int:
    """The most ranks that read on one host, hosts being filled in order."""
    degree = degree_of(strategy, Trait.STAGES)
    if degree <= 1:
        return ranks_on_host
    inside = 1
    for axis in reversed(strategy.axes):
        if axis.has(Trait.STAGES):
            break
        inside *= axis.degree
    ranks = np.arange(strategy.ranks)
    reads = ranks // inside % degree == 0
    return int(np.bincount(ranks[reads] // ranks_on_host).max())


def refuse_unknown(options: InputOptions) -> None:
    """Where nothing is known of an input.

    Raises:
        UserError: options ask for one.
    """
    if options != InputOptions():
        raise UserError(
            "the profile holds no input of this model to read or copy: paradl-bench io PATH -o DIR, then calibrate fit,"
            " or give --io-seconds and --h2d-seconds"
        )
