"""What a proof sees of a model's forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from paradl_bench.measure.proof.parts import Place
from paradl_bench.measure.proof.reference import SerialReference
from paradl_bench.measure.proof.watching import WatchedForward
from paradl_bench.network.models.catalog import LoadedModel


class Lone:
    """One rank without others."""

    rank = 0

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def mean(self, tensors: Sequence[torch.Tensor]) -> None:
        pass

    def let_go(self, groups: Sequence[Any]) -> None:
        pass


class Assigning(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = 2 * x
        y[:, 0] = 0.25
        return y


def test_an_assignment_gives_the_tensor_that_it_changes() -> None:
    model = Assigning()
    watched = WatchedForward(model)
    watched.noting = True
    model(torch.ones(2, 3, dtype=torch.float64))
    (passage,) = watched.passages
    assert passage.outputs[1, 0].tolist() == [[0.25, 2.0, 2.0]] * 2
    assert watched.dtypes == {torch.float64}


class Endless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight) / 0.0


def test_no_gradient_is_made_behind_outputs_that_are_not_finite() -> None:
    model = LoadedModel("endless", Endless(), (3,))
    reference = SerialReference(model, Place(0, 1, 1, 2), Lone(), cuts={}, at_once="own")
    step = reference.run(torch.ones(2, 3, dtype=torch.float64), torch.zeros(2, dtype=torch.int64), with_input=True)
    assert not step.finite
    assert model.module.weight.grad is None
    assert step.input_gradient is None
