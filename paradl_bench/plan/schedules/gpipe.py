"""GPipe: all forwards, then all backwards, each in the order of micro-batches."""

from __future__ import annotations

from paradl_bench.plan.schedules.schedule import Action, Schedule


def _order(rank: int, ranks: int, micro_batches: int) -> tuple[Action, ...]:
    forward = [Action("FW", rank, index) for index in range(micro_batches)]
    backward = [Action("BW", rank, index) for index in range(micro_batches)]
    return (*forward, *backward)


SCHEDULE = Schedule(
    name="gpipe",
    torch_name="GPipe",
    order=_order,
    source="Huang et al. 2019 (GPipe); torch's ScheduleGPipe",
)
