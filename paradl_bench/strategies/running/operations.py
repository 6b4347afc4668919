"""Which calls under a torch-function mode are operations of a network, and what they are called.

Tracing counts operations in the order in which forward calls them; a module that runs sharded counts them alike, and so
knows which layer of the traced network each call is.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from paradl_bench.network.kinds.grouped_matmul import KIND as GROUPED

_ASSIGNMENT = "__setitem__"
_ATTRIBUTE = "__get__"
_VIEWS = frozenset(("T", "mT", "H", "mH", "real", "imag", "data"))
"""Attributes that are tensors of their own, on the same memory."""
_EXTENT = frozenset(
    ("size", "shape", "numel", "nelement", "stride", "nbytes", "__len__", "is_contiguous", "is_same_size")
)
_ELSE = frozenset((
    "device", "dtype", "layout", "ndim", "dim", "itemsize", "element_size", "requires_grad", "requires_grad_", "grad",
    "grad_fn", "is_leaf", "is_cuda", "is_cpu", "is_meta", "is_mps", "is_xpu", "is_sparse", "is_quantized", "is_nested",
    "is_floating_point", "is_complex", "is_signed", "is_inference", "names", "name", "get_device", "type", "output_nr",
    "_version",
))  # fmt: skip


def is_operation(function: Any, result: Any) -> bool:
    """Whether a torch function's call counts as an operation: it returned a tensor, or assigned to a part of one.

    An attribute access is none, unless the attribute is another view of the tensor.
    """
    name = function.__name__
    if name == _ASSIGNMENT:
        return True
    if name == _ATTRIBUTE:
        return attribute_of(function) in _VIEWS
    if name in ("__set__", "requires_grad_", "register_hook"):
        return False
    if isinstance(result, torch.Tensor):
        return True
    return isinstance(result, (tuple, list)) and bool(result) and isinstance(result[0], torch.Tensor)


def output_of(function: Any, args: tuple[Any, ...], result: Any) -> Any:
    """What an operation returned; of an assignment (``x[:, 0] = y``), which returns none, what it changed."""
    return args[0] if function.__name__ == _ASSIGNMENT else result


def attribute_of(function: Any) -> str:
    """The attribute that a function reads; empty for another function."""
    return str(getattr(function.__self__, "__name__", "")) if function.__name__ == _ATTRIBUTE else ""


@functools.lru_cache(maxsize=1024)
def asks_extent(function: Any) -> bool:
    """Whether a function asks a tensor how large it is, and nothing about its values."""
    return (attribute_of(function) or function.__name__) in _EXTENT


@functools.lru_cache(maxsize=1024)
def asks_else(function: Any) -> bool:
    """Whether a function asks a tensor what neither its extents nor its values decide, as its dtype."""
    return (attribute_of(function) or function.__name__) in _ELSE


def function_name(function: Any) -> tuple[str, bool]:
    """Normalised name of a torch function, and whether it works in place: ``Tensor.__iadd__`` is (``add``, True).

    Of an attribute that is read, the attribute's.
    """
    name: str = attribute_of(function) or function.__name__
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
        if name == "setitem":
            return name, True
        if name.startswith("i") and name[1:] in ("add", "sub", "mul", "truediv", "pow"):
            return name[1:], True
        return name, False
    if name.endswith("_") and not name.startswith("_"):
        return name[:-1], True
    return name, False


def shaped(function: Any) -> Any:
    """What returns a tensor without memory as a function does; torch's product of groups has it in bf16 alone."""
    return _of_groups(function) if function_name(function)[0] in GROUPED.functions else function


def _of_groups(function: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        rows, matrices = tensors[:2]
        if rows.is_meta and (rows.dim(), matrices.dim()) == (2, 3):
            product: torch.Tensor = _ProductOfGroups.apply(rows, matrices)  # type: ignore[no-untyped-call]
            return product
        return function(*args, **kwargs)

    return run


class _ProductOfGroups(torch.autograd.Function):
    """Of tensors without memory. Gradients lie in memory as what they are of, as torch's kernels return them.

    So autograd keeps the gradient of matrices that were transposed, and makes no copy in the parameter's order.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, matrices)
        return rows @ matrices[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, matrices = ctx.saved_tensors
        return torch.empty_like(rows), torch.empty_like(matrices)
