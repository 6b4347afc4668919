"""Plans: the tasks of one iteration on each distinct role, as arrays.

A strategy turns (network, ranks, settings) into a plan; the closed forms, the simulator, the memory model and the
comparison with a real run all read the same one. A plan holds no durations: it names work, and a cost model gives
each *distinct* work its seconds. It is symbolic in the batch: the local batch is a number beside it, used by the cost
model alone.

Ranks that do the same are one role with a multiplicity, so that cost does not grow with the number of replicas.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from paradl_bench.core.cache_keys import Answers
from paradl_bench.network.graph import Layer
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.strategy import Strategy
from paradl_bench.plan.works.communication import Collective, HaloExchange, Scope, Transfer
from paradl_bench.plan.works.computing import Compute, ComputePhase, FrameworkOverhead, GradientPass, WeightUpdate
from paradl_bench.plan.works.moving import BucketCopy, CopyDirection, InputCopy, InputRead, Wait
from paradl_bench.plan.works.work import Communication, Phase, Sort, Stream, Work

__all__ = [
    "BucketCopy",
    "Collective",
    "Communication",
    "Compute",
    "ComputePhase",
    "CopyDirection",
    "FrameworkOverhead",
    "GradientPass",
    "HaloExchange",
    "InputCopy",
    "InputRead",
    "Phase",
    "Plan",
    "Role",
    "RoleBuilder",
    "Scope",
    "Sort",
    "Stream",
    "Transfer",
    "Wait",
    "WeightUpdate",
    "Work",
]

Ints = NDArray[np.int32]
Before = tuple[tuple[str, Collective], ...]
"""Collectives of the first two iterations, each with its ``when``, that a role issues over axes of their own."""
Setup = tuple[tuple[str, str, int, int], ...]
"""Collectives as (when, operation, message_bytes, count); ``when`` as in
:class:`~paradl_bench.records.training.training_record.IssuedCollective`.
"""
W = TypeVar("W", bound=Work)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskArrays:
    """The tasks of a role, one by one.

    Attributes:
        phase, stream, work: per task; ``work`` indexes the plan's distinct works.
        dependency_start, dependencies: compressed rows: task i waits for
            ``dependencies[dependency_start[i]:dependency_start[i + 1]]``, all of them earlier tasks.
        action: of a pipeline, per task the number of the schedule's action that it belongs to; -1 for none.
    """

    phase: Ints
    stream: Ints
    work: Ints
    dependency_start: Ints
    dependencies: Ints
    action: Ints | None = None

    def __post_init__(self) -> None:
        count = len(self.phase)
        if not len(self.stream) == len(self.work) == count or len(self.dependency_start) != count + 1:
            raise ValueError("the arrays of tasks differ in length")
        if self.action is not None and len(self.action) != count:
            raise ValueError(f"{len(self.action)} tasks of actions, {count} in all")
        lengths = np.diff(self.dependency_start)
        if self.dependency_start[0] != 0 or np.any(lengths < 0) or lengths.sum() != len(self.dependencies):
            raise ValueError("dependency_start does not part the dependencies into rows")
        rows = np.repeat(np.arange(count), lengths)
        if np.any(self.dependencies >= rows) or np.any(self.dependencies < 0):
            raise ValueError("a task waits for a later one")

    @property
    def tasks(self) -> int:
        """Number of tasks."""
        return len(self.phase)

    @property
    def laid_out(self) -> int:
        """All."""
        return self.tasks

    @property
    def whole(self) -> TaskArrays:
        """All of them."""
        return self

    @property
    def brief(self) -> Brief:
        """All of them, as one action."""
        return Brief(self, np.zeros(self.tasks, np.intp), *np.zeros((3, 1), np.intp))


@dataclass(frozen=True)
class Brief:
    """Tasks that stand for all of a role: each of its actions is like one here, and so is what is around it.

    Attributes:
        action: per task, the number of its action here, ascending; what follows the schedule's actions is one more.
        like: per action of the role, the first one here that it is like.
        forward, forward_here: per action of the role, and here, the one that computes its micro-batch forward.
    """

    tasks: TaskArrays
    action: NDArray[np.intp]
    like: NDArray[np.intp]
    forward: NDArray[np.intp]
    forward_here: NDArray[np.intp]

    @property
    def is_whole(self) -> bool:
        """Whether these are all tasks of the role."""
        return len(self.like) == len(self.forward_here)

    @cached_property
    def times(self) -> NDArray[np.intp]:
        """Per task, for how many of the role it stands."""
        return np.asarray(np.bincount(self.like, minlength=len(self.forward_here))[self.action])

    @cached_property
    def counted(self) -> NDArray[np.int64]:
        """How often the role does each work, as far as the last one that it does."""
        return np.bincount(self.tasks.work, weights=self.times).astype(np.int64)


class RoleTasks(Protocol):
    """The tasks of a role: arrays of them, or actions that are repeated."""

    @property
    def tasks(self) -> int:
        """How many these are."""

    @property
    def laid_out(self) -> int:
        """How many of them memory holds."""

    @property
    def whole(self) -> TaskArrays:
        """All of them."""

    @property
    def brief(self) -> Brief:
        """As few as stand for all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """What ``multiplicity`` ranks each do in one iteration.

    Attributes:
        arrays: its tasks; alike ranks share them.
        setup: collectives issued before the steady state that the tasks show and not in it.
        handshake: communication of the first iteration alone.
        exchanged_before: collectives of the first two iterations that stand in neither, as those within and between
            nodes, which later ones do not have.
    """

    name: str
    multiplicity: int
    arrays: RoleTasks
    setup: Setup = ()
    handshake: tuple[Communication, ...] = ()
    exchanged_before: Before = ()

    def __post_init__(self) -> None:
        if self.multiplicity < 1:
            raise ValueError(f"role {self.name!r} stands for {self.multiplicity} ranks")

    @property
    def tasks(self) -> int:
        """Number of tasks."""
        return self.arrays.tasks

    @property
    def phase(self) -> Ints:
        """Per task, as of :class:`TaskArrays`."""
        return self.arrays.whole.phase

    @property
    def stream(self) -> Ints:
        """Per task, as of :class:`TaskArrays`."""
        return self.arrays.whole.stream

    @property
    def work(self) -> Ints:
        """Per task, as of :class:`TaskArrays`."""
        return self.arrays.whole.work

    @property
    def dependency_start(self) -> Ints:
        """As of :class:`TaskArrays`."""
        return self.arrays.whole.dependency_start

    @property
    def dependencies(self) -> Ints:
        """As of :class:`TaskArrays`."""
        return self.arrays.whole.dependencies

    @property
    def action(self) -> Ints | None:
        """Per task, as of :class:`TaskArrays`."""
        return self.arrays.whole.action

    def counts(self, works: int) -> NDArray[np.int64]:
        """How often an iteration does each of so many works."""
        counted = self.arrays.brief.counted
        return np.append(counted, np.zeros(works - len(counted), np.int64))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The tasks of one iteration of a strategy.

    Attributes:
        works: distinct works that the roles' tasks point at.
        local_batch: samples a rank computes in an iteration.
        micro_batches: into how many parts it computes them, one after the other.
        stage_ranks: of a pipeline, per stage the place along its axis that holds it.
        recomputes: whether some of forward is computed again in backward.
        notes: what the plan leaves out, in words, for reports.
        positions: per position along the axes that shard layers (the last one counting fastest), the index of the role
            that stands there.
        per_node: ranks that exchange gradients on a node, where their roles differ by their place on it: ``positions``
            then has all positions once a place; 1 where they do not.
        exchange_axes: indices of the axes over which gradients are exchanged, as are the collectives of ``Role.setup``.
        sharded: layers with the shapes that ranks run in the place of the network's, each operation once, and the bytes
            of the parameters that a rank holds of it.
    """

    strategy: Strategy
    network: str
    local_batch: int
    works: tuple[Work, ...]
    roles: tuple[Role, ...]
    notes: tuple[str, ...] = ()
    positions: tuple[int, ...] = (0,)
    exchange_axes: tuple[int, ...] = ()
    sharded: tuple[tuple[Layer, int], ...] = ()
    micro_batches: int = 1
    stage_ranks: tuple[int, ...] = ()
    per_node: int = 1
    recomputes: bool = False
    found: Answers = field(init=False, compare=False, repr=False, default_factory=Answers)
    """What follows from the tasks alone."""

    def __post_init__(self) -> None:
        if sum(role.multiplicity for role in self.roles) != self.strategy.ranks:
            raise ValueError(f"the roles of {self.strategy} do not add up to {self.strategy.ranks} ranks")
        for role in self.roles:
            works = role.arrays.brief.tasks.work
            if len(works) and not 0 <= works.min() <= works.max() < len(self.works):
                raise ValueError(f"role {role.name!r}: a task points at no work of the plan")

    def collectives(self, role: int = 0) -> Counter[tuple[str, int, int]]:
        """How often one iteration issues each (operation, message_bytes, group size), on a rank of a role."""
        counts: Counter[tuple[str, int, int]] = Counter()
        for work in self.communication(role):
            if isinstance(work, Collective):
                counts[work.operation, work.message_bytes, work.ranks] += 1
        return counts

    def role_of(self, rank: int) -> int:
        """Index of the role that a rank plays."""
        place = exchanging = 0
        for index, (axis, at) in enumerate(zip(self.strategy.axes, self.strategy.coordinates(rank), strict=True)):
            if not axis.has(Trait.DIVIDES_BATCH):
                place = place * axis.degree + at
            if index in self.exchange_axes:
                exchanging = exchanging * axis.degree + at
        local = exchanging % self.per_node
        return self.positions[local * (len(self.positions) // self.per_node) + place]

    def of_kind(self, kind: type[W], role: Role | None = None) -> Mapping[int, W]:
        """Works of one kind by their index; those of a role in the order in which it first does them."""
        if role is None:

            def find() -> dict[int, W]:
                return {index: work for index, work in enumerate(self.works) if isinstance(work, kind)}

            return self.found.once(("works", kind), find)
        chosen = ((index, self.works[index]) for index in dict.fromkeys(role.arrays.brief.tasks.work.tolist()))
        return {index: work for index, work in chosen if isinstance(work, kind)}

    def of_sort(self, *sorts: Sort) -> NDArray[np.bool_]:
        """Per work, whether it is of one of these sorts."""
        return np.array([work.sort in sorts for work in self.works], bool)

    def of_layers(self, role: int = 0) -> list[Communication]:
        """Communication for layers, in every iteration alike: all of FW and BW but the broadcasts of buffers."""
        return [work for work in self.communication(role, phases=(Phase.FW, Phase.BW)) if work.is_of_layer]

    def communication(self, role: int = 0, *, phases: tuple[Phase, ...] = tuple(Phase)) -> list[Communication]:
        """Collectives and messages that a rank of a role issues in one iteration, in the plan's order."""
        tasks, issued = self.roles[role], self.of_kind(Communication)
        # Plain numbers: a role has many tasks, and one of numpy's takes long to be compared with a phase.
        placed = zip(tasks.work.tolist(), tasks.phase.tolist(), strict=True)
        return [issued[index] for index, phase in placed if index in issued and phase in phases]


@dataclass(slots=True)
class RoleBuilder:
    """Appends the tasks of one role in order and ends in arrays; equal works are stored once in ``works``.

    A plan of several roles starts a builder a role, over one ``works``.
    """

    works: dict[Work, int] = field(default_factory=dict)
    phase: array[int] = field(default_factory=lambda: array("i"))
    stream: array[int] = field(default_factory=lambda: array("i"))
    work: array[int] = field(default_factory=lambda: array("i"))
    dependency_start: array[int] = field(default_factory=lambda: array("i", (0,)))
    dependencies: array[int] = field(default_factory=lambda: array("i"))

    def add(self, work: Work, phase: Phase, stream: Stream, after: tuple[int, ...] = ()) -> int:
        """Append a task that waits for the tasks ``after``; returns its index."""
        self.phase.append(phase)
        self.stream.append(stream)
        self.work.append(self.works.setdefault(work, len(self.works)))
        self.dependencies.extend(after)
        self.dependency_start.append(len(self.dependencies))
        return len(self.phase) - 1

    def last_of(self, stream: Stream) -> int:
        """The last task so far of a stream that has one."""
        return next(task for task in reversed(range(self.tasks)) if self.stream[task] == stream)

    def copy(self) -> RoleBuilder:
        """One that goes on from here by itself, over the same works."""
        arrays = (self.phase, self.stream, self.work, self.dependency_start, self.dependencies)
        return RoleBuilder(self.works, *(numbers[:] for numbers in arrays))

    def repeat(self, start: int, times: int, since: int = 0) -> int:
        """Append the tasks from ``start`` on so many times more; returns how many tasks that are.

        Each time they wait for what lies as far in front of them as the first time, but for tasks before ``since``:
        for these all of them wait.
        """
        count, turns = self.tasks - start, np.arange(1, max(times, 0) + 1, dtype=np.int32)[:, None]
        for numbers in (self.phase, self.stream, self.work):
            numbers.extend(numbers[start:] * len(turns))
        bounds = np.array(self.dependency_start[start:], np.int32)
        blocking = np.array(self.dependencies[bounds[0] :], np.int32)
        moved = np.where(blocking >= since, blocking + turns * np.int32(count), blocking)
        self.dependencies.frombytes(moved.tobytes())
        self.dependency_start.frombytes((bounds[1:] + turns * np.int32(len(blocking))).tobytes())
        return count * len(turns)

    @property
    def tasks(self) -> int:
        """Tasks so far."""
        return len(self.phase)

    def build(self, name: str, multiplicity: int, setup: Setup = (), exchanged_before: Before = ()) -> Role:
        """The role."""
        return Role(
            name=name,
            multiplicity=multiplicity,
            arrays=self.arrays(),
            setup=setup,
            exchanged_before=exchanged_before,
        )

    def arrays(self) -> TaskArrays:
        """Its tasks."""
        return TaskArrays(
            phase=np.array(self.phase, np.int32),
            stream=np.array(self.stream, np.int32),
            work=np.array(self.work, np.int32),
            dependency_start=np.array(self.dependency_start, np.int32),
            dependencies=np.array(self.dependencies, np.int32),
        )
