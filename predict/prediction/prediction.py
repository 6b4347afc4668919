"""Predictions: what ``predict`` prints and writes, one object a strategy, rank count and batch.

A prediction is a type of its own, which nothing that calibrates reads.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from calibrate.profile.memory_factors import MemoryMeasure
from calibrate.profile.unlike_parts import unlike_parts
from paradl_bench.core.cache_keys import Answers
from paradl_bench.core.units import format_bytes
from paradl_bench.importers.training_programs.launch import Launch
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy, parse_strategy
from paradl_bench.records.emulation import kind_of_emulation, simulated_messages
from paradl_bench.records.hosts.host_load import busy_lines
from paradl_bench.strategies.exchange.options import ExchangeOptions
from paradl_bench.strategies.passes.lower_precision import check_dtype, check_kernel_settings
from predict.costs.cost_model import CostModel
from predict.costs.memory_estimate import EstimatedMemory
from predict.ledger.crowding import crowding
from predict.ledger.ledger import Ledger, shown_role
from predict.ledger.waterfall import waterfall
from predict.prediction.interval import Timed, efficiency_band, interval
from predict.prediction.utilisation import effort, model_flops, tokens_per_sample, utilisation
from predict.workload import Configuration, Evaluator, PreparedEvaluation, Timing


class PredictedTime(msgspec.Struct, frozen=True, kw_only=True):
    """How long an iteration takes, and what it is made of; seconds.

    Attributes:
        iteration_s: median iteration of the slowest rank. interval_s: its 90% interval.
        phases_s: FW, BW, GE (what is left of the exchange after the last gradient) and WU follow each other and add up
            to the iteration, but for a pipeline's waiting.
        pipeline_stage: whose phases these are, from 0; null without a pipeline, and where they are of no single stage.
        breakdown_s: FW and BW without communication for layers that compute waits for, GE, WU, and that communication
            by name (halo, all_gather, ...) add up to the iteration, with what ranks wait for other stages
            (pipeline_idle), for a mini-batch to be read (input) and to be copied (h2d); exposed_communication lies
            inside of them.
        compute_s, communication_s: all of a median rank's compute, and all collectives, each unhindered.
        overlap_s: both at once.
        straggler: the slowest rank's compute over a median one's.
    """

    iteration_s: float
    interval_s: tuple[float, float]
    epoch_s: float | None
    samples_per_s: float
    phases_s: dict[str, float]
    pipeline_stage: int | None
    breakdown_s: dict[str, float]
    compute_s: float
    communication_s: float
    overlap_s: float
    straggler: float


class PredictedMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What the rank that needs most holds.

    Attributes:
        memory_bytes: its peak. memory_interval_bytes: the 90% interval; null where the profile has no memory factor.
        memory_of: whose peak: the tensors', or what the factor was fitted to (allocator, device).
        fits: in the cluster's memory per rank; null where that is not known. ``notes`` say where the limit lies inside
            of the interval.
    """

    memory_bytes: int
    memory_interval_bytes: tuple[int, int] | None
    memory_of: MemoryMeasure
    memory_parts_bytes: dict[str, int]
    fits: bool | None


class PredictedUse(msgspec.Struct, frozen=True, kw_only=True):
    """What the iteration makes of its ranks.

    Attributes:
        speedup: samples/s over those of one rank on ``speedup_batch`` samples. efficiency: speedup / ranks, with its
            90% interval. knee_ranks: of the sweep that this is a point of (:mod:`predict.prediction.scaling`); else
            null.
        model_flops: of forward and backward of the mini-batch, each operation once.
        model_flops_utilisation: model_flops / (iteration_s x ranks x peak_flops_per_rank); null where no peak was
            measured or stated. peak_flops_basis: where the peak comes from, or why there is none.
        tokens_per_s_per_rank: of models of token sequences; else null.
        rank_hours_per_epoch, rank_hours_per_million_samples: hours of all ranks together; an epoch's are null where its
            samples were not given. cost_per_epoch, cost_per_million_samples: at the price of a rank-hour, if given.
    """

    speedup: float
    efficiency: float
    speedup_batch: int
    efficiency_interval: tuple[float, float]
    knee_ranks: int | None = None
    samples_per_s_per_rank: float
    tokens_per_s_per_rank: float | None
    model_flops: float
    model_flops_utilisation: float | None
    peak_flops_per_rank: float | None
    peak_flops_basis: str
    rank_hours_per_epoch: float | None
    rank_hours_per_million_samples: float
    cost_per_epoch: float | None
    cost_per_million_samples: float | None


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """What a prediction rests on, and how far it may be off.

    Attributes:
        sources: shares of all predicted seconds. extrapolated: what lies beyond measurement.
        spread_s: half-width of the interval that each source of error alone would give.
    """

    limits: tuple[str, ...]
    sources: dict[str, float]
    extrapolated: tuple[str, ...]
    notes: tuple[str, ...]
    spread_s: dict[str, float]


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """One predicted configuration, and what is said of it. Files hold its :meth:`record`.

    Attributes:
        batch: global mini-batch. local_batch: samples a rank computes.
        options: those of the strategy that are not the defaults, by the name of the setting.
    """

    strategy: str
    ranks: int
    batch: int
    evaluator: str
    model: str
    input_shape: tuple[int, ...]
    local_batch: int
    dtype: str
    kernel_settings: str
    optimizer: str
    backend: str
    bucket_cap_bytes: int
    options: dict[str, str]
    time: PredictedTime
    memory: PredictedMemory
    use: PredictedUse
    provenance: Provenance

    @property
    def iteration_s(self) -> float:
        """Median iteration of the slowest rank, in seconds."""
        return self.time.iteration_s

    @property
    def launch(self) -> Launch:
        """What a program that trains is told of it."""
        return Launch(
            strategy=parse_strategy(self.strategy),
            batch=self.batch,
            # One extent is that of a text.
            sequence=self.input_shape[0] if len(self.input_shape) == 1 else None,
            dtype=self.dtype,
            optimizer=self.optimizer,
            bucket_cap_bytes=self.bucket_cap_bytes,
            kernels=tuple(self.kernel_settings.split("+")) if self.kernel_settings else (),
            options=self.options,
        )

    def record(self) -> dict[str, Any]:
        """All fields on one level, as JSON and CSV hold them, in their order."""
        configuration = msgspec.structs.asdict(self)
        time, memory, use, provenance = (
            msgspec.structs.asdict(configuration.pop(part)) for part in ("time", "memory", "use", "provenance")
        )
        compared = {name: use.pop(name) for name in ("speedup", "efficiency", "speedup_batch")}
        return {**configuration, **time, **compared, **memory, **provenance, **use}

    def fields_of(self, row: type[msgspec.Struct]) -> dict[str, Any]:
        """What a row of another table takes over as it is: the fields of its type that a record has too, by name."""
        record = self.record()
        return {name: record[name] for name in row.__struct_fields__ if name in record}


class _Alone(NamedTuple):
    """One rank on some samples, and whether that was extrapolated."""

    timed: Timed
    extrapolated: bool


@dataclass(slots=True)
class Predictor:
    """Predicts points of one model with one evaluator.

    Args:
        strong_scaling: speed-up is against one rank on the whole batch; else against one rank on the local batch.
        price_per_rank_hour: in any currency; None leaves costs out.
        alike: times of evaluations that are like others; None where few points are predicted, which all differ.
    """

    costs: CostModel
    evaluator: Evaluator
    dataset_samples: int | None = None
    strong_scaling: bool = False
    price_per_rank_hour: float | None = None
    alike: Answers | None = None
    _serial: dict[tuple[object, ...], _Alone] = field(init=False, default_factory=dict)
    _latest: Answers = field(init=False, default_factory=lambda: Answers(1))

    def predict(self, point: Configuration) -> Prediction:
        """One prediction.

        Raises:
            UserError: the strategy has no plan or closed form, a limit is exceeded, or the profile lacks a part.
        """
        return self.predict_timed(point)[0]

    def explain(self, point: Configuration) -> Ledger:
        """What every second of a point's iteration is made of; raises as :meth:`predict`."""
        workload, _, (iteration_s, bounds) = self._latest.once(point, lambda: self._timed(point))
        roles, place = workload.ledger(), self.costs.place(point.strategy, point.local_batch)
        return Ledger(
            model=self.costs.network.name,
            strategy=str(point.strategy),
            ranks=point.strategy.ranks,
            batch=point.settings.batch,
            evaluator=self.evaluator.name,
            iteration_s=iteration_s,
            interval_s=(bounds.low_s, bounds.high_s),
            waterfall_s=waterfall(shown_role(roles), crowding(self.costs, place)),
            roles=roles,
        )

    def _timed(self, point: Configuration) -> tuple[PreparedEvaluation, Timing, Timed]:
        check_dtype(point.strategy, point.settings, self.costs.dtype)
        check_kernel_settings(point.strategy, point.settings, self.costs.kernel_settings)
        workload = self.evaluator.prepare(self.costs, point)
        if self.alike is None or workload.likeness is None:
            return workload, *_evaluated(workload)
        return workload, *self.alike.once(workload.likeness(), lambda: _evaluated(workload))

    def predict_timed(self, point: Configuration) -> tuple[Prediction, Timed]:
        """One prediction, and its iteration as other points of a sweep are compared with it; raises as the former."""
        workload, timing, timed = self._latest.once(point, lambda: self._timed(point))
        iteration_s, batch = timed.iteration_s, point.settings.batch
        reference = batch if self.strong_scaling else point.local_batch
        speedup, notes = self._speedup(iteration_s, batch, reference, point.settings)
        epoch_s = None if self.dataset_samples is None else -(-self.dataset_samples // batch) * iteration_s
        memory, limit = workload.memory(), self.costs.communication.cluster.memory_bytes_per_rank
        prediction = Prediction(
            strategy=str(point.strategy),
            ranks=point.strategy.ranks,
            batch=batch,
            evaluator=self.evaluator.name,
            model=self.costs.network.name,
            input_shape=self.costs.network.input_shape,
            local_batch=point.local_batch,
            dtype=self.costs.dtype,
            kernel_settings=self.costs.kernel_settings,
            optimizer=self.costs.optimizer,
            backend=self.costs.communication.backend,
            bucket_cap_bytes=point.settings.of(ExchangeOptions).bucket_cap_bytes,
            options=point.settings.options,
            time=_time(workload, timing, timed, batch, epoch_s),
            memory=_memory(memory, limit),
            use=self._use(point, timed, epoch_s, reference, speedup),
            provenance=Provenance(
                limits=workload.limits,
                sources=workload.costs.source_shares(),
                extrapolated=(*unlike_parts(self.costs.profile), *workload.remarks.extrapolated()),
                notes=(*workload.remarks.notes(), *notes, *_memory_notes(memory, limit), *self._measured()),
                spread_s=timed.bounds.spread_s,
            ),
        )
        return prediction, timed

    def _use(
        self, point: Configuration, timed: Timed, epoch_s: float | None, reference: int, speedup: float
    ) -> PredictedUse:
        network, ranks = self.costs.network, point.strategy.ranks
        peak = self.costs.device.peak(self.costs.place(point.strategy, point.local_batch).ranks_on_host)
        tokens = tokens_per_sample(network)
        per_rank = point.settings.batch / timed.iteration_s / ranks
        efficiency = speedup / ranks
        return PredictedUse(
            speedup=speedup,
            efficiency=efficiency,
            speedup_batch=reference,
            efficiency_interval=self._band(point, timed, reference, efficiency),
            samples_per_s_per_rank=per_rank,
            tokens_per_s_per_rank=None if tokens is None else tokens * per_rank,
            model_flops=model_flops(network, point.settings.batch),
            model_flops_utilisation=utilisation(network, point, timed.iteration_s, peak),
            peak_flops_per_rank=peak.flops,
            peak_flops_basis=peak.basis,
            **effort(point, timed.iteration_s, epoch_s, self.price_per_rank_hour)._asdict(),
        )

    def _band(self, point: Configuration, timed: Timed, reference: int, efficiency: float) -> tuple[float, float]:
        if point.strategy.ranks == 1 and point.settings.batch == reference:
            return efficiency, efficiency
        return efficiency_band(timed, self._serial[_alone_on(reference, point.settings)].timed, efficiency)

    def _measured(self) -> tuple[str, ...]:
        """What the profile's measurements emulated, or had simulated, and compiled, and which a busy host slowed."""
        emulations = {
            ("not measured" if simulated_messages(environment.emulated) else "measured on an emulated cluster")
            + f": {kind_of_emulation(environment.emulated)}"
            for environment in self.costs.profile.environments
            if environment.emulated
        }
        busy = busy_lines(self.costs.profile.host_loads)
        return (*sorted(emulations), *busy, *_compiled_notes(self.costs.kernel_settings))

    def _speedup(
        self, iteration_s: float, batch: int, reference: int, settings: PlanSettings
    ) -> tuple[float, tuple[str, ...]]:
        key = _alone_on(reference, settings)
        if key not in self._serial:
            serial = Configuration(strategy=Strategy(), settings=msgspec.structs.replace(settings, batch=reference))
            known = self.evaluator.name, serial.settings
            self._serial[key] = self.costs.device.alone.once(known, lambda: self._by_itself(serial))
        (serial_s, _), beyond = self._serial[key]
        text = f"speed-up is relative to one rank on batch {reference}, whose time is itself extrapolated"
        return (batch / iteration_s) / (reference / serial_s), ((text,) if beyond else ())

    def _by_itself(self, serial: Configuration) -> _Alone:
        even = self.costs if self.costs.slow_rank is None else dataclasses.replace(self.costs, slow_rank=None)
        workload = self.evaluator.prepare(even, serial)
        return _Alone(_evaluated(workload)[1], bool(workload.remarks.extrapolated()))


def _evaluated(workload: PreparedEvaluation) -> tuple[Timing, Timed]:
    return workload.timing(), Timed(workload.timing().iteration_s, interval(workload))


def _time(
    workload: PreparedEvaluation, timing: Timing, timed: Timed, batch: int, epoch_s: float | None
) -> PredictedTime:
    return PredictedTime(
        iteration_s=timed.iteration_s,
        interval_s=(timed.bounds.low_s, timed.bounds.high_s),
        epoch_s=epoch_s,
        samples_per_s=batch / timed.iteration_s,
        phases_s={"FW": timing.fw_s, "BW": timing.bw_s, "GE": timing.ge_s, "WU": timing.wu_s},
        pipeline_stage=timing.stage,
        breakdown_s=timing.breakdown_s,
        compute_s=workload.costs.compute_s,
        communication_s=workload.costs.communication_s,
        overlap_s=timing.overlap_s,
        straggler=workload.straggler,
    )


def _memory(memory: EstimatedMemory, limit: float | None) -> PredictedMemory:
    return PredictedMemory(
        memory_bytes=memory.peak_bytes,
        memory_interval_bytes=memory.interval_bytes,
        memory_of=memory.measured,
        memory_parts_bytes=memory.parts_bytes,
        fits=None if limit is None else memory.peak_bytes <= limit,
    )


def _memory_notes(memory: EstimatedMemory, limit: float | None) -> tuple[str, ...]:
    bounds = memory.interval_bytes
    if limit is None or bounds is None or not bounds[0] <= limit < bounds[1]:
        return ()
    held = " to ".join(map(format_bytes, bounds))
    return (f"{format_bytes(limit)} of memory a rank lie within the 90% interval of the peak ({held}): it may not fit",)


def _compiled_notes(label: str) -> tuple[str, ...]:
    """What layers that were compiled each by itself leave out."""
    if "compile" not in label.split("+"):
        return ()
    return (
        "layers were timed with each compiled alone. Their sum is more than the time of the model compiled as a"
        " whole; the interval includes that measured time",
        "memory is predicted for the model without --compile",
    )


def _alone_on(samples: int, settings: PlanSettings) -> tuple[object, ...]:
    """What one rank's iteration depends on."""
    return samples, *settings.simulated_alone.items()
