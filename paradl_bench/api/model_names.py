"""The name by which another process imports a model that this one holds."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Union

from paradl_bench.core.errors import UserError

if TYPE_CHECKING:
    from torch import nn

Model = Union[str, "nn.Module", Callable[[], "nn.Module"]]
"""A name, a module, or what builds one."""


def named(model: Model) -> tuple[str, str]:
    """``package.module:attribute`` of a model, and its folder; empty if any process can import it.

    Raises:
        UserError: no importable file holds the model at its top level.
    """
    if isinstance(model, str):
        return model, ""
    for module in _modules(getattr(model, "__module__", None)):
        name, folder = _importable(module)
        attribute = next((key for key, value in vars(module).items() if value is model), None) if name else None
        if attribute is not None:
            return f"{name}:{attribute}", folder
    called = getattr(model, "__qualname__", type(model).__name__)
    raise UserError(
        f"model {called}: other processes cannot import it, because no file holds it at its top level. Write the"
        " model, or a function that builds it, into a file, import it from there and give that"
    )


def _modules(first: str | None) -> Iterator[ModuleType]:
    """All that are loaded, that of the model's own code and the script before the others."""
    names = dict.fromkeys((*filter(None, (first,)), "__main__", *sys.modules))
    loaded = (sys.modules.get(name) for name in names)
    return (module for module in loaded if isinstance(module, ModuleType))


def _importable(module: ModuleType) -> tuple[str, str]:
    """The name of a module in another process, and the folder that it lies in; an empty name where it has no file."""
    spec, file = getattr(module, "__spec__", None), getattr(module, "__file__", None)
    if file is None:
        return "", ""
    name = spec.name if spec is not None else Path(file).stem
    path = Path(file).absolute()
    folder = path.parents[name.count(".") + (path.name == "__init__.py")]
    # What is installed, every process finds; the working directory, every command looks into.
    everywhere = "site-packages" in folder.parts or str(folder) == os.getcwd()
    return name, "" if everywhere else str(folder)
