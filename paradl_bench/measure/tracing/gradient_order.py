"""The order in which the gradients of a module's parameters arrive.

Tracing sees it on the meta device. Devices have kernels of their own for some layers: recurrent ones return all their
gradients at once (oneDNN, cuDNN), in another order, which depends on the dtype too. So the order is seen again where
the module runs.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from paradl_bench.network.graph import ModelGraph


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

    @property
    def completed(self) -> tuple[str, ...]:
        """Each parameter once, by when its gradient was last added to: a reentrant checkpoint may add several times."""
        last = {name: place for place, name in enumerate(self.names)}
        return tuple(sorted(last, key=last.__getitem__))

    def of(self, network: ModelGraph) -> ModelGraph:
        """The network with its gradients in the order of the last backward.

        The network as it is where other gradients arrived than tracing saw.
        """
        seen = self.completed
        if seen == network.gradient_order or set(seen) != set(network.gradient_order):
            return network
        return msgspec.structs.replace(network, gradient_order=seen)
