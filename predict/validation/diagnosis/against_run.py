"""A run beside its prediction: what was measured of each limitation takes the place of what was predicted."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping

import msgspec

from paradl_bench.core.units import format_bytes, format_seconds
from predict.validation.diagnosis import limitations as of
from predict.validation.diagnosis.diagnosis import Case, by_weight, timed_finding
from predict.validation.diagnosis.findings import Diagnosis, Finding
from predict.validation.diagnosis.measured import seconds_of_run
from predict.validation.diagnosis.shares import Seconds, contended_s, taken_by_layers
from predict.validation.ranks.calls import calls_of
from predict.validation.runs import Run

_FULL = 0.95
"""Of a device's memory: an allocator that has taken more has to wait for what is given back."""


def held_against(diagnosis: Diagnosis, case: Case, run: Run) -> Diagnosis:
    """The diagnosis of a run."""
    measured = seconds_of_run(run)
    seconds = dict(measured.seconds)
    seconds[of.SLOWER_LAYERS] = _beyond(measured.computed, taken_by_layers(case.ledger))
    calls = calls_of(run, case.ledger)
    seconds = _parted(seconds, case)
    findings = [_finding(finding, seconds, case, run, diagnosis.at_least) for finding in diagnosis.findings]
    return msgspec.structs.replace(
        diagnosis,
        iteration_s=run.median_s,
        findings=by_weight(findings),
        run=str(run.path),
        said=(*(calls.lines() if calls else ()), *diagnosis.said),
    )


def _parted(seconds: Mapping[str, Seconds], case: Case) -> dict[str, Seconds]:
    """What stamps hold in one, in the proportions in which it is predicted.

    A call that takes longer since other groups call at once is one call, and a stage that waits for another waits for
    its messages too. So no second is of two limitations.
    """
    contended, predicted = contended_s(case.ledger), case.seconds
    parted: dict[str, Seconds] = {}
    for name, stamped in seconds.items():
        parts = {name: predicted[name].seconds if name in predicted else 0.0, of.CONTENTION: contended.get(name, 0.0)}
        if name == of.BUBBLES and of.PIPELINE_MESSAGES in predicted:
            parts[of.PIPELINE_MESSAGES] = predicted[of.PIPELINE_MESSAGES].seconds
            parts[of.CONTENTION] += contended.get(of.PIPELINE_MESSAGES, 0.0)
        whole_s = sum(parts.values())
        for part, part_s in parts.items():
            share = part_s / whole_s if whole_s else float(part == name)
            if share or part == name:
                parted[part] = _sum(parted.get(part), Seconds(*(share * value for value in stamped)))
    return parted


def _sum(one: Seconds | None, other: Seconds) -> Seconds:
    return other if one is None else Seconds(*map(operator.add, one, other))


def _beyond(measured: Seconds, predicted: Seconds) -> Seconds:
    """What was measured beyond a prediction, as far as both are known; none below 0."""
    beyond_s = measured.seconds - predicted.seconds
    less_s = math.hypot(measured.seconds - measured.low_s, predicted.high_s - predicted.seconds)
    more_s = math.hypot(measured.high_s - measured.seconds, predicted.seconds - predicted.low_s)
    return Seconds(*(max(value, 0.0) for value in (beyond_s, beyond_s - less_s, beyond_s + more_s)))


def _finding(finding: Finding, seconds: dict[str, Seconds], case: Case, run: Run, at_least: float) -> Finding:
    name = finding.limitation.name
    if name == of.MEMORY_STALLS:
        return _memory_stalls(finding, case, run)
    if name == of.REDUNDANT_COMPUTE and name in case.seconds and of.SPLIT_AND_CONCATENATE in seconds:
        return _without_copies(finding, case, seconds[of.SPLIT_AND_CONCATENATE], at_least)
    if name not in seconds:
        return finding
    predicted = case.seconds.get(name)
    whole = f"measured: {format_seconds(seconds[name].seconds)} of {format_seconds(run.median_s)}"
    beside = f", predicted {format_seconds(predicted.seconds)}" if predicted else ""
    if name == of.SLOWER_LAYERS and seconds[name].seconds:
        expected_s = taken_by_layers(case.ledger).seconds
        beside = f" beyond the {format_seconds(expected_s)} predicted; if the host was busy, measure again"
    return timed_finding(
        finding.limitation,
        seconds[name],
        run.median_s,
        at_least,
        evidence=whole + beside,
        predicted_s=predicted.seconds if predicted else 0.0,
    )


def _without_copies(finding: Finding, case: Case, copies: Seconds, at_least: float) -> Finding:
    """Times of shards hold the copies around them, which have their own row once they are measured."""
    again = Seconds(*(max(value - copies.seconds, 0.0) for value in case.seconds[of.REDUNDANT_COMPUTE]))
    evidence = f"{finding.evidence}, without {format_seconds(copies.seconds)} of splits and concatenations"
    return timed_finding(finding.limitation, again, case.prediction.iteration_s, at_least, evidence=evidence)


def _memory_stalls(finding: Finding, case: Case, run: Run) -> Finding:
    """An allocator that holds nearly all of a device makes kernels wait for memory."""
    limit = case.memory_limit_bytes
    reserved = [peak.reserved_bytes for peak in run.description.memory if peak.reserved_bytes is not None]
    if not reserved:
        text = "only a GPU's allocator makes kernels wait, and this run had no GPU"
        return msgspec.structs.replace(finding, state="does not apply", evidence=text)
    if limit is None:
        text = "the size of the memory: give a cluster file with memory_bytes_per_rank"
        return msgspec.structs.replace(finding, evidence=f"needs {text}")
    share = max(reserved) / limit
    return msgspec.structs.replace(
        finding,
        state="possible" if share >= _FULL else "not present",
        share=share,
        share_interval=(share, share),
        basis="measured",
        evidence=f"measured: the allocator took {format_bytes(max(reserved))} of {format_bytes(round(limit))}",
    )
