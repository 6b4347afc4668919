"""A diagnosis as a table for a person."""

from __future__ import annotations

from paradl_bench.core.terminal.command_line import open_console
from paradl_bench.core.terminal.tables import table
from paradl_bench.core.units import format_difference, format_seconds
from predict.prediction.confidence import confidence_in
from predict.validation.diagnosis.findings import Diagnosis, Finding

_NOT_APPLICABLE = "does not apply"
_COLUMNS = ("limitation or bottleneck", "category", "comes of", "phases", "share", "90%", "state", "evidence")


def print_diagnosis(diagnosis: Diagnosis, *, why: bool = False) -> None:
    """The rows of what applies, then remedies, and what the prediction rests on in one line.

    Args:
        why: rows of what does not apply too, and all remarks.
    """
    console = open_console()
    shown = [finding for finding in diagnosis.findings if why or finding.state != _NOT_APPLICABLE]
    console.print(table(_COLUMNS, [_row(finding) for finding in shown], title=_title(diagnosis)))
    if len(shown) < len(diagnosis.findings):
        names = ", ".join(hidden.limitation.name for hidden in diagnosis.findings if hidden not in shown)
        console.print(f"{_NOT_APPLICABLE} to {diagnosis.strategy}: {names}", highlight=False)
    there = [finding for finding in diagnosis.findings if finding.state in ("present", "possible")]
    if not there:
        console.print(f"No limitation takes {diagnosis.at_least:.0%} of the iteration or more.", highlight=False)
    remedies = (line for finding in there if diagnosis.remedies_tried for line in _remedies(finding))
    rests = confidence_in([(diagnosis.strategy, diagnosis)]).lines(why=why)
    for line in (*remedies, *diagnosis.said, *rests):
        console.print(line, highlight=False)


def _title(diagnosis: Diagnosis) -> str:
    against = f", measured in {diagnosis.run}" if diagnosis.run else ", predicted"
    whole = format_seconds(diagnosis.iteration_s)
    return f"{diagnosis.model} {diagnosis.strategy}, batch {diagnosis.batch}: an iteration of {whole}{against}"


def _row(finding: Finding) -> tuple[str, ...]:
    about, ends = finding.limitation, finding.share_interval
    return (
        about.name,
        about.category,
        about.comes_of,
        " ".join(about.phases),
        "" if finding.share is None else f"{finding.share:.1%}",
        "" if ends is None or finding.seconds_s is None else f"{ends[0]:.1%} to {ends[1]:.1%}",
        finding.state,
        finding.evidence,
    )


def _remedies(finding: Finding) -> list[str]:
    name = finding.limitation.name
    if not finding.remedies:
        return [f"{name}: none of the changes that were tried helps"]
    lines = []
    for remedy in finding.remedies:
        gain, low, high = (format_difference(value, 1) for value in (remedy.gain, *remedy.gain_interval))
        faster = f"{format_seconds(remedy.iteration_s)}, {gain} samples/s (90%: {low} to {high})"
        lines += [f"{name}: {remedy.change}: {faster}", f"  {remedy.command}"]
    return lines
