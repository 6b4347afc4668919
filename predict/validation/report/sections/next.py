"""What to measure next, with the command that does it."""

from __future__ import annotations

from calibrate.report.explanation import weaknesses
from predict.validation.report.content import Content, Section
from predict.validation.shown.cells import Table

_SHOWN = 12


def section(content: Content) -> Section | None:
    """Where the profile is weak, as ``calibrate show`` says it; nothing where it is not."""
    weak = weaknesses(content.profile)
    if not weak:
        return None
    wanted = content.validation.serial_runs_wanted if content.validation else ()
    rows = [
        (weakness.kind, weakness.text, "" if weakness.size is None else f"{weakness.size:.1%}", weakness.command)
        for weakness in weak[:_SHOWN]
    ]
    return Section(
        name="next",
        title="What to measure next",
        lines=["What is missing comes first, then what is inaccurate, then what is untested."],
        tables={"Where the profile is weak": Table(("kind", "what", "size", "command"), rows)},
        further={"Runs that are wanted": wanted} if wanted else {},
        documents={"weaknesses": weak},
    )
