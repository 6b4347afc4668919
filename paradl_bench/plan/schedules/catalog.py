"""Pipeline schedules by name; each file beside this one that declares a ``SCHEDULE``, found by discovery."""

from __future__ import annotations

from paradl_bench.core.registry import discover, lookup
from paradl_bench.plan.schedules.schedule import Schedule


def schedules() -> dict[str, Schedule]:
    """Every schedule, by name."""
    return discover("paradl_bench.plan.schedules", "SCHEDULE", Schedule)


def schedule_name(given: str) -> str:
    """The name of a schedule that is given by it, or by torch's name, in any case; an unknown name as it is."""
    names = {other.lower(): name for name, schedule in schedules().items() for other in (name, schedule.torch_name)}
    return names.get(given.lower(), given)


def schedule_of(name: str) -> Schedule:
    """The schedule of a name.

    Raises:
        UserError: unknown; the message names the choices.
    """
    return lookup(schedules(), name, "schedule")
