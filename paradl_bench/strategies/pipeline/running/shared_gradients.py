"""Gradients of parameters that several stages use, added up over the ranks that hold them, as planned in
:mod:`~paradl_bench.strategies.pipeline.stages`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from paradl_bench.strategies.pipeline.stages import sent_to_places
from paradl_bench.strategies.running.group_functions import Group


class SharedGradients:
    """Those of one rank.

    Args:
        shared: per parameter that several ranks hold, their places along the pipeline, ascending.
        group: of the pipeline.
    """

    def __init__(self, module: torch.nn.Module, shared: Mapping[str, tuple[int, ...]], group: Group) -> None:
        self.holders = {name: len(places) for name, places in shared.items()}
        self._group, self._partners = group, sent_to_places(shared, group.rank)
        self._parameters = {name: module.get_parameter(name) for name, places in shared.items() if group.rank in places}

    def add_up(self) -> None:
        """Once all backwards of this rank are done, have every rank hold the sum; together with those ranks."""
        pairs = [(place, name) for place, names in self._partners.items() for name in names]
        gradients = {name: _gradient(parameter) for name, parameter in self._parameters.items()}
        received = [torch.empty_like(gradients[name]) for _, name in pairs]
        self._group.exchange(
            [(place, gradients[name]) for place, name in pairs],
            [(place, buffer) for (place, _), buffer in zip(pairs, received, strict=True)],
        )
        earlier: dict[str, torch.Tensor] = {}
        for (place, name), part in zip(pairs, received, strict=True):
            # In the order of ranks, of which the own one is added between: two numbers add up alike either way.
            if place < self._group.rank:
                earlier[name] = earlier[name].add_(part) if name in earlier else part
        for name, part in earlier.items():
            gradients[name].add_(part)
        for (place, name), part in zip(pairs, received, strict=True):
            if place > self._group.rank:
                gradients[name].add_(part)


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        # Nothing of this rank's reached it; others wait for its part nevertheless.
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
