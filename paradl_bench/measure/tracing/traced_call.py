"""A call of a torch function as it was made: what it was given, and how its gradient lay in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from paradl_bench.measure.tracing.layouts import tensor_leaves

GradientLayout = tuple[tuple[int, ...], tuple[int, ...], bool]
"""Shape, strides, and whether elements lie in their order."""


class PartOf(NamedTuple):
    """A part of a tensor, as autograd knows it: a view of it.

    Attributes:
        whole: a likeness of the tensor on the meta device. offset: of the part's first element.
    """

    whole: torch.Tensor
    offset: int


class TracedCall:
    """A call as it was made, and how its gradient was laid out in memory; it holds no tensor of the model.

    Args:
        graded: ids of the tensors that required a gradient before the call.
    Attributes:
        arguments: positional and by name, each tensor a likeness on the meta device.
        changed_part: of what tensor the first argument is a part that was changed; None where it was no view, or was
            not changed.
        activations: tensors among them that are neither parameters nor buffers, in order.
        is_wide: whether it reads or makes complex or double numbers, which are no dtype that networks are trained in.
        views_parameter: whether it is a view of a parameter.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
        outputs: Sequence[torch.Tensor],
        held: Callable[[torch.Tensor], bool],
        graded: frozenset[int],
        *,
        in_place: bool,
    ) -> None:
        likenesses: dict[int, torch.Tensor] = {}

        def likeness(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in likenesses:
                like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
                likenesses[id(tensor)] = like.requires_grad_(id(tensor) in graded)
            return likenesses[id(tensor)]

        self.function, self.in_place = function, in_place
        self.arguments = tree_map_only(torch.Tensor, likeness, (args, kwargs))
        self.activations = [likenesses[id(tensor)] for tensor in tensor_leaves((args, kwargs)) if not held(tensor)]
        self.changed_part = _part_of(args[0], likenesses[id(args[0])]) if in_place else None
        self.is_wide = any(_is_wide(tensor) for tensor in (*self.activations, *outputs))
        self.views_parameter = not self.activations and outputs[0].requires_grad and outputs[0]._is_view()
        self._arrived: list[GradientLayout] = []
        if outputs[0].requires_grad and not outputs[0].is_leaf and not in_place:
            arrived = self._arrived

            def note(gradient: torch.Tensor) -> None:
                arrived[:] = [(tuple(gradient.shape), gradient.stride(), gradient.is_contiguous())]

            outputs[0].register_hook(note)  # type: ignore[no-untyped-call]

    @property
    def gradient(self) -> GradientLayout | None:
        """How the gradient of the first output lay in memory; None where none arrived."""
        return self._arrived[0] if self._arrived else None

    @property
    def is_plain(self) -> bool:
        """Whether the elements of all that it reads, and of the gradient, lie in memory in their order."""
        gradient = self.gradient
        return (gradient is None or gradient[2]) and all(tensor.is_contiguous() for tensor in self.activations)

    @property
    def is_mixed(self) -> bool:
        """Whether some activations that it reads get a gradient and others, as a mask or a constant, do not."""
        return len({tensor.requires_grad for tensor in self.activations}) > 1


def _is_wide(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float64 or tensor.dtype.is_complex


def _part_of(tensor: torch.Tensor, like: torch.Tensor) -> PartOf | None:
    """What a tensor is a view of, so far as autograd has to take its gradients apart; ``like`` is its likeness."""
    base = tensor._base
    if base is None or not like.requires_grad:
        return None
    whole = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device="meta")
    return PartOf(whole, int(tensor.storage_offset()))
