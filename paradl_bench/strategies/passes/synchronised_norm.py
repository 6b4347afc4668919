"""Batch normalisation with the statistics of all ranks that hold a part of the mini-batch.

torch's own SyncBatchNorm needs a GPU, and one part of equal size a rank. The formulas are those of Ioffe and Szegedy
2015, section 3: the gradient of the input needs two more sums over the mini-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from paradl_bench.strategies.passes.norm_statistics import SUMS
from paradl_bench.strategies.running.group_functions import Group
from paradl_bench.strategies.running.sharded_module import Call, Rule, Substitute, Whole


class _Normalise(torch.autograd.Function):
    """From (inputs, weight, bias), running statistics and group to the output; running statistics are updated."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running: tuple[torch.Tensor, torch.Tensor] | None,
        momentum: float,
        eps: float,
        group: Group,
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        mean, variance, count = _statistics(inputs, group)
        if running is not None:
            running[0].lerp_(mean.to(running[0].dtype), momentum)
            running[1].lerp_((variance * (count / (count - 1))).to(running[1].dtype), momentum)
        mean, variance = mean.to(inputs.dtype), variance.to(inputs.dtype)
        ctx.save_for_backward(inputs, weight, mean, torch.rsqrt(variance + eps))
        ctx.count, ctx.group = count, group
        return F.batch_norm(inputs, mean, variance, weight, bias, training=False, eps=eps)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        if gradient is None:
            return (None,) * 7
        inputs, weight, mean, scale = ctx.saved_tensors
        dims, channels = _reduced_dims(inputs), (-1, *(1,) * (inputs.dim() - 2))
        normalised = (inputs - mean.view(channels)) * scale.view(channels)
        of_bias, of_weight = gradient.sum(dims), (gradient * normalised).sum(dims)
        of_inputs = None
        if ctx.needs_input_grad[0]:
            sums = torch.stack([of_bias, of_weight])
            ctx.group.all_reduce(sums)
            mean_gradient, mean_product = (sums / ctx.count).view(SUMS, *channels)
            factor = scale if weight is None else scale * weight
            of_inputs = (gradient - mean_gradient - normalised * mean_product) * factor.view(channels)
        of_parameters = (
            value if needed else None
            for value, needed in zip((of_weight, of_bias), ctx.needs_input_grad[1:3], strict=True)
        )
        return of_inputs, *of_parameters, None, None, None, None


def _reduced_dims(inputs: torch.Tensor) -> list[int]:
    return [dim for dim in range(inputs.dim()) if dim != 1]


def _statistics(inputs: torch.Tensor, group: Group) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean and biased variance of each channel over the group, in fp64, and over how many elements."""
    channels = inputs.shape[1]
    elements = inputs.numel() // channels
    variance, mean = torch.var_mean(inputs.detach(), _reduced_dims(inputs), correction=0)
    variance, mean = variance.double(), mean.double()
    sums = torch.cat([mean * elements, (variance + mean * mean) * elements, mean.new_tensor([elements])])
    group.all_reduce(sums)
    count = sums[-1]
    mean, squares = (sums[:-1] / count).view(SUMS, channels)
    return mean, (squares - mean * mean).clamp_(min=0), count


class _Substituted(Substitute):
    """What stands for a batch normalisation that computes no statistics, with the messages of one that does.

    They go where the plan puts them: before its forward, and behind its backward.
    """

    def __init__(self, substitute: Substitute, group: Group) -> None:
        self._substitute, self._group = substitute, group

    def __call__(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        told = _Messages.apply(input, self._group)  # type: ignore[no-untyped-call]
        return self._substitute(told, *args, **kwargs)

    def instead(self, function: Call, *, rounds: int = 1, backward: bool = False) -> Call:
        return self._substitute.instead(function, rounds=rounds, backward=backward)

    def beside(self, function: Call) -> Call:
        return self._substitute.beside(function)


class _Messages(torch.autograd.Function):
    """An input as it is, and all-reduces of zeros as large as its sums, forward and for its gradient."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.channels, ctx.group = inputs.shape[1], group
        group.all_reduce(inputs.new_zeros(SUMS * ctx.channels + 1, dtype=torch.float64))
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        if gradient is not None:
            ctx.group.all_reduce(gradient.new_zeros(SUMS * ctx.channels))
        return gradient, None


class _SynchronisedNorm:
    """Runs one batch normalisation over a group, within what runs the layer otherwise."""

    def __init__(self, group: Group, within: Rule | None, whole: Whole | None) -> None:
        self._group, self._within, self._whole = group, within, whole

    def __call__(self, function: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        normalise = _Substituted(function, self._group) if isinstance(function, Substitute) else self._normalise
        if self._within is not None:
            return self._within.run(normalise, args, kwargs)
        if self._whole is not None:
            args, kwargs = self._whole((args, kwargs))
        return normalise(*args, **kwargs)

    def _normalise(
        self,
        input: torch.Tensor,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        """As ``torch.nn.functional.batch_norm``."""
        if not training:
            return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
        running = None if running_mean is None or running_var is None else (running_mean, running_var)
        result: torch.Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
            input, weight, bias, running, momentum, eps, self._group
        )
        return result


def with_synchronised_norms(
    rules: Mapping[int, Rule], groups: Mapping[int, Group], whole: Whole | None = None
) -> dict[int, Rule]:
    """The rules with those of batch normalisations, whose groups are given by index of the layer."""
    norms = {
        index: Rule(frozenset({"batch_norm"}), _SynchronisedNorm(group, rules.get(index), whole))
        for index, group in groups.items()
    }
    return {**rules, **norms}
