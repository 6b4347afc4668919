"""Simulation of a pipeline: all of its roles together, since a stage waits for what its neighbours send.

A receive ends when the matching send does; a send takes the time of its messages (alpha + m beta each) on the sender's
communication stream, beside compute. ``overlapped=False`` lets nothing be computed while a transfer is under way, as
ParaDL's closed form assumes; with equal stages both then agree.

Replicas of a stage are one role. Where an axis shares layers, ranks at one position along it form a line of roles from
the first stage to the last, which receive from and send to each other alone; lines are simulated each by itself, the
slowest is the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paradl_bench.core.cache_keys import Answers
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.tasks import Ints, Plan, Role, Sort, Stream
from predict.costs.priced import PricedPlan
from predict.costs.sourced import Floats
from predict.simulation.exposure import overlapped_and_exposed
from predict.simulation.input_tasks import waits_for_input
from predict.simulation.phases import timing_of_stage
from predict.simulation.pipelines.alike_segments import AlikeSegments, Places, joined
from predict.simulation.pipelines.stage import Ended, Stage, Transfers, edges_of, meetings_of
from predict.simulation.pipelines.windows import LineNodes, last_stage
from predict.simulation.simulator import (
    LANES,
    TaskGraph,
    Timeline,
    iteration_seconds,
    merge_graphs,
    simulate,
    sums_within,
)
from predict.workload import Timing


def lines_of_stages(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Indices of the roles from the first stage to the last, for each distinct position along the other axes."""
    axes = [axis for axis in plan.strategy.axes if not axis.has(Trait.DIVIDES_BATCH)]
    along = next(index for index, axis in enumerate(axes) if axis.has(Trait.STAGES))
    places = np.array(plan.positions).reshape([axis.degree for axis in axes])
    lines = np.moveaxis(places, along, -1).reshape(-1, axes[along].degree)
    return tuple(dict.fromkeys(tuple(line) for line in lines.tolist()))


class PipelineSimulation:
    """A pipeline's plan, coalesced and joined once, to be run under many costs of its works.

    Args:
        straggler: per work, how much longer the slowest rank takes. overlapped: false lets a rank compute nothing
            while it sends. merge: false keeps every task a segment of its own.
        slower: per role, how many times longer its rank computes, and, with ``slow_copies``, copies; empty for all
            alike.
        blocking: works that go on beside what is in flight.
    """

    def __init__(
        self,
        plan: Plan,
        straggler: Floats,
        *,
        overlapped: bool = True,
        merge: bool = True,
        slower: Sequence[float] = (),
        slow_copies: bool = True,
        blocking: frozenset[int] = frozenset(),
    ) -> None:
        # What ranks of a host take from each other, the straggler factor and the answer are all simulated of one plan,
        # and so are other links and devices.
        def find() -> tuple[_Line, ...]:
            return _lines(plan, overlapped=overlapped, merge=merge, blocking=blocking)

        lines = plan.found.once(("lines", overlapped, merge, blocking), find)
        self.lines = [StageLine(line, straggler) for line in lines]
        for of_line, line in zip(self.lines, lines_of_stages(plan), strict=True):
            if slower:
                of_line.stretch_stages([slower[index] for index in line], copies=slow_copies)

    @classmethod
    def of_priced(cls, priced: PricedPlan, straggler: Floats, *, merge: bool = True) -> PipelineSimulation:
        """Of a priced plan, with its slow ranks and its calls that go on beside the exchange."""
        return cls(
            priced.plan,
            straggler,
            merge=merge,
            slower=priced.slower,
            slow_copies=priced.slow_copies,
            blocking=priced.blocking,
        )

    def timing(self, seconds: Floats, compute_slowdown: Floats, communication_slowdown: Floats) -> Timing:
        """Phases of the rank that ends last: forward, backward and exchange as it was busy with them, then idle time.

        Communication for layers is a part of forward and backward, as in a run.
        """
        timings = [line.timing(seconds, compute_slowdown, communication_slowdown) for line in self.lines]
        return max(timings, key=lambda timing: timing.iteration_s)

    def iteration_s(self, *costs: Floats) -> Floats:
        """When the last role ends, under each row of costs per work."""
        return np.asarray(np.max([line.iteration_s(*costs) for line in self.lines], axis=0))

    def timelines(self, *costs: Floats) -> list[Timeline]:
        """Those of each of :func:`lines_of_stages`: segments (tasks, unless merged) role after role."""
        return [line.run(*costs) for line in self.lines]


class Computing(NamedTuple):
    """When the ranks of a line compute: segments, from the start of the iteration; arrays of one length.

    Attributes:
        stage: along the line. start_s, end_s: of the segment.
        task_work, task_segment: of every task that computes, its work and the index of the segment that it lies in.
    """

    stage: NDArray[np.integer]
    start_s: Floats
    end_s: Floats
    task_work: Places
    task_segment: NDArray[np.integer]


def _lines(plan: Plan, *, overlapped: bool, merge: bool, blocking: frozenset[int]) -> tuple[_Line, ...]:
    alike, transfers, meetings = Answers(), Transfers(plan), meetings_of(plan)

    def stage(role: Role) -> Stage:
        return alike.once(
            id(role.arrays),
            lambda: Stage(plan, role, transfers, meetings, blocking=blocking, overlapped=overlapped, merge=merge),
        )

    return tuple(_Line(plan, [stage(plan.roles[index]) for index in line]) for line in lines_of_stages(plan))


class LineTasks:
    """The single tasks of a line, role after role: millions, while most predictions ask for windows alone."""

    def __init__(self, plan: Plan, stages: Sequence[Stage]) -> None:
        # The plan keeps its lines: one that held the plan would keep both from being freed at once.
        self._stages, self._copies = stages, plan.of_sort(Sort.COPY)

    @cached_property
    def work(self) -> Places:
        """The work of each."""
        return _as_places(np.concatenate([stage.whole.tasks.work for stage in self._stages]))

    @cached_property
    def stage(self) -> Ints:
        """The place along the line of each."""
        tasks = [stage.whole.tasks.tasks for stage in self._stages]
        return np.repeat(np.arange(len(tasks), dtype=np.int32), tasks)

    @cached_property
    def computes(self) -> NDArray[np.bool_]:
        """Whether each lies on the compute stream."""
        return np.asarray(np.concatenate([stage.whole.tasks.stream for stage in self._stages]) == Stream.COMPUTE)

    @cached_property
    def copies(self) -> NDArray[np.bool_]:
        """Whether each is a copy."""
        return np.asarray(self._copies[self.work])

    @cached_property
    def segment(self) -> Places:
        """The segment that holds each."""
        joined = [stage.whole.condensed for stage in self._stages]
        starts = np.cumsum([0, *(of_stage.graph.tasks for of_stage in joined)])
        own = (of_stage.segment + start for of_stage, start in zip(joined, starts, strict=False))
        return _as_places(np.concatenate(list(own)))


class _Line:
    """Stages that send to each other, from the first to the last: all of it that no costs change."""

    def __init__(self, plan: Plan, stages: Sequence[Stage]) -> None:
        self.stages, self.tasks = stages, LineTasks(plan, stages)

    @cached_property
    def graph(self) -> TaskGraph:
        """All segments, of which a long pipeline has millions."""
        joined = [stage.whole for stage in self.stages]
        edges = edges_of([Ended(of_stage.ends, of_stage.meets) for of_stage in joined])
        return merge_graphs([of_stage.condensed.graph for of_stage in joined], edges)

    @cached_property
    def alike(self) -> AlikeSegments:
        """Of all segments."""
        return joined([stage.whole.alike for stage in self.stages])

    @cached_property
    def segment_work(self) -> Places:
        """Per segment, the work of its first task."""
        return np.concatenate([stage.whole.work for stage in self.stages])

    @cached_property
    def role(self) -> NDArray[np.integer]:
        """Per segment, the place of its stage."""
        return np.repeat(np.arange(len(self.stages)), [len(stage.whole.work) for stage in self.stages])

    @cached_property
    def fetches(self) -> bool:
        """Whether any stage has tasks of the input."""
        return any(stage.brief.fetches for stage in self.stages)

    @cached_property
    def nodes(self) -> LineNodes:
        """Those of all stages."""
        alike = {id(stage): stage.nodes for stage in self.stages}
        number = {key: index for index, key in enumerate(alike)}
        edges = edges_of([stage.ended for stage in self.stages])
        return LineNodes(list(alike.values()), [number[id(stage)] for stage in self.stages], edges)


class StageLine:
    """Stages that send to each other, each of whose works takes so much longer on the slowest rank."""

    def __init__(self, line: _Line, straggler: Floats) -> None:
        self._line, self._straggler = line, straggler
        # Per task, how many times longer its stage takes; None where all stages are alike.
        self._longer: Floats | None = None

    @property
    def tasks(self) -> LineTasks:
        """Its single tasks."""
        return self._line.tasks

    def stretch_stages(self, factors: Sequence[float], *, copies: bool) -> None:
        """Let each stage compute, and copy where copies take longer too, so many times longer."""
        tasks = self.tasks
        longer = tasks.computes | tasks.copies if copies else tasks.computes & ~tasks.copies
        self._longer = np.where(longer, np.asarray(factors)[tasks.stage], 1.0)

    def task_seconds(self, seconds: Floats) -> Floats:
        """Per task, from seconds per work: one row of them or several."""
        of_tasks = np.asarray((seconds * self._straggler).take(self.tasks.work, axis=-1))
        return of_tasks if self._longer is None else of_tasks * self._longer

    def run(self, seconds: Floats, *slowdowns: Floats, added_s: Floats | None = None) -> Timeline:
        """The timeline of all stages' segments under costs per work, and so many seconds more per task."""
        of_segments = (of_works.take(self._line.segment_work, axis=-1) for of_works in slowdowns)
        return simulate(self._line.graph, self._segment_seconds(seconds, added_s), *of_segments)

    def iteration_s(self, seconds: Floats, *slowdowns: Floats) -> Floats:
        """When the last segment ends, under each row of costs per work: seconds, slow-downs."""
        if self._longer is None:
            return self._line.nodes.iteration_s(seconds * self._straggler, *slowdowns)
        of_segments = (of_works.take(self._line.segment_work, axis=-1) for of_works in slowdowns)
        return iteration_seconds(self._line.graph, self._segment_seconds(seconds, None), *of_segments)

    def _segment_seconds(self, seconds: Floats, added_s: Floats | None) -> Floats:
        if added_s is None and self._longer is None:
            return self._line.alike.seconds(seconds * self._straggler)
        of_tasks = self.task_seconds(seconds)
        if added_s is not None:
            of_tasks = np.maximum(of_tasks + added_s, 0.0)
        return sums_within(self.tasks.segment, of_tasks, self._line.graph.tasks)

    def computing(self, *costs: Floats) -> Computing:
        """When its ranks compute."""
        line, chosen = self.run(*costs), self._line.graph.lane % LANES == Stream.COMPUTE
        index = np.cumsum(chosen) - 1
        tasks = np.flatnonzero(chosen[self.tasks.segment])
        return Computing(
            stage=self._line.role[chosen],
            start_s=line.start_s[chosen],
            end_s=line.end_s[chosen],
            task_work=self.tasks.work[tasks],
            task_segment=index[self.tasks.segment[tasks]],
        )

    def timing(self, seconds: Floats, *slowdowns: Floats) -> Timing:
        """Phases of the stage that ends last."""
        if self._longer is None and not self._line.fetches:
            late = seconds * self._straggler
            last, start_s, end_s, iteration_s = self._line.nodes.last(late, *slowdowns)
            stage = self._line.stages[last].whole
            of_last = stage.windows.timeline(start_s, end_s, late, *slowdowns)
            return timing_of_stage(last, of_last, stage.phased, iteration_s)
        return self._timing_of_all(self.run(seconds, *slowdowns))

    def _timing_of_all(self, line: Timeline) -> Timing:
        stages = [stage.whole for stage in self._line.stages]
        borders = np.cumsum([len(stage.work) for stage in stages])[:-1]
        starts, ends = np.split(line.start_s, borders), np.split(line.end_s, borders)
        phased = [stage.phased for stage in stages]
        fetches = np.concatenate([of_stage.fetches for of_stage in phased])
        phase = np.concatenate([of_stage.phase for of_stage in phased])
        _, waiting = waits_for_input(line, phase, fetches, self._line.role == 0)
        last = last_stage([np.where(of.fetches, 0.0, end_s) for of, end_s in zip(phased, ends, strict=True)])
        lane = stages[last].condensed.graph.lane
        beside = overlapped_and_exposed(starts[last], ends[last], lane)
        of_last = Timeline(starts[last], ends[last], *beside)
        return timing_of_stage(last, of_last, phased[last], line.iteration_s, waiting)


def _as_places(indices: Ints) -> Places:
    """Indices in the width that numpy looks places up by; narrower ones it would widen in each simulation, slowly."""
    return indices.astype(np.intp)
