"""Rows of a diagnosis in CSV and Parquet. A field is a column: its name has the unit, its type the dtype."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from predict.validation.diagnosis.findings import Diagnosis, Finding


class FindingRow(msgspec.Struct, frozen=True, kw_only=True):
    """One limitation of one configuration, with its best remedy; the columns of the remedy are empty without one.

    Attributes:
        iteration_s, run: those of the :class:`~predict.validation.diagnosis.findings.Diagnosis`.
        state to evidence: those of the :class:`~predict.validation.diagnosis.findings.Finding`.
        phases: names of the phases, with spaces between them.
    """

    model: str
    strategy: str
    ranks: int
    batch: int
    run: str
    iteration_s: float
    limitation: str
    category: str
    comes_of: str
    phases: str
    state: str
    basis: str
    seconds_s: float | None
    share: float | None
    share_interval: tuple[float, float] | None
    predicted_s: float | None
    evidence: str
    remedy: str | None = None
    remedy_iteration_s: float | None = None
    remedy_gain: float | None = None
    remedy_gain_interval: tuple[float, float] | None = None
    remedy_memory_bytes: int | None = None
    remedy_command: str | None = None


def finding_rows(diagnoses: Iterable[Diagnosis]) -> Iterator[FindingRow]:
    """Each limitation of each configuration, one in each row."""
    return (_row(diagnosis, finding) for diagnosis in diagnoses for finding in diagnosis.findings)


def _row(diagnosis: Diagnosis, finding: Finding) -> FindingRow:
    about, best = finding.limitation, max(finding.remedies, key=lambda remedy: remedy.gain, default=None)
    row = FindingRow(
        model=diagnosis.model,
        strategy=diagnosis.strategy,
        ranks=diagnosis.ranks,
        batch=diagnosis.batch,
        run=diagnosis.run,
        iteration_s=diagnosis.iteration_s,
        limitation=about.name,
        category=about.category,
        comes_of=about.comes_of,
        phases=" ".join(about.phases),
        state=finding.state,
        basis=finding.basis,
        seconds_s=finding.seconds_s,
        share=finding.share,
        share_interval=finding.share_interval,
        predicted_s=finding.predicted_s,
        evidence=finding.evidence,
    )
    if best is None:
        return row
    return msgspec.structs.replace(
        row,
        remedy=best.change,
        remedy_iteration_s=best.iteration_s,
        remedy_gain=best.gain,
        remedy_gain_interval=best.gain_interval,
        remedy_memory_bytes=best.memory_bytes,
        remedy_command=best.command,
    )
