"""One rank's model, data and optimizer in training, and its iterations: recorded ones first, then timed chunks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from paradl_bench.core.errors import UserError, WorkError
from paradl_bench.emulation.twin import GhostTwin
from paradl_bench.measure.execution.compiled import Compiling, compile_errors, compile_in_place, set_up_compiler
from paradl_bench.measure.execution.kernel_layout import as_read, lay_out, set_modes
from paradl_bench.measure.execution.micro_steps import MicroSteps, Row, by_turn
from paradl_bench.measure.execution.optimizers import optimizer_of
from paradl_bench.measure.input.feed import Fed, ImageFeed, RunImages, input_times
from paradl_bench.measure.proof.parts import place_of
from paradl_bench.measure.tracing.gradient_order import GradientOrder
from paradl_bench.measure.training.calls.recorder import CollectiveRecorder, SequenceCounter
from paradl_bench.measure.training.calls.timer import CallTimer
from paradl_bench.measure.training.ghosts import HostTime, measure_host_time
from paradl_bench.measure.training.memory_tracking import track_memory
from paradl_bench.measure.training.request import RECORDED, TrainingRequest
from paradl_bench.measure.training.stamps import Stamps, communication_of, copies_of, turns_of
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.models.catalog import LoadedModel
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.mesh import degree_of, group_axes, zero_stage
from paradl_bench.ranks.clocks import Clock, CpuClock, clock_for
from paradl_bench.ranks.groups.process_group import end_groups
from paradl_bench.ranks.groups.process_groups import RankContext
from paradl_bench.ranks.out_of_memory import ran_out
from paradl_bench.ranks.pulse import beat
from paradl_bench.records.training.compile_record import CompileRecord
from paradl_bench.records.training.training_record import IssuedCollective, MemoryPeak, TrainingIterations
from paradl_bench.strategies.nesting.parallel import build_parallel
from paradl_bench.strategies.passes.recomputed_module import recompute_segments
from paradl_bench.strategies.running.autocast import autocast_to, hold_weights
from paradl_bench.strategies.running.axis_runners import StagedModule
from paradl_bench.strategies.running.clipped_gradients import GradientClipper
from paradl_bench.strategies.running.sharded_module import LossOfParts
from paradl_bench.strategies.running.spans import Spans


@dataclass(slots=True)
class _Arrival:
    """When the last gradient of an iteration arrived."""

    stamp: Any = None


class Trainer:
    """One rank's model, data and optimizer, and its iterations.

    Attributes:
        recorded_count: collectives that the process group counted in the recorded steady iteration; None where the
            backend does not count.
        compiled: what was compiled in the recorded iterations; nothing where nothing was.
        sample_s: seconds that forward and backward of one sample took alone, the first time.
        feed: of iterations, where samples are read; None where they are drawn.
    """

    _optimizer: torch.optim.Optimizer

    def __init__(
        self, model: LoadedModel, request: TrainingRequest, context: RankContext, twin: GhostTwin | None = None
    ) -> None:
        self._model = model
        self._twin = twin
        self._request = request
        self._context = context
        self.phase = "setting up"
        self.attempt, self.sample_s = 0, 0.0
        self.compiled: tuple[CompileRecord, ...] = ()
        set_modes(request.kernel_settings, context.device)
        set_up_compiler(context.device)
        self._clock: Clock = clock_for(context.device)
        replica = place_of(request.strategy, request.settings, context.rank).replica
        torch.manual_seed(replica)
        # Replicas have their own samples, the same ones in every run; reading input is not part of the iteration.
        batch = model.make_batch(request.batch // degree_of(request.strategy, Trait.DIVIDES_BATCH), seed=replica)
        inputs, self._targets = (tensor.to(context.device) for tensor in batch)
        self._as_read = partial(as_read, dtype=request.dtype, settings=request.kernel_settings)
        self._inputs, self._entered = self._as_read(inputs), autocast_to(request.dtype, context.device)
        self._parallel, self._groups = model.module, tuple[dist.ProcessGroup, ...]()
        self._steps: MicroSteps | None = None
        self._counter, self._spans = SequenceCounter(), Spans()
        self._pipeline: StagedModule | None = None
        self._loss_of_parts: LossOfParts | None = None
        self._clipper: GradientClipper | None = None
        self._last_gradient, self._watches_gradients = _Arrival(), False
        self._shards_parameters = zero_stage(request.strategy) > 1
        self.recorded_count: int | None = None
        self.feed: ImageFeed | None = None

    def prepare(self, network: ModelGraph, images: RunImages | None = None) -> tuple[IssuedCollective, ...]:
        """Build the parallel module and run the recorded iterations; returns what this rank issued in all of that.

        Args:
            images: that are read for every iteration; None for samples as they are.

        Raises:
            UserError: nothing in the model is trained, or an image can't be read.
        """
        request, model, model_loss = self._request, self._model.module, self._model.loss
        self.phase = "building the parallel module"
        device, layers = self._context.device, self._twin.layers if self._twin else None
        with CollectiveRecorder() as recorder:
            built = build_parallel(model, network, request.strategy, request.settings, device, model_loss, layers)
        self._parallel, self._spans, self._pipeline = built.module, built.spans, built.pipeline
        self._groups, self._loss_of_parts, self._clipper = built.groups, built.loss, built.clipper
        if built.pipeline is None:
            self._steps = MicroSteps(built, model_loss, self._inputs, self._targets, request.accumulate, self._entered)
        receives = built.pipeline is not None and built.pipeline.stages[0].receives
        if receives:
            # Only the first stage reads samples.
            self._inputs = self._inputs.new_empty(0)
        if images is not None:
            self.feed = ImageFeed(images, self._context.device, self._as_read, reads=not receives)
        self._counter = SequenceCounter(built.groups)
        # Only now: parameters may have been replaced by shards of them.
        parameters, twin = list(model.parameters()), self._twin
        self._optimizer = optimizer_of(request.settings_of_update, parameters, built.state_groups, twin)
        if twin:
            twin.follow(built.spans, parameters)
        issued: tuple[IssuedCollective, ...] = recorder.issued("setup")
        recorded = self._run_compiled() if request.kernel_settings.compile else self._run_recorded()
        return (*issued, *recorded)

    def _run_compiled(self) -> tuple[IssuedCollective, ...]:
        """The recorded iterations of a model that is compiled in them; returns what this rank issued."""
        request = self._request
        # Inside of the wrapper that exchanges gradients, which torch parts the graph at the buckets of.
        compile_in_place(self._model.module)
        with Compiling() as compiling, compile_errors(request.model):
            issued = self._run_recorded()
            # Hooks of those iterations are gone, and one is there that stays.
            self.iterate()
        local = len(self._inputs) // request.accumulate
        self.compiled = (compiling.record(self._context.rank, request.model, local, "whole"),)
        return issued

    def _run_recorded(self) -> tuple[IssuedCollective, ...]:
        """Returns what this rank issued in the recorded iterations, and watches the last gradient from then on."""
        issued: tuple[IssuedCollective, ...] = ()
        last: str | None = None
        for when in RECORDED:
            with self._awake(), CollectiveRecorder() as recorder, GradientOrder(self._model.module) as order:
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
        if group_axes(self._request.strategy, Trait.REPLICATES):
            self._watch_gradient(last)
        return issued

    def close(self) -> None:
        """Let go of the parallel module, then of its process groups, but for that of all ranks. A collective.

        No more iterations after it.
        """
        if self.feed is not None:
            self.feed.close()
        self._context.barrier()
        if not self._groups:
            return  # nothing was built, or on this rank alone
        groups = self._groups[1:]
        del self._parallel, self._optimizer
        self._steps, self._pipeline, self._groups, self._loss_of_parts, self._clipper = None, None, (), None, None
        self._counter, self._spans = SequenceCounter(), Spans()
        end_groups(groups)

    def track_memory(self) -> MemoryPeak:
        """Peak of one more iteration, on every rank at once, on the samples of the one before."""
        feed, self.feed = self.feed, None
        batch, pipeline = (self._inputs, self._targets), self._pipeline
        handed = (lambda: pipeline.handed) if pipeline else tuple
        peak = track_memory(
            self.iterate, self._parallel, self._optimizer, batch, rank=self._context.rank, handed=handed
        )
        self.feed = feed
        return peak

    def try_alone(self, network: ModelGraph) -> ModelGraph:
        """Forward and backward without the other ranks: what fails here is the model's or the batch's doing.

        Returns the network with its gradients in the order in which they arrive on this device.

        Raises:
            UserError: the model does not run on its local batch.
        """
        self.phase = "forward and backward of the model alone"
        try:
            self._model.module.to(self._context.device)
            hold_weights(self._model.module, self._request.dtype)
            lay_out(self._model.module, self._request.kernel_settings)
            recompute_segments(self._model.module, network, self._request.settings)
            at_once = len(self._inputs) // self._request.accumulate
            twin, own_loss = self._twin, self._model.loss
            module = twin.alone(self._model.module) if twin else self._model.module
            loss_of = twin.loss(own_loss) if twin else own_loss
            begin = self._clock.stamp()
            with self._awake(), GradientOrder(self._model.module) as order:
                with self._entered():
                    loss = loss_of(module(self._inputs[:at_once]), self._targets[:at_once])
                loss.backward()  # type: ignore[no-untyped-call]
            end = self._clock.stamp()
            self._clock.synchronise()
            self.sample_s = self._clock.seconds(begin, end) / at_once
        except (RuntimeError, ValueError) as error:
            if ran_out(error):
                raise
            where = f"model {self._request.model} does not train on a local batch of {at_once}"
            raise UserError(f"{where}: {error}") from error
        self._model.module.zero_grad(set_to_none=True)
        # Ghosts hand on gradients in the order that they were told.
        return network if self._twin else order.of(network)

    def _awake(self) -> contextlib.AbstractContextManager[None]:
        """For what is not timed: ghosts do not sleep in it. Nothing of a real run."""
        return self._twin.sleeper.awake() if self._twin else contextlib.nullcontext()

    def host_time(self, network: ModelGraph) -> HostTime:
        """What ghosts take rank 0's host; only before :meth:`prepare`, which makes the module one of several ranks'."""
        assert self._twin is not None
        self.phase = "measuring what ghosts take the host"
        batch = self._inputs, self._targets
        return measure_host_time(self._twin, self._model, network, batch, self._request, self._context)

    def _watch_gradient(self, last: str) -> None:
        """Stamp when the gradient that arrives last is there; one hook, since each one costs time."""
        # The hook must not hold the trainer: parameters keep their hooks where Python's collector does not look, and
        # the process group has to be gone when the rank leaves.
        arrival, stamp = self._last_gradient, self._clock.stamp

        def arrived(_: torch.Tensor) -> None:
            arrival.stamp = stamp()

        self._model.module.get_parameter(last).register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
        self._watches_gradients = True

    def iterate(self) -> Stamps:
        """Forward, loss, backward and weight update, once."""
        beat()
        stamp = self._twin.then(self._clock.stamp) if self._twin else self._clock.stamp
        self._last_gradient.stamp = None
        rows: list[Row] = []
        self._spans.rows = rows
        loss: torch.Tensor | None
        begin = stamp()
        fed = self._take(stamp)
        if self._pipeline is not None:
            self.phase = "forward and backward of a pipeline"
            loss, backward_end = self._pipeline.step(self._inputs, self._targets), stamp()
        else:
            assert self._steps is not None
            loss = self._steps.run(begin if fed is None else fed.copied, stamp, rows, self._enter)
            backward_end = rows[-1][2]
        self._enter("weight update")
        if self._clipper is not None:
            (self._clipper.communicate if self._twin else self._clipper.clip)()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        end = stamp()
        last = self._last_gradient.stamp if self._watches_gradients else backward_end
        return Stamps(begin, last, backward_end, end, loss, *by_turn(rows), fed)

    def _take(self, stamp: Callable[[], Any]) -> Fed | None:
        """Have the samples of an iteration, where they are read."""
        if self.feed is None:
            return None
        self.phase = "waiting for its input"
        fed = self.feed.take(stamp)
        self._inputs, self._targets = fed.inputs, fed.targets
        if self._steps is not None:
            self._steps.feed(fed.inputs, fed.targets)
        return fed

    def _enter(self, phase: str) -> None:
        self.phase = phase
        if self._twin:
            self._twin.sleeper.begin_turn()

    def run_chunk(self, first: int, count: int, *, each_call: bool = False) -> TrainingIterations:
        """Timed iterations ``first`` to ``first + count - 1``.

        Args:
            each_call: also time each collective and message by itself.

        Raises:
            WorkError: a loss is not finite, or the gradient that arrived last in the recorded iterations did not.
        """
        self._context.barrier()
        # Numbered from the untimed one on: what a rank is late by in it goes on into the first that is timed.
        self._iterate_as(first)
        self._counter.since_last()
        stamps, counts = [], []
        self._spans.stamp = self._clock.stamp
        with CallTimer(self._clock.stamp) if each_call else contextlib.nullcontext() as timer:
            for index in range(first + 1, first + 1 + count):
                if timer is not None:
                    timer.begin_iteration()
                stamps.append(self._iterate_as(index))
                counts.append(self._counter.since_last())
        self._spans.stamp = None
        self._clock.synchronise()
        losses = self._losses(stamps)
        for index, item in enumerate(stamps, start=first):
            self._check(index, item)
        record = self._record(first, stamps, counts, losses)
        if timer is None:
            return record
        return msgspec.structs.replace(record, calls=timer.calls([item.begin for item in stamps]))

    def _iterate_as(self, number: int) -> Stamps:
        """An iteration, in which ghosts sleep what they draw for this number."""
        if self._twin:
            self._twin.begin_iteration(number)
        return self.iterate()

    def _losses(self, stamps: list[Stamps]) -> tuple[float, ...]:
        """By iteration; where ranks have shares of a loss, what these add up to."""
        losses = tuple(float(item.loss) for item in stamps if item.loss is not None)
        if self._loss_of_parts is None or not losses:
            return losses
        shares = torch.tensor(losses, dtype=torch.float64, device=self._context.device)
        return tuple(self._loss_of_parts.mean(shares).tolist())

    def _check(self, index: int, stamps: Stamps) -> None:
        where = f"{self._request.model}, rank {self._context.rank}, iteration {index}"
        if stamps.loss is not None and not math.isfinite(stamps.loss):
            raise WorkError(f"{where}: the loss is {float(stamps.loss)}; chunks of iterations before are kept")
        if stamps.last_gradient is None:
            raise WorkError(f"{where}: the gradient that came last in the recorded iterations did not come")

    def _record(
        self, first: int, stamps: list[Stamps], counts: list[int | None], losses: tuple[float, ...]
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
            fw_communication_s=communication_of([item.fw_communication for item in stamps], seconds),
            bw_communication_s=communication_of([self._before_exchange(item) for item in stamps], seconds),
            copies_s=copies_of(stamps, seconds),
            collectives_issued=known if len(known) == len(counts) else (),
            losses=() if self._twin else losses,
            host_begin_s=tuple(item.begin for item in stamps) if isinstance(self._clock, CpuClock) else (),
            attempt=self.attempt,
            turns=turns_of(stamps, seconds),
            input=input_times([(item.begin, item.fed) for item in stamps], seconds, self._context.device),
        )

    def _before_exchange(self, item: Stamps) -> Sequence[Row]:
        """Communication of backward but for the exposed exchange: of sharded gradients, what is reduced last."""
        rows = item.bw_communication
        if not self._shards_parameters or self._pipeline is not None:
            return rows
        return rows[: max(index for index, (what, *_) in enumerate(rows) if what == "reduce_scatter")]

    def _phases(self, item: Stamps) -> tuple[float, float, float, float]:
        """Seconds of forward, backward, exposed gradient exchange, and idle time of a pipeline."""
        seconds = self._clock.seconds
        spent = {"FW": 0.0, "BW": 0.0}
        for what, begin, end in item.turns:
            spent[what] += seconds(begin, end)
        if self._pipeline is None:
            last = item.last_gradient
            if self._shards_parameters:
                # A sharded gradient is there when it has been reduced; what is reduced last was there before.
                last = item.bw_communication[len(self._before_exchange(item))][1]
            exchange = seconds(last, item.backward_end)
            return spent["FW"], spent["BW"] - exchange, exchange, 0.0
        begin = item.begin if item.fed is None else item.fed.copied
        idle = seconds(begin, item.backward_end) - spent["FW"] - spent["BW"]
        # The exchange ends inside the last backward, which waits for it; gradients of shards are reduced behind that.
        exchange = max(0.0, seconds(item.last_gradient, item.turns[-1][2])) if self._watches_gradients else 0.0
        behind = seconds(item.turns[-1][2], item.backward_end) if self._shards_parameters else 0.0
        return spent["FW"], spent["BW"] - exchange, exchange + behind, max(0.0, idle - behind)
