"""Zero bubble (ZB-H1): backward in two parts, of which that of the weights, which nobody waits for, fills idle time.

The input's gradient goes back to the stage before at once. The weights' gradients of a micro-batch follow: at once on
the first rank, as many micro-batches later as ranks stand before it on the others. So every rank has no more
micro-batches under way than the first rank of 1F1B has, and idles p - 1 times forward + input - weights (Qi et al.,
section 2.3 and Table 2), a third of what it does under 1F1B where the three take as long as each other.
"""

from __future__ import annotations

import itertools

from paradl_bench.plan.schedules.interleaved import refuse_unequal_groups
from paradl_bench.plan.schedules.schedule import Action, Schedule


def _order(rank: int, ranks: int, micro_batches: int) -> tuple[Action, ...]:
    ahead = min(ranks - 1 - rank, micro_batches)
    forward = [Action("FW", rank, index) for index in range(micro_batches)]
    of_input = [Action("BW_input", rank, index) for index in range(micro_batches)]
    of_weight = [Action("BW_weight", rank, index) for index in range(micro_batches)]
    turns = itertools.zip_longest(forward[ahead:], of_input, (*[None] * rank, *of_weight))
    alternating = [action for turn in turns for action in turn if action is not None]
    return (*forward[:ahead], *alternating)


SCHEDULE = Schedule(
    name="zb",
    torch_name="InterleavedZeroBubble",
    order=_order,
    refusal=refuse_unequal_groups,
    source="Qi et al. 2023 (arXiv:2401.10241), ZB-H1; torch's ScheduleInterleavedZeroBubble with one stage a rank",
    splits_backward=True,
)
