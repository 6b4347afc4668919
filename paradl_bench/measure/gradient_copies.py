"""What a gradient exchange copies: every gradient into its bucket, divided by the number of ranks, and back out.

torch's reducer does this with one call a gradient (``mul_out`` into the bucket's view, ``copy_`` back); so does this,
over gradients and buckets of the same sizes, in the order in which backward finishes them.
"""

from __future__ import annotations

import torch

from paradl_bench.measure.clocks import Clock
from paradl_bench.measure.process_groups import RankContext
from paradl_bench.spec.network import Network


class GradientCopies:
    """Gradients of a model and a bucket that holds them all."""

    def __init__(self, module: torch.nn.Module, network: Network, device: torch.device) -> None:
        parameters = dict(module.named_parameters())
        order = network.gradient_order or tuple(parameters)
        self._gradients = [torch.zeros_like(parameters[name].detach()) for name in order]
        bucket = torch.zeros(sum(gradient.numel() for gradient in self._gradients), device=device)
        self._views = []
        offset = 0
        for gradient in self._gradients:
            self._views.append(bucket[offset : offset + gradient.numel()].view_as(gradient))
            offset += gradient.numel()

    @torch.no_grad()
    def measure(self, clock: Clock, context: RankContext, *, repetitions: int) -> tuple[list[float], list[float]]:
        """Seconds to copy all gradients into the bucket, and out of it, ``repetitions`` of each, in turn."""
        factor = torch.tensor(0.5)
        into, out = [], []
        for _ in range(repetitions):
            context.barrier()
            begin = clock.stamp()
            for gradient, view in zip(self._gradients, self._views, strict=True):
                torch.mul(gradient, factor, out=view)
            end = clock.stamp()
            context.barrier()
            out_begin = clock.stamp()
            for gradient, view in zip(self._gradients, self._views, strict=True):
                gradient.copy_(view)
            out_end = clock.stamp()
            clock.synchronise()
            into.append(clock.seconds(begin, end))
            out.append(clock.seconds(out_begin, out_end))
        return into, out
