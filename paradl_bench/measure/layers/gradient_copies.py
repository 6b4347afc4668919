"""What becomes of gradients: copied into buckets, divided by the number of ranks, and back out; or added up.

torch's reducer does this with one call a gradient (``mul_out`` into the bucket's view, ``copy_`` back); so does this,
over gradients and buckets of the same sizes, in the order in which backward finishes them. Autograd adds to the
gradients of an earlier micro-batch in place, one call a gradient. An optimizer's state that lies in host memory is
copied to the device and back, one call a tensor; tensors of the gradients' sizes stand for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from paradl_bench.measure.execution.optimizers import fetch_values, host_copy, store_values
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.tasks import CopyDirection
from paradl_bench.ranks.clocks import Clock
from paradl_bench.ranks.groups.process_groups import RankContext

_Tensors = Sequence[torch.Tensor]


class GradientCopies:
    """Gradients of a model and a bucket that holds them all."""

    def __init__(self, module: torch.nn.Module, network: ModelGraph, device: torch.device) -> None:
        parameters = dict(module.named_parameters())
        order = network.gradient_order or tuple(parameters)
        self._gradients = [torch.zeros_like(parameters[name].detach()) for name in order]
        sizes = [gradient.numel() for gradient in self._gradients]
        parts = torch.split(torch.zeros(sum(sizes), device=device), sizes)
        self._views = [part.view_as(gradient) for part, gradient in zip(parts, self._gradients, strict=True)]
        self._hosts = [host_copy(gradient) for gradient in self._gradients]

    @torch.no_grad()
    def measure(self, clock: Clock, context: RankContext, *, repetitions: int) -> dict[CopyDirection, list[float]]:
        """Seconds, ``repetitions`` times, of all copies of a direction; those of a state are of as many bytes."""
        factor = torch.tensor(0.5)
        state = [torch.empty_like(gradient) for gradient in self._gradients]
        for tensor in state:
            tensor.untyped_storage().resize_(0)
        calls: dict[CopyDirection, tuple[Callable[[torch.Tensor, torch.Tensor], object], _Tensors, _Tensors]] = {
            "into": (lambda gradient, view: torch.mul(gradient, factor, out=view), self._gradients, self._views),
            "out": (lambda gradient, view: gradient.copy_(view), self._gradients, self._views),
            "add": (lambda gradient, view: gradient.add_(view), self._gradients, self._views),
            "fetch": (fetch_values, state, self._hosts),
            "store": (store_values, state, self._hosts),
        }
        measured: dict[CopyDirection, list[float]] = {direction: [] for direction in calls}
        for _ in range(repetitions):
            stamps = []
            for call, firsts, seconds in calls.values():
                context.barrier()
                clock.hold()
                begin = clock.stamp()
                for first, second in zip(firsts, seconds, strict=True):
                    call(first, second)
                stamps.append((begin, clock.stamp()))
            clock.synchronise()
            for samples_s, (begin, end) in zip(measured.values(), stamps, strict=True):
                samples_s.append(clock.seconds(begin, end))
        return measured
