"""What the runs of filter and channel parallelism have in common: parameters become shards, layers get their rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paradl_bench.network.graph import Layer, ModelGraph
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Axis
from paradl_bench.strategies.running.group_functions import Group
from paradl_bench.strategies.running.parameters import replace_parameter
from paradl_bench.strategies.running.sharded_module import Rule, Sharding, functions_of
from paradl_bench.strategies.splitting.channel_shards import Shards, Splitting, with_parameter_shapes
from paradl_bench.strategies.splitting.gradient_parts import Parts


class SplitRunner:
    """Replaces the parameters of layers that are split by this rank's shards of them.

    Outputs, input gradients and the gradients of all parameters are those of the serial model.

    Args:
        splitting: how layers are split.
        operation: from a layer, all ranks' shards of it, which parts of its input's gradient they need (None for all of
            it) and their group, what runs it (:attr:`Rule.run`).
    """

    def __init__(
        self,
        splitting: Splitting,
        operation: Callable[[Layer, Shards, Parts | None, Group], Callable[..., Any]],
    ) -> None:
        self.name = splitting.name
        self._splitting = splitting
        self._operation = operation

    def shard(
        self, module: torch.nn.Module, network: ModelGraph, axis: Axis, group: Group, settings: PlanSettings
    ) -> Sharding:
        """See :class:`~paradl_bench.strategies.running.axis_runners.AxisRunner`."""
        split = self._splitting.layers(network, group.size, settings)
        rules, shapes = {}, {}
        for index, shards in split.shards.items():
            layer = network.layers[index]
            for name, held in self._splitting.parameter_parts(layer, shards[group.rank]).items():
                part = module.get_parameter(name)[tuple(slice(*interval) for interval in held)]
                replace_parameter(module, name, part)
                shapes[name] = tuple(part.shape)
            run = self._operation(layer, shards, split.gradients.parts.get(index), group)
            rules[index] = Rule(functions_of(layer), run)
        return Sharding(rules, with_parameter_shapes(network, shapes))
