"""Ghost layers in the place of compute before a call, as in emulated runs between their calls.

A call behind a bare sleep finds its rank's code where the last call left it. Behind layers it does not: the host
dispatches them, ranks that share a core one after the other, and then they sleep.
"""

from __future__ import annotations

import torch
from torch import nn

from paradl_bench.emulation.twin import GhostTwin
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.network.models.catalog import load_model
from paradl_bench.plan.compute import operations_of_forward
from paradl_bench.ranks.environment import host_cores
from paradl_bench.records.training.ghost_record import GhostPhase, GhostRole

GHOSTS_S = 5e-3
"""Of ghosts: as long as dilated layers sleep between calls. A core that was idle for longer wakes up more slowly."""
RANKS_A_CORE = 2
"""That so long a sleep leaves time to dispatch; where more share one ghosts sleep longer, as runs are dilated more."""
_CHANNELS, _EXTENT = 8, 8


def ghosts_seconds(ranks_on_host: int) -> float:
    """How long ghosts before a call sleep, on all cores of this host."""
    return GHOSTS_S * max(1.0, ranks_on_host / (RANKS_A_CORE * host_cores()))


class FewLayers(nn.Sequential):
    """As many calls as networks make between two that communicate: a convolution, what follows it, and a classifier."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(_CHANNELS, _CHANNELS, 3, padding=1),
            nn.BatchNorm2d(_CHANNELS),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(_CHANNELS * _EXTENT**2, 4),
        )


class GhostsBefore:
    """A few ghosts that sleep so many seconds in all."""

    def __init__(self, seconds: float) -> None:
        model = load_model(f"{__name__}:{FewLayers.__name__}", (_CHANNELS, _EXTENT, _EXTENT))
        network = trace_network(model)
        forward = network.layers[: operations_of_forward(network)]
        sleeps: dict[str, dict[GhostPhase, float]] = {layer.name: {"FW": seconds / len(forward)} for layer in forward}
        twin = GhostTwin(network, GhostRole(layers=sleeps, between={}, update_s=0.0), 1.0)
        self._sleeper = twin.sleeper
        self._module = twin.alone(model.module)
        self._inputs = torch.zeros(1, _CHANNELS, _EXTENT, _EXTENT)

    def run(self) -> None:
        """Dispatch them, and sleep until their compute is over."""
        self._sleeper.begin_anew()
        self._module(self._inputs)
        self._sleeper.settle()

    @property
    def over(self) -> float:
        """When compute was to be over: a stamp of ``time.perf_counter``."""
        return self._sleeper.due
