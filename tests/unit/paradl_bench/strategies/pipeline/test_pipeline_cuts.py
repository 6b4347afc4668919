"""Where a pipeline is not cut, and why."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.network.models.catalog import LoadedModel
from paradl_bench.strategies.pipeline.crossings import refusals


class Twice(nn.Module):
    """Calls one layer twice; where ``unread``, nothing reads what the first call returns."""

    def __init__(self, *, unread: bool) -> None:
        super().__init__()
        self.first, self.twice, self.head = (nn.Linear(4, 4) for _ in range(3))
        self.unread = unread

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        y = self.twice(x)
        z = torch.tanh(x if self.unread else y)
        return self.head(self.twice(z))


def read() -> nn.Module:
    return Twice(unread=False)


def unread() -> nn.Module:
    return Twice(unread=True)


@pytest.mark.parametrize("built", [read, unread])
def test_no_cut_parts_a_weight_from_use_without_gradient(built: Callable[[], nn.Module]) -> None:
    model = LoadedModel(name=f"{__name__}:{built.__name__}", module=built(), input_shape=(4,))
    found = refusals(trace_network(model))
    assert any("and not all of these have a gradient" in why for why in found.values()) == (built is unread)
