"""The order in which the gradients of a module's parameters arrive, and sums of gradients where branches meet.

Tracing sees the order on the meta device. Devices have kernels of their own for some layers: recurrent ones return all
their gradients at once (oneDNN, cuDNN), in another order, which depends on the dtype too. So the order is seen again
where the module runs.
"""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

import msgspec
import torch

from paradl_bench.network.graph import ModelGraph

Moment = TypeVar("Moment")


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


class SumOfGradients(Generic[Moment]):
    """A sum, as a dispatch mode sees it, that autograd makes in place where nobody else holds the first.

    Under a dispatch mode, such as a tracker, it makes a third tensor. Whether somebody holds the first is known when
    the next operation runs.

    Attributes:
        moment: memory while the third tensor is there.
    """

    def __init__(self, first: torch.Tensor) -> None:
        storage = first.untyped_storage()
        self._first = weakref.ref(storage)
        self._dense = storage.nbytes() == first.numel() * first.element_size()
        self.moment: Moment | None = None

    @property
    def in_place(self) -> bool:
        """Whether autograd would have added in place."""
        return self._dense and self._first() is None
