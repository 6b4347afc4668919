"""Filter parallel layers: all of the input, some of the filters, outputs gathered (ParaDL, section 3.3)."""

from __future__ import annotations

from typing import Any

import torch

from paradl_bench.network.graph import Layer
from paradl_bench.strategies.filter.plan import FILTERS
from paradl_bench.strategies.running.group_functions import (
    Group,
    axis_slices,
    gather,
    reduce_gradient,
    reduce_scatter_gradient,
)
from paradl_bench.strategies.running.sharded_module import Call, bind
from paradl_bench.strategies.splitting.channel_shards import Shards
from paradl_bench.strategies.splitting.gradient_parts import Parts, channel_dim
from paradl_bench.strategies.splitting.split_runner import SplitRunner


class _FilterLayer:
    """One layer: forward all-gather of outputs, backward all-reduce or reduce-scatter of the input's gradient."""

    def __init__(self, layer: Layer, shards: Shards, parts: Parts | None, group: Group) -> None:
        self._layer, self._parts, self._group = layer, parts, group
        self._own = shards[group.rank]
        self._filters = [shard.filters for shard in shards]

    def __call__(self, function: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        given = bind(self._layer, args, kwargs)
        dim = channel_dim(self._layer, tuple(given["input"].shape))
        if self._parts is None:
            whole = reduce_gradient(given["input"], self._group)
        else:
            whole = reduce_scatter_gradient(given["input"], axis_slices(self._parts, dim), self._group)
        channels = self._own.channels
        given["input"] = whole
        if channels.extent < whole.shape[dim]:
            given["input"] = whole.narrow(dim, channels.start, channels.extent)
        if self._layer.kind == "conv":
            given["groups"] = self._own.groups
        part = function(**given)
        shape = list(part.shape)
        shape[dim] = self._filters[-1].stop
        return gather(part, axis_slices(self._filters, dim), shape, self._group)


RUNNER = SplitRunner(FILTERS, _FilterLayer)
