"""Autocast as runs and layer profiles enter it: round forward and the loss, not round backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from paradl_bench.network.kinds.autocast import computed_in, given_dtype, has_masters, is_autocast

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Entered = Callable[[], AbstractContextManager[Any]]
"""Makes a context for one forward."""


def autocast_to(dtype: str, device: torch.device) -> Entered:
    """The context of a forward, and its loss, trained in ``dtype``."""
    if not is_autocast(dtype):
        return contextlib.nullcontext
    return lambda: torch.autocast(device.type, dtype=TORCH_DTYPES[computed_in(dtype)])


def hold_weights(module: torch.nn.Module, dtype: str, *, in_shards: bool = False) -> None:
    """Round parameters and buffers to the dtype that ``dtype`` trains them in; they stay the same tensors.

    Args:
        in_shards: whether ranks are to hold fp32 shards of the parameters, whose gathers round them.
    """
    if not has_masters(dtype):
        return
    lower = TORCH_DTYPES[computed_in(dtype)]
    module._apply(  # type: ignore[no-untyped-call]
        lambda tensor: tensor.to(lower) if tensor.dtype == torch.float32 else tensor
    )
    for parameter in module.parameters() if in_shards else ():
        if parameter.dtype == lower:
            parameter.data = parameter.data.float()


def as_given(inputs: torch.Tensor, dtype: str) -> torch.Tensor:
    """A mini-batch in the dtype that ``dtype`` trains on it in; whole numbers stay."""
    return inputs.to(TORCH_DTYPES[given_dtype(dtype)]) if has_masters(dtype) and inputs.is_floating_point() else inputs


def as_product_reads_it(tensor: torch.Tensor) -> torch.Tensor:
    """What autocast, where it is on, makes of an operand of a matrix product; float64 it leaves alone."""
    kind = tensor.device.type
    casts = tensor.is_floating_point() and tensor.dtype != torch.float64 and torch.is_autocast_enabled(kind)
    return tensor.to(torch.get_autocast_dtype(kind)) if casts else tensor


def as_loss_reads_it(tensor: torch.Tensor) -> torch.Tensor:
    """What autocast, where it is on, makes of the logits that a loss reads; float64 it leaves alone."""
    casts = tensor.dtype != torch.float64 and torch.is_autocast_enabled(tensor.device.type)
    return tensor.float() if casts else tensor


CONVERSIONS = frozenset(("to", "float", "type_as", "bfloat16"))


def converts_alone(function: Any, args: tuple[Any, ...], device: str = "") -> bool:
    """Whether a call under autocast may do nothing but give a tensor another of the two dtypes.

    A model's code may ask for that where autocast has made a dtype another than it is in fp32 (T5's feed-forward).

    Args:
        device: kind of the device that runs the model, where that is not the tensor's.
    """
    if function.__name__ not in CONVERSIONS or not args or not isinstance(args[0], torch.Tensor):
        return False
    # The meta device, on which stages are rehearsed, knows no autocast.
    device = device or args[0].device.type
    known = torch.amp.autocast_mode.is_autocast_available(device)
    return args[0].is_floating_point() and known and torch.is_autocast_enabled(device)


def as_noted(made: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """What a conversion made of a tensor, with what strategies noted on that."""
    if made is not tensor:
        vars(made).update(vars(tensor))
    return made
