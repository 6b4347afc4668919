"""Raw samples of a measurement directory: of layers, iterations, copies, collectives, imported traces."""

from __future__ import annotations

from typing import Literal

import msgspec

from paradl_bench.core.bounds import (
    Bytes,
    Count,
    Index,
    PositiveCount,
    RankIndex,
    Ranks,
    RanksOrUnknown,
    Samples,
    Seconds,
    SignedSamples,
)
from paradl_bench.core.checks import check_aligned
from paradl_bench.plan.tasks import CopyDirection
from paradl_bench.records.kernel_settings import settings_of_label
from paradl_bench.records.measurement import Mode, PhaseName


class LayerSamples(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Raw times of one layer and phase in one block of iterations (file ``layers.jsonl``).

    Attributes:
        model, layer, operation: which layer of which network, and its operation key.
        phase: FW, BW; BW_input and BW_weight where measured apart (isolated).
        mode: in situ (inside the real iteration) or isolated (the operation alone).
        batch: local batch.
        ranks_on_host: how many ranks ran this at once on the host; rank: which of them.
        block: blocks are spread over time, so that drift between them is seen.
        samples_s: one a measured iteration (or a call, isolated).
        shard: which part of a layer this is, as one rank of a strategy runs it (``f2``); empty for whole layers.
        position: of that rank along the strategy's axis.
        calls_per_sample: how many iterations each value is the mean of; 1 for raw times.
        kernel_settings: label of :class:`~paradl_bench.records.kernel_settings.KernelSettings`; empty for none.
    """

    model: str
    layer: str
    operation: str
    phase: PhaseName
    mode: Mode
    batch: PositiveCount
    dtype: str
    ranks_on_host: Ranks
    rank: RankIndex
    block: Index
    samples_s: Samples
    shard: str = ""
    position: Index = 0
    calls_per_sample: PositiveCount = 1
    kernel_settings: str = ""

    def __post_init__(self) -> None:
        settings_of_label(self.kernel_settings)


class IterationSamples(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whole iterations of the model beside which layers were measured (file ``iterations.jsonl``).

    Uninstrumented iterations give ``fw_s``, ``bw_s`` and ``wu_s``; the instrumented ones that alternate with them give
    the time between operations, probes' own cost taken off. Index i of all lists was measured within one A-B pair.

    Attributes:
        wu_s: the whole optimizer step and zero_grad.
        fw_between_s, bw_between_s: framework, engine and allocator between operations; a remainder with the probes'
            cost taken off, which may fall below zero.
        fw_instrumented_s, bw_instrumented_s: the instrumented phases, probes included.
        fw_layers_s, bw_layers_s: sum of the layers' times in the iteration.
        fw_dispatch_s, bw_dispatch_s: what a GPU's host takes to dispatch the phase, without probes; else empty.
        shard, position: as those of layers; of iterations of one rank's part of the model, without communication.
        kernel_settings: as those of layers.
    """

    model: str
    batch: PositiveCount
    dtype: str
    optimizer: str
    ranks_on_host: Ranks
    rank: RankIndex
    block: Index
    fw_s: Samples
    bw_s: Samples
    wu_s: Samples
    fw_layers_s: Samples
    bw_layers_s: Samples
    fw_between_s: SignedSamples
    bw_between_s: SignedSamples
    fw_instrumented_s: Samples
    bw_instrumented_s: Samples
    wu_instrumented_s: tuple[Seconds, ...] = ()
    fw_dispatch_s: tuple[Seconds, ...] = ()
    bw_dispatch_s: tuple[Seconds, ...] = ()
    shard: str = ""
    position: Index = 0
    kernel_settings: str = ""

    def __post_init__(self) -> None:
        settings_of_label(self.kernel_settings)
        check_aligned(self, *(label for label in self.__struct_fields__ if label.endswith("_s")))


class CopySamples(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times of moving all gradients of a model: into or out of buckets, or added up (file ``copies.jsonl``).

    Attributes:
        direction: ``into`` (with the division by the number of ranks), ``out``, or ``add`` (to others).
        tensors, bytes: how many gradients, and their bytes in all.
    """

    model: str
    direction: CopyDirection
    tensors: Count
    bytes: Bytes
    ranks_on_host: Ranks
    rank: RankIndex
    block: Index
    samples_s: Samples


class CollectiveSamples(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Raw times of one collective at one size in one block (file ``collectives.jsonl``).

    Attributes:
        library: gloo, nccl, mpi. tool: torch, nccl-tests, osu.
        level: which level of the cluster the group spans.
        message_bytes: as the operation defines it (whole buffer for all_reduce and broadcast, what each
            rank contributes or keeps for all_gather and reduce_scatter).
        samples_s: a list a rank, one value a repetition; the same index is the same call on all ranks. A send_recv has
            the sender's and the receiver's.
        verified: the result was compared with the expected one on every rank.
        calls_per_sample: how many calls each value is the mean of; 1 for raw times. Logs of other tools hold means.
        buffers: ``in_place`` or ``out_of_place`` where the tool measured both; empty where it says nothing.
        source: ``FILE:LINE`` of what was imported.
        ranks_per_node: the most ranks of the group that share a host; 0 where nobody said.
        concurrent: how many disjoint groups of so many ranks ran at once; group: which of them this is.
        first_rank: of all ranks, the first of a group of ranks side by side, all of which call at once.
    """

    library: str
    tool: str
    operation: str
    level: str
    ranks: Ranks
    message_bytes: Bytes
    dtype: str
    block: Index
    samples_s: tuple[Samples, ...]
    verified: bool
    calls_per_sample: PositiveCount = 1
    buffers: Literal["", "in_place", "out_of_place"] = ""
    source: str = ""
    ranks_per_node: RanksOrUnknown = 0
    concurrent: Ranks = 1
    group: Index = 0
    first_rank: RankIndex = 0

    def __post_init__(self) -> None:
        if not 0 <= self.group < self.concurrent:
            raise ValueError(f"group of {self.operation} has to be below {self.concurrent}, not {self.group}")
        if len({len(samples) for samples in self.samples_s}) != 1:
            raise ValueError(f"{self.operation} of {self.message_bytes} bytes has not as many samples on every rank")


class TraceTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one rank's profiler trace adds up to (file ``trace.jsonl``).

    Attributes:
        source: the file. rank, ranks: None where the trace does not say.
        iterations: how many it holds; optimizer_s: kernels of the weight update, all iterations together.
        span_s: from the first kernel's start to the last one's end.
        compute_s, communication_s, copy_s: while any kernel of that sort ran.
        overlap_s: while compute and communication ran side by side. idle_s: while nothing ran.
    """

    source: str
    rank: RankIndex | None
    ranks: Ranks | None
    iterations: Count
    span_s: Seconds
    compute_s: Seconds
    communication_s: Seconds
    overlap_s: Seconds
    copy_s: Seconds
    idle_s: Seconds
    optimizer_s: Seconds
