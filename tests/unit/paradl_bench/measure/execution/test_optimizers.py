"""Optimizers as measurements and runs build them: AdamW in one kernel is AdamW."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from paradl_bench.core.errors import UserError
from paradl_bench.measure.execution.optimizers import build_optimizer, offload_state
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


def low_parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((7, 5), (5,), (3, 2, 4))
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).bfloat16()) for shape in shapes]


def step_with(optimizers: list[torch.optim.Optimizer], *all_parameters: list[torch.nn.Parameter]) -> None:
    """Three steps with the same gradients, in the dtype of each parameter."""
    generator = torch.Generator().manual_seed(4)
    for _ in range(3):
        for together in zip(*all_parameters, strict=True):
            gradient = torch.randn(together[0].shape, generator=generator).bfloat16()
            for parameter in together:
                parameter.grad = gradient.to(parameter.dtype)
        for optimizer in optimizers:
            optimizer.step()


class TestParametersInBf16:
    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_copies_in_fp32_take_the_steps_of_fp32_parameters(self, name: str) -> None:
        low = low_parameters()
        wide = [torch.nn.Parameter(parameter.detach().float()) for parameter in low]
        before = [parameter.detach().clone() for parameter in low]
        optimizer = build_optimizer(name, low, dtype="bf16-weights")
        step_with([optimizer, build_optimizer(name, wide)], low, wide)
        for parameter, exact, old in zip(low, wide, before, strict=True):
            state = optimizer.state[parameter]
            kept = [value for value in state.values() if isinstance(value, torch.Tensor) and value.dim()]
            assert len(kept) == OPTIMIZERS[name].state_copies + 1
            assert all(value.dtype == torch.float32 for value in kept)
            assert torch.equal(state["master"], exact)
            assert torch.equal(parameter, exact.bfloat16())
            # The steps are so small that rounding each by itself would lose them.
            assert not torch.equal(exact, old.float())

    def test_offloaded_copies_come_back_for_each_step(self) -> None:
        low, kept = low_parameters(), low_parameters()
        optimizers = [build_optimizer("adamw", each, dtype="bf16-weights") for each in (low, kept)]
        offload_state(optimizers[1])
        step_with(optimizers, low, kept)
        assert all(torch.equal(one, other) for one, other in zip(low, kept, strict=True))
        masters = [optimizers[1].state[parameter]["master"] for parameter in kept]
        assert all(master.untyped_storage().size() == 0 for master in masters)

    def test_parameters_that_are_wide_have_no_copies(self) -> None:
        wide = [torch.nn.Parameter(torch.ones(3, dtype=torch.float64))]
        optimizer = build_optimizer("sgd", wide, dtype="bf16-weights")
        step_with([optimizer], wide)
        assert "master" not in optimizer.state[wide[0]]
        assert not torch.equal(wide[0], torch.ones(3, dtype=torch.float64))
