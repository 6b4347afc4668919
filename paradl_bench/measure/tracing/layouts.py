"""How what a function returns lies in memory, for tensors without memory.

The meta device lays out in the order of elements what kernels of devices lay out as they found it: a convolution or a
normalisation of channels that are last. Whether a later operation reads memory as it is, or copies it, follows from
that. A CPU's layout is asked of fake tensors.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from paradl_bench.strategies.running.operations import function_name

_ATTENTION = "scaled_dot_product_attention"
FAILS_WITHOUT_VALUES = (RuntimeError, NotImplementedError, TypeError, ValueError)
"""What functions raise on fake tensors where they need values."""


@contextlib.contextmanager
def fake_tensors() -> Iterator[None]:
    """While the body runs, tensors that are made are fake; torch does not log the functions that fail on them."""
    logger = logging.getLogger(FakeTensorMode.__module__)
    disabled, logger.disabled = logger.disabled, True
    try:
        with FakeTensorMode():
            yield
    finally:
        logger.disabled = disabled


def laid_out_as_on_a_cpu(function: Callable[..., Any], args: Any, kwargs: dict[str, Any], result: Any) -> Any:
    """What a function returned, with the strides that its kernel on a CPU gives, where that is the meta device's.

    Only memory that the function made is laid out anew: a view of what it read, or that itself, stays as it is.
    """
    given = tensor_leaves((args, kwargs))
    if function_name(function)[0] != _ATTENTION and all(tensor.is_contiguous() for tensor in given):
        # Attention alone returns heads behind positions whatever it reads.
        return result
    read = addresses_of(given)
    if not any(_is_new(made, read) for made in tensor_leaves(result)):
        return result
    try:
        with fake_tensors():
            own_args, own_kwargs = tree_map_only(torch.Tensor, as_it_lay, (args, kwargs))
            returned = tensor_leaves(function(*own_args, **own_kwargs))
    except FAILS_WITHOUT_VALUES:
        return result
    strides = iter([tensor.stride() for tensor in returned])

    def laid_out(made: torch.Tensor) -> torch.Tensor:
        wanted = next(strides)
        if wanted == made.stride() or not _is_new(made, read):
            return made
        return torch.empty_strided(made.shape, wanted, dtype=made.dtype, device="meta").copy_(made)

    return tree_map_only(torch.Tensor, laid_out, result)


def _is_new(made: torch.Tensor, read: set[int]) -> bool:
    return made.is_meta and not addresses_of(made) & read


def as_it_lay(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor like another, with its strides."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def tensor_leaves(values: Any) -> list[torch.Tensor]:
    """All tensors among values, tuples, lists and dicts of them included."""
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def storages_of(values: Any) -> list[torch.UntypedStorage]:
    """The memory of every tensor among values."""
    return [tensor.untyped_storage() for tensor in tensor_leaves(values)]


def addresses_of(values: Any) -> set[int]:
    """What tells that memory from other memory, while it is held."""
    return {storage._cdata for storage in storages_of(values)}
