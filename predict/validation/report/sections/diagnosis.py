"""What limits the configuration, and what would help."""

from __future__ import annotations

from paradl_bench.core.units import format_difference, format_seconds
from predict.validation.diagnosis.findings import Finding
from predict.validation.report.content import Content, Figure, Section
from predict.validation.shown.cells import Table


def section(content: Content) -> Section:
    """As ``predict diagnose`` says it, on the run where there is one."""
    diagnosis = content.diagnosis
    there = [finding for finding in diagnosis.findings if finding.state in ("present", "possible")]
    basis = f"measured in {diagnosis.run}" if diagnosis.run else "predicted"
    lines = [f"An iteration of {format_seconds(diagnosis.iteration_s)}, {basis}."]
    if not there:
        lines.append(f"Nothing takes {diagnosis.at_least:.0%} of it or more.")
    helpless = [finding.limitation.name for finding in there if not finding.remedies]
    if helpless and diagnosis.remedies_tried:
        lines.append(f"None of the changes that were tried helps against {', '.join(helpless)}.")
    tables = {"All limitations": _table(diagnosis.findings)}
    if any(finding.remedies for finding in there):
        tables = {"What would help": _remedies(there), **tables}
    notes = (*diagnosis.said, *(f"extrapolated: {line}" for line in diagnosis.extrapolated), *diagnosis.notes)
    return Section(
        name="diagnosis",
        title="What limits it, and what would help",
        lines=lines,
        figures=(_shares(content),),
        tables=tables,
        further={"Notes": notes} if notes else {},
        documents={"diagnosis": diagnosis},
    )


def _shares(content: Content) -> Figure:
    """Of the iteration; what has no seconds has no share of it."""
    diagnosis = content.diagnosis
    timed = [finding for finding in diagnosis.findings if finding.seconds_s is not None and finding.share]
    rows = [
        {
            "label": finding.limitation.name,
            "share": finding.share,
            "interval": finding.share_interval,
            "state": finding.state,
            "basis": finding.basis,
        }
        for finding in timed
    ]
    return Figure(
        name="limitations",
        title="Share of the iteration that each limitation takes",
        shows="Lines are 90% intervals. Filled marks are present, hollow ones possible, crosses not present. The dashed"
        f" line is the threshold, {diagnosis.at_least:.0%}.",
        table=_table(timed),
        data={"rows": rows, "at_least": diagnosis.at_least},
    )


def _table(findings: list[Finding] | tuple[Finding, ...]) -> Table:
    rows = [
        (
            finding.limitation.name,
            finding.state,
            "" if finding.share is None else f"{finding.share:.1%}",
            " to ".join(f"{end:.1%}" for end in finding.share_interval or ()) if finding.seconds_s is not None else "",
            finding.evidence,
        )
        for finding in findings
    ]
    return Table(("limitation or bottleneck", "state", "share", "90%", "evidence"), rows)


def _remedies(findings: list[Finding]) -> Table:
    rows = [
        (
            finding.limitation.name,
            remedy.change,
            format_seconds(remedy.iteration_s),
            format_difference(remedy.gain, 1),
            " to ".join(format_difference(end, 1) for end in remedy.gain_interval),
            remedy.command,
        )
        for finding in findings
        for remedy in finding.remedies
    ]
    return Table(("against", "change", "iteration", "samples/s", "90%", "command"), rows)
