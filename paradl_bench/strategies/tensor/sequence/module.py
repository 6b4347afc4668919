"""How operations run on a part of the sequence beside tensor parallelism's pairs."""

from __future__ import annotations

from typing import Any

import torch

from paradl_bench.network.graph import ModelGraph
from paradl_bench.strategies.running.group_functions import Group, gather_for_all, reduce_scatter, sum_gradients
from paradl_bench.strategies.running.own_randomness import OwnRandomness
from paradl_bench.strategies.running.sharded_module import Call, Rule, functions_of
from paradl_bench.strategies.running.summed_gradients import Run, SummedGradients
from paradl_bench.strategies.tensor.sequence.on_tokens import OnTokens, OwnTokens
from paradl_bench.strategies.tensor.sequence.parts import SEQUENCE, SequenceParts
from paradl_bench.strategies.tensor.sequence.sorted_rows import gathered_rows, scattered_rows

_TOLD_BY = "_paradl_sequence"


class SequenceRun:
    """This rank's part of the sequence: how it is left and entered, and what runs on it.

    Args:
        cut: in how many parts another axis cuts the sequence first.
    """

    def __init__(self, parts: SequenceParts, group: Group, random: OwnRandomness, cut: int) -> None:
        self.own = OwnTokens(group, parts.length // cut, _TOLD_BY)
        self._parts, self._group, self._random = parts, group, random

    def gathered(self, part: torch.Tensor) -> torch.Tensor:
        """All of the sequence, in front of layers by columns; its gradient is reduce-scattered."""
        by_sample = _by_sample(part, self.own.length // self._group.size)
        shape = list(by_sample.shape)
        shape[-2] = self.own.length
        return gather_for_all(by_sample, self.own.slices(by_sample.dim(), -2), shape, self._group).flatten(-3, -2)

    def scattered(self, partial: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sum of what ranks made; the gradient is all-gathered."""
        by_sample = _by_sample(partial, self.own.length)
        shape = *partial.shape[:-2], partial.shape[-2] // self._group.size, partial.shape[-1]
        part = reduce_scatter(by_sample, self.own.slices(by_sample.dim(), -2), self._group, shape)
        marked: torch.Tensor = self.own.mark(part, SEQUENCE)
        return marked

    def gathered_rows(self, part: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """As :meth:`gathered`, of sorted rows, which end there."""
        return gathered_rows(part, ends, self._group)

    def scattered_rows(self, partial: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """As :meth:`scattered`, of sorted rows."""
        marked: torch.Tensor = self.own.mark(scattered_rows(partial, ends, self._group), SEQUENCE, 0)
        return marked

    def reorders(self, block: int) -> bool:
        """Whether layers between a pair have rows in another order than the serial model."""
        return block in self._parts.sorted_rows

    def received(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """What an earlier stage of a pipeline made in a layer: this rank's part, or all of it."""
        layer, each = self._parts.layers.get(index), self._parts.scattered.get(index)
        if layer is None and each is None:
            return tensor
        marked: torch.Tensor = self.own.mark(tensor, *((layer.output, layer.each) if layer else (SEQUENCE, each)))
        return marked

    def bias(self, bias: torch.Tensor) -> torch.Tensor:
        """What is added to a part."""
        return sum_gradients([bias], self._group)[0] if bias.requires_grad else bias

    def sums(self, network: ModelGraph, pieces: frozenset[int]) -> dict[int, Rule]:
        """Of the gradients of parameters of layers in no pair.

        All of a parameter, whatever part of it other rules take.
        """
        alone = self._parts.summed.keys() - pieces
        return {index: Rule(functions_of(network.layers[index]), SummedGradients(self._group)) for index in alone}

    def rules(self, network: ModelGraph) -> dict[int, Rule]:
        """Of layers on a part of the sequence, which are in no pair."""
        rules = {}
        for index, on_part in self._parts.layers.items():
            layer = network.layers[index]
            run: Run = OnTokens(layer, on_part, self.own, self._random)
            rules[index] = Rule(functions_of(layer), _Entered(run, self.own) if index in self._parts.entered else run)
        return rules


def _by_sample(tensor: torch.Tensor, tokens: int) -> torch.Tensor:
    """With a dim of its own for samples that lie one after the other along the sequence."""
    return tensor.reshape(*tensor.shape[:-2], -1, tokens, tensor.shape[-1])


class _Entered:
    """An embedding of this rank's part of the tokens."""

    def __init__(self, run: Run, own_tokens: OwnTokens) -> None:
        self._run, self._own = run, own_tokens

    def __call__(self, function: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return self._run(function, (self._own.part(args[0], -1), *args[1:]), kwargs)
        return self._run(function, args, kwargs | {"input": self._own.part(kwargs["input"], -1)})
