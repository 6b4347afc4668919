"""What a real training run leaves in its measurement directory: its configuration, collectives, memory and iterations.

The format's version and history are those of :mod:`paradl_bench.records.measurement`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from paradl_bench.core.bounds import (
    AnyFloat,
    Bytes,
    ClockSeconds,
    Count,
    Extent,
    Index,
    MicroBatches,
    PositiveCount,
    RankIndex,
    Ranks,
    Samples,
    Seconds,
)
from paradl_bench.core.checks import check_aligned
from paradl_bench.core.files.storage import read_json
from paradl_bench.plan.settings import ChosenSettings, PlanSettings, library_blocks, plan_settings, typed_options
from paradl_bench.records.kernel_settings import settings_of_label
from paradl_bench.records.training.compile_record import CompileRecord
from paradl_bench.records.training.ghost_record import GhostRun
from paradl_bench.records.training.input_times import InputTimes, RunInput
from paradl_bench.records.training.timed_call import TimedCall
from paradl_bench.records.training.verification import Verification

TRAINING_FILE = "training.jsonl"
RUN_NAME = "run.json"


class IssuedCollective(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A collective that a run issued, or that a plan holds: operation, bytes, group and how many of them.

    Attributes:
        when: ``setup`` (once, before the first iteration), ``first`` (the first iteration), ``rebuild`` (the second, in
            which DDP rebuilds its buckets), ``iteration`` (every later one).
        group: ranks of the group, in order.
        received_bytes: of an all-to-all that was issued, whose ``message_bytes`` are what the rank sent; else None.
    """

    when: Literal["setup", "first", "rebuild", "iteration"]
    operation: str
    message_bytes: Bytes
    group: tuple[RankIndex, ...]
    count: PositiveCount
    received_bytes: Bytes | None = None


class Turn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A turn at forward or backward, in every iteration: of a micro-batch, or of a stage of a pipeline.

    Attributes:
        begin_s, end_s: from the start of the iteration on its rank.
    """

    way: Literal["FW", "BW"]
    begin_s: Samples
    end_s: Samples

    def __post_init__(self) -> None:
        check_aligned(self, "begin_s", "end_s")


class TrainingIterations(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Timed iterations of a real run on one rank (file ``training.jsonl``), warm-up excluded.

    Attributes:
        first_iteration: index, within the run, of the first one here.
        iteration_s: from the start of forward, or of waiting for its input, to the end of the weight update; the sum of
            the phases and of that waiting.
        fw_s: to the loss, what precedes forward (the broadcast of buffers) included.
        bw_s: to the readiness of the last gradient.
        exposed_ge_s: from there to the end of backward's call: what the exchange adds; 0 for serial.
        wu_s: optimizer step and zero_grad.
        pipeline_idle_s: where stages of a pipeline compute forward and backward in turns, what is neither: waiting for
            other stages; empty elsewhere.
        fw_communication_s, bw_communication_s: by kind (``halo``, or the collective), what layer-wise communication
            took of ``fw_s`` and ``bw_s``, waiting for other ranks included; empty where layers are not shared.
        copies_s: what cutting, padding and putting together tensors of shared layers took of ``fw_s`` and ``bw_s``;
            empty where nothing did, and in runs of before.
        collectives_issued: how many collectives the process group counted in each iteration, to show that each timed
            one issued as many as the recorded one; empty where the backend does not count.
        losses: of this rank's samples; empty where another stage computes them.
        host_begin_s: when each iteration began, on the monotonic clock of the rank's host; empty on GPUs, whose stamps
            are of no host's clock, and in runs of before.
        attempt: at the run, as ``hosts.jsonl`` counts them.
        turns: where there are several at forward or backward, in their order; a loss that a stage computes is one by
            itself, behind its forward. Empty where phases tell as much, and in runs of before.
        input: of ranks that read samples; None where samples are drawn in memory, and on later stages of a pipeline.
        calls: each collective and message of these iterations, timed by itself, in the order of issue. Empty where
            that was not asked for, and where iterations issued unlike calls.
    """

    rank: RankIndex
    first_iteration: Index
    iteration_s: Samples
    fw_s: Samples
    bw_s: Samples
    exposed_ge_s: Samples
    wu_s: Samples
    pipeline_idle_s: tuple[Seconds, ...] = ()
    fw_communication_s: dict[str, tuple[Seconds, ...]] = {}
    bw_communication_s: dict[str, tuple[Seconds, ...]] = {}
    copies_s: tuple[Seconds, ...] = ()
    collectives_issued: tuple[Count, ...] = ()
    losses: tuple[AnyFloat, ...] = ()
    host_begin_s: tuple[ClockSeconds, ...] = ()
    attempt: Index = 0
    turns: tuple[Turn, ...] = ()
    input: InputTimes | None = None
    calls: tuple[TimedCall, ...] = ()

    def __post_init__(self) -> None:
        lists = ("iteration_s", "fw_s", "bw_s", "exposed_ge_s", "wu_s", "pipeline_idle_s", "copies_s", "host_begin_s")
        check_aligned(self, *lists, "collectives_issued", "losses")
        for kind, values in (*self.fw_communication_s.items(), *self.bw_communication_s.items()):
            if len(values) != len(self.iteration_s):
                raise ValueError(f"{kind} has {len(values)} values for {len(self.iteration_s)} iterations")
        if self.input is not None and len(self.input.waited_s) != len(self.iteration_s):
            raise ValueError(f"input has {len(self.input.waited_s)} values for {len(self.iteration_s)} iterations")
        for what, parts in (("turns", self.turns), ("calls", self.calls)):
            if any(len(part.begin_s) != len(self.iteration_s) for part in parts):
                raise ValueError(
                    f"{what} have to have a begin and an end for each of {len(self.iteration_s)} iterations"
                )


def without_timed_calls(records: Iterable[TrainingIterations]) -> list[TrainingIterations]:
    """Those whose calls were not timed one by one, which takes time; all of them where none is such."""
    known = list(records)
    return [record for record in known if not record.calls] or known


class CallTiming(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many iterations of a run had each call timed, and what that cost; of rank 0.

    Attributes:
        timed, others: iterations.
        disturbance: the timed ones' median over that of the others, less 1; None where there are fewer than two others.
        spread: interquartile range of the others' times over their median; None likewise.
    """

    timed: Count
    others: Count
    disturbance: AnyFloat | None = None
    spread: AnyFloat | None = None

    @classmethod
    def of_iterations(cls, timed_s: Sequence[float], others_s: Sequence[float]) -> CallTiming:
        """Of iterations of so many seconds, whose calls were timed or not."""
        if len(others_s) < 2:
            return cls(timed=len(timed_s), others=len(others_s))
        low, median, high = statistics.quantiles(others_s, n=4, method="inclusive")
        return cls(
            timed=len(timed_s),
            others=len(others_s),
            disturbance=statistics.median(timed_s) / median - 1,
            spread=(high - low) / median,
        )

    def line(self) -> str:
        """What to know of the calls' times."""
        timed = f"calls were timed one by one in {self.timed} of {self.timed + self.others} iterations"
        if self.disturbance is None or self.spread is None:
            return f"{timed}: this disturbs their times by an unknown amount; more --iterations show it"
        change = "longer" if self.disturbance >= 0 else "shorter"
        return (
            f"{timed}, which took {abs(self.disturbance):.1%} {change} than the others (median of rank 0; quartiles of"
            f" the others lie {self.spread:.1%} apart)"
        )


class MemoryPeak(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The most memory that one rank held at a time in an iteration.

    Attributes:
        tracked_bytes: of the tensors that torch's tracker saw; the sum of ``parts_bytes``.
        allocator_bytes: the CUDA allocator's own peak, which holds rounding and workspaces; reserved_bytes: what it
            had taken of the device for that, fragments included; device_bytes: all that was taken of the device after
            it, by the context and the communication library too, and by other processes. None on a CPU, and in runs of
            before.
        parts_bytes: parameters, buffers, gradients, optimizer, activations, communication, temporary, input, other.
    """

    rank: RankIndex
    tracked_bytes: Bytes
    parts_bytes: dict[str, Bytes]
    allocator_bytes: Bytes | None = None
    reserved_bytes: Bytes | None = None
    device_bytes: Bytes | None = None


class MemoryShortage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Memory that ran out on one rank.

    Attributes:
        phase: what the rank was doing, in words.
        requested_bytes: that were asked for at that moment; 0 where the error did not say.
        needed_bytes: what the rank held by then, and that. had_bytes: the device's memory, or the process's limit.
    """

    rank: RankIndex
    phase: str
    requested_bytes: Bytes
    needed_bytes: Bytes
    had_bytes: Bytes


_OF_PLAN = (
    *("bucket_cap_bytes", "first_bucket_bytes", "exchange", "ranks_per_node"),
    *("micro_batches", "schedule", "stages", "cut_by", "split", "filter_backward", "spatial_until"),
)
"""Fields of a run that are of axes' options, as files have had them from the first version on."""


class TrainingRun(ChosenSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration of a run (file ``run.json``), everything that a prediction of it needs.

    Attributes:
        first_bucket_bytes, bucket_cap_bytes: DDP's bucket limits.
        network_digest: digest of the traced network.
        cores: the core that each rank was pinned to; empty on GPUs.
        issued: collectives that rank 0 issued, by when; planned: what the plan holds.
        issued_equals_plan: whether they agree to the byte, on every rank; None until they were recorded.
        differences: what does not agree, in words.
        micro_batches, schedule, stages, cut_by: of a pipeline, as in :class:`~paradl_bench.plan.settings.PlanSettings`;
            stages as they were cut, whatever by. Empty, in runs of before, for a cut that balances FLOPs.
        split, filter_backward, spatial_until: of layers that are shared out, as there.
        exchange, ranks_per_node: of gradients, as there.
        axis_options: further fields of axes' options that are not the default, by name.
        losses: of the first rank that computes them, one a timed iteration.
        memory: of every rank, in an iteration that was not timed.
        ghost: of an emulated run, whose layers slept; None where they computed. Its losses and memory mean nothing, and
            are left out.
        kernel_settings: label of :class:`~paradl_bench.records.kernel_settings.KernelSettings`; empty for none.
        compiled: what every rank compiled before it timed anything; empty where nothing was.
        did_not_fit: ranks whose memory ran out, which ended the run; empty where none did.
        verified: whether the strategy was proved on the model before anything was timed; None for serial training, for
            layers that slept, and in runs of before.
        input: images that were read; None for samples that are drawn in memory.
        call_timing: of a run whose calls were timed one by one; None elsewhere.
    """

    model: str
    input_shape: tuple[Extent, ...]
    strategy: str
    ranks: Ranks
    dtype: str
    optimizer: str
    backend: str
    launcher: str
    iterations: Count
    warmup: Count
    bucket_cap_bytes: Bytes
    first_bucket_bytes: Bytes
    network_digest: str
    micro_batches: MicroBatches | None = None
    schedule: str = "gpipe"
    stages: tuple[str, ...] = ()
    cut_by: str = ""
    split: tuple[str, ...] = ()
    filter_backward: Literal["all-reduce", "reduce-scatter"] = "all-reduce"
    spatial_until: str | None = None
    exchange: str = "flat"
    ranks_per_node: Ranks | None = None
    axis_options: dict[str, Any] = msgspec.field(default_factory=dict)
    cores: tuple[Index, ...] = ()
    issued: tuple[IssuedCollective, ...] = ()
    planned: tuple[IssuedCollective, ...] = ()
    issued_equals_plan: bool | None = None
    differences: tuple[str, ...] = ()
    losses: tuple[AnyFloat, ...] = ()
    memory: tuple[MemoryPeak, ...] = ()
    did_not_fit: tuple[MemoryShortage, ...] = ()
    ghost: GhostRun | None = None
    kernel_settings: str = ""
    compiled: tuple[CompileRecord, ...] = ()
    verified: Verification | None = None
    input: RunInput | None = None
    call_timing: CallTiming | None = None

    def __post_init__(self) -> None:
        settings_of_label(self.kernel_settings)
        # Raises where they don't go together.
        self.settings  # noqa: B018

    @property
    def settings(self) -> PlanSettings:
        """What a plan of this run needs."""
        fields = {name: value for name in _OF_PLAN if (value := getattr(self, name)) is not None}
        further = typed_options(self.axis_options)
        blocking = library_blocks(self.backend)
        device = "cpu" if blocking else "cuda"
        return plan_settings(blocking=blocking, dtype=self.dtype, device=device, **self.chosen, **fields, **further)


def fields_of_plan(settings: PlanSettings) -> dict[str, Any]:
    """What a :class:`TrainingRun` holds of a plan's settings, by its fields."""
    known = {name: value for name, value in settings.fields.items() if name in _OF_PLAN}
    others = {name: value for options in settings.axes for name, value in msgspec.structs.asdict(options).items()}
    return {
        **settings.chosen,
        **known,
        "axis_options": {name: value for name, value in others.items() if name not in _OF_PLAN},
    }


def read_run(directory: Path) -> TrainingRun:
    """Read and validate the description of a training run.

    Raises:
        UserError: unreadable, or a wrong field (named by its path).
    """
    return read_json(directory / RUN_NAME, TrainingRun)
