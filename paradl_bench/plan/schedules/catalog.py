"""Pipeline schedules by name; each file beside this one that declares a ``SCHEDULE``, found by discovery."""

from __future__ import annotations

from paradl_bench.core.registry import discover, lookup
from paradl_bench.plan.schedules.schedule import Schedule


def schedules() -> dict[str, Schedule]:
    """Every schedule, by name."""
    return discover("paradl_bench.plan.schedules", "SCHEDULE", Schedule)


def names_by_torch_name() -> dict[str, str]:
    """The name of every schedule by the one that torch has for it."""
    return {schedule.torch_name: name for name, schedule in schedules().items()}


def schedule_name(given: str) -> str:
    """The name of a schedule that is given by it, or by torch's name, in any case; an unknown name as it is."""
    names = {name: name for name in schedules()} | {t.lower(): name for t, name in names_by_torch_name().items()}
    return names.get(given.lower(), given)


def schedule_of(name: str) -> Schedule:
    """The schedule of a name.

    Raises:
        UserError: unknown; the message names the choices.
    """
    return lookup(schedules(), name, "schedule")
