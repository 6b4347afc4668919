"""Optimizers as measurements and runs build them: AdamW in one kernel is AdamW."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from paradl_bench.core.errors import UserError
from paradl_bench.measure.execution.optimizers import build_optimizer
from paradl_bench.network.kinds.kernel_shape import optimizer_shape
from paradl_bench.network.optimizers import OPTIMIZERS


def stepped(name: str) -> list[torch.Tensor]:
    """Parameters in float64 after three steps, and the optimizer's state after the last."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((7, 5), (5,), (3, 2, 4))
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in shapes]
    optimizer = build_optimizer(name, parameters)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        optimizer.step()
    moments = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    assert len(moments) == OPTIMIZERS[name].state_copies * len(parameters)
    return [*(parameter.detach() for parameter in parameters), *moments]


def test_fused_adamw_is_adamw() -> None:
    for found, exact in zip(stepped("adamw-fused"), stepped("adamw"), strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-14)


def test_adamw_decays_parameters_and_adam_does_not() -> None:
    decayed, kept = stepped("adamw")[0], stepped("adam")[0]
    assert not torch.allclose(decayed, kept, rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_has_a_shape_for_pricing(name: str) -> None:
    shape = optimizer_shape(name, 10, 2, "fp32")
    assert (shape.flops, shape.bytes) == (OPTIMIZERS[name].flops * 10, OPTIMIZERS[name].touched * 40)


def test_an_unknown_optimizer_is_named_with_the_choices() -> None:
    with pytest.raises(UserError, match="adamw-fused"):
        build_optimizer("adagrad", [])
