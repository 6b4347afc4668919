"""Which calls under a torch-function mode are operations of a network, and what they are called.

Tracing counts operations in the order in which forward calls them; a module that runs sharded counts them alike, and so
knows which layer of the traced network each call is.
"""

from __future__ import annotations

from typing import Any

import torch

_ASSIGNMENT = "__setitem__"


def is_operation(function: Any, result: Any) -> bool:
    """Whether a torch function's call counts as an operation: it returned a tensor, or assigned to a part of one.

    An attribute access is none.
    """
    if function.__name__ == _ASSIGNMENT:
        return True
    if function.__name__ in ("__get__", "__set__", "requires_grad_", "register_hook"):
        return False
    if isinstance(result, torch.Tensor):
        return True
    return isinstance(result, (tuple, list)) and bool(result) and isinstance(result[0], torch.Tensor)


def output_of(function: Any, args: tuple[Any, ...], result: Any) -> Any:
    """What an operation returned; of an assignment (``x[:, 0] = y``), which returns none, the tensor that it changed.

    Args:
        args: that the function was called with.
    """
    return args[0] if function.__name__ == _ASSIGNMENT else result


def function_name(function: Any) -> tuple[str, bool]:
    """Normalised name of a torch function, and whether it works in place: ``Tensor.__iadd__`` is (``add``, True)."""
    name: str = function.__name__
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
