"""Interleaved 1F1B: two stages a rank, so that the pipeline fills in smaller steps and idles less.

Micro-batches go round in groups: a rank runs one group on its first stage, then the same group on its second one.
"""

from __future__ import annotations

from paradl_bench.schedules.schedule import Action, Schedule

_STAGES_PER_RANK = 2


def _rounds(ranks: int, micro_batches: int) -> int:
    return max(1, micro_batches // ranks)


def _order(rank: int, ranks: int, micro_batches: int) -> tuple[Action, ...]:
    group = micro_batches // _rounds(ranks, micro_batches)
    operations = _STAGES_PER_RANK * micro_batches
    # Two forwards more for each rank between this one and the last: the way there and back.
    ahead = min((_STAGES_PER_RANK - 1) * group + 2 * (ranks - 1 - rank), operations)
    forward = [_action("FW", index, group, rank, ranks) for index in range(operations)]
    backward = [_action("BW", index, group, rank, ranks) for index in range(operations)]
    actions = forward[:ahead]
    for index in range(operations):
        if ahead + index < operations:
            actions.append(forward[ahead + index])
        actions.append(backward[index])
    return tuple(actions)


def _action(direction: str, index: int, group: int, rank: int, ranks: int) -> Action:
    """The rank's forward or backward number ``index``: groups take turns over its stages, backward from the last."""
    turn, within = divmod(index, group)
    round_, local = divmod(turn, _STAGES_PER_RANK)
    micro_batch = round_ * group + within
    if direction == "FW":
        return Action("FW", local * ranks + rank, micro_batch)
    return Action("BW", (_STAGES_PER_RANK - 1 - local) * ranks + rank, micro_batch)


def _refusal(ranks: int, micro_batches: int) -> str:
    rounds = _rounds(ranks, micro_batches)
    if micro_batches % rounds == 0:
        return ""
    lower = micro_batches - micro_batches % ranks
    return f"{micro_batches} do not split into {rounds} equal groups; {lower} and {lower + ranks} would"


SCHEDULE = Schedule(
    name="interleaved",
    torch_name="Interleaved1F1B",
    stages_per_rank=_STAGES_PER_RANK,
    order=_order,
    refusal=_refusal,
    source="Narayanan et al. 2021 (arXiv:2104.04473), section 2.2; torch's ScheduleInterleaved1F1B",
)
