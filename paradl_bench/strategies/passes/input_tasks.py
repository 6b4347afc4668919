"""Reading and copying a mini-batch as tasks of a plan, on an input pipeline and a copy engine of their own.

What a role does is one iteration of the steady state, from the moment at which the batch that it computes was read (and
copied, where that is done ahead) and the iteration before is over. So what is fetched ahead, for an iteration to come,
starts at once and nothing inside of the iteration waits for it; the iteration ends when both it and computing have.
With one batch ahead its copy waits until it was read; with more, one batch is copied while another one is read. What is
not fetched ahead comes first, and all that a rank computes and communicates waits for it.

Ranks read as they compute: every rank of a group that shards layers has the whole local mini-batch, of a pipeline those
of the first stage do (labels, which the last one reads, are not counted). Reading for the ranks of one host takes as
long as one loader needs for all of their samples. Neither readers nor copies slow compute or each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.mesh import degree_of
from paradl_bench.plan.strategy import Strategy
from paradl_bench.plan.tasks import InputCopy, InputRead, Phase, Plan, Role, Stream, TaskArrays

INPUT_PHASES = (Phase.IO, Phase.H2D)
"""Of tasks that fetch a mini-batch."""


class Fetch(NamedTuple):
    """What is fetched before the iteration that computes it.

    Attributes:
        ahead: mini-batches that are fetched while others are computed; 0 for none.
        to_device: whether they are copied to the device ahead, and not only read.
    """

    ahead: int
    to_device: bool


class Fetched(NamedTuple):
    """A mini-batch to be read and copied.

    Attributes:
        takes_time: whether either does; what takes none is no task.
    """

    works: tuple[InputRead, InputCopy]
    takes_time: tuple[bool, bool]
    fetch: Fetch


def with_input(plan: Plan, fetched: Fetched) -> Plan:
    """A plan with the tasks of its input; both works stand behind its own."""
    first = len(plan.works)
    works = [first + index if takes_time else None for index, takes_time in enumerate(fetched.takes_time)]
    reading = _reading_roles(plan)
    roles = tuple(
        _fed(role, works, fetched.fetch) if reads else role for role, reads in zip(plan.roles, reading, strict=True)
    )
    return dataclasses.replace(plan, works=(*plan.works, *fetched.works), roles=roles)


def _fed(role: Role, input_works: Sequence[int | None], fetch: Fetch) -> Role:
    """A role with the tasks that read and copy its input before all others; None for what takes no time."""
    added = [(work, *where) for work, where in zip(input_works, _PLACES, strict=True) if work is not None]
    in_turn = len(added) == 2 and (not fetch.ahead or (fetch.to_device and fetch.ahead == 1))
    before = len(added)
    copies = input_works[1] is not None
    # Whether computing waits for the last of them.
    blocking = before - 1 if not fetch.ahead or (copies and not fetch.to_device) else None
    # Streams run in order: where its first task waits, all of it does.
    first = np.unique(role.stream, return_index=True)[1]
    lengths = np.diff(role.dependency_start)
    held = first[lengths[first] == 0] if blocking is not None else first[:0]
    lengths[held] += 1
    dependencies = np.insert(role.dependencies + before, role.dependency_start[held], blocking or 0)
    lengths = np.concatenate([[0, int(in_turn)][:before], lengths])
    works, phases, streams = zip(*added, strict=True)
    tasks = TaskArrays(
        phase=_joined(phases, role.phase),
        stream=_joined(streams, role.stream),
        work=_joined(works, role.work),
        dependency_start=_joined([0], np.cumsum(lengths)),
        dependencies=_joined([0] if in_turn else [], dependencies),
        action=None if role.action is None else _joined([-1] * before, role.action),
    )
    return dataclasses.replace(role, arrays=tasks)


_PLACES = ((Phase.IO, Stream.INPUT), (Phase.H2D, Stream.COPY_ENGINE))


def _joined(before: Sequence[int], rest: NDArray[np.integer]) -> NDArray[np.int32]:
    return np.concatenate([np.array(before, np.int32), rest]).astype(np.int32)


def _reading_roles(plan: Plan) -> list[bool]:
    """Per role, whether its ranks read: in a pipeline those that receive no activations do."""
    if degree_of(plan.strategy, Trait.STAGES) <= 1:
        return [True] * len(plan.roles)
    axes = [axis for axis in plan.strategy.axes if not axis.has(Trait.DIVIDES_BATCH)]
    along = next(index for index, axis in enumerate(axes) if axis.has(Trait.STAGES))
    places = np.array(plan.positions).reshape([-1, *(axis.degree for axis in axes)])
    first = set(np.take(places, 0, axis=along + 1).ravel().tolist())
    return [index in first for index in range(len(plan.roles))]


def readers_on_host(strategy: Strategy, ranks_on_host: int) -> int:
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
