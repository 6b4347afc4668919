"""From a prediction, and a run beside it, to findings on each limitation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from paradl_bench.core.errors import UserError
from paradl_bench.core.units import format_bytes, format_seconds
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.mesh import degree_of
from paradl_bench.plan.strategy import Strategy, parse_strategy
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.pipeline.axis import PipelineOptions
from predict.costs.compute.host_dispatch import said_of_dispatch
from predict.costs.hardware.what_if_hardware import Hardware
from predict.ledger.crowding import crowding
from predict.ledger.ledger import Ledger
from predict.prediction.interval import Timed
from predict.prediction.prediction import Prediction, Predictor
from predict.search.candidates.mesh import divisors
from predict.validation.diagnosis import limitations as of
from predict.validation.diagnosis.findings import Diagnosis, Finding, State
from predict.validation.diagnosis.limitations import LIMITATIONS, Limitation
from predict.validation.diagnosis.shares import Seconds, seconds_of_limitations
from predict.workload import Configuration

_FREE = 1e9
"""A link so many times as fast takes no time."""
_HELD = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A configuration as predicted, with all that a diagnosis asks of it.

    Attributes:
        seconds: by limitation, those that it can have. serial: of one rank that trains alone on what a replica does.
        memory_limit_bytes: of a rank; None where nobody says.
    """

    point: Configuration
    prediction: Prediction
    timed: Timed
    ledger: Ledger
    seconds: Mapping[str, Seconds]
    serial: Prediction
    network: ModelGraph
    memory_limit_bytes: float | None

    @property
    def redundant_bytes(self) -> float:
        """Parameters, gradients and the optimizer's state that a rank holds beyond its part of one copy."""
        parts, whole = self.prediction.memory.memory_parts_bytes, self.serial.memory.memory_parts_bytes
        held = sum(parts.get(name, 0) for name in _HELD)
        return max(held - sum(whole.get(name, 0) for name in _HELD) / self.prediction.ranks, 0.0)


@dataclass(slots=True)
class Diagnostician:
    """Diagnoses points of one predictor; keeps what one rank takes alone.

    Args:
        at_least: the share from which on a limitation is present.
    """

    predictor: Predictor
    at_least: float
    _alone: dict[Configuration, tuple[Ledger, Prediction]] = field(init=False, default_factory=dict)

    def case_of(self, point: Configuration) -> Case:
        """A configuration, predicted.

        Raises:
            UserError: it has no prediction.
        """
        prediction, timed = self.predictor.predict_timed(point)
        ledger = self.predictor.explain(point)
        settings = msgspec.structs.replace(point.settings, batch=point.local_batch)
        alone = Configuration(strategy=Strategy(), settings=settings)
        if alone not in self._alone:
            self._alone[alone] = self.predictor.explain(alone), self.predictor.predict(alone)
        serial_ledger, serial = self._alone[alone]
        free = self._over_free_links(point) if degree_of(point.strategy, Trait.STAGES) > 1 else None
        costs = self.predictor.costs
        crowded = crowding(costs, costs.place(point.strategy, point.local_batch)).get("FW", 1.0)
        seconds = seconds_of_limitations(ledger, serial_ledger, free, crowding=crowded)
        return Case(
            point=point,
            prediction=prediction,
            timed=timed,
            ledger=ledger,
            seconds=seconds,
            serial=serial,
            network=costs.network,
            memory_limit_bytes=costs.communication.cluster.memory_bytes_per_rank,
        )

    def _over_free_links(self, point: Configuration) -> Ledger:
        hardware = Hardware(bandwidth=_FREE, latency=1 / _FREE)
        costs = self.predictor.costs.on(hardware)
        return Predictor(costs, self.predictor.evaluator).explain(point)

    def diagnose(self, case: Case) -> Diagnosis:
        """Every limitation of a predicted configuration."""
        findings = [self._finding(limitation, case) for limitation in LIMITATIONS]
        about = case.prediction.provenance
        return Diagnosis(
            model=case.prediction.model,
            strategy=case.prediction.strategy,
            ranks=case.prediction.ranks,
            batch=case.prediction.batch,
            iteration_s=case.prediction.iteration_s,
            at_least=self.at_least,
            findings=by_weight(findings),
            sources=dict(about.sources),
            extrapolated=tuple(about.extrapolated),
            notes=tuple(about.notes),
        )

    def _finding(self, limitation: Limitation, case: Case) -> Finding:
        special: dict[str, Callable[[Limitation, Case], Finding]] = {
            of.REDUNDANT_MEMORY: _memory,
            of.RANKS: _ranks,
        }
        if limitation.name in special:
            return special[limitation.name](limitation, case)
        if limitation.measure and _can_have(limitation, case.point.strategy):
            return Finding(limitation=limitation, state="not measured", evidence=f"needs {limitation.measure}")
        if limitation.name not in case.seconds:
            return _absent(limitation, case)
        spent, whole_s = case.seconds[limitation.name], case.prediction.iteration_s
        return timed_finding(limitation, spent, whole_s, self.at_least, evidence=_sources(limitation.name, case))


def _can_have(limitation: Limitation, strategy: Strategy) -> bool:
    """Whether there may be anything to measure."""
    if limitation.name == of.SPLIT_AND_CONCATENATE:
        return degree_of(strategy, Trait.SHARDS_LAYERS) > 1
    return limitation.name != of.CONGESTION or strategy.ranks > 1


def _absent(limitation: Limitation, case: Case) -> Finding:
    if limitation.name == of.INPUT:
        text = "the input is unknown; measure it: paradl-bench io, then calibrate fit"
        return Finding(limitation=limitation, state="not measured", evidence=text)
    if limitation.name == of.HOST_DISPATCH:
        text = "no kernel is predicted to wait for its dispatch"
        return Finding(limitation=limitation, state="does not apply", evidence=text)
    return Finding(limitation=limitation, state="does not apply", evidence=f"{case.prediction.strategy} has none")


def timed_finding(
    limitation: Limitation,
    taken: Seconds,
    iteration_s: float,
    at_least: float,
    *,
    evidence: str,
    predicted_s: float | None = None,
) -> Finding:
    """A finding of so many seconds of an iteration, whose share is at most the whole."""
    share, low, high = (min(seconds / iteration_s, 1.0) for seconds in taken)
    return Finding(
        limitation=limitation,
        state=state_of(low, high, at_least),
        evidence=evidence,
        seconds_s=taken.seconds,
        share=share,
        share_interval=(low, high),
        predicted_s=predicted_s,
        basis="predicted" if predicted_s is None else "measured",
    )


def state_of(low: float, high: float, at_least: float) -> State:
    """By both ends of a share's interval."""
    if low >= at_least:
        return "present"
    return "possible" if high >= at_least else "not present"


def by_weight(findings: list[Finding]) -> tuple[Finding, ...]:
    """What takes most first; then what is there without seconds, then the rest in the order of the table."""

    def weight(finding: Finding) -> tuple[bool, bool, float]:
        there = finding.state in ("present", "possible")
        return not there, not finding.holds, -(finding.share or 0.0)

    return tuple(sorted(findings, key=weight))


def _sources(name: str, case: Case) -> str:
    spent, about = case.seconds[name], case.prediction.provenance
    text = f"predicted: {format_seconds(spent.seconds)} of {format_seconds(case.prediction.iteration_s)} a rank"
    said = said_of_dispatch((*about.extrapolated, *about.notes)) if name == of.HOST_DISPATCH else ""
    return f"{text}; {said}" if said else text


def _memory(limitation: Limitation, case: Case) -> Finding:
    """Redundant memory hurts where a rank's peak comes near to what there is."""
    peak, limit = case.prediction.memory.memory_bytes, case.memory_limit_bytes
    share = case.redundant_bytes / peak if peak else 0.0
    held = (
        f"{format_bytes(round(case.redundant_bytes))} of the peak of {format_bytes(peak)} are also held on other ranks"
    )
    if case.prediction.ranks == 1:
        return Finding(limitation=limitation, state="does not apply", evidence="one rank holds every tensor once")
    state: State = "not measured"
    if limit is None:
        held += "; the memory size is unknown: give --memory or a cluster file"
    else:
        _, high = case.prediction.memory.memory_interval_bytes or (peak, peak)
        held += f"; there are {format_bytes(round(limit))} a rank"
        state = "not present" if high <= limit or not share else "present" if peak > limit else "possible"
    return Finding(
        limitation=limitation,
        state=state,
        share=share,
        share_interval=(share, share),
        basis="predicted",
        evidence=held,
    )


def _ranks(limitation: Limitation, case: Case) -> Finding:
    """A strategy is at its end where no axis can have more ranks on this mini-batch, up to four times as many."""
    strategy = parse_strategy(case.prediction.strategy)
    if strategy.ranks == 1:
        return Finding(limitation=limitation, state="does not apply", evidence="one rank")
    refusals: list[str] = []
    for wider in _wider(strategy):
        try:
            _check(case, wider)
            return Finding(limitation=limitation, state="not present", evidence=f"{wider} is possible")
        except UserError as error:
            refusals.append(str(error))
    return Finding(limitation=limitation, state="present", evidence=f"no more ranks: {refusals[0]}")


def _check(case: Case, strategy: Strategy) -> None:
    """Refuse what is impossible with any number of micro-batches."""
    point = Configuration(strategy=strategy, settings=case.point.settings)
    refused: UserError | None = None
    for count in (None, *divisors(point.local_batch)):
        settings = point.settings.changed(PipelineOptions, micro_batches=count, stages=(), cut_by="")
        try:
            planner_for(strategy).check(case.network, strategy, settings)
            return
        except UserError as error:
            refused = refused or error
    assert refused is not None
    raise refused


def _wider(strategy: Strategy) -> Iterator[Strategy]:
    """The strategy with more ranks along one axis: twice as many first, then from one more to four times as many."""
    for index, axis in enumerate(strategy.axes):
        for dim, extent in enumerate(axis.extents):
            for more in (2 * extent, *range(extent + 1, 4 * extent + 1)):
                extents = (*axis.extents[:dim], more, *axis.extents[dim + 1 :])
                wider = msgspec.structs.replace(axis, extents=extents)
                yield Strategy(axes=(*strategy.axes[:index], wider, *strategy.axes[index + 1 :]))
