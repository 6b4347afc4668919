"""Layer profiles: every operation of a model in situ, the weight update, and what passes between operations.

Blocks are spread over time: one block visits every (model, batch) in shuffled order, each with every number of ranks in
turn, so that a slow spell of the machine falls on all of them alike. In a block uninstrumented and instrumented
iterations alternate, so that the layers' sum can be held against the iteration that nobody probed (closure).
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from paradl_bench.core.files.storage import encode_pretty, write_bytes_atomically
from paradl_bench.core.terminal.command_line import progress, say
from paradl_bench.core.units import counted, format_seconds
from paradl_bench.measure.execution.compiled import Compiling, keep_records, set_up_compiler
from paradl_bench.measure.execution.compiler import compiler_settings
from paradl_bench.measure.execution.kernel_layout import set_modes
from paradl_bench.measure.execution.probes import (
    ProbeCost,
    ProbedIteration,
    dispatched_iteration,
    measure_probe_cost,
    probed_iteration,
)
from paradl_bench.measure.layers.isolated import IsolatedOperation
from paradl_bench.measure.layers.request import LayersRequest
from paradl_bench.measure.layers.subjects import Subject, make_subjects
from paradl_bench.measure.opening import open_directory
from paradl_bench.network.graph import Layer, ModelGraph
from paradl_bench.ranks.clocks import Clock, clock_for
from paradl_bench.ranks.directories.directory import MeasurementDirectory, write_network
from paradl_bench.ranks.groups.process_group import make_group
from paradl_bench.ranks.groups.process_groups import RankContext
from paradl_bench.ranks.pulse import beat
from paradl_bench.records.measurement import COPIES_FILE, ITERATIONS_FILE, LAYERS_FILE
from paradl_bench.records.samples import CopySamples, IterationSamples, LayerSamples
from paradl_bench.records.training.verification import VERIFICATION_FILE, VerifiedShards


def measure_layers(
    request: LayersRequest,
    context: RankContext,
    output: Path,
    command_line: tuple[str, ...],
    network: ModelGraph | None = None,
) -> None:
    """Measure together with the other ranks of the host, as many at once as a block asks for; rank 0 writes.

    Args:
        network: of the request's one model, where ranks that measure it several times have traced it before.

    Raises:
        UserError: a model or batch that does not run, or a directory of something else.
    """
    clock = clock_for(context.device)
    set_modes(request.kernel_settings, context.device)
    set_up_compiler(context.device)
    # An interrupted measurement was proved when it began.
    proofs: list[VerifiedShards] | None = None if context.share((output / ITERATIONS_FILE).exists(), bool) else []
    subjects = [
        subject
        for name in request.models
        for subject in make_subjects(request, name, context, clock, proofs, network=network)
    ]
    directory = None
    if context.rank == 0:
        compiling_settings = compiler_settings(request.kernel_settings, request.device)
        settings = {"dtype": request.dtype, **compiling_settings, **context.settings}
        directory = open_directory(output, "layers", request.arguments(), command_line, request.device, settings)
        for network in {subject.network.name: subject.network for subject in subjects}.values():
            write_network(output, network)
        if proofs:
            write_bytes_atomically(output / VERIFICATION_FILE, encode_pretty(proofs))
    done = context.share(_finished(directory), _Done)
    cost = measure_probe_cost(clock, context.device)
    active = {count: context.first(count) for count in request.ranks_on_host}
    answering = _answering(context, active, subjects)
    plan = _block_plan(request, subjects)
    left = {place for place in plan if (*subjects[place[1]].key, place[2], place[0]) not in done}
    if context.rank == 0 and left:
        seconds = format_seconds(sum(_block_s(request, subjects[index]) for _, index, _ in left))
        blocks = counted(len(left), "block")
        say(f"layers of {', '.join(request.models)}: {blocks}, whose iterations take about {seconds} in all")
    if left:
        keep_records([subject.compiled for subject in subjects if subject.compiled], context, directory)
    with progress("layers", len(plan)) as bar, Compiling() as compiling:
        for block, index, count in plan:
            subject = subjects[index]
            bar.describe(" ".join(f"{subject.model.name} {subject.shard} batch {subject.batch}".split()))
            if (block, index, count) in left:
                about = _About(subject, active[count], request, block)
                group = answering.get((count, subject.part.ranks)) if subject.part else None
                answered = subject.part.answered(group) if subject.part else contextlib.nullcontext()
                with compiling.nothing_more(subject.model.name), answered:
                    _append(directory, context, _measure_block(about, cost) if context.rank < count else None)
            bar.advance()
    if directory is not None:
        directory.finish()


def _answering(
    context: RankContext, active: Mapping[int, RankContext], subjects: Sequence[Subject]
) -> dict[tuple[int, int], dist.ProcessGroup | None]:
    """By how many ranks compute and how many an axis has: this rank's group of adjacent ranks that rehearse together.

    None where the former do not part into such groups, and on a GPU, where messages would take time.
    """
    sizes = sorted({subject.part.ranks for subject in subjects if subject.part})
    found: dict[tuple[int, int], dist.ProcessGroup | None] = {}
    for count, size in itertools.product(active, sizes):
        if context.device.type != "cpu" or size < 2 or count % size:
            continue
        if count == size:
            found[count, size] = active[count].group or dist.group.WORLD
            continue
        groups = [make_group(range(start, start + size)) for start in range(0, count, size)]
        found[count, size] = groups[context.rank // size] if context.rank < count else None
    return found


_Done = set[tuple[str, int, str, int, int, int]]
"""Model, batch, shard, position, ranks on the host and block of what was measured."""


def _finished(directory: MeasurementDirectory | None) -> _Done:
    if directory is None:
        return set()
    records = directory.records(ITERATIONS_FILE, IterationSamples)
    done = {(r.model, r.batch, r.shard, r.position, r.ranks_on_host, r.block) for r in records}
    if directory.resumed and done:
        say(f"going on in {directory.path}: {counted(len(done), 'block')} measured before")
    return done


def _block_plan(request: LayersRequest, subjects: Sequence[Subject]) -> list[tuple[int, int, int]]:
    """(block, subject, ranks that compute), in the order in which they are measured."""
    counts = request.ranks_on_host
    shuffle = random.Random(request.seed)
    plan = []
    for block in range(request.blocks):
        order = list(range(len(subjects)))
        shuffle.shuffle(order)
        # Numbers of ranks are compared with each other: one right behind the other, each as often the first.
        turn = block % len(counts)
        turned = (*counts[turn:], *counts[:turn])
        plan += [(block, index, count) for index in order for count in turned if subjects[index].runs_with(count)]
    return plan


def _block_s(request: LayersRequest, subject: Subject) -> float:
    """About how long a block takes: its iterations, and operations alone, which together take about one more."""
    of_a_pair = 3 if request.device == "cuda" else 2
    return subject.iteration_s * (1 + of_a_pair * request.pairs + (1 if subject.operations else 0))


_Records = dict[str, list[Any]]
"""By file, in the order in which they are written: the iterations' last, whose records say what is finished."""


def _measure_block(about: _About, cost: ProbeCost) -> _Records:
    """One block of one subject, on all the ranks that it is about at once; what this one has to say of it."""
    subject, context = about.subject, about.context
    layers, clock = len(subject.network.layers), subject.clock
    # Other models ran since: one iteration brings this one's memory and code back.
    _plain_iteration(subject, context, clock)
    plain, probed, dispatched = [], [], []
    with _no_garbage_collection():
        for _ in range(about.request.pairs):
            context.barrier()
            plain.append(_plain_iteration(subject, context, clock))
            context.barrier()
            probed.append(
                probed_iteration(
                    subject.forward,
                    subject.update,
                    clock,
                    cost,
                    layers,
                    observed=subject.observed,
                    stand_in=subject.compiled.layers if subject.compiled else None,
                )
            )
            if context.device.type == "cuda":
                context.barrier()
                dispatched.append(dispatched_iteration(subject.trained, subject.update, clock))
    isolated = [about.isolated(operation, clock) for operation in subject.operations]
    context.barrier()
    return {
        LAYERS_FILE: [*about.layer_records(probed), *(record for group in isolated for record in group)],
        COPIES_FILE: about.copies(clock),
        ITERATIONS_FILE: [about.iterations(plain, probed, dispatched)],
    }


def _append(directory: MeasurementDirectory | None, context: RankContext, records: _Records | None) -> None:
    """Gather a block from the ranks that ran it, while the others, which have no records, rest; rank 0 appends it."""
    if records is None:
        context.rest()
    else:
        context.barrier()
    kinds = {LAYERS_FILE: LayerSamples, COPIES_FILE: CopySamples, ITERATIONS_FILE: IterationSamples}
    gathered = {}
    for name, kind in kinds.items():
        of_ranks = context.gather((records or {}).get(name, []), list[kind])  # type: ignore[valid-type]
        gathered[name] = [record for of_rank in of_ranks for record in of_rank]
    if directory is not None:
        directory.append_together(gathered)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keep Python's collector, which the probes' many objects would call far more often than training does, out."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _plain_iteration(subject: Subject, context: RankContext, clock: Clock) -> tuple[float, float, float]:
    """An uninstrumented iteration: seconds of forward, backward and weight update.

    Ranks that share the host wait for each other before the weight update, as data parallelism makes them do: all of
    them use the memory's bandwidth at once then.
    """
    begin = clock.stamp()
    loss = subject.trained()
    fw_end = clock.stamp()
    loss.backward()  # type: ignore[no-untyped-call]
    bw_end = clock.stamp()
    wu_begin = bw_end
    if context.ranks > 1:
        context.barrier()
        wu_begin = clock.stamp()
    subject.update()
    end = clock.stamp()
    clock.synchronise()
    return clock.seconds(begin, fw_end), clock.seconds(fw_end, bw_end), clock.seconds(wu_begin, end)


@dataclass(slots=True)
class _About:
    """What all records of a block share; the context is that of the ranks that compute."""

    subject: Subject
    context: RankContext
    request: LayersRequest
    block: int

    def layer_records(self, probed: list[ProbedIteration]) -> list[LayerSamples]:
        """In-situ forward and backward of every layer."""
        records = []
        for index, kept in enumerate(self.subject.layers):
            if kept is not None:
                layer, shard = kept
                fw_s, bw_s = [float(p.fw_s[index]) for p in probed], [float(p.bw_s[index]) for p in probed]
                records.append(self._layer(layer, "FW", "in_situ", fw_s, shard))
                records.append(self._layer(layer, "BW", "in_situ", bw_s, shard))
        return records

    def isolated(self, operation: IsolatedOperation, clock: Clock) -> list[LayerSamples]:
        """One isolated measurement of an operation, each phase that it has."""
        beat()
        times = operation.measure(clock)
        return [self._layer(operation.layer, phase, "isolated", values) for phase, values in times.items()]

    def _layer(self, layer: Layer, phase: Any, mode: Any, samples_s: list[float], shard: str = "") -> LayerSamples:
        return LayerSamples(
            model=self.subject.network.name,
            layer=layer.name,
            operation=layer.operation,
            phase=phase,
            mode=mode,
            batch=self.subject.batch,
            dtype=self.request.dtype,
            kernel_settings=self.request.kernel_settings.label,
            ranks_on_host=self.context.ranks,
            rank=self.context.rank,
            block=self.block,
            samples_s=tuple(samples_s),
            shard=shard,
            position=self.subject.position,
        )

    def copies(self, clock: Clock) -> list[CopySamples]:
        """All gradients of a whole model copied into and out of buckets, and added up."""
        if self.subject.copies is None:
            return []
        measured = self.subject.copies.measure(clock, self.context, repetitions=2)
        network = self.subject.network
        return [
            CopySamples(
                model=network.name,
                direction=direction,
                tensors=len(network.parameters),
                bytes=network.parameter_bytes,
                ranks_on_host=self.context.ranks,
                rank=self.context.rank,
                block=self.block,
                samples_s=tuple(samples_s),
            )
            for direction, samples_s in measured.items()
        ]

    def iterations(
        self,
        plain: list[tuple[float, float, float]],
        probed: list[ProbedIteration],
        dispatched: list[tuple[float, float]],
    ) -> IterationSamples:
        """Uninstrumented and instrumented iterations, pair by pair."""
        return IterationSamples(
            model=self.subject.network.name,
            batch=self.subject.batch,
            dtype=self.request.dtype,
            kernel_settings=self.request.kernel_settings.label,
            optimizer=self.request.optimizer,
            ranks_on_host=self.context.ranks,
            rank=self.context.rank,
            block=self.block,
            fw_s=tuple(p[0] for p in plain),
            bw_s=tuple(p[1] for p in plain),
            wu_s=tuple(p[2] for p in plain),
            fw_layers_s=tuple(float(p.fw_s.sum()) for p in probed),
            bw_layers_s=tuple(float(p.bw_s.sum()) for p in probed),
            fw_between_s=tuple(p.fw_between_s for p in probed),
            bw_between_s=tuple(p.bw_between_s for p in probed),
            fw_instrumented_s=tuple(p.fw_total_s for p in probed),
            bw_instrumented_s=tuple(p.bw_total_s for p in probed),
            wu_instrumented_s=tuple(p.wu_s for p in probed),
            fw_dispatch_s=tuple(d[0] for d in dispatched),
            bw_dispatch_s=tuple(d[1] for d in dispatched),
            shard=self.subject.shard,
            position=self.subject.position,
        )
