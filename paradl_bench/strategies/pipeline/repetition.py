"""Tasks of a rank of a pipeline: those of an action once, repeated for every micro-batch. Torch-free.

What a rank does of one micro-batch on one stage is the same for the next one, but for where its tasks stand. So a plan
is put together of arrays: what an action waits for is in its own tasks, in the forward of its micro-batch, or the end
of the action before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paradl_bench.plan.schedules.ordered import Order
from paradl_bench.plan.schedules.surroundings import representatives
from paradl_bench.plan.tasks import Brief, Ints, RoleBuilder, TaskArrays, Work

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


class RepeatedTasks:
    """The tasks of a rank: those of a few actions, in the order in which its schedule repeats them, and then others.

    Args:
        distinct: the actions. order: of all. shorter: makes orders of fewer micro-batches, from few to many.
        end: what waits for all that the actions are done with.
    """

    def __init__(
        self,
        distinct: Sequence[ActionTasks],
        order: Order,
        shorter: Callable[[], Iterator[Order]],
        end: TaskArrays,
    ) -> None:
        self._distinct, self._order, self._shorter, self._end = distinct, order, shorter, end
        lengths = np.array([len(action.phase) for action in distinct])
        self.tasks = int(lengths[order.kinds].sum()) + end.tasks
        """How many these are."""

    @property
    def laid_out(self) -> int:
        """How many of them memory holds: few, unless all were asked for."""
        return self.brief.tasks.tasks + ("whole" in self.__dict__) * self.tasks

    @cached_property
    def whole(self) -> TaskArrays:
        """All of them: a large pipeline has millions, which few ask for."""
        return repeat(self._distinct, self._order, self._end)

    @cached_property
    def brief(self) -> Brief:
        """Of so few micro-batches that every action is still like one of these; of all where there are no fewer."""
        whole = self._with_end(self._order)
        for order in self._shorter():
            short = self._with_end(order)
            like = representatives(whole, short)
            if like is not None:
                return _brief(repeat(self._distinct, order, self._end), whole, short, like)
        return _brief(self.whole, whole, whole, np.arange(len(whole.kinds)))

    def _with_end(self, order: Order) -> Order:
        """An order with what follows it, as one more action of a kind of its own."""
        return Order(
            kinds=np.append(order.kinds, len(self._distinct)),
            forwards=np.append(order.forwards, len(order.kinds)),
            marks=np.append(order.marks, order.marks[-1:]),
        )


def _brief(tasks: TaskArrays, whole: Order, short: Order, like: NDArray[np.intp]) -> Brief:
    assert tasks.action is not None
    action = np.where(tasks.action >= 0, tasks.action, len(short.kinds) - 1).astype(np.intp)
    return Brief(tasks, action, like, whole.forwards, short.forwards)


def repeat(distinct: Sequence[ActionTasks], order: Order, end: TaskArrays) -> TaskArrays:
    """The tasks of all actions of a rank, and those that wait for all that these are done with."""
    kinds = order.kinds
    lengths = np.array([len(action.phase) for action in distinct])[kinds]
    starts = np.cumsum(lengths) - lengths
    computed = starts + np.array([action.computed for action in distinct])[kinds]
    # Nothing stands before the first action, which waits for nothing there.
    bases = np.stack([starts, starts[order.forwards], np.append(0, computed[:-1])])
    tasks = rows_of([len(action.phase) for action in distinct], kinds)
    blocking = rows_of([len(action.base) for action in distinct], kinds)
    done = rows_of([len(action.done) for action in distinct], kinds)
    waits = _joined([action.waits for action in distinct])[tasks.items]
    base, offset = (_joined([getattr(action, name) for action in distinct])[blocking.items] for name in _DEPENDENCY)
    of_actions = (_joined([getattr(action, name) for action in distinct])[tasks.items] for name in _TASK)
    phase, stream, work = (
        np.append(of_task, getattr(end, name)) for of_task, name in zip(of_actions, _TASK, strict=True)
    )
    dependencies = bases[base, blocking.action] + offset
    finished = starts[done.action] + _joined([action.done for action in distinct])[done.items]
    # The first of those at the end waits for all that is done.
    rows = len(dependencies) + len(finished) + end.dependency_start[1:]
    return TaskArrays(
        phase=phase,
        stream=stream,
        work=work,
        dependency_start=_as_ints(np.concatenate([[0], np.cumsum(waits), rows])),
        dependencies=_as_ints(np.concatenate([dependencies, finished, end.dependencies + len(tasks.items)])),
        action=_as_ints(np.append(tasks.action, np.full(end.tasks, -1))),
    )


def moved(
    tasks: ActionTasks, works: dict[Work, int], layers: Mapping[str, str], cuts: Mapping[int, int]
) -> ActionTasks:
    """The same tasks on another stage, whose works are added where they are new, in the order in which they come.

    Args:
        works: by number; a plan's. layers: names there, by those here. cuts: likewise, of the rank's stages.
    """
    numbers, first = np.unique(tasks.work, return_index=True)
    known, number_there = list(works), np.zeros(len(works), np.int32)
    for number in numbers[np.argsort(first)].tolist():
        number_there[number] = works.setdefault(known[number].on_other_stage(layers, cuts), len(works))
    return replace(tasks, work=number_there[tasks.work])


_TASK = ("phase", "stream", "work")
_DEPENDENCY = ("base", "offset")


class Rows(NamedTuple):
    """Of something that every action has some of: per item, its action, and where it stands among the distinct ones."""

    action: NDArray[np.intp]
    items: NDArray[np.intp]


def rows_of(lengths: Sequence[int], kinds: NDArray[np.integer]) -> Rows:
    """The items of all actions, by how many each kind of action has."""
    of_kind = np.array(lengths)
    first = np.cumsum(of_kind) - of_kind
    counts = of_kind[kinds]
    action = np.repeat(np.arange(len(kinds)), counts)
    begin = np.cumsum(counts) - counts
    items = np.arange(len(action)) + (first[kinds] - begin)[action]
    # As wide as numpy looks places up by.
    return Rows(action, items)


def _joined(arrays: Sequence[Ints]) -> Ints:
    return _as_ints(np.concatenate(arrays))


def _as_ints(values: NDArray[np.integer]) -> Ints:
    return values.astype(np.int32, copy=False)
