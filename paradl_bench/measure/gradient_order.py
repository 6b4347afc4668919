"""The order in which the gradients of a module's parameters arrive."""

from __future__ import annotations

from typing import Any

import torch


class GradientOrder:
    """While active, notes the parameters in the order in which their gradients arrive, each once a backward."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._handles: list[Any] = []
        self.names: list[str] = []

    def __enter__(self) -> GradientOrder:
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda _, name=name: self.names.append(name)
                )
                self._handles.append(hook)
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
