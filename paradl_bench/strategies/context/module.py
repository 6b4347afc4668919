"""A part of the sequence on each rank: positions, masks and the loss are those of all of it.

The module's code runs as it is: where it asks how long the sequence is it is told the whole length, and the sizes that
it gives to views, whole ones too, are cut before they get there. Constants that it makes of that length, as positions,
are whole, and a rank takes its part of them where they meet its tokens.

Every rank's loss covers its own targets. Gradients are then *averaged* over all ranks that replicate, as torch's
DistributedDataParallel does, so the loss of a part is taken times the number of parts: the mean is the sum over parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from paradl_bench.core.errors import WorkError
from paradl_bench.network.graph import Layer, ModelGraph
from paradl_bench.network.partition import cut
from paradl_bench.plan.compute import operations_of_forward
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Axis
from paradl_bench.strategies.context.plan import tokens_of
from paradl_bench.strategies.context.tokens import Tokens
from paradl_bench.strategies.running.autocast import as_product_reads_it
from paradl_bench.strategies.running.group_functions import Group, Slices, axis_slices, gather_for_all, take
from paradl_bench.strategies.running.own_randomness import OwnRandomness
from paradl_bench.strategies.running.sharded_module import Call, Loss, Rule, Sharding, Walk, beside, functions_of
from paradl_bench.strategies.tensor.cuts import Cut

_MARK = "_paradl_tokens"
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class ContextRunner:
    """Runs a module on a part of the sequence; no parameter is changed.

    Outputs are this rank's part of the serial model's; parameter gradients are the serial model's after the mean over
    all ranks.
    """

    name = "context"

    def shard(
        self, module: torch.nn.Module, network: ModelGraph, axis: Axis, group: Group, settings: PlanSettings
    ) -> Sharding:
        """See :class:`~paradl_bench.strategies.running.sharded_module.AxisRunner`."""
        return _shard(network, tokens_of(network), group)


RUNNER = ContextRunner()


class _Own(NamedTuple):
    """The tokens of one rank of a group, ``length`` in all."""

    group: Group
    length: int

    def slices(self, dims: int, dim: int) -> tuple[Slices, ...]:
        """Every rank's part of a tensor of so many dims along one of them, which is counted from the end."""
        return axis_slices(cut(self.length, self.group.size), dims + dim)

    def part(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part of a whole tensor, in which samples may lie along the dim, one after the other."""
        size, at = self.length // self.group.size, dim % whole.dim()
        if whole.shape[at] == self.length:
            return whole.narrow(at, self.group.rank * size, size)
        parts = whole.reshape(*whole.shape[:at], -1, self.group.size, size, *whole.shape[at + 1 :])
        return parts.select(at + 1, self.group.rank).flatten(at, at + 1)

    def mark(self, result: Any, along: Cut) -> Any:
        """The result, so that the module's code is told whole shapes of it."""
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            setattr(tensor, _MARK, (along.dim, self.group.size))
        return result


def _whole_shape(tensor: torch.Tensor) -> torch.Size | None:
    mark: tuple[int, int] | None = getattr(tensor, _MARK, None)
    if mark is None:
        return None
    shape = list(tensor.shape)
    shape[mark[0]] *= mark[1]
    return torch.Size(shape)


def _shard(network: ModelGraph, tokens: Tokens, group: Group) -> Sharding:
    own, random = _Own(group, tokens.length), OwnRandomness(group)
    layers, masks, counted = network.layers, _Masks(own), _Counted()
    rules = {}
    for index, found in tokens.layers.items():
        run: Any = None
        if found.gathered:
            run = _Attention(layers[index], own, random, masks)
        elif found.output is None:
            run = _CrossEntropy(layers[index], group.size, counted)
        else:
            run = _OnTokens(layers[index], found.output, own, random)
        rules[index] = Rule(functions_of(layers[index]), run)
    along = Cut(-len(network.input_shape))

    def enter(inputs: torch.Tensor) -> torch.Tensor:
        if inputs.requires_grad:
            # Gradients here are as many times larger as there are parts; the input's shall not be.
            part = take(inputs, own.slices(inputs.dim(), along.dim), group, scale=1 / group.size)
        else:
            part = own.part(inputs, along.dim).contiguous()
        own.mark(part, along)
        return part

    def own_part(tensor: torch.Tensor, whole: torch.Tensor) -> tuple[torch.Tensor, float]:
        mark: tuple[int, int] | None = getattr(tensor, _MARK, None)
        return (whole, 1.0) if mark is None else (own.part(whole, mark[0]), float(group.size))

    sharding = Sharding(
        rules,
        network,
        enter=enter,
        whole_shape=_whole_shape,
        randomness=random,
        own_part=own_part,
    )
    (output,) = (found.output for index, found in tokens.layers.items() if layers[index].name in network.outputs)
    assert output is not None
    return sharding._replace(loss=_LossOfTokens(sharding, own, output, counted))


class _OnTokens:
    """An operation that runs token by token."""

    def __init__(self, layer: Layer, along: Cut, own: _Own, random: OwnRandomness) -> None:
        self._layer, self._along, self._own, self._random = layer, along, own, random
        # What lines tensors up with each other may meet one that is whole; others read weights, which stay so.
        self._takes = layer.kind not in ("linear", "addmm", "matmul", "mm", "norm", "embedding", "reduction")
        self._sized = _SIZED.get(str(layer.attributes.get("function"))) if layer.kind == "view" else None

    def __call__(self, function: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._sized is not None:
            args, kwargs = self._sized(self._shorter, args, kwargs)
        if self._takes:
            args, kwargs = tree_map_only(torch.Tensor, self._taken, (args, kwargs))
        if self._layer.kind == "dropout" and self._layer.attributes["training"]:
            with self._random.used(args[0] if args else kwargs["input"]):
                return self._own.mark(function(*args, **kwargs), self._along)
        return self._own.mark(function(*args, **kwargs), self._along)

    def _taken(self, tensor: torch.Tensor) -> torch.Tensor:
        dim = self._along.dim
        if hasattr(tensor, _MARK) or tensor.dim() < -dim or tensor.shape[dim] != self._own.length:
            return tensor
        return self._own.part(tensor, dim)

    def _shorter(self, sizes: list[int], behind: int = 0) -> list[int]:
        """Sizes of all dims but ``behind`` last ones with that of the tokens cut, if it is there; -1 finds itself."""
        at = len(sizes) + behind + self._along.dim
        if 0 <= at < len(sizes) and sizes[at] != -1:
            if sizes[at] % self._own.group.size:
                raise WorkError(f"layer {self._layer.name} is given {sizes[at]} positions, which don't split evenly")
            sizes[at] //= self._own.group.size
        return sizes


Shorter = Callable[..., list[int]]


def _whole_view(shorter: Shorter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """view, reshape, expand: sizes of all dims."""
    given = args[1:] or tuple(kwargs.values())
    sizes = list(given[0] if isinstance(given[0], (tuple, list)) else given)
    if any(not isinstance(size, int) for size in sizes):
        # A view as another dtype.
        return args, kwargs
    return (args[0], shorter(sizes)), {}


def _unflattened(shorter: Shorter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """unflatten: the dim, and the sizes that it is parted into."""
    given = dict(zip(("input", "dim", "sizes"), args, strict=False)) | kwargs
    tensor, dim = given["input"], given["dim"] % given["input"].dim()
    return (tensor, dim, shorter(list(given["sizes"]), tensor.dim() - 1 - dim)), {}


_SIZED = dict.fromkeys(("view", "reshape", "expand"), _whole_view) | {"unflatten": _unflattened}
"""Views that are given sizes."""


class _Masks:
    """What keeps this rank's queries from later tokens, to be added to scores; made once a dtype."""

    def __init__(self, own: _Own) -> None:
        self._own = own
        self._made: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def like(self, queries: torch.Tensor) -> torch.Tensor:
        """(own tokens, all tokens): 0 up to a query's own place, minus infinity behind it."""
        key = queries.dtype, queries.device
        if key not in self._made:
            own, length = self._own, self._own.length
            mask = queries.new_full((length // own.group.size, length), float("-inf"))
            self._made[key] = mask.triu(1 + own.group.rank * (length // own.group.size))
        return self._made[key]


_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class _Attention:
    """This rank's queries with the keys and values of all ranks."""

    def __init__(self, layer: Layer, own: _Own, random: OwnRandomness, masks: _Masks) -> None:
        self._layer, self._own, self._random, self._masks = layer, own, random, masks

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

    def __init__(self, sharding: Sharding, own: _Own, output: Cut, counted: _Counted) -> None:
        self._sharding, self._own, self._output, self._counted = sharding, own, output, counted

    def share(self, loss: Loss, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        """See above; targets are (samples, tokens)."""
        network, dim = self._sharding.network, 1 - targets.dim()
        # What exchanges gradients may have returned another tensor than the model.
        tree_map_only(torch.Tensor, lambda output: self._own.mark(output, self._output), outputs)
        part = self._own.mark(self._own.part(targets, dim).contiguous(), Cut(dim))
        self._counted.targets = targets
        try:
            with Walk(self._sharding, operations_of_forward(network)):
                return loss(outputs, part)
        finally:
            self._counted.targets = None

    def mean(self, share: torch.Tensor) -> torch.Tensor:
        """See above."""
        total = share.detach().clone()
        self._own.group.all_reduce(total)
        return total / self._own.group.size
