"""Plan of context parallelism: every rank computes a part of the sequence, and attends to all of it.

Ranks hold the whole model and equal, contiguous parts of the tokens. Before an attention its keys and values are
all-gathered, in the dtype that its products run in; behind its backward their gradients are reduce-scattered, values
first, as autograd comes to them. With ``--context-exchange all-to-all`` an attention has all tokens of a share of the
heads instead (:mod:`~paradl_bench.strategies.context.heads`), with ``ring`` keys and values go round
(:mod:`~paradl_bench.strategies.context.ring`). Nothing else is communicated for layers: the loss of a rank is the sum
over its own targets over the number of all targets. Gradients of parameters are then exchanged as in data parallelism.

Of gathered keys and values a rank's queries meet all. A causal attention needs other masks on each rank, which torch's
kernel takes as a tensor: it computes the pairs that the mask leaves out too, so all ranks compute as much.

Source: Llama Team 2024, "The Llama 3 Herd of Models", section 3.3.2 (keys and values all-gathered); Li et al. 2021,
"Sequence Parallelism: Long Sequence Training from System Perspective".
"""

from __future__ import annotations

import math

import msgspec

from paradl_bench.core.errors import uneven
from paradl_bench.network.graph import Layer, LayerMemory, ModelGraph
from paradl_bench.network.kinds.autocast import widths_of
from paradl_bench.plan.axis_planner import AxisPlace, Latest, PartsHeld, ShardedLayers, shard_label
from paradl_bench.plan.compute import LayerShard, held_layer, layers_with_gradient, shard_within
from paradl_bench.plan.settings import Limit, PlanSettings
from paradl_bench.plan.strategy import Axis, Strategy
from paradl_bench.plan.tasks import Collective, Communication
from paradl_bench.strategies.context.heads import attentions, check_heads, check_masks, fewest_heads, on_own_heads
from paradl_bench.strategies.context.options import ContextOptions
from paradl_bench.strategies.context.ring import check_ring, in_rounds, is_mirrored
from paradl_bench.strategies.splitting.channel_shards import check_extent
from paradl_bench.strategies.splitting.grouped_products import numbers_among
from paradl_bench.strategies.tensor.sequence.tokens import TokenLayer, Tokens, find_tokens, part_of_tokens

_LATEST: Latest[Tokens] = Latest()


def tokens_of(network: ModelGraph) -> Tokens:
    """How the tokens of a network are cut; found once."""
    return _LATEST.get(network, None, lambda: find_tokens(network))


class ContextPlanner:
    """Every rank computes a part of the sequence."""

    name = "context"

    def __init__(self) -> None:
        self._shards: Latest[ShardedLayers] = Latest()

    def check(self, network: ModelGraph, strategy: Strategy, axis: int, settings: PlanSettings) -> None:
        """Raises:
        UserError: a layer that mixes tokens, or a sequence or heads that do not part evenly.
        """
        ranks = strategy.axes[axis].degree
        if ranks == 1 or not network.layers:
            return
        tokens = tokens_of(network)
        check_extent(network, strategy, axis, self.limit(network, settings))
        options = settings.of(ContextOptions)
        chunks = _chunks_a_rank(network, tokens, options)
        if tokens.length % (chunks * ranks):
            what = f"strategy {strategy}: a sequence of {tokens.length} tokens"
            over = f"{ranks} ranks" + (f", {chunks} chunks each" if chunks > 1 else "")
            raise uneven(what, tokens.length, chunks * ranks, over)
        if options.by_heads:
            for layer in attentions(network, tokens):
                check_heads(layer, str(strategy), ranks)
            check_masks(network, tokens, strategy)
        if options.by_ring:
            check_ring(network, tokens, strategy)

    def limit(self, network: ModelGraph, settings: PlanSettings) -> Limit:
        """A token a rank, or a head of keys of the layer with the fewest."""
        tokens = tokens_of(network)
        if tokens.refused:
            return Limit(axis="context", ranks=1, reason=f"{network.name} can't be cut at {tokens.refused}")
        options = settings.of(ContextOptions)
        fewest = fewest_heads(network, tokens) if options.by_heads else None
        if fewest is not None and fewest[0] < tokens.length:
            return Limit(axis="context", ranks=fewest[0], reason=f"{fewest[0]} heads of keys, layer {fewest[1]}")
        chunks = _chunks_a_rank(network, tokens, options)
        chunks_text = f", {chunks} chunks a rank" if chunks > 1 else ""
        most = tokens.length // chunks
        return Limit(axis="context", ranks=most, reason=f"a sequence of {tokens.length} tokens{chunks_text}")

    def parts_held(self, network: ModelGraph, axis: Axis, position: int, settings: PlanSettings) -> PartsHeld:
        """Every parameter is whole on every rank."""
        return {}

    def shard(self, network: ModelGraph, place: AxisPlace, settings: PlanSettings) -> ShardedLayers:
        """See :class:`~paradl_bench.plan.axis_planner.ShardingPlanner`; alike at every position."""
        return self.shard_further(ShardedLayers({}, network), network, place, settings)

    def shard_further(
        self, sharded: ShardedLayers, network: ModelGraph, place: AxisPlace, settings: PlanSettings
    ) -> ShardedLayers:
        """See :class:`~paradl_bench.plan.axis_planner.FurtherPlanner`."""
        key = place._replace(position=0), settings
        return self._shards.get(sharded.network, key, lambda: _shard(sharded, network, place, settings))


PLANNER = ContextPlanner()


def _chunks_a_rank(network: ModelGraph, tokens: Tokens, options: ContextOptions) -> int:
    return 2 if options.by_ring and is_mirrored(network, tokens) else 1


def _shard(sharded: ShardedLayers, network: ModelGraph, place: AxisPlace, settings: PlanSettings) -> ShardedLayers:
    shards, ranks = dict(sharded.shards), place.axis.degree
    on_tokens = _OnTokens(network, place, settings)
    for index, token_layer in tokens_of(network).layers.items():
        outer = shards.get(index)
        if outer is None:
            shards[index] = on_tokens.shard(index, token_layer, network.layers[index])
            continue
        own = on_tokens.shard(index, token_layer, outer.layer)
        shards[index] = shard_within(_of_part(outer, ranks), own)
        if shards[index].after_fw and token_layer.output is not None:
            held = part_of_tokens(held_layer(network.layers[index], outer), token_layer, ranks)
            shards[index] = shards[index]._replace(held=held)
    return sharded._replace(shards={index: shards[index] for index in sorted(shards)})


class _OnTokens:
    """The layers of a network, whole or as another axis leaves them, on a rank's part of the tokens."""

    def __init__(self, network: ModelGraph, place: AxisPlace, settings: PlanSettings) -> None:
        self._network, self._place, self._options = network, place, settings.of(ContextOptions)
        self._label = shard_label(place.axis, settings)
        self._widths = widths_of(network, settings.dtype, settings.device)
        names = (layer.name for layer in network.layers)
        self._differentiated = dict(zip(names, layers_with_gradient(network), strict=True))

    def shard(self, index: int, token_layer: TokenLayer, layer: Layer) -> LayerShard:
        """What a rank runs, and what it sends to the others of its axis.

        Raises:
            UserError: heads that do not part evenly.
        """
        ranks, width, whole = self._place.axis.degree, self._widths[index].runs, self._network.layers[index]

        def message(operation: str, shape: tuple[int, ...]) -> Collective:
            elements = math.prod(shape) // ranks
            return self._place.collective(operation, elements, batchless=False, element_bytes=width)

        part = part_of_tokens(layer, token_layer, ranks)
        if token_layer.output is None and layer.memory is not None and layer.memory is not whole.memory:
            part = msgspec.structs.replace(part, memory=_of_tokens(layer.memory, ranks))
        if not token_layer.gathered:
            return LayerShard(part, self._label)
        # Keys and values of one tensor have one name.
        named = layer.inputs if len(layer.inputs) == len(layer.input_shapes) else layer.inputs[-1:] * 3
        made = [at < len(named) and self._differentiated.get(named[at], False) for at in range(len(layer.input_shapes))]
        if self._options.by_heads:
            check_heads(layer, str(self._place.axis), ranks, left=True)
            return on_own_heads(layer, part, ranks, made, message)._replace(shard=self._label)
        if self._options.by_ring:
            rows = math.prod(whole.output_shape[:-1])
            return in_rounds(layer, token_layer, self._place, width, made, rows)._replace(shard=self._label)
        return LayerShard(
            part,
            self._label,
            before_fw=tuple(message("all_gather", layer.input_shapes[at]) for at in token_layer.gathered),
            after_bw=tuple(
                message("reduce_scatter", layer.input_shapes[at]) for at in reversed(token_layer.gathered) if made[at]
            ),
        )


def _of_tokens(memory: LayerMemory, ranks: int) -> LayerMemory:
    """What another axis says that a loss keeps of all tokens, for a rank's."""
    of_sample, fixed = memory.kept
    return msgspec.structs.replace(memory, kept=(of_sample // ranks, fixed))


def _of_part(outer: LayerShard, ranks: int) -> LayerShard:
    """What another axis leaves of a layer, where it sends so many ranks' part of the tokens each."""
    numbers = numbers_among(outer.layer, outer.before_fw)
    before_fw, after_fw, before_bw, after_bw = (
        tuple(_of_one_part(work, ranks) for work in works)
        for works in (outer.before_fw[numbers:], outer.after_fw, outer.before_bw, outer.after_bw)
    )
    before_fw = (*outer.before_fw[:numbers], *before_fw)
    return outer._replace(before_fw=before_fw, after_fw=after_fw, before_bw=before_bw, after_bw=after_bw)


def _of_one_part(work: Communication, ranks: int) -> Communication:
    assert isinstance(work, Collective)
    return msgspec.structs.replace(work, message_bytes=work.message_bytes // ranks)
