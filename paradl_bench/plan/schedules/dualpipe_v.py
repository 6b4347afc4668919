"""DualPipe in a V (DualPipeV): a rank computes forward of one micro-batch together with backward of another one.

Stages lie in a V, as under ZB-V. In the steady part the two stages of a rank go in opposite directions. Forward of the
one and backward of the other are one step, whose messages are sent when both are done. Kernels made for it hide the
experts' messages of each behind the compute of the other (DeepSeek-AI 2024, section 3.2.1). Here, as in torch unless it
is given a function for such steps, one stream computes forward and then backward.

Backward has two parts only where its weights' part fills a gap: before the steady part, and in the second half of the
cool-down. There the weights' parts wait in line, and the oldest goes first.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Literal

from paradl_bench.plan.schedules.one_forward_one_backward import refuse_fewer_than_stages
from paradl_bench.plan.schedules.placement import V_SHAPE
from paradl_bench.plan.schedules.schedule import Action, Direction, Schedule


class _Steps:
    """The actions of a rank, each of the next micro-batch that its stage has not done it for."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._next: Counter[tuple[Literal["FW", "BW"], int]] = Counter()
        self._waiting: deque[Action] = deque()

    def forward(self, stage: int) -> None:
        """Forward on a stage."""
        self._add("FW", stage)

    def backward(self, stage: int, *, parted: bool = False) -> None:
        """Backward on a stage: all of it, or the input's part, behind which the weights' part waits."""
        self._add("BW_input" if parted else "BW", stage)
        if parted:
            self._waiting.append(self.actions[-1]._replace(direction="BW_weight"))

    def both(self, forward: int, backward: int) -> None:
        """Forward on one stage and backward on the other, as one step."""
        self._add("FW", forward)
        self._add("BW", backward, joins=True)

    def weights(self) -> None:
        """The weights' part that has waited for longest."""
        self.actions.append(self._waiting.popleft())

    def _add(self, direction: Direction, stage: int, *, joins: bool = False) -> None:
        way: Literal["FW", "BW"] = "FW" if direction == "FW" else "BW"
        self.actions.append(Action(direction, stage, self._next[way, stage], joins))
        self._next[way, stage] += 1


def _order(rank: int, ranks: int, micro_batches: int) -> tuple[Action, ...]:
    steps, behind = _Steps(), ranks - rank - 1
    down, up = V_SHAPE.stages_of(rank, ranks)
    _fill(steps, down, up, rank, behind)
    for turn in range(micro_batches - 2 * ranks + rank + 1):
        if turn or behind:
            steps.both(down, up)
        else:
            # The last rank waits for nobody here: apart, the two send their messages sooner.
            steps.forward(down)
            steps.backward(up)
        steps.both(up, down)
    _empty(steps, down, up, rank, behind)
    return tuple(steps.actions)


def _fill(steps: _Steps, down: int, up: int, rank: int, behind: int) -> None:
    """Until micro-batches come back on both stages."""
    for _ in range(2 * behind):
        steps.forward(down)
    for _ in range(rank + 1):
        steps.forward(down)
        steps.forward(up)
    for _ in range(behind):
        steps.backward(up, parted=True)
        steps.weights()
        steps.forward(up)


def _empty(steps: _Steps, down: int, up: int, rank: int, behind: int) -> None:
    """From the last forward on the way down."""
    for _ in range(behind):
        steps.backward(up)
        steps.both(up, down)
    # Stages alternate; the first half of these is whole.
    for turn in range(2 * (rank + 1)):
        steps.backward(down if turn % 2 else up, parted=turn > rank)
    for _ in range(behind):
        steps.weights()
        steps.backward(down, parted=True)
    for _ in range(rank + 1):
        steps.weights()


SCHEDULE = Schedule(
    name="dualpipev",
    torch_name="DualPipeV",
    placement=V_SHAPE,
    order=_order,
    refusal=lambda ranks, micro_batches: refuse_fewer_than_stages(V_SHAPE.stages(ranks), micro_batches),
    source="DeepSeek-AI 2024 (arXiv:2412.19437), section 3.2.1; DeepSeek's DualPipeV; torch's ScheduleDualPipeV",
    splits_backward=True,
)
