"""What ``predict validate`` writes into ``report.json``: pairs of predicted and measured, scores, outliers."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from predict.validation.memory_validation import MemoryPair, MemoryScore
from predict.validation.ranks.activity import Activity
from predict.validation.ranks.calls import Calls

PREDICTOR = "simulate"
"""The evaluator under test; the others of :data:`EVALUATORS` are its baselines."""
_FIRST, _LATER = (PREDICTOR, "proportional", "paradl", "csf"), ("osf", "dag", "flops")
EVALUATORS = (*_FIRST, *_LATER)
IN_ORDER_OF_PAIRS = (_FIRST, _LATER)
"""A report's pairs are of all runs by the former, then by those that reports did not have from the beginning."""
PIPELINE_IDLE = "pipeline_idle"
INPUT = "input"
"""What explains an error where it is no phase, by the name of ``breakdown_s``."""
FAR_OFF = 0.1
"""Errors from which on a run's worst phase is told even where its interval, being wide, holds."""


class PhasePair(msgspec.Struct, frozen=True, kw_only=True):
    """A phase as predicted and as measured; error is (predicted - measured) / measured, None where it took no time."""

    predicted_s: float
    measured_s: float
    error: float | None


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """A prediction beside the run that it predicts.

    Attributes:
        options: those of the strategy that are not the defaults, by the name of the setting.
        noise_floor: run-to-run spread of the measurement, relative to it. noise_floor_from: what it was taken from.
        error: (predicted - measured) / measured. accuracy: 1 - |error|.
        interval_s: of an emulated run, with what its ranks take the host for besides communication at its upper end.
        covered: whether the interval holds the measured median.
        idle: of a pipeline, waiting of the stage that the phases are of for others; None where it is not known.
        input: waiting for the mini-batch to be read and copied; None of runs that read none, and of pipelines.
        explained_by: the phase, ``pipeline_idle`` or ``input``, whose difference has the error's sign and is largest.
        issued_equals_plan: whether the run issued the plan's collectives.
        memory: None where the run did not track it.
        emulated: what of the run was not real, in words; empty for a real one.
        activity: of the evaluator under test alone; None where begins and ends are not known, which a note says.
        calls: of the evaluator under test alone; None where the run did not time its calls one by one.
    """

    run: str
    complete: bool
    evaluator: str
    model: str
    input_shape: tuple[int, ...]
    strategy: str
    ranks: int
    batch: int
    dtype: str
    kernel_settings: str
    optimizer: str
    backend: str
    bucket_cap_bytes: int
    first_bucket_bytes: int
    options: dict[str, str]
    iterations: int
    predicted_s: float
    interval_s: tuple[float, float]
    measured_median_s: float
    measured_iqr_s: float
    noise_floor: float
    noise_floor_from: str
    error: float
    accuracy: float
    covered: bool
    phases: dict[str, PhasePair]
    explained_by: str
    issued_equals_plan: bool | None
    memory: MemoryPair | None
    sources: dict[str, float]
    extrapolated: tuple[str, ...]
    emulated: str = ""
    activity: Activity | None = None
    idle: PhasePair | None = None
    input: PhasePair | None = None

    @property
    def parts(self) -> dict[str, PhasePair]:
        """All that an iteration is made of, as far as it is known."""
        others = {PIPELINE_IDLE: self.idle, INPUT: self.input}
        return self.phases | {name: part for name, part in others.items() if part is not None}

    calls: Calls | None = None


def pairs_of(pairs: Iterable[Pair], evaluator: str) -> list[Pair]:
    """Those of one evaluator."""
    return [pair for pair in pairs if pair.evaluator == evaluator]


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """How one evaluator did over some runs.

    Attributes:
        interval_coverage: share of runs whose median lies in the interval.
        median_half_width: of the interval, relative to the prediction.
        phase_accuracy: mean per phase, over runs in which it took time.
    """

    runs: int
    mean_accuracy: float
    worst_accuracy: float
    mean_error: float
    interval_coverage: float
    median_half_width: float
    median_noise_floor: float
    phase_accuracy: dict[str, float]


class Ranking(msgspec.Struct, frozen=True, kw_only=True):
    """How one evaluator orders strategies that were run at the same model and batch; means over such groups.

    Attributes:
        rank_correlation: Spearman's.
        top1_regret: measured time of the strategy predicted best over that of the best, less 1.
    """

    groups: int
    rank_correlation: float | None
    top1_regret: float | None


class Rerun(msgspec.Struct, frozen=True, kw_only=True):
    """How well a run is predicted by other real runs of its configuration: the median of their medians.

    Attributes:
        runs: those that have at least one other.
        half_width_85: relative half-width that an interval round it needs to hold 85% of the runs.
    """

    runs: int
    mean_accuracy: float
    half_width_85: float


class RepeatedPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """What an evaluator says of a configuration that ran more than once: of the median of its runs' medians."""

    predicted_s: float
    error: float
    covered: bool


class Repeated(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration that ran more than once, beside its predictions.

    On a host whose speed changes from run to run, a single run tells the host's error as much as the prediction's.

    Attributes:
        measured_median_s: of the runs' medians. measured_range_s: the fastest run's and the slowest one's.
    """

    model: str
    input_shape: tuple[int, ...]
    strategy: str
    batch: int
    options: dict[str, str]
    emulated: str
    runs: int
    measured_median_s: float
    measured_range_s: tuple[float, float]
    by_evaluator: dict[str, RepeatedPrediction]


class PredictedFactor(msgspec.Struct, frozen=True, kw_only=True):
    """A scaling factor as an evaluator predicts both of its iterations; error is relative to the measured one."""

    predicted: float
    error: float


class ScalingFactor(msgspec.Struct, frozen=True, kw_only=True):
    """How a data parallel run scales: seconds of one rank over the run's, at the same mini-batch a rank (OSF, eq. 1).

    Attributes:
        local_batch: samples a rank. serial_runs: directories, whose medians' median is taken.
    """

    run: str
    model: str
    strategy: str
    ranks: int
    local_batch: int
    serial_runs: tuple[str, ...]
    measured: float
    by_evaluator: dict[str, PredictedFactor]


class Overall(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluator's score and ranking over all runs; memory over those that it was not fitted to."""

    score: Score
    ranking: Ranking
    memory: MemoryScore | None = None


class Outlier(msgspec.Struct, frozen=True, kw_only=True):
    """A run that is far off, or whose median lies outside the interval, and what explains most of the error.

    Attributes:
        phase: one of those of the run, ``pipeline_idle`` or ``input``.
        shares_memory: whether several ranks computed on CPUs, and so from one host's memory.
    """

    run: str
    model: str
    strategy: str
    batch: int
    error: float
    noise_floor: float
    phase: str
    phase_difference_s: float
    shares_memory: bool = False


class Unfit(msgspec.Struct, frozen=True, kw_only=True):
    """A run that memory ended, beside the memory that was predicted of it.

    Attributes:
        needed_bytes: what the rank that ran out held and asked for; its whole process, where the prediction counts
            tensors. had_bytes: what there was.
    """

    run: str
    model: str
    strategy: str
    batch: int
    rank: int
    phase: str
    needed_bytes: int
    had_bytes: int
    predicted_bytes: int


class RunLimitation(msgspec.Struct, frozen=True, kw_only=True):
    """A limitation or bottleneck of a run that is present or possible, as ``predict diagnose`` says it.

    Attributes:
        share: of the measured iteration; of the peak for redundant memory, which has no interval.
        evidence: what says so: measured, predicted, or both.
    """

    run: str
    model: str
    strategy: str
    batch: int
    limitation: str
    category: str
    comes_of: str
    phases: tuple[str, ...]
    state: str
    share: float | None
    share_interval: tuple[float, float] | None
    evidence: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What ``report.json`` holds.

    Attributes:
        strategies: by strategy, then by evaluator. overall: by evaluator.
        outliers: outside of their intervals. far_off: inside, by errors of more than :data:`FAR_OFF`.
        reruns: by strategy: what a prediction can reach at best on this machine.
        notes: runs that were skipped or incomplete, and differences of environment that were accepted.
        did_not_fit: runs that memory ended; those with enough iterations are among the pairs too.
        scaling_factors: of data parallel runs that have a serial run beside them. serial_runs_wanted: of the others, in
            lines, with the command that measures it.
        not_applicable: evaluators that have nothing to say on some strategies, in lines.
        busy_hosts: in a line, which measurements of the profile and which runs a busy host slowed.
        limitations: of every run, those that take most first.
    """

    profile: str
    pairs: tuple[Pair, ...]
    strategies: dict[str, dict[str, Score]]
    overall: dict[str, Overall]
    reruns: dict[str, Rerun]
    outliers: tuple[Outlier, ...]
    notes: tuple[str, ...]
    did_not_fit: tuple[Unfit, ...] = ()
    repeated: tuple[Repeated, ...] = ()
    far_off: tuple[Outlier, ...] = ()
    scaling_factors: tuple[ScalingFactor, ...] = ()
    serial_runs_wanted: tuple[str, ...] = ()
    not_applicable: tuple[str, ...] = ()
    busy_hosts: tuple[str, ...] = ()
    limitations: tuple[RunLimitation, ...] = ()
