"""A part of the sequence on each rank: positions, masks and the loss are those of all of it.

The module's code runs as it is: where it asks how long the sequence is it is told the whole length, and the sizes that
it gives to views, whole ones too, are cut before they get there. Constants that it makes of that length, as positions,
are whole, and a rank takes its part of them where they meet its tokens.

Every rank's loss covers its own targets. Gradients are then *averaged* over all ranks that replicate, as torch's
DistributedDataParallel does, so the loss of a part is taken times the number of parts: the mean is the sum over parts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from paradl_bench.core.errors import WorkError
from paradl_bench.network.graph import Layer, ModelGraph
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Axis
from paradl_bench.strategies.context.by_heads import AttentionByHeads
from paradl_bench.strategies.context.by_ring import AttentionByRing, MirroredTokens
from paradl_bench.strategies.context.options import ContextOptions
from paradl_bench.strategies.context.plan import tokens_of
from paradl_bench.strategies.context.ring import is_mirrored
from paradl_bench.strategies.running.autocast import as_product_reads_it
from paradl_bench.strategies.running.group_functions import Group, gather_for_all, take
from paradl_bench.strategies.running.own_randomness import OwnRandomness
from paradl_bench.strategies.running.sharded_module import Call, Loss, Rule, Sharding, beside, functions_of
from paradl_bench.strategies.tensor.cuts import Cut
from paradl_bench.strategies.tensor.sequence.on_tokens import MARK, OnTokens, OwnTokens, whole_shape_of_tokens
from paradl_bench.strategies.tensor.sequence.tokens import Tokens


class ContextRunner:
    """Runs a module on a part of the sequence; no parameter is changed.

    Outputs are this rank's part of the serial model's; parameter gradients are the serial model's after the mean over
    all ranks.
    """

    name = "context"

    def shard(
        self, module: torch.nn.Module, network: ModelGraph, axis: Axis, group: Group, settings: PlanSettings
    ) -> Sharding:
        """See :class:`~paradl_bench.strategies.running.axis_runners.AxisRunner`."""
        return _shard(network, tokens_of(network), group, settings)


RUNNER = ContextRunner()


def _rules(
    network: ModelGraph,
    tokens: Tokens,
    own_tokens: OwnTokens,
    random: OwnRandomness,
    options: ContextOptions,
    counted: _Counted,
) -> dict[int, Rule]:
    layers, masks, rules = network.layers, _Masks(own_tokens), {}
    for index, token_layer in tokens.layers.items():
        functions = functions_of(layers[index])
        if layers[index].kind == "loss":
            # It is asked for a sum in the place of a mean.
            run: Any = _CrossEntropy(layers[index], own_tokens.group.size, counted)
            rules[index] = Rule(functions, run, around=True)
            continue
        if token_layer.gathered and options.by_heads:
            run = AttentionByHeads(own_tokens, random)
        elif token_layer.gathered and options.by_ring:
            run = AttentionByRing(own_tokens, random)
        elif token_layer.gathered:
            run = _Attention(own_tokens, random, masks)
        else:
            run = OnTokens(layers[index], token_layer, own_tokens, random)
        mark = partial(own_tokens.mark, along=token_layer.output, each=token_layer.each)
        rules[index] = Rule(functions, run, mark)
    return rules


def _shard(network: ModelGraph, tokens: Tokens, group: Group, settings: PlanSettings) -> Sharding:
    options, random = settings.of(ContextOptions), OwnRandomness(group)
    mirrored = options.by_ring and is_mirrored(network, tokens)
    own_tokens = (MirroredTokens if mirrored else OwnTokens)(group, tokens.length)
    counted = _Counted()
    along = Cut(-len(network.input_shape))

    def enter(inputs: torch.Tensor) -> torch.Tensor:
        if inputs.requires_grad:
            # Gradients here are as many times larger as there are parts; the input's shall not be.
            whole = own_tokens.in_order(inputs, along.dim)
            part = take(whole, own_tokens.slices(inputs.dim(), along.dim), group, scale=1 / group.size)
        else:
            part = own_tokens.part(inputs, along.dim).contiguous()
        own_tokens.mark(part, along)
        return part

    def receive(index: int, output: int, tensor: torch.Tensor) -> torch.Tensor:
        on_part = tokens.layers.get(index)
        marked: torch.Tensor = own_tokens.mark(tensor, on_part.output, on_part.each) if on_part else tensor
        return marked

    def own_part(tensor: torch.Tensor, whole: torch.Tensor) -> tuple[torch.Tensor, float] | None:
        part = own_tokens.own_part(tensor, whole)
        return None if part is None else (part, float(group.size) if hasattr(tensor, MARK) else 1.0)

    sharding = Sharding(
        _rules(network, tokens, own_tokens, random, options, counted),
        network,
        enter=enter,
        whole_shape=whole_shape_of_tokens,
        receive=receive,
        randomness=(random,),
        own_part=own_part,
    )
    outputs = (at for at in tokens.layers if network.layers[at].name in network.outputs)
    (output,) = (tokens.layers[at].output for at in outputs)
    assert output is not None
    return sharding._replace(loss=_LossOfTokens(own_tokens, output, counted))


class _Masks:
    """What keeps this rank's queries from later tokens, to be added to scores; made once a dtype."""

    def __init__(self, own_tokens: OwnTokens) -> None:
        self._own = own_tokens
        self._made: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def like(self, queries: torch.Tensor) -> torch.Tensor:
        """(own tokens, all tokens): 0 up to a query's own place, minus infinity behind it."""
        key = queries.dtype, queries.device
        if key not in self._made:
            own_tokens, length = self._own, self._own.length
            mask = queries.new_full((length // own_tokens.group.size, length), float("-inf"))
            self._made[key] = mask.triu(1 + own_tokens.group.rank * (length // own_tokens.group.size))
        return self._made[key]


_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class _Attention:
    """This rank's queries with the keys and values of all ranks."""

    def __init__(self, own_tokens: OwnTokens, random: OwnRandomness, masks: _Masks) -> None:
        self._own, self._random, self._masks = own_tokens, random, masks

    def __call__(self, function: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(zip(_ATTENTION, args, strict=False)) | kwargs
        query = given["query"] = as_product_reads_it(given["query"])
        for name in ("key", "value"):
            given[name] = self._gathered(as_product_reads_it(given[name]))
        mask = given.get("attn_mask")
        if given.pop("is_causal", False):
            given["attn_mask"] = self._masks.like(query)
        elif mask is not None and mask.dim() > 1 and mask.shape[-2] == self._own.length:
            given["attn_mask"] = self._own.part(mask, -2)
        if not given.get("dropout_p"):
            return self._own.mark(function(**given), Cut(-2))
        with self._random.used(query):
            return self._own.mark(function(**given), Cut(-2))

    def _gathered(self, part: torch.Tensor) -> torch.Tensor:
        shape = list(part.shape)
        shape[-2] = self._own.length
        return gather_for_all(part, self._own.slices(part.dim(), -2), shape, self._own.group)


class _Counted:
    """The targets of all tokens, while the loss of some of them is taken."""

    targets: torch.Tensor | None = None


_LOSS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")


class _CrossEntropy:
    """The sum over this rank's targets over the number of all targets, times the number of ranks."""

    def __init__(self, layer: Layer, ranks: int, counted: _Counted) -> None:
        self._layer, self._ranks, self._counted = layer, ranks, counted

    def __call__(self, function: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(zip(_LOSS, args, strict=False)) | kwargs
        targets = self._counted.targets
        if given.get("weight") is not None or given.get("reduction", "mean") != "mean" or targets is None:
            raise WorkError(f"layer {self._layer.name} is no plain mean over tokens: context parallelism can't run it")
        count = (targets != given.get("ignore_index", -100)).sum()
        summed = function(**given | {"reduction": "sum"})
        # Of two whole numbers torch's quotient would be of fp32.
        return beside(function, torch.div)(summed, count.to(summed.dtype) / self._ranks)


class _LossOfTokens:
    """See :class:`~paradl_bench.strategies.running.sharded_module.LossOfParts`."""

    def __init__(self, own_tokens: OwnTokens, output: Cut, counted: _Counted) -> None:
        self._own, self._output, self._counted = own_tokens, output, counted

    def part(self, output: torch.Tensor) -> torch.Tensor:
        """See above."""
        return self._own.part(output, self._output.dim)

    def share(self, loss: Loss, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        """See above; targets are (samples, tokens)."""
        dim = 1 - targets.dim()
        # What exchanges gradients may have returned another tensor than the model.
        tree_map_only(torch.Tensor, lambda output: self._own.mark(output, self._output), outputs)
        part = self._own.mark(self._own.part(targets, dim).contiguous(), Cut(dim))
        self._counted.targets = targets
        try:
            return loss(outputs, part)
        finally:
            self._counted.targets = None

    def mean(self, share: torch.Tensor) -> torch.Tensor:
        """See above."""
        total = share.detach().clone()
        self._own.group.all_reduce(total)
        return total / self._own.group.size
