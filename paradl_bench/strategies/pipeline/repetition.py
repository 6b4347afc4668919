"""Tasks of a rank of a pipeline: those of an action once, repeated for every micro-batch. Torch-free.

What a rank does of one micro-batch on one stage is the same for the next one, but for where its tasks stand. So a plan
is put together of arrays: what an action waits for is in its own tasks, in the forward of its micro-batch, or the end
of the action before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paradl_bench.plan.tasks import Ints, RoleBuilder, Work

BEFORE = -1
"""What stands, in a builder of one action, for the task that ends what the action before has computed."""

_OWN, _FORWARD, _BEFORE = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionTasks:
    """The tasks of one action.

    Attributes:
        phase, stream, work: per task, as of a :class:`~paradl_bench.plan.tasks.Role`. waits: how many it waits for.
        base, offset: per dependency, what it is counted from, and how far behind that it is.
        computed: offset of the task that ends what the action computes; what it sends may follow.
        done: offsets of the tasks that the weight update waits for.
    """

    phase: Ints
    stream: Ints
    work: Ints
    waits: Ints
    base: Ints
    offset: Ints
    computed: int
    done: Ints

    @classmethod
    def of_builder(cls, builder: RoleBuilder, start: int, computed: int, done: Sequence[int] = ()) -> ActionTasks:
        """The tasks from ``start`` on of a builder that begins with the forward of the same micro-batch."""
        bounds = np.array(builder.dependency_start[start:], np.int32)
        blocking = np.array(builder.dependencies[bounds[0] :], np.int32)
        before, inside = blocking == BEFORE, blocking >= start
        base = np.where(before, np.int32(_BEFORE), np.where(inside, np.int32(_OWN), np.int32(_FORWARD)))
        return cls(
            phase=np.array(builder.phase[start:], np.int32),
            stream=np.array(builder.stream[start:], np.int32),
            work=np.array(builder.work[start:], np.int32),
            waits=np.diff(bounds),
            base=base,
            offset=np.where(before, np.int32(0), np.where(inside, blocking - np.int32(start), blocking)),
            computed=computed - start,
            done=np.array(done, np.int32) - np.int32(start),
        )


class Repeated(NamedTuple):
    """Tasks of a rank, as in a role, the action of each, and those that the weight update waits for."""

    phase: Ints
    stream: Ints
    work: Ints
    dependency_start: Ints
    dependencies: Ints
    action: Ints
    done: Ints


def repeat(distinct: Sequence[ActionTasks], kinds: NDArray[np.integer], forwards: NDArray[np.integer]) -> Repeated:
    """The tasks of all actions of a rank.

    Args:
        kinds: per action, which of the distinct ones it is.
        forwards: per action, the index of the action that is the forward of its micro-batch on its stage.
    """
    lengths = np.array([len(action.phase) for action in distinct])[kinds]
    starts = np.cumsum(lengths) - lengths
    computed = starts + np.array([action.computed for action in distinct])[kinds]
    # Nothing stands before the first action, which waits for nothing there.
    bases = np.stack([starts, starts[forwards], np.append(0, computed[:-1])])
    tasks = _rows([len(action.phase) for action in distinct], kinds)
    blocking = _rows([len(action.base) for action in distinct], kinds)
    done = _rows([len(action.done) for action in distinct], kinds)
    waits = _joined([action.waits for action in distinct])[tasks.items]
    base, offset = (_joined([getattr(action, name) for action in distinct])[blocking.items] for name in _DEPENDENCY)
    phase, stream, work = (_joined([getattr(action, name) for action in distinct])[tasks.items] for name in _TASK)
    return Repeated(
        phase=phase,
        stream=stream,
        work=work,
        dependency_start=np.concatenate([[0], np.cumsum(waits)]).astype(np.int32),
        dependencies=(bases[base, blocking.action] + offset).astype(np.int32),
        action=tasks.action.astype(np.int32),
        done=(starts[done.action] + _joined([action.done for action in distinct])[done.items]).astype(np.int32),
    )


def followed_by(tasks: Repeated, builder: RoleBuilder) -> dict[str, Ints]:
    """The tasks of all actions and those of a builder, which wait for all that the actions are done with; as fields of
    a :class:`~paradl_bench.plan.tasks.Role`."""
    rows = len(tasks.dependencies) + len(tasks.done) + np.array(builder.dependency_start[1:], np.int32)
    blocking = np.array(builder.dependencies, np.int32) + np.int32(len(tasks.phase))
    return {
        "phase": np.append(tasks.phase, np.array(builder.phase, np.int32)),
        "stream": np.append(tasks.stream, np.array(builder.stream, np.int32)),
        "work": np.append(tasks.work, np.array(builder.work, np.int32)),
        "dependency_start": np.append(tasks.dependency_start, rows),
        "dependencies": np.concatenate([tasks.dependencies, tasks.done, blocking]),
        "action": np.append(tasks.action, np.full(builder.tasks, -1, np.int32)),
    }


def moved(tasks: ActionTasks, works: dict[Work, int], layers: Mapping[str, str], stages: int) -> ActionTasks:
    """The same tasks on another stage, whose works are added where they are new, in the order in which they come.

    Args:
        works: by number; a plan's. layers: names there, by those here. stages: how many stages further on it is.
    """
    numbers, first = np.unique(tasks.work, return_index=True)
    known, number_there = list(works), np.zeros(len(works), np.int32)
    for number in numbers[np.argsort(first)].tolist():
        number_there[number] = works.setdefault(known[number].on_other_stage(layers, stages), len(works))
    return replace(tasks, work=number_there[tasks.work])


_TASK = ("phase", "stream", "work")
_DEPENDENCY = ("base", "offset")


class _Rows(NamedTuple):
    """Of something that every action has some of: per item, its action, and where it stands among the distinct ones."""

    action: NDArray[np.intp]
    items: NDArray[np.intp]


def _rows(lengths: Sequence[int], kinds: NDArray[np.integer]) -> _Rows:
    of_kind = np.array(lengths)
    first = np.cumsum(of_kind) - of_kind
    counts = of_kind[kinds]
    action = np.repeat(np.arange(len(kinds)), counts)
    begin = np.cumsum(counts) - counts
    items = np.arange(len(action)) + (first[kinds] - begin)[action]
    # As wide as numpy looks places up by.
    return _Rows(action, items)


def _joined(arrays: Sequence[Ints]) -> Ints:
    return np.concatenate(arrays).astype(np.int32)
