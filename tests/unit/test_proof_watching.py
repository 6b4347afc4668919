"""What a proof sees of a model's forward."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from paradl_bench.measure.proof.watching import watch_forward


class Assigning(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = 2 * x
        y[:, 0] = 0.25
        return y


def test_an_assignment_gives_the_tensor_that_it_changes() -> None:
    model = Assigning()
    watched = watch_forward(model)
    watched.noting = True
    model(torch.ones(2, 3, dtype=torch.float64))
    (passage,) = watched.passages
    assert passage.outputs[1, 0].tolist() == [[0.25, 2.0, 2.0]] * 2
    assert watched.dtypes == {torch.float64}
