"""The ghost twin of a model on one rank: its layers, its loss and its optimizer, all of which sleep."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeVar

import torch

from paradl_bench.emulation.draws import IterationDraws
from paradl_bench.emulation.layers import GhostLayers
from paradl_bench.emulation.sleeper import Sleeper, wake_in_time
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.compute import operations_of_forward
from paradl_bench.records.training.ghost_record import GhostRole
from paradl_bench.strategies.running.sharded_module import ShardedModule, Sharding, Walk
from paradl_bench.strategies.running.spans import Spans

T = TypeVar("T")
Loss = Callable[[Any, torch.Tensor], torch.Tensor]


class GhostTwin:
    """What stands for a model's compute on one rank.

    Args:
        seconds: that this rank's part of it takes.
        draws: of an ``iteration``, what single sleeps are drawn with; None where they do not spread.
    """

    def __init__(
        self,
        network: ModelGraph,
        seconds: GhostRole,
        dilate: float,
        draws: Callable[..., IterationDraws] | None = None,
    ) -> None:
        wake_in_time()
        self.sleeper = Sleeper(dilate)
        self.layers = GhostLayers(network, seconds, self.sleeper)
        self._network, self._seconds, self._draws = network, seconds, draws

    def begin_iteration(self, iteration: int) -> None:
        """Draw what this iteration, from 0 on, sleeps; until then, and where sleeps do not spread, nothing is drawn."""
        if self._draws is not None:
            self.sleeper.draws = self._draws(iteration=iteration)

    def alone(self, module: torch.nn.Module) -> torch.nn.Module:
        """The module with ghosts for layers, on this rank alone."""
        return ShardedModule(module, Sharding({}, self._network, run_layer=self.layers))

    def loss(self, loss: Loss) -> Loss:
        """The loss, whose operations follow the model's."""
        sharding, first = Sharding({}, self._network, run_layer=self.layers), operations_of_forward(self._network)

        def slept(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
            with Walk(sharding, first):
                return loss(outputs, targets)

        return slept

    def follow(self, spans: Spans, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Know from now on when the rank waits for others, and when it works on gradients, which both are no sleep."""
        sleeper = spans.listener = self.sleeper
        for parameter in parameters:
            if parameter.requires_grad:
                # What a hook returns would take the gradient's place.
                parameter.register_hook(lambda _: sleeper.work())  # type: ignore[no-untyped-call]

    def then(self, stamp: Callable[[], T]) -> Callable[[], T]:
        """A stamp of when all compute that was asked for is over."""

        def settled() -> T:
            self.sleeper.settle()
            return stamp()

        return settled

    def optimizer_class(self) -> type[torch.optim.Optimizer]:
        """Of optimizers that sleep for the weight update, and change nothing."""
        sleeper, seconds = self.sleeper, self._seconds

        class Ghost(torch.optim.Optimizer):
            made: ClassVar[list[torch.optim.Optimizer]] = []

            def __init__(self, parameters: Any, **defaults: Any) -> None:
                super().__init__(parameters, defaults)
                self.made.append(self)

            def step(self, closure: Any = None) -> None:  # type: ignore[override]
                # The seconds are those of all optimizers of the rank.
                if self is self.made[-1]:
                    sleeper.ask("WU", seconds.update_s, seconds.update_own_relative_sd)
                    sleeper.begin_turn()

        return Ghost
