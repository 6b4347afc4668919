"""What to measure next, with the command that does it."""

from __future__ import annotations

from calibrate.report.explanation import weaknesses
from predict.validation.report.content import Content, Section
from predict.validation.shown.cells import Table

_SHOWN = 12


def section(content: Content) -> Section | None:
    """Where the profile is weak, as ``calibrate show`` says it; nothing where it is not."""
    found = weaknesses(content.profile)
    if not found:
        return None
    wanted = content.validation.serial_runs_wanted if content.validation else ()
    rows = [
        (each.kind, each.text, "" if each.size is None else f"{each.size:.1%}", each.command) for each in found[:_SHOWN]
    ]
    return Section(
        name="next",
        title="What to measure next",
        lines=["What is missing comes first, then what is inaccurate, then what is untested."],
        tables={"Where the profile is weak": Table(("kind", "what", "size", "command"), rows)},
        further={"Runs that are wanted": wanted} if wanted else {},
        documents={"weaknesses": found},
    )
