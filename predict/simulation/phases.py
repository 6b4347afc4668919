"""How a simulated iteration parts into phases: the one rule, for roles, stages of a pipeline and drawn timelines.

- A rank that waits for no other stage goes through phases one after the other. A turn of forward or backward lasts from
  the end of the turn before to the end of what it computes, whatever it waits for in between. The exchange lasts from
  there to the end of the last task of its phase; the update has what is left of the iteration.
- A stage of a pipeline waits for other stages within every phase. So a phase has what the stage computes of it, and
  what it waits for communication for layers, or for the exchange behind the last backward. What is left is idle time.

What is waited for input lies before the first and behind the last of these (:func:`waits_for_input`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paradl_bench.core.cache_keys import Answers
from paradl_bench.plan.tasks import Ints, Phase
from paradl_bench.strategies.passes.input_tasks import INPUT_PHASES
from predict.costs.input.input_closed_form import InputWait
from predict.costs.sourced import Floats
from predict.simulation.exposure import exposed_seconds
from predict.simulation.input_tasks import NO_WAIT, waits_for_input
from predict.simulation.simulator import Timeline
from predict.workload import Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasedTasks:
    """What is to be known of a rank's tasks, or segments of tasks; arrays of one length.

    Attributes:
        computes: whether it is on the stream that computes. names: of communication for layers, as in breakdowns; else
            empty.
        found: what timelines of these tasks are all asked for.
    """

    phase: Ints
    computes: NDArray[np.bool_]
    names: tuple[str, ...]
    found: Answers = field(init=False, default_factory=Answers, compare=False, repr=False)

    @property
    def in_turn(self) -> NDArray[np.integer]:
        """Tasks that compute forward or backward, in order."""
        return self.found.once(
            "in turn", lambda: np.flatnonzero(self.computes & ((self.phase == Phase.FW) | (self.phase == Phase.BW)))
        )

    @property
    def fetches(self) -> NDArray[np.bool_]:
        """Per task, whether it is of the input."""
        return self.found.once("fetches", lambda: np.isin(self.phase, INPUT_PHASES))

    def messages(self, phase: Phase) -> dict[str, list[int]]:
        """Tasks of communication for layers in a phase, by name."""
        return self.found.once(phase, lambda: self._messages(phase))

    def _messages(self, phase: Phase) -> dict[str, list[int]]:
        by_name: dict[str, list[int]] = {}
        for task in np.flatnonzero(~self.computes & (self.phase == phase)).tolist():
            if self.names[task]:
                by_name.setdefault(self.names[task], []).append(task)
        return by_name


class PhaseEnds(NamedTuple):
    """Where backward has ended, and where the exchange has, from the start of the iteration."""

    computed_s: float
    exchanged_s: float


def phase_ends(phase: Ints, computes: NDArray[np.bool_], end_s: Floats, begin_s: float = 0.0) -> PhaseEnds:
    """Ends of phases that follow each other, of tasks on one rank, the first of which begins at ``begin_s``."""
    turns = end_s[computes & ((phase == Phase.FW) | (phase == Phase.BW))]
    computed_s = float(turns.max(initial=begin_s))
    return PhaseEnds(computed_s, max(computed_s, float(end_s[phase == Phase.GE].max(initial=0.0))))


def timing_in_turn(line: Timeline, tasks: PhasedTasks) -> Timing:
    """Phases of a rank that waits for no other stage."""
    every = np.ones(len(line.end_s), bool)
    begin_s, waiting = waits_for_input(line, tasks.phase, tasks.fetches, every)
    in_turn = tasks.in_turn
    spans = np.diff(line.end_s[in_turn], prepend=begin_s)
    ends = phase_ends(tasks.phase, tasks.computes, line.end_s, begin_s)
    forward = float(spans[tasks.phase[in_turn] == Phase.FW].sum())
    return Timing(
        fw_s=forward,
        bw_s=ends.computed_s - begin_s - forward,
        ge_s=ends.exchanged_s - ends.computed_s,
        wu_s=max(line.iteration_s - waiting.input_s + begin_s - ends.exchanged_s, 0.0),
        **waiting._asdict(),
        exposed_communication_s=line.exposed_communication_s,
        overlap_s=line.overlap_s,
        fw_of_layers_s=exposed_seconds(line, tasks.computes, tasks.messages(Phase.FW)),
        bw_of_layers_s=exposed_seconds(line, tasks.computes, tasks.messages(Phase.BW)),
    )


def timing_of_stage(
    stage: int, line: Timeline, tasks: PhasedTasks, iteration_s: float, waiting: InputWait = NO_WAIT
) -> Timing:
    """Phases of a stage of a pipeline.

    Args:
        stage: its place along the pipeline. line: of its tasks. iteration_s: when the last stage ends.
        waiting: for input, which the first stage reads.
    """
    busy = line.end_s - line.start_s

    def computed(phase: Phase) -> float:
        return float(busy[tasks.computes & (tasks.phase == phase)].sum())

    waited = {phase: exposed_seconds(line, tasks.computes, tasks.messages(phase)) for phase in (Phase.FW, Phase.BW)}
    forward, backward = (computed(phase) + sum(waited[phase].values()) for phase in (Phase.FW, Phase.BW))
    update = computed(Phase.WU)
    exchange = _exposed_exchange(line, tasks) + computed(Phase.GE)
    return Timing(
        fw_s=forward,
        bw_s=backward,
        ge_s=exchange,
        wu_s=update,
        exposed_communication_s=line.exposed_communication_s,
        overlap_s=line.overlap_s,
        fw_of_layers_s=waited[Phase.FW],
        bw_of_layers_s=waited[Phase.BW],
        idle_s=iteration_s - forward - backward - exchange - update - waiting.input_s,
        **waiting._asdict(),
        stage=stage,
    )


def _exposed_exchange(line: Timeline, tasks: PhasedTasks) -> float:
    """Exchange after the last backward, less the copies out of buckets, which compute."""
    exchanging = ~tasks.computes & (tasks.phase == Phase.GE)
    if not exchanging.any():
        return 0.0
    last = line.end_s[tasks.computes & (tasks.phase == Phase.BW)].max()
    after = line.end_s[exchanging].max()
    copying = tasks.computes & (tasks.phase == Phase.GE) & (line.start_s >= last) & (line.end_s <= after)
    return max(0.0, float(after - last - (line.end_s - line.start_s)[copying].sum()))
