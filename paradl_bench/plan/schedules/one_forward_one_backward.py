"""1F1B: once the pipeline is full, each stage alternates backward and forward, and so keeps few activations."""

from __future__ import annotations

from paradl_bench.plan.schedules.schedule import Action, Schedule


def _order(rank: int, ranks: int, micro_batches: int) -> tuple[Action, ...]:
    """As many forwards first as there are stages from this one on; the last stage starts to alternate at once."""
    ahead = min(micro_batches, ranks - rank)
    actions = [Action("FW", rank, index) for index in range(ahead)]
    for index in range(micro_batches):
        actions.append(Action("BW", rank, index))
        if ahead + index < micro_batches:
            actions.append(Action("FW", rank, ahead + index))
    return tuple(actions)


def refuse_fewer_than_stages(stages: int, micro_batches: int) -> str:
    """Refuses what torch does: fewer micro-batches than stages."""
    return "" if micro_batches >= stages else f"at least one a stage is needed, {stages} in all"


SCHEDULE = Schedule(
    name="1f1b",
    torch_name="1F1B",
    order=_order,
    refusal=refuse_fewer_than_stages,
    source="Narayanan et al. 2019 (PipeDream), synchronous as in DAPPLE (Fan et al. 2021); torch's Schedule1F1B",
    drops_messages=True,
)
