"""What a layer profile runs: a model on a batch, whole or as the shard of a rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from paradl_bench.core.errors import UserError
from paradl_bench.measure.execution.compiled import CompiledModel
from paradl_bench.measure.execution.kernel_layout import as_read, lay_out, refuse_without_channels
from paradl_bench.measure.execution.optimizers import build_optimizer
from paradl_bench.measure.execution.probes import OperationProbe, entered
from paradl_bench.measure.layers.gathered import GatheredModel
from paradl_bench.measure.layers.gradient_copies import GradientCopies
from paradl_bench.measure.layers.isolated import IsolatedOperation, isolated_operations
from paradl_bench.measure.layers.rehearsal import RehearsedModel, distinct_positions, sharing_axis
from paradl_bench.measure.layers.request import LayersRequest
from paradl_bench.measure.layers.shards_proof import verify_on_first_rank
from paradl_bench.measure.tracing.batch_dependence import refuse_changed_input
from paradl_bench.measure.tracing.gradient_order import GradientOrder
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.network.graph import Layer, ModelGraph
from paradl_bench.network.kinds.autocast import as_held
from paradl_bench.network.models.catalog import LoadedModel, load_model
from paradl_bench.plan.axis_planner import shard_label
from paradl_bench.plan.mesh import label_of_gathers
from paradl_bench.plan.strategy import Strategy
from paradl_bench.ranks.clocks import Clock
from paradl_bench.ranks.groups.process_groups import RankContext
from paradl_bench.ranks.pulse import beat
from paradl_bench.records.training.verification import VerifiedShards
from paradl_bench.strategies.running.autocast import as_given, autocast_to, hold_weights


@dataclass(slots=True)
class Subject:
    """One model, or one rank's part of it, at one local batch, ready to be measured.

    Attributes:
        forward: to the loss; as it is probed, and as it is trained unless that is compiled.
        copies: None for a part of a model.
        compiled: what is trained in the place of forward, and stands for its functions where it is probed.
        iteration_s: of the last iteration before the first block, on all ranks at once.
        layers: per layer of the network, as it ran and which part of it that is; None for layers that are not kept.
        part: of a part of a model, what rehearses it.
    """

    model: LoadedModel
    network: ModelGraph
    optimizer: torch.optim.Optimizer
    batch: int
    clock: Clock
    forward: Callable[[], torch.Tensor]
    observed: Callable[[OperationProbe], AbstractContextManager[Any]]
    layers: list[tuple[Layer, str] | None]
    copies: GradientCopies | None = None
    compiled: CompiledModel | None = None
    operations: list[IsolatedOperation] = field(default_factory=list)
    shard: str = ""
    position: int = 0
    iteration_s: float = 0.0
    part: RehearsedModel | GatheredModel | None = None

    def runs_with(self, ranks: int) -> bool:
        """Whether so many ranks of the host can run it at once."""
        return self.part is None or self.part.runs_with(ranks)

    @property
    def key(self) -> tuple[str, int, str, int]:
        """What tells it from the others of a directory."""
        return self.model.name, self.batch, self.shard, self.position

    def trained(self) -> torch.Tensor:
        """Forward as training runs it: compiled where that is asked for."""
        return self.compiled.forward() if self.compiled else self.forward()

    def update(self) -> None:
        """The weight update, gradients let go of."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def make_subjects(
    request: LayersRequest,
    name: str,
    context: RankContext,
    clock: Clock,
    proofs: list[VerifiedShards] | None,
    *,
    network: ModelGraph | None = None,
) -> Iterator[Subject]:
    """The model at every batch, then the shards that were asked for; each is made when it is its turn."""
    model = load_model(name, request.input_shape)
    network = network or trace_network(model)
    if context.rank == 0:
        model.say_guess()
    refuse_without_channels(name, model.input_shape, request.kernel_settings)
    refuse_changed_input(network)
    hold_weights(model.module.to(context.device), request.dtype)
    lay_out(model.module, request.kernel_settings)
    optimizer = build_optimizer(request.optimizer, model.module.parameters(), dtype=request.dtype)
    copies = GradientCopies(model.module, as_held(network, request.dtype), context.device)
    layers: list[tuple[Layer, str] | None] = [(layer, "") for layer in network.layers]
    within = autocast_to(request.dtype, context.device)
    for batch in request.batches:
        inputs, targets = (tensor.to(context.device) for tensor in model.make_batch(batch, context.rank))
        inputs = as_read(inputs, request.dtype, request.kernel_settings)

        def forward(
            run: Callable[..., Any] = model.module, inputs: torch.Tensor = inputs, targets: torch.Tensor = targets
        ) -> torch.Tensor:
            with within():
                return model.loss(run(inputs), targets)

        subject = Subject(model, network, optimizer, batch, clock, forward, entered, layers, copies)
        with GradientOrder(model.module) as order:
            _warm_up(subject, request.warmup)
        subject.network = network = order.of(network)
        sample_s = subject.iteration_s / batch
        if request.kernel_settings.compile:
            subject.compiled = CompiledModel(name, network, batch, model.module, forward)
            subject.compiled.compile(clock.stamp, subject.update)
            _warm_up(subject, request.warmup)
        subject.operations = isolated_operations(
            network,
            batch,
            context.device,
            which=request.isolated,
            dtype=request.dtype,
            kernel_settings=request.kernel_settings,
        )
        yield subject
    for strategy in request.shards:
        make = _gathered_subjects if label_of_gathers(strategy) else _rehearsed_subjects
        if proofs is not None and make is _rehearsed_subjects:
            proofs += verify_on_first_rank(request, network, strategy, context, sample_s)
        yield from make(request, name, network, strategy, context)


def _rehearsed_subjects(
    request: LayersRequest, name: str, network: ModelGraph, strategy: Strategy, context: RankContext
) -> Iterator[Subject]:
    """What unlike ranks of a strategy run, one subject each."""
    axis = sharing_axis(strategy)
    for batch in request.batches:
        settings = request.settings(batch)
        for position in distinct_positions(network, strategy, settings):
            model = load_model(name, request.input_shape)
            model.module.to(context.device)
            hold_weights(model.module, request.dtype)
            part = RehearsedModel(model, network, axis, position, settings, context.device)
            optimizer = build_optimizer(request.optimizer, model.module.parameters(), dtype=request.dtype)
            shard = shard_label(axis, settings)
            yield _subject_of(part, model, optimizer, shard, request, network, batch, context, position)


def _gathered_subjects(
    request: LayersRequest, name: str, network: ModelGraph, strategy: Strategy, context: RankContext
) -> Iterator[Subject]:
    """What every rank of a strategy runs on parameters that it gathers."""
    for batch in request.batches:
        model = load_model(name, request.input_shape)
        model.module.to(context.device)
        settings = request.settings(batch * strategy.ranks)
        part = GatheredModel(model, network, strategy, settings, context.device)
        yield _subject_of(part, model, part.optimizer, str(strategy), request, network, batch, context)


def _subject_of(
    part: RehearsedModel | GatheredModel,
    model: LoadedModel,
    optimizer: torch.optim.Optimizer,
    shard: str,
    request: LayersRequest,
    network: ModelGraph,
    batch: int,
    context: RankContext,
    position: int = 0,
) -> Subject:
    """What a rank runs of a model, warm."""
    inputs, targets = (tensor.to(context.device) for tensor in model.make_batch(batch, context.rank))
    subject = Subject(
        model=model,
        network=network,
        optimizer=optimizer,
        batch=batch,
        clock=part.clock,
        forward=functools.partial(part.loss, as_given(inputs, request.dtype), targets),
        observed=part.observed,
        layers=[part.layers.get(index) for index in range(len(network.layers))],
        shard=shard,
        position=position,
        part=part,
    )
    _warm_up(subject, request.warmup)
    return subject


def _warm_up(subject: Subject, iterations: int) -> None:
    """Raises:
    UserError: the model does not train on its local batch.
    """
    try:
        for _ in range(iterations):
            beat()
            begin = subject.clock.stamp()
            subject.trained().backward()  # type: ignore[no-untyped-call]
            subject.update()
            end = subject.clock.stamp()
        subject.clock.synchronise()
        # The first ones also allocate memory and choose kernels.
        subject.iteration_s = subject.clock.seconds(begin, end)
    except (RuntimeError, ValueError) as error:
        shape = "x".join(map(str, subject.model.input_shape))
        where = f"model {subject.model.name!r} does not train with batch {subject.batch} of {shape}"
        raise UserError(f"{where}{f' as one rank of {subject.shard}' if subject.shard else ''}: {error}") from error
