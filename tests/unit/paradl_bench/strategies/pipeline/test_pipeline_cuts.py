"""Where a pipeline is not cut, and why; what a stage holds and trains."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.network.models.catalog import LoadedModel, load_model
from paradl_bench.plan.compute import gradient_order
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.strategies.pipeline.axis import PipelineOptions
from paradl_bench.strategies.pipeline.crossings import refusals
from paradl_bench.strategies.pipeline.stages import cut_into_stages


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


class Penalised(nn.Module):
    """Adds squares of all weights, that of a layer among them whose output nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.dead, self.late = (nn.Linear(4, 4, bias=False) for _ in range(3))

    def stage(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.early(x)
        self.dead(x)
        return self.late(torch.tanh(x)), self.dead.weight.square().sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, penalty = self.stage(x)
        for weight in (self.early.weight, self.late.weight):
            penalty = penalty + weight.square().sum()
        return x + penalty


def test_gradients_of_a_stage_arrive_as_backward_makes_them() -> None:
    module, arrived = Penalised(), []
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    made = module.stage(torch.randn(2, 4))
    torch.autograd.backward(made, [torch.ones_like(value) for value in made])
    network = trace_network(LoadedModel(name=f"{__name__}:Penalised", module=Penalised(), input_shape=(4,)))
    options = PipelineOptions(stages=("square#2",))
    first, _ = cut_into_stages(network, 2, PlanSettings(batch=2, axes=(options,)))
    assert gradient_order(first.network) == tuple(arrived)


class Turned(nn.Module):
    """Turns outputs of all layers but the last by angles made from a buffer; where ``counts``, forward changes it."""

    def __init__(self, *, counts: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.register_buffer("frequencies", torch.ones(4))
        self.counts = counts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counts:
            self.frequencies.add_(1)
        angles = torch.cos(self.frequencies * 2)
        for layer in self.layers[:-1]:
            x = layer(x) * angles
        return self.layers[-1](x)


def turned() -> nn.Module:
    return Turned(counts=False)


def counting() -> nn.Module:
    return Turned(counts=True)


def test_stages_that_read_constants_hold_their_buffers() -> None:
    network = trace_network(load_model(f"{__name__}:turned", (4,)))
    stages = cut_into_stages(network, 4, PlanSettings(batch=8))
    assert [len(stage.network.buffers) for stage in stages] == [1, 1, 1, 0]
    # What a layer made crosses, and no angles.
    assert [len(stage.sends) for stage in stages] == [1, 1, 1, 0]


def test_constants_of_a_buffer_that_changes_cross() -> None:
    reasons = refusals(trace_network(load_model(f"{__name__}:counting", (4,)))).values()
    assert any("crosses, and has no gradient" in reason for reason in reasons)
