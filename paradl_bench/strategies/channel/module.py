"""Channel parallel layers: some channels of the input, partial sums of all filters, reduced (ParaDL, section 3.4)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from paradl_bench.network.graph import Layer
from paradl_bench.strategies.channel.plan import CHANNELS
from paradl_bench.strategies.running.group_functions import Group, axis_slices, reduce, take
from paradl_bench.strategies.running.sharded_module import Call, beside, bind
from paradl_bench.strategies.splitting.channel_shards import Shards, channels_of
from paradl_bench.strategies.splitting.gradient_parts import Parts, channel_dim
from paradl_bench.strategies.splitting.split_runner import SplitRunner


class _ChannelLayer:
    """One layer: forward all-reduce of partial sums, backward all-gather of the input's gradient.

    Where ranks hold whole groups their filters differ; each adds zeros for those of others. Biases stay whole.
    """

    def __init__(self, layer: Layer, shards: Shards, parts: Parts | None, group: Group) -> None:
        self._layer, self._group = layer, group
        self._own = shards[group.rank]
        self._channels = [shard.channels for shard in shards]
        self._filters = channels_of(layer)[0]

    def __call__(self, function: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        given = bind(self._layer, args, kwargs)
        bias = given.pop("bias", None)
        dim = channel_dim(self._layer, tuple(given["input"].shape))
        given["input"] = take(given["input"], axis_slices(self._channels, dim), self._group)
        if self._layer.kind == "conv":
            given["groups"] = self._own.groups
        partial = function(**given)
        behind = partial.dim() - dim - 1
        own_filters = self._own.filters
        if own_filters.extent < self._filters:
            margins = (own_filters.start, self._filters - own_filters.stop)
            with self._group.spans.copies():
                partial = beside(function, F.pad)(partial, (0, 0) * behind + margins)
        whole = reduce(partial, self._group)
        return whole if bias is None else beside(function, torch.add)(whole, bias.view(-1, *(1,) * behind))


RUNNER = SplitRunner(CHANNELS, _ChannelLayer)
