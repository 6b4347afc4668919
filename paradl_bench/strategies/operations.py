"""Which calls under a torch-function mode are operations of a network, and what they are called.

Tracing counts operations in the order in which forward calls them; a module that runs sharded counts them alike, and so
knows which layer of the traced network each call is.
"""

from __future__ import annotations

from typing import Any

import torch


def is_operation(function: Any, result: Any) -> bool:
    """Whether a torch function's call counts as an operation: it returned a tensor, and is no attribute access."""
    if function.__name__ in ("__get__", "__set__", "requires_grad_", "register_hook"):
        return False
    if isinstance(result, torch.Tensor):
        return True
    return isinstance(result, (tuple, list)) and bool(result) and isinstance(result[0], torch.Tensor)


def function_name(function: Any) -> tuple[str, bool]:
    """Normalised name of a torch function, and whether it works in place: ``Tensor.__iadd__`` is (``add``, True)."""
    name: str = function.__name__
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
        if name.startswith("i") and name[1:] in ("add", "sub", "mul", "truediv", "pow"):
            return name[1:], True
        return name, False
    if name.endswith("_") and not name.startswith("_"):
        return name[:-1], True
    return name, False
