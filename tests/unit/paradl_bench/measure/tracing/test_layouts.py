"""How what functions return lies in memory while a network is traced: as on a CPU, for tensors without memory too."""

from __future__ import annotations

import logging

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F

from paradl_bench.measure.tracing.layouts import laid_out_as_on_a_cpu


def channels_last(device: str) -> torch.Tensor:
    return torch.zeros(6, 4, 4, 8, device=device).permute(0, 3, 1, 2)


def convolved(x: torch.Tensor) -> torch.Tensor:
    return F.conv2d(x, torch.zeros(4, 8, 1, 1, device=x.device))


FUNCTIONS = {
    "convolution": convolved,
    "normalisation": lambda x: F.group_norm(x, 4),
    "reflected edges": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "softmax": lambda x: torch.softmax(x, 1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_channels_stay_last_where_a_cpu_keeps_them(name: str) -> None:
    function = FUNCTIONS[name]
    given = channels_last("meta")
    found = laid_out_as_on_a_cpu(function, (given,), {}, function(given))
    assert found.is_meta
    assert found.stride() == function(channels_last("cpu")).stride()


def test_all_that_a_function_returns_is_laid_out() -> None:
    given = channels_last("meta")
    function = torch.native_group_norm
    arguments = (given, None, None, 6, 8, 16, 4, 1e-5)
    output, *rest = laid_out_as_on_a_cpu(function, arguments, {}, function(*arguments))
    assert output.stride() == given.stride()
    assert [tensor.stride() for tensor in rest] == [(4, 1), (4, 1)]


def test_what_was_read_keeps_its_layout_in_memory() -> None:
    given = channels_last("meta")
    for function in (torch.relu_, lambda x: x.flatten(2), lambda x: x[:, 1:]):
        made = function(given)
        assert laid_out_as_on_a_cpu(function, (given,), {}, made) is made


def test_what_a_cpu_returned_stays_as_it_is() -> None:
    made = convolved(channels_last("cpu"))
    assert laid_out_as_on_a_cpu(convolved, (channels_last("cpu"),), {}, made) is made


def test_gradients_pass_through_a_tensor_that_is_laid_out() -> None:
    given = channels_last("meta").requires_grad_()
    found = laid_out_as_on_a_cpu(convolved, (given,), {}, convolved(given))
    found.sum().backward()
    assert given.grad.shape == given.shape


def test_torch_does_not_log_what_fails_without_values() -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append

    def fails_on_a_cpu(x: torch.Tensor) -> torch.Tensor:
        return x if x.is_meta and type(x) is torch.Tensor else x + torch.zeros(3)

    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(handler)
    try:
        given = channels_last("meta")
        laid_out_as_on_a_cpu(fails_on_a_cpu, (given,), {}, torch.empty_like(given))
    finally:
        logger.removeHandler(handler)
    assert not records
    assert not logger.disabled
