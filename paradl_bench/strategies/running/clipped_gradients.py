"""The gradients of one rank limited by their norm over all parameters of the model, by torch's own functions.

See :mod:`~paradl_bench.strategies.passes.clipping` for what ranks sum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

_FP32_BYTES = 4


class GradientClipper:
    """Limits the norm of a rank's gradients before each weight update.

    Args:
        module: whose parameters' gradients are limited.
        max_norm: the largest that the norm may be.
        alike: per parameter, how many ranks of the group hold the same gradient; 1 where it is missing.
        group: whose ranks hold other gradients; None where every rank holds all of them.
        dtype: that squares are added in, by :func:`dtype_of_squares`.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        max_norm: float,
        alike: Mapping[str, int],
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
    ) -> None:
        self.max_norm = max_norm
        self._module, self._alike, self._group, self._dtype = module, alike, group, dtype

    def clip(self) -> torch.Tensor:
        """Scale the gradients where their norm is too large; returns the norm that they had. A collective."""
        held = {
            name: local_part(parameter)
            for name, parameter in self._module.named_parameters()
            if parameter.grad is not None
        }
        by_count: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        for name, part in held.items():
            assert part.grad is not None
            by_count[self._alike.get(name, 1)].append(part.grad)
        squares = self._zero()
        for count, gradients in by_count.items():
            squares += self._norm(gradients) ** 2 / count
        norm = self._summed(squares).sqrt()
        clip_grads_with_norm_(list(held.values()), self.max_norm, norm)
        return norm

    def _norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        if all(gradient.element_size() >= _FP32_BYTES for gradient in gradients):
            return get_total_norm(gradients).to(self._dtype)
        # torch would round the norm to the gradients' dtype.
        norm: torch.Tensor = torch.stack(torch._foreach_norm(gradients, 2, dtype=self._dtype)).norm()
        return norm

    def communicate(self) -> None:
        """What the ranks communicate for it, alone: an emulated update sleeps its seconds."""
        self._summed(self._zero())

    def _zero(self) -> torch.Tensor:
        return torch.zeros((), dtype=self._dtype, device=next(self._module.parameters()).device)

    def _summed(self, squares: torch.Tensor) -> torch.Tensor:
        if self._group is not None:
            dist.all_reduce(squares, group=self._group)
        return squares


def dtype_of_squares(module: torch.nn.Module) -> torch.dtype:
    """fp32, which holds the square of any narrower number; fp64 where a parameter of the whole model has that."""
    dtypes = {parameter.dtype for parameter in module.parameters()}
    return torch.float64 if torch.float64 in dtypes else torch.float32


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter, with its gradient; of one that ranks hold rows of, this rank's rows, in the same memory."""
    if not isinstance(parameter, DTensor):
        return parameter
    part = parameter.to_local().detach()
    gradient = parameter.grad
    assert isinstance(gradient, DTensor)
    part.grad = gradient.to_local()
    return part
