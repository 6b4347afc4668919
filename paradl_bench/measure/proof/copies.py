"""Copies of a model that a proof trains, so that the model itself stays as it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch

from paradl_bench.measure.proof.comparison import FLOAT32, FLOAT64, Tolerance
from paradl_bench.network.models.catalog import LoadedModel, load_model


class Trial(NamedTuple):
    """How a model's forward runs in a proof.

    Attributes:
        dtype: of its parameters and inputs. with_input: whether an input that needs a gradient may be given.
    """

    dtype: torch.dtype
    with_input: bool


TRIALS = (
    Trial(torch.float64, True),
    # A model may change its input in place.
    Trial(torch.float64, False),
    # Some functions are there in fp32 alone.
    Trial(torch.float32, True),
    Trial(torch.float32, False),
)


def fresh_copy(model: LoadedModel, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """The model built anew, so that it has the values that every rank begins with."""
    with _default_dtype(torch.float32):
        other = load_model(model.name, model.input_shape)
    other.module.to(device=device, dtype=dtype)
    return other


def copy_values(source: torch.nn.Module, copied: torch.nn.Module) -> None:
    """Give a copy the values of parameters and buffers."""
    values = dict(source.named_parameters()) | dict(source.named_buffers())
    with torch.no_grad():
        for name, tensor in (*copied.named_parameters(), *copied.named_buffers()):
            tensor.copy_(values[name])


@contextlib.contextmanager
def undisturbed(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Let what is inside draw and make tensors of ``dtype`` without a trace on what follows."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), _default_dtype(dtype):
        yield
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def tolerance_of(dtypes: set[torch.dtype]) -> Tolerance:
    """What results may differ by where layers gave these floating dtypes."""
    return FLOAT64 if all(dtype == torch.float64 for dtype in dtypes) else FLOAT32


def runs(model: LoadedModel, inputs: torch.Tensor, trial: Trial) -> bool:
    """Whether forward of a copy takes some samples of a trial's kind."""
    leaf = inputs.detach().clone().requires_grad_(trial.with_input and inputs.is_floating_point())
    try:
        # As it is given a micro-batch.
        model.module(leaf.chunk(1)[0])
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return False
    return True
