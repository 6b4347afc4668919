"""What rank 0 writes of a training run (``run.json``, ``training.jsonl``), and what an interrupted run goes on from."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from paradl_bench.core.files.storage import encode_pretty, write_bytes_atomically
from paradl_bench.core.terminal.command_line import say
from paradl_bench.core.units import counted
from paradl_bench.measure.execution.compiler import compiler_settings
from paradl_bench.measure.input.feed import RunImages
from paradl_bench.measure.training.request import TrainingRequest
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.axis_planner import staging_axis
from paradl_bench.ranks.directories.directory import MeasurementDirectory, write_network
from paradl_bench.ranks.environment import capture_environment
from paradl_bench.ranks.groups.process_groups import RankContext
from paradl_bench.records.emulation import EmulatedLayers
from paradl_bench.records.training.compile_record import CompileRecord
from paradl_bench.records.training.ghost_record import GHOST_FILE, GhostRun, GhostTable
from paradl_bench.records.training.input_times import RunInput
from paradl_bench.records.training.training_record import (
    RUN_NAME,
    TRAINING_FILE,
    CallTiming,
    IssuedCollective,
    MemoryPeak,
    MemoryShortage,
    TrainingIterations,
    TrainingRun,
    fields_of_plan,
    read_run,
)
from paradl_bench.records.training.verification import Verification
from paradl_bench.strategies.pipeline.axis import PipelineOptions, cut_by
from paradl_bench.strategies.pipeline.stages import cut_names


class RankTraining(NamedTuple):
    """A run on one rank: what was asked, and where its measurements go.

    Attributes:
        layers: that slept, of an emulated run.
    """

    request: TrainingRequest
    context: RankContext
    output: Path
    command_line: tuple[str, ...]
    layers: EmulatedLayers | None


@dataclass(slots=True)
class TrainingWriter:
    """What rank 0 keeps: the run's description, and chunks of iterations as they are measured.

    Attributes:
        timed_s, others_s: iterations of rank 0 whose calls were timed one by one, and all others.
    """

    directory: MeasurementDirectory
    request: TrainingRequest
    done: int
    run: TrainingRun | None = None
    losses: list[float] = field(default_factory=list)
    timed_s: list[float] = field(default_factory=list)
    others_s: list[float] = field(default_factory=list)

    @classmethod
    def open(cls, run: RankTraining, *, alone: bool = True) -> TrainingWriter:
        """Start in a new directory, or go on in one of the same command.

        Args:
            alone: as of :meth:`MeasurementDirectory.open`.

        Raises:
            UserError: the directory holds something else.
        """
        request, context = run.request, run.context
        directory = MeasurementDirectory.open(
            run.output,
            kind="training",
            arguments=request.arguments(context),
            command_line=run.command_line,
            environment=capture_environment(
                request.device,
                settings={
                    "dtype": request.dtype,
                    **compiler_settings(request.kernel_settings, request.device),
                    **context.settings,
                },
                layers=run.layers,
            ),
            alone=alone,
            watch=alone,
        )
        records = directory.records(TRAINING_FILE, TrainingIterations)
        done = [0] * context.ranks
        for record in records:
            done[record.rank] = max(done[record.rank], record.first_iteration + len(record.iteration_s))
        writer = cls(directory, request, min(done))
        if writer.done:
            writer._resume(records)
        return writer

    def _resume(self, records: list[TrainingIterations]) -> None:
        whole = [record for record in records if record.first_iteration < self.done]
        first = min((record.rank for record in whole if record.losses), default=0)
        self.losses = [loss for record in whole if record.rank == first for loss in record.losses]
        self._keep_times(whole)
        if len(whole) < len(records):
            # The last chunk was written for some ranks only: it is measured again for all.
            lines = b"".join(msgspec.json.encode(record) + b"\n" for record in whole)
            write_bytes_atomically(self.directory.path / TRAINING_FILE, lines)
        if self.done >= self.request.iterations:
            say(f"{self.directory.path} holds all {self.done} iterations already")
            self.directory.finish()
        else:
            say(f"going on in {self.directory.path}: {counted(self.done, 'iteration')} measured before")

    def describe(
        self,
        network: ModelGraph,
        context: RankContext,
        cores: tuple[int, ...],
        issued: tuple[IssuedCollective, ...],
        planned: tuple[IssuedCollective, ...],
        memory: tuple[MemoryPeak, ...],
        ghost: GhostRun | None = None,
        compiled: tuple[CompileRecord, ...] = (),
        verified: Verification | None = None,
        images: RunImages | None = None,
    ) -> None:
        """Set what is known of the run before its timed iterations, and keep its network beside it."""
        write_network(self.directory.path, network)
        request, settings = self.request, self.request.settings
        by = cut_by(settings) if staging_axis(request.strategy) is not None else ""
        # Stages as they were cut, whatever by.
        cut = settings.changed(PipelineOptions, stages=cut_names(network, request.strategy, settings), cut_by=by)
        self.run = TrainingRun(
            model=request.model,
            input_shape=network.input_shape,
            strategy=str(request.strategy),
            ranks=context.ranks,
            dtype=request.dtype,
            backend=context.backend,
            launcher=context.launcher,
            iterations=request.iterations,
            warmup=request.warmup,
            **fields_of_plan(cut),
            network_digest=network.digest,
            cores=cores,
            issued=issued,
            planned=planned,
            memory=memory,
            ghost=ghost,
            kernel_settings=request.kernel_settings.label,
            compiled=compiled,
            verified=verified,
            input=None if images is None else _run_input(request, images),
        )

    def keep_table(self, table: GhostTable) -> None:
        """Keep what an emulated run's layers sleep."""
        write_bytes_atomically(self.directory.path / GHOST_FILE, encode_pretty(table))

    def append(self, chunks: list[TrainingIterations]) -> None:
        """Keep a chunk of every rank."""
        self.directory.append(TRAINING_FILE, chunks)
        self.losses += next((chunk.losses for chunk in chunks if chunk.losses), ())
        self._keep_times(chunks)

    def _keep_times(self, records: list[TrainingIterations]) -> None:
        for record in records:
            if record.rank == 0:
                (self.timed_s if record.calls else self.others_s).extend(record.iteration_s)

    def write(self, unplanned: list[str]) -> None:
        """Replace the run's description by what is known now.

        Args:
            unplanned: what was issued other than planned, a line each.
        """
        assert self.run is not None
        run = msgspec.structs.replace(
            self.run,
            losses=tuple(self.losses),
            issued_equals_plan=not unplanned,
            differences=tuple(unplanned),
            call_timing=CallTiming.of_iterations(self.timed_s, self.others_s) if self.timed_s else None,
        )
        write_bytes_atomically(self.directory.path / RUN_NAME, encode_pretty(run))


def _run_input(request: TrainingRequest, images: RunImages) -> RunInput:
    arguments = request.input_arguments
    return RunInput(
        source=arguments["input"],
        files=len(images.paths),
        crop=images.crop,
        workers=images.workers,
        preset=arguments["preset"],
    )


def keep_shortage(lacked: MemoryShortage, network: ModelGraph, run: RankTraining) -> None:
    """Note in ``run.json`` that memory ran out on this rank; any rank writes it, since the others may wait for ever.

    Raises:
        UserError: the directory holds something else.
    """
    run.output.parent.mkdir(parents=True, exist_ok=True)
    directory = os.open(run.output.parent, os.O_RDONLY)
    try:
        # Ranks run out together.
        fcntl.flock(directory, fcntl.LOCK_EX)
        writer = TrainingWriter.open(run, alone=False)
        if (run.output / RUN_NAME).exists():
            described = read_run(run.output)
        else:
            writer.describe(network, run.context, (), (), (), ())
            assert writer.run is not None
            described = writer.run
        described = msgspec.structs.replace(described, did_not_fit=(*described.did_not_fit, lacked))
        write_bytes_atomically(run.output / RUN_NAME, encode_pretty(described))
    finally:
        os.close(directory)
