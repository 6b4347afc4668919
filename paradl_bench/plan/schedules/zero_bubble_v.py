"""Zero bubble in a V (ZB-V): two stages a rank, backward in two parts, on every rank the memory of 1F1B's first one.

Stages lie in a V. A micro-batch goes down from the first rank to the last, and up again to the first. That one has the
last stage too, and so starts backward first. Every rank has 2p micro-batches under way at most, of stages of half the
size. Where forward and both parts of backward take as long as each other, no rank idles between its first action and
its last one (Qi et al. 2023, section 6).

Until the cool-down the weights' part follows the input's at once. In the cool-down it waits where other ranks wait for
an input's gradient.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator

from paradl_bench.plan.schedules.placement import V_SHAPE
from paradl_bench.plan.schedules.schedule import Action, Direction, Schedule

_Turn = tuple[Direction, int]


def _order(rank: int, ranks: int, micro_batches: int) -> tuple[Action, ...]:
    numbers: defaultdict[_Turn, Iterator[int]] = defaultdict(itertools.count)
    actions = (Action(*turn, next(numbers[turn])) for turn in _turns(rank, ranks, micro_batches))
    # Fewer micro-batches than fill the pipeline leave out the turns of those that are missing.
    return tuple(action for action in actions if action.micro_batch < micro_batches)


def _turns(rank: int, ranks: int, micro_batches: int) -> list[_Turn]:
    """What a rank does on which stage; each the next micro-batch that this has not been done for."""
    down, up = V_SHAPE.stages_of(rank, ranks)
    behind = ranks - rank
    forward_down, input_down, weight_down = _of_stage(down)
    forward_up, input_up, weight_up = _of_stage(up)
    # Forwards on the way down end before the others do: the last turns have none left.
    steady = [forward_down, input_down, weight_down, forward_up, input_up, weight_up]
    return [
        # As many as go to the last rank and back before the first of them comes up to this one.
        *[forward_down] * (2 * behind - 1),
        *[forward_up, forward_down] * rank,
        *[forward_up, input_up, weight_up] * behind,
        *steady * (max(micro_batches, 2 * ranks - 1) - ranks),
        *[input_down, input_up] * rank,
        *[input_down, weight_down] * behind,
        *[weight_up] * rank,
        *[weight_down] * rank,
    ]


def _of_stage(stage: int) -> tuple[_Turn, _Turn, _Turn]:
    return ("FW", stage), ("BW_input", stage), ("BW_weight", stage)


SCHEDULE = Schedule(
    name="zbv",
    torch_name="ZBVZeroBubble",
    placement=V_SHAPE,
    order=_order,
    source="Qi et al. 2023 (arXiv:2401.10241), section 6; Qi et al. 2024 (arXiv:2405.15362); torch's"
    " ScheduleZBVZeroBubble",
    splits_backward=True,
)
