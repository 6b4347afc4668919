"""Shards rehearsed: the module runs as one rank of a strategy runs it, and its communication takes no time.

What a rank computes, copies, splits and concatenates is really done, on the shapes that it really has. Communication
has its own measurement, and runs while the clock stands still: ranks of a host that rehearse together send each other
real messages, since compute takes longer behind these than behind none. Where a rank rehearses alone, what others would
send is made up. On a GPU clocks can't be stopped: there it is made up too, and takes the time of a copy on the device.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from paradl_bench.core.errors import UserError
from paradl_bench.measure.execution.probes import OperationProbe
from paradl_bench.network.graph import Layer, ModelGraph
from paradl_bench.network.models.catalog import LoadedModel
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.axes.registry import kinds_with
from paradl_bench.plan.axis_planner import AxisPlace, ShardingPlanner, axis_planner, shard_label
from paradl_bench.plan.mesh import axes_that_shard
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Axis, Strategy
from paradl_bench.ranks.clocks import Clock, CpuClock, clock_for
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.running.autocast import autocast_to
from paradl_bench.strategies.running.axis_runners import sharding_runner
from paradl_bench.strategies.running.group_functions import (
    Group,
    Messages,
    all_gather_into,
    reduce_scatter_into,
)
from paradl_bench.strategies.running.sharded_module import ShardedModule, sharded_loss
from paradl_bench.strategies.running.spans import Spans


class StoppableClock(CpuClock):
    """A CPU clock that can be stopped."""

    def __init__(self) -> None:
        self._stopped_s = 0.0
        self._since: float | None = None

    def stamp(self) -> float:
        """Seconds that have passed while it ran."""
        return (time.perf_counter() if self._since is None else self._since) - self._stopped_s

    start = stamp

    def stop(self) -> None:
        """Let no time pass from now on, if it passes."""
        if self._since is None:
            self._since = time.perf_counter()

    def go_on(self) -> None:
        """Let time pass again."""
        if self._since is not None:
            self._stopped_s += time.perf_counter() - self._since
            self._since = None

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Let no time pass inside."""
        self.stop()
        yield
        self.go_on()


@dataclass(slots=True)
class _Others:
    """Ranks that each rehearse the same part beside this one, and answer it; None where nobody does."""

    group: dist.ProcessGroup | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rehearsal(Group):
    """A group whose communication runs while the clock stands still.

    All of its ranks run the part of this one. Where they are not there, they would send what this one does, or zeros,
    and an all-reduce leaves the tensor as it is.
    """

    pause: Callable[[], AbstractContextManager[None]]
    others: _Others

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        if self.others.group is not None:
            with self.pause():
                dist.all_reduce(tensor, op=op, group=self.others.group)
                self._take_mean(tensor, op)

    def _take_mean(self, total: torch.Tensor, op: Any) -> None:
        """Sums of equal parts would grow from layer to layer."""
        if op == dist.ReduceOp.SUM and total.is_floating_point():
            total.div_(self.size)

    def all_gather(self, gathered: torch.Tensor, sent: torch.Tensor) -> None:
        with self.pause():
            if self.others.group is not None:
                all_gather_into(gathered, sent, group=self.others.group)
            else:
                gathered.view(self.size, -1).copy_(sent)

    def reduce_scatter(self, received: torch.Tensor, sent: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        with self.pause():
            if self.others.group is not None:
                reduce_scatter_into(received, sent, op=op, group=self.others.group)
                self._take_mean(received, op)
            else:
                received.copy_(sent.view(self.size, -1)[self.rank])

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, sizes: tuple[Sequence[int], Sequence[int]] | None = None
    ) -> None:
        with self.pause():
            if self.others.group is not None:
                out, given = ([], []) if sizes is None else map(list, sizes)
                dist.all_to_all_single(received, sent, out, given, group=self.others.group)
            elif sizes is None:
                received.view(self.size, -1).copy_(sent.view(self.size, -1)[self.rank])
            elif len(sent):
                received.copy_(sent[torch.arange(len(received), device=sent.device) % len(sent)])
            else:
                received.zero_()

    def begin_exchange(self, sent: Messages, received: Messages) -> Callable[[], None]:
        self.send_and_receive(sent, received)
        return lambda: None

    def send_and_receive(self, sent: Messages, received: Messages) -> None:
        with self.pause():
            if self.others.group is not None:
                self._swap(sent, received, self.others.group)
            else:
                for _, buffer in received:
                    buffer.zero_()

    def _swap(self, sent: Messages, received: Messages, group: dist.ProcessGroup) -> None:
        """Send messages as far along the group as this rank's position does, and receive such from as far before.

        A position may receive what it sends nothing like: there others send zeros, so that no buffer stays unfilled.
        """
        unfilled, moves = dict(enumerate(received)), []
        for number, (peer, tensor) in enumerate(sent):
            fits = number in unfilled and unfilled[number][1].shape == tensor.shape
            moves.append((tensor, unfilled.pop(number)[1] if fits else torch.empty_like(tensor), peer - self.rank))
        moves += [(torch.zeros_like(buffer), buffer, self.rank - peer) for peer, buffer in unfilled.values()]
        operations, own = [], dist.get_rank(group)
        for tensor, buffer, by in moves:
            for call, moved, other in ((dist.isend, tensor, own + by), (dist.irecv, buffer, own - by)):
                operations.append(dist.P2POp(call, moved, dist.get_global_rank(group, other % self.size), group))
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()


def sharing_axis(strategy: Strategy) -> Axis:
    """The axis whose ranks share layers; raises UserError where no axis does, or several do."""
    axes = [strategy.axes[index] for index in axes_that_shard(strategy)]
    if len(axes) > 1:
        raise UserError(
            f"--shards {strategy}: {' and '.join(axis.kind for axis in axes)} both share layers, and parts are measured"
            f" of one axis; give {','.join(map(str, axes))}"
        )
    if axes:
        return axes[0]
    kinds = ", ".join(kind.name for kind in kinds_with(Trait.SHARDS_LAYERS))
    raise UserError(
        f"--shards {strategy}: none of its axes splits layers; give axes of {kinds}, as f2, or"
        " stages 2 and 3 of ZeRO, as z3d2"
    )


def distinct_positions(network: ModelGraph, strategy: Strategy, settings: PlanSettings) -> tuple[int, ...]:
    """Positions along the axis that shares layers whose ranks run unlike shapes; the first of each.

    Raises:
        UserError: a limit is exceeded, or layers that were chosen are not there.
    """
    alone = Strategy(axes=(sharing_axis(strategy),))
    plan = planner_for(alone).plan(network, alone, settings)
    return tuple(plan.positions.index(role) for role in range(len(plan.roles)))


class RehearsedModel:
    """One rank's part of a model, which the settings' whole batch is given to, to be trained without the other ranks.

    Args:
        model: on its device, with the same values as on every rank; its parameters are replaced by shards.

    Attributes:
        ranks: along the axis.
        layers: by index in the network, each layer as this rank runs it, and what measurements call that; without those
            that it runs in several rounds.
    """

    def __init__(
        self,
        model: LoadedModel,
        network: ModelGraph,
        axis: Axis,
        position: int,
        settings: PlanSettings,
        device: torch.device,
    ) -> None:
        self.layers = _layers_as_run(network, axis, position, settings)
        clock, self._others, self.ranks = StoppableClock(), _Others(), axis.degree
        self.clock: Clock = clock if device.type == "cpu" else clock_for(device)
        nobody: Any = None
        group = _Rehearsal(
            process_group=nobody,
            rank=position,
            size=axis.degree,
            spans=Spans(),
            pause=clock.pause if device.type == "cpu" else contextlib.nullcontext,
            others=self._others,
        )
        sharding = sharding_runner(axis.declared).shard(model.module, network, axis, group, settings)
        self._model, self._sharding, self._entered = model, sharding, autocast_to(settings.dtype, device)
        self._module = ShardedModule(model.module, sharding)
        self._probe: OperationProbe | None = None

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Forward to the loss."""
        with self._entered():
            outputs = self._module(inputs)
            loss = sharded_loss(self._model.loss, self._sharding, self._probe)
            return loss(outputs, targets)

    def runs_with(self, ranks: int) -> bool:
        """Whether so many ranks can run it at once: each can by itself."""
        return True

    @contextlib.contextmanager
    def answered(self, group: dist.ProcessGroup | None) -> Iterator[None]:
        """Let the ranks of a group, as many as there are along the axis, answer each other; None: nobody answers."""
        self._others.group = group
        try:
            yield
        finally:
            self._others.group = None

    @contextlib.contextmanager
    def observed(self, probe: OperationProbe) -> Iterator[None]:
        """Let a probe see the model's own calls, one a layer, and none of those that a shard is made of."""
        self._probe = self._module.observer = probe
        try:
            yield
        finally:
            self._probe = self._module.observer = None


def _layers_as_run(
    network: ModelGraph, axis: Axis, position: int, settings: PlanSettings
) -> dict[int, tuple[Layer, str]]:
    planner = axis_planner(axis.declared)
    assert isinstance(planner, ShardingPlanner)
    strategy = Strategy(axes=(axis,))
    planner.check(network, strategy, 0, settings)
    shared = planner.shard(network, AxisPlace(strategy.axes[0], 0, position, settings.batch), settings)
    # A layer that is left whole takes longer here than in the whole model: what splits the others is called for it too.
    label = shard_label(axis, settings)
    run = {index: (layer, label) for index, layer in enumerate(network.layers)}
    for index, shard in shared.shards.items():
        # What runs several times is seen once, as long as all of them.
        if shard.shard and len(shard.rounds_fw) != 1:
            del run[index]
        elif shard.shard:
            run[index] = shard.layer, shard.shard
    return run
