"""Real training of a strategy: phases of every iteration on every rank, and every collective that it issued.

The first three iterations are recorded instead of timed: collectives are seen at the dispatcher (DDP sends one bucket
in the first and rebuilds its buckets in the second), and which gradient arrives last is found. After the rest of the
warm-up, ranks run chunks of timed iterations, without a barrier between iterations, as real training does. A chunk
starts from a barrier and one iteration that is not timed, since rank 0 writes the chunk before.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from paradl_bench.emulate.layers import hold_in_common
from paradl_bench.emulate.twin import GhostTwin
from paradl_bench.measure.autocast import autocast_to
from paradl_bench.measure.clocks import Clock, CpuClock, clock_for
from paradl_bench.measure.compiled import Compiling, compile_errors, compile_in_place, set_up_compiler
from paradl_bench.measure.ghosts import Ghost, HostTime, describe_run, emulate, measure_host_time
from paradl_bench.measure.gradient_order import GradientOrder
from paradl_bench.measure.kernel_layout import laid_out, lay_out, refuse_without_channels, set_modes
from paradl_bench.measure.measured_nodes import note_places
from paradl_bench.measure.memory_tracking import track_memory
from paradl_bench.measure.micro_steps import MicroSteps, Row, by_turn
from paradl_bench.measure.optimizers import build_optimizer
from paradl_bench.measure.out_of_memory import describe_shortage, ran_out, shortage
from paradl_bench.measure.process_groups import RankContext
from paradl_bench.measure.pulse import beat
from paradl_bench.measure.recorder import (
    CollectiveRecorder,
    SequenceCounter,
    differences,
    planned_collectives,
)
from paradl_bench.measure.stage_balance import with_measured_stages
from paradl_bench.measure.tracing import trace_network
from paradl_bench.measure.training_request import RECORDED, TrainingRequest
from paradl_bench.measure.training_writer import TrainingWriter, keep_shortage
from paradl_bench.models.catalog import LoadedModel, load_model
from paradl_bench.spec.compile_record import CompileRecord
from paradl_bench.spec.errors import UserError, WorkError
from paradl_bench.spec.ghost_record import GhostRun
from paradl_bench.spec.network import Network
from paradl_bench.spec.plan import Plan
from paradl_bench.spec.training_record import IssuedCollective, MemoryPeak, TrainingIterations
from paradl_bench.strategies.catalog import planner_for
from paradl_bench.strategies.group_functions import Spans
from paradl_bench.strategies.mesh import REPLICATING, degree_of, group_axes
from paradl_bench.strategies.parallel import build_parallel
from paradl_bench.strategies.pipeline.module import RankPipeline
from paradl_bench.strategies.recomputed_module import recompute_segments
from paradl_bench.strategies.zero.plan import zero_stage
from paradl_bench.terminal import progress

CHUNK_ITERATIONS = 10
"""Timed iterations between two writes: what an interruption loses at most."""


def check_limits(request: TrainingRequest) -> None:
    """Refuse, before any rank is started, what the model's layers do not allow.

    Raises:
        UserError: a model that does not load or run, or a limit that is exceeded; the message names the layer.
    """
    network = trace_network(load_model(request.model, request.input_shape, device="meta"))
    refuse_without_channels(request.model, network.input_shape, request.kernel_settings)
    request = with_measured_stages(request, network)
    planner_for(request.strategy).plan(network, request.strategy, request.settings)


def measure_training(
    request: TrainingRequest, context: RankContext, output: Path, command_line: tuple[str, ...]
) -> None:
    """Train on this rank, together with the others; rank 0 writes ``run.json`` and ``training.jsonl``.

    Raises:
        UserError: a model, batch or number of ranks that does not fit the strategy, or a directory of something else.
        WorkError: a loss that is not finite, control flow that varies between iterations, or memory that ran out, which
            ``run.json`` then holds.
    """
    wanted = request.strategy.ranks
    if context.ranks != wanted:
        raise UserError(f"strategy {request.strategy} takes {wanted} ranks; {context.launcher} started {context.ranks}")
    # The model comes first: a mistake in it leaves no directory, which the corrected command would not fit.
    model = load_model(request.model, request.input_shape)
    network = trace_network(model)
    refuse_without_channels(request.model, network.input_shape, request.kernel_settings)
    request = with_measured_stages(request, network)
    plan = planner_for(request.strategy).plan(network, request.strategy, request.settings)
    ghost = emulate(request, network, context)
    if ghost:
        hold_in_common(model.module)
    trainer: Trainer | None = None
    try:
        trainer = Trainer(model, request, context, ghost.twin if ghost else None)
        _measure(trainer, request, context, network, plan, output, command_line, ghost)
        trainer.close()
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        phase = trainer.phase if trainer else "setting up the batch"
        found = shortage(error, context.rank, phase, context.device)
        keep_shortage(found, network, request, context, output, command_line, ghost.emulated if ghost else None)
        raise WorkError(describe_shortage(found)) from error


def _measure(
    trainer: Trainer,
    request: TrainingRequest,
    context: RankContext,
    network: Network,
    plan: Plan,
    output: Path,
    command_line: tuple[str, ...],
    ghost: Ghost | None,
) -> None:
    trainer.try_alone(network)
    layers, first = ghost.emulated if ghost else None, context.rank == 0
    writer = TrainingWriter.open(request, context, output, command_line, layers=layers) if first else None
    done = context.share(writer.done if writer else 0)
    if done >= request.iterations:
        return
    hosts_noted = note_places(context, writer.directory if writer else None)
    trainer.attempt = hosts_noted.attempt
    host = trainer.host_time(network) if ghost else None
    issued = trainer.prepare(network)
    planned = planned_collectives(plan, context.rank)
    found = _differences(context, issued, planned)
    cores = tuple(core for core in context.gather(context.core) if core is not None)
    # Ghosts hold other tensors than layers do: their memory says nothing of a real run's. A model that is tracked runs
    # uncompiled.
    untracked = ghost or request.kernel_settings.compile
    peaks = [] if untracked else context.gather(msgspec.to_builtins(trainer.track_memory()))
    compiled = context.gather(list(map(msgspec.to_builtins, trainer.compiled)))
    about = trainer.describe_ghosts(ghost, host) if ghost and host else None
    if writer is not None:
        memory = msgspec.convert(peaks, tuple[MemoryPeak, ...])
        whole = msgspec.convert([record for of_rank in compiled for record in of_rank], tuple[CompileRecord, ...])
        writer.describe(network, context, cores, issued, planned, memory, about, whole)
        if ghost:
            writer.keep_table(ghost.table)
        writer.write(found)
    about_run = f"{request.model} {request.strategy}, batch {request.batch}"
    with progress(about_run, request.iterations) as bar, Compiling() as compiling:
        bar.advance(done)
        for _ in range(request.warmup - len(RECORDED)):
            trainer.iterate()
        while done < request.iterations:
            count = min(CHUNK_ITERATIONS, request.iterations - done)
            with compiling.nothing_more(request.model):
                chunk = trainer.run_chunk(done, count)
            found += _count_differences(context, chunk, trainer.recorded_count)
            chunks = context.gather(chunk)
            if writer is not None:
                writer.append(chunks)
                writer.write(found)
            done += count
            bar.advance(count)
    hosts_noted.again()
    if writer is not None:
        writer.finish()


def _differences(
    context: RankContext, issued: tuple[IssuedCollective, ...], planned: tuple[IssuedCollective, ...]
) -> list[str]:
    """What any rank issued other than planned, each line once; on every rank."""
    lines = [f"rank {context.rank}, {line}" for line in differences(issued, planned)]
    return [line for found in context.gather(lines) for line in found]


def _count_differences(context: RankContext, chunk: TrainingIterations, recorded: int | None) -> list[str]:
    wrong = [] if recorded is None else [count for count in chunk.collectives_issued if count != recorded]
    lines = []
    if wrong:
        lines = [
            f"rank {context.rank}, timed iterations from {chunk.first_iteration} on: {len(wrong)} issued {wrong[0]}"
            f" collectives where the recorded one issued {recorded}"
        ]
    return [line for found in context.gather(lines) for line in found]


class _Stamps(msgspec.Struct, frozen=True):
    """One iteration: stamps at its start and end and at the end of backward, and the loss, still on the device.

    Layer-wise communication is (what, begin, end) in the order of issue; so are the turns at forward and backward
    (``FW``, ``BW``) of micro-batches, or of a pipeline's stages. The loss is None where another stage computes it.
    """

    begin: Any
    last_gradient: Any
    backward_end: Any
    end: Any
    loss: torch.Tensor | None
    fw_communication: list[tuple[str, Any, Any]]
    bw_communication: list[tuple[str, Any, Any]]
    turns: list[tuple[str, Any, Any]]


@dataclass(slots=True)
class _Arrival:
    """When the last gradient of an iteration arrived."""

    stamp: Any = None


class Trainer:
    """One rank's model, data and optimizer, and its iterations.

    Args:
        twin: of an emulated run: what stands for the model's compute.

    Attributes:
        recorded_count: collectives that the process group counted in the recorded steady iteration; None where the
            backend does not count.
        phase: what the rank is doing, in words.
        attempt: at the run, for what is recorded.
        compiled: what was compiled in the recorded iterations; nothing where nothing was.
    """

    _optimizer: torch.optim.Optimizer

    def __init__(
        self, model: LoadedModel, request: TrainingRequest, context: RankContext, twin: GhostTwin | None = None
    ) -> None:
        self._model = model
        self._twin = twin
        self._loss = twin.loss(model.loss) if twin else model.loss
        self._request = request
        self._context = context
        self.phase = "setting up"
        self.attempt = 0
        self.compiled: tuple[CompileRecord, ...] = ()
        set_modes(request.kernel_settings, context.device)
        set_up_compiler(context.device)
        self._clock: Clock = clock_for(context.device)
        torch.manual_seed(_replica(request, context))
        # Replicas have their own samples, the same ones in every run; reading input is not part of the iteration.
        local = request.batch // degree_of(request.strategy, "data")
        self._inputs, self._targets = (
            tensor.to(context.device) for tensor in model.make_batch(local, seed=_replica(request, context))
        )
        self._inputs = laid_out(self._inputs, request.kernel_settings)
        self._parallel = model.module
        self._entered = autocast_to(request.dtype, context.device)
        self._steps: MicroSteps | None = None
        self._groups: tuple[dist.ProcessGroup, ...] = ()
        self._counter = SequenceCounter()
        self._spans = Spans()
        self._pipeline: RankPipeline | None = None
        self._last_gradient = _Arrival()
        self._watches_gradients = False
        self._shards_parameters = zero_stage(request.strategy) > 1
        self.recorded_count: int | None = None

    def prepare(self, network: Network) -> tuple[IssuedCollective, ...]:
        """Build the parallel module and run the recorded iterations; returns what this rank issued in all of that.

        Raises:
            UserError: nothing in the model is trained.
        """
        request, model = self._request, self._model.module
        self.phase = "building the parallel module"
        with CollectiveRecorder() as recorder:
            built = build_parallel(
                model,
                network,
                request.strategy,
                request.settings,
                self._context.device,
                self._loss,
                self._twin.layers if self._twin else None,
            )
        self._parallel, self._spans, self._pipeline = built.module, built.spans, built.pipeline
        self._groups = built.groups
        if built.pipeline is None:
            self._steps = MicroSteps(built, self._loss, self._inputs, self._targets, request.accumulate, self._entered)
        if built.pipeline is not None and built.pipeline.stages[0].receives:
            # Only the first stage reads samples.
            self._inputs = self._inputs.new_empty(0)
        self._counter = SequenceCounter(built.groups)
        # Only now: parameters may have been replaced by shards of them.
        if self._twin:
            self._optimizer = self._twin.optimizer(model.parameters(), built.optimizer_group)
        else:
            self._optimizer = build_optimizer(request.optimizer, model.parameters(), built.optimizer_group)
        issued: tuple[IssuedCollective, ...] = recorder.issued("setup")
        if not request.kernel_settings.compile:
            return (*issued, *self._run_recorded())
        # Inside of the wrapper that exchanges gradients, which torch parts the graph at the buckets of.
        compile_in_place(model)
        with Compiling() as compiling, compile_errors(request.model):
            issued += self._run_recorded()
            # Hooks of those iterations are gone, and one is there that stays.
            self.iterate()
        local = len(self._inputs) // request.accumulate
        self.compiled = (compiling.record(self._context.rank, request.model, local, "whole"),)
        return issued

    def _run_recorded(self) -> tuple[IssuedCollective, ...]:
        """The recorded iterations; returns what this rank issued in them, and watches the last gradient from then on.

        Raises:
            UserError: nothing in the model is trained.
        """
        issued: tuple[IssuedCollective, ...] = ()
        last: str | None = None
        for when in RECORDED:
            with CollectiveRecorder() as recorder, GradientOrder(self._model.module) as order:
                self._counter.since_last()
                self.iterate()
                self.recorded_count = self._counter.since_last()
            issued += recorder.issued(when)
            last = order.names[-1] if order.names else None
        if last is None:
            raise UserError(
                f"model {self._request.model} has no parameter that gets a gradient: there is nothing to train"
            )
        # Where no gradients are exchanged nothing is waited for after the last one.
        if group_axes(self._request.strategy, *REPLICATING):
            self._watch(last)
        return issued

    def close(self) -> None:
        """Let its process groups go, but for that of all ranks: they keep threads. A collective."""
        self._context.barrier()
        for group in self._groups[1:]:
            dist.destroy_process_group(group)

    def track_memory(self) -> MemoryPeak:
        """Peak of one more iteration, on every rank at once."""
        return track_memory(
            self.iterate,
            self._parallel,
            self._optimizer,
            (self._inputs, self._targets),
            rank=self._context.rank,
        )

    def try_alone(self, network: Network) -> None:
        """Forward and backward without the other ranks: what fails here is the model's or the batch's doing.

        Raises:
            UserError: the model does not run on its local batch.
        """
        self.phase = "forward and backward of the model alone"
        try:
            self._model.module.to(self._context.device)
            lay_out(self._model.module, self._request.kernel_settings)
            recompute_segments(self._model.module, network, self._request.settings)
            at_once = len(self._inputs) // self._request.accumulate
            module = self._twin.alone(self._model.module) if self._twin else self._model.module
            with self._twin.sleeper.awake() if self._twin else contextlib.nullcontext():
                with self._entered():
                    loss = self._loss(module(self._inputs[:at_once]), self._targets[:at_once])
                loss.backward()  # type: ignore[no-untyped-call]
        except (RuntimeError, ValueError) as error:
            if ran_out(error):
                raise
            where = f"model {self._request.model} does not train on a local batch of {at_once}"
            raise UserError(f"{where}: {error}") from error
        self._model.module.zero_grad(set_to_none=True)

    def host_time(self, network: Network) -> HostTime:
        """What ghosts take rank 0's host; only before :meth:`prepare`, which makes the module one of several ranks'."""
        assert self._twin is not None
        self.phase = "measuring what ghosts take the host"
        batch = self._inputs, self._targets
        return measure_host_time(self._twin, self._model, network, batch, self._request, self._context)

    def describe_ghosts(self, ghost: Ghost, host: HostTime) -> GhostRun:
        """What an emulated run says of itself; the host's time is known to rank 0 alone."""
        return describe_run(ghost, host, self.iterate, self._context)

    def _watch(self, last: str) -> None:
        """Stamp when the gradient that arrives last is there; one hook, since each one costs time."""
        # The hook must not hold the trainer: parameters keep their hooks where Python's collector does not look, and
        # the process group has to be gone when the rank leaves.
        arrival, stamp = self._last_gradient, self._clock.stamp

        def arrived(_: torch.Tensor) -> None:
            arrival.stamp = stamp()

        parameter = dict(self._model.module.named_parameters())[last]
        parameter.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
        self._watches_gradients = True

    def iterate(self) -> _Stamps:
        """Forward, loss, backward and weight update, once."""
        beat()
        stamp = self._clock.stamp
        self._last_gradient.stamp = None
        rows: list[Row] = []
        self._spans.rows = rows
        loss: torch.Tensor | None
        begin = stamp()
        if self._pipeline is not None:
            self.phase = "forward and backward of a pipeline"
            loss, backward_end = self._pipeline.step(self._inputs, self._targets), stamp()
        else:
            assert self._steps is not None
            loss = self._steps.run(begin, stamp, rows, self._enter)
            backward_end = rows[-1][2]
        self.phase = "weight update"
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        end = stamp()
        last = self._last_gradient.stamp if self._watches_gradients else backward_end
        return _Stamps(begin, last, backward_end, end, loss, *by_turn(rows))

    def _enter(self, phase: str) -> None:
        self.phase = phase

    def run_chunk(self, first: int, count: int) -> TrainingIterations:
        """Timed iterations ``first`` to ``first + count - 1``.

        Raises:
            WorkError: a loss is not finite, or the gradient that arrived last in the recorded iterations did not.
        """
        self._context.barrier()
        self.iterate()
        self._counter.since_last()
        stamps, counts = [], []
        self._spans.stamp = self._clock.stamp
        for _ in range(count):
            stamps.append(self.iterate())
            counts.append(self._counter.since_last())
        self._spans.stamp = None
        self._clock.synchronise()
        losses = tuple(float(item.loss) for item in stamps if item.loss is not None)
        for index, item in enumerate(stamps, start=first):
            self._check(index, item)
        return self._record(first, stamps, counts, losses)

    def _check(self, index: int, stamps: _Stamps) -> None:
        where = f"{self._request.model}, rank {self._context.rank}, iteration {index}"
        if stamps.loss is not None and not math.isfinite(stamps.loss):
            raise WorkError(f"{where}: the loss is {float(stamps.loss)}; chunks of iterations before are kept")
        if stamps.last_gradient is None:
            raise WorkError(f"{where}: the gradient that came last in the recorded iterations did not come")

    def _record(
        self, first: int, stamps: list[_Stamps], counts: list[int | None], losses: tuple[float, ...]
    ) -> TrainingIterations:
        seconds = self._clock.seconds
        known = tuple(count for count in counts if count is not None)
        forward, backward, exchange, idle = zip(*map(self._phases, stamps), strict=True)
        return TrainingIterations(
            rank=self._context.rank,
            first_iteration=first,
            iteration_s=tuple(seconds(item.begin, item.end) for item in stamps),
            fw_s=forward,
            bw_s=backward,
            exposed_ge_s=exchange,
            pipeline_idle_s=idle if self._pipeline is not None else (),
            wu_s=tuple(seconds(item.backward_end, item.end) for item in stamps),
            fw_communication_s=self._communication([item.fw_communication for item in stamps]),
            bw_communication_s=self._communication([self._in_backward(item) for item in stamps]),
            collectives_issued=known if len(known) == len(counts) else (),
            losses=() if self._twin else losses,
            host_begin_s=tuple(item.begin for item in stamps) if isinstance(self._clock, CpuClock) else (),
            attempt=self.attempt,
        )

    def _phases(self, item: _Stamps) -> tuple[float, float, float, float]:
        """Seconds of forward, backward, exposed gradient exchange, and idle time of a pipeline."""
        seconds = self._clock.seconds
        spent = {"FW": 0.0, "BW": 0.0}
        for what, begin, end in item.turns:
            spent[what] += seconds(begin, end)
        if self._pipeline is None:
            last = item.last_gradient
            if self._shards_parameters:
                # A sharded gradient is there when it has been reduced; what is reduced last was there before.
                last = next(begin for what, begin, _ in reversed(item.bw_communication) if what == "reduce_scatter")
            exchange = seconds(last, item.backward_end)
            return spent["FW"], spent["BW"] - exchange, exchange, 0.0
        # The exchange ends inside the last backward, which waits for it.
        exchange = max(0.0, seconds(item.last_gradient, item.turns[-1][2])) if self._watches_gradients else 0.0
        idle = seconds(item.begin, item.backward_end) - spent["FW"] - spent["BW"]
        return spent["FW"], spent["BW"] - exchange, exchange, max(0.0, idle)

    def _in_backward(self, item: _Stamps) -> list[tuple[str, Any, Any]]:
        """Communication before the exposed gradient exchange, which the last reduction of sharded gradients is."""
        return item.bw_communication[:-1] if self._shards_parameters else item.bw_communication

    def _communication(self, iterations: list[list[tuple[str, Any, Any]]]) -> dict[str, tuple[float, ...]]:
        """Seconds of each kind of layer-wise communication, one value an iteration."""
        sums: dict[str, list[float]] = {}
        for index, rows in enumerate(iterations):
            for what, begin, end in rows:
                own = sums.setdefault(what, [0.0] * len(iterations))
                own[index] += self._clock.seconds(begin, end)
        return {what: tuple(own) for what, own in sums.items()}


def _replica(request: TrainingRequest, context: RankContext) -> int:
    """Which of the replicas this rank belongs to: ranks that share layers see the same samples."""
    coordinates = zip(request.strategy.axes, request.strategy.coordinates(context.rank), strict=True)
    return next((coordinate for axis, coordinate in coordinates if axis.kind == "data"), 0)
