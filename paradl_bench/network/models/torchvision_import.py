"""Import torchvision beside a torch that lacks its compiled operators.

torchvision's wheel is built against CUDA torch; beside a CPU-only build its extension does not load, and importing it
fails at the registration of ``nms``'s fake implementation. Classification models use none of these operators: their
schemas are defined here, when missing, so that the import goes through.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from types import ModuleType
from typing import Any

from paradl_bench.core.errors import UserError

_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
# The library has to live as long as the process, or its schemas are withdrawn.
_kept: list[Any] = []


def import_torchvision_models() -> ModuleType:
    """The module ``torchvision.models``.

    Raises:
        UserError: torchvision is not installed, or does not fit the installed torch.
    """
    import torch

    try:
        return importlib.import_module("torchvision.models")
    except ModuleNotFoundError as error:
        if error.name == "torchvision":
            raise UserError("torchvision is not installed: pip install 'paradl[bench]'") from None
        raise
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    if not _kept:
        library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for name, schema in _SCHEMAS.items():
            if not hasattr(getattr(torch.ops, "torchvision", object()), name):
                library.define(schema)
        _kept.append(library)
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        # Half imported.
        del sys.modules[name]
    try:
        return importlib.import_module("torchvision.models")
    except RuntimeError as error:
        raise UserError(f"torchvision does not fit this torch ({torch.__version__}): {error}") from None


def fit_torchvision() -> None:
    """See to it that other packages can import torchvision, as transformers does where it is installed."""
    with contextlib.suppress(UserError):
        import_torchvision_models()
