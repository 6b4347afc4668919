"""Interleaved 1F1B: two stages a rank, so that the pipeline fills in smaller steps and idles less.

Micro-batches go round in groups: a rank runs one group on its first stage, then the same group on its second one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from paradl_bench.plan.schedules.placement import LOOP
from paradl_bench.plan.schedules.schedule import Action, Direction, Schedule, in_turn


def _rounds(ranks: int, micro_batches: int) -> int:
    return max(1, micro_batches // ranks)


def _order(rank: int, ranks: int, micro_batches: int) -> tuple[Action, ...]:
    group = micro_batches // _rounds(ranks, micro_batches)
    operations = LOOP.stages_per_rank * micro_batches
    # Two forwards more for each rank between this one and the last: the way there and back.
    ahead = min((LOOP.stages_per_rank - 1) * group + 2 * (ranks - 1 - rank), operations)
    stages = LOOP.stages_of(rank, ranks)
    forward = _in_turn("FW", stages, group, micro_batches)
    backward = _in_turn("BW", stages[::-1], group, micro_batches)
    alternating = itertools.chain.from_iterable(zip(forward[ahead:], backward, strict=False))
    return (*forward[:ahead], *alternating, *backward[operations - ahead :])


def _in_turn(direction: Direction, stages: Sequence[int], group: int, micro_batches: int) -> list[Action]:
    """A rank's forwards, or backwards: groups of micro-batches, each on one stage after the other."""
    return [
        action
        for start in range(0, micro_batches, group)
        for stage in stages
        for action in in_turn(direction, stage, range(start, start + group))
    ]


def refuse_unequal_groups(ranks: int, micro_batches: int) -> str:
    """Refuses what torch does: micro-batches that do not go round in groups of one size."""
    rounds = _rounds(ranks, micro_batches)
    if micro_batches % rounds == 0:
        return ""
    lower = micro_batches - micro_batches % ranks
    return f"{micro_batches} do not split into {rounds} equal groups; {lower} and {lower + ranks} would"


SCHEDULE = Schedule(
    name="interleaved",
    torch_name="Interleaved1F1B",
    placement=LOOP,
    order=_order,
    refusal=refuse_unequal_groups,
    source="Narayanan et al. 2021 (arXiv:2104.04473), section 2.2; torch's ScheduleInterleaved1F1B",
)
