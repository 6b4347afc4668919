"""A whole model whose parameters ranks share out, as one of them trains it; what is sent and copied takes no time.

Layers run whole, on parameters that were gathered right before. They take longer so than in a model that holds them:
what was sent took the caches, and torch runs hooks round each unit of parameters. All ranks run at once, since a gather
needs all of them. What is gathered, reduced and copied has its own measurement, and runs while the clock stands still.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

from paradl_bench.measure.execution.optimizers import build_optimizer
from paradl_bench.measure.execution.probes import OperationProbe
from paradl_bench.measure.layers.rehearsal import StoppableClock
from paradl_bench.network.graph import Layer, ModelGraph
from paradl_bench.network.models.catalog import LoadedModel
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.strategies.nesting.parallel import build_parallel
from paradl_bench.strategies.passes.lower_precision import settings_of_update
from paradl_bench.strategies.running.autocast import autocast_to


class _Stopping:
    """Stops a clock while parameters and gradients are sent and copied."""

    def __init__(self, clock: StoppableClock) -> None:
        self._clock = clock

    def span_began(self, what: str) -> None:
        self._clock.stop()

    def span_ended(self, what: str) -> None:
        self._clock.go_on()

    def settle(self) -> None:
        """Nothing runs beside the rank's own work."""

    def work(self) -> None:
        self._clock.stop()

    def worked(self) -> None:
        self._clock.go_on()


class GatheredModel:
    """One rank's run of a model whose parameters all ranks share out; a collective over all of them.

    Args:
        model: on its device, with the same values as on every rank; its parameters are replaced by shards.

    Attributes:
        ranks: that share parameters out.
        layers: by index in the network, each layer and what measurements call it so.
    """

    def __init__(
        self, model: LoadedModel, network: ModelGraph, strategy: Strategy, settings: PlanSettings, device: torch.device
    ) -> None:
        (axis,) = strategy.axes
        self.clock, self.ranks = StoppableClock(), strategy.ranks
        self.layers: dict[int, tuple[Layer, str]] = {i: (layer, str(axis)) for i, layer in enumerate(network.layers)}
        self._model, self._entered = model, autocast_to(settings.dtype, device)
        parallel = build_parallel(model.module, network, strategy, settings, device, model.loss)
        parallel.spans.listener = _Stopping(self.clock)
        self._module = parallel.module
        update = settings_of_update(strategy, settings)
        self.optimizer = build_optimizer(update.optimizer, model.module.parameters(), dtype=update.dtype)

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Forward to the loss."""
        with self._entered():
            return self._model.loss(self._module(inputs), targets)

    def runs_with(self, ranks: int) -> bool:
        """Whether so many ranks can run it at once."""
        return ranks == self.ranks

    @contextlib.contextmanager
    def answered(self, group: dist.ProcessGroup | None) -> Iterator[None]:
        """The ranks answer each other in any case."""
        yield

    @contextlib.contextmanager
    def observed(self, probe: OperationProbe) -> Iterator[None]:
        """Let a probe see every call of forward but those of hooks."""
        with probe:
            yield
