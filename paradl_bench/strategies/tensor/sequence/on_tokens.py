"""Operations on a rank's part of the sequence.

The module's code runs as it is: where it asks how long the sequence is it is told the whole length, and the sizes that
it gives to views, whole ones too, are cut before they get there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from paradl_bench.core.errors import WorkError
from paradl_bench.network.graph import Layer
from paradl_bench.network.partition import cut
from paradl_bench.strategies.running.group_functions import Group, Slices, axis_slices
from paradl_bench.strategies.running.own_randomness import OwnRandomness
from paradl_bench.strategies.running.sharded_module import Call
from paradl_bench.strategies.tensor.cuts import Cut
from paradl_bench.strategies.tensor.sequence.tokens import TokenLayer

MARK = "_paradl_tokens"
"""Attribute of a tensor of which a rank has what its tokens make (:class:`Mark`)."""
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Mark(NamedTuple):
    """What is noted of such a tensor.

    Attributes:
        along: the dim of its rows, counted from the end; None of numbers of rows. parts: how many ranks share rows out.
        each: rows of a token; 0 where the serial model has others in their places.
    """

    along: int | None
    parts: int
    each: int


class OwnTokens(NamedTuple):
    """The tokens of one rank of a group, ``length`` in all: all of a sample's, or those that another axis leaves.

    Attributes:
        told_by: attribute of tensors that are a part of them, each axis' own.
    """

    group: Group
    length: int
    told_by: str = MARK

    def slices(self, dims: int, dim: int) -> tuple[Slices, ...]:
        """Every rank's part of a tensor of so many dims along one of them, which is counted from the end."""
        return axis_slices(cut(self.length, self.group.size), dims + dim)

    def part(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part of a whole tensor, in which samples may lie along the dim, one after the other."""
        return self.part_of(self.group.rank, whole, dim)

    def part_of(self, rank: int, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """As :meth:`part`, of any rank."""
        size, at = self.length // self.group.size, dim % whole.dim()
        if whole.shape[at] == self.length:
            return whole.narrow(at, rank * size, size)
        parts = whole.reshape(*whole.shape[:at], -1, self.group.size, size, *whole.shape[at + 1 :])
        return parts.select(at + 1, rank).flatten(at, at + 1)

    def in_order(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """A whole tensor in which ranks' parts lie one behind the other."""
        return whole

    def mark(self, result: Any, along: Cut | None, each: int = 1) -> Any:
        """The result, so that the module's code is told whole shapes of it."""
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            setattr(tensor, self.told_by, Mark(along.dim if along else None, self.group.size, each))
        return result

    def parted_along(self, tensor: torch.Tensor) -> int | None:
        """The dim along which a tensor is this rank's part, counted from the end; None where it is none."""
        mark: Mark | None = getattr(tensor, self.told_by, None)
        return mark.along if mark else None

    def own_part(self, tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor | None:
        """What the serial model has in the place of a tensor; None where it has other rows there."""
        mark: Mark | None = getattr(tensor, self.told_by, None)
        if mark is None:
            return whole
        if mark.along is None or not mark.each:
            return None
        return self._replace(length=self.length * mark.each).part(whole, mark.along)

    def whole_shape(self, tensor: torch.Tensor) -> torch.Size | None:
        """The shape with all of these tokens, where a tensor is this rank's part."""
        return whole_shape_of_tokens(tensor, self.told_by)


def whole_shape_of_tokens(tensor: torch.Tensor, told_by: str = MARK) -> torch.Size | None:
    """The shape of all tokens, where a tensor is a part of them."""
    mark: Mark | None = getattr(tensor, told_by, None)
    if mark is None or mark.along is None:
        return None
    shape = list(tensor.shape)
    shape[mark.along] *= mark.parts
    return torch.Size(shape)


_READ_WEIGHTS = ("linear", "addmm", "matmul", "mm", "norm", "embedding", "reduction", "grouped_matmul")


class OnTokens:
    """An operation that runs token by token."""

    def __init__(self, layer: Layer, token_layer: TokenLayer, own_tokens: OwnTokens, random: OwnRandomness) -> None:
        self._layer, self._own, self._random = layer, own_tokens, random
        self._along, self._each = token_layer.output, token_layer.each
        # What lines tensors up with each other may meet one that is whole; others read weights, which stay so.
        self._takes = self._along is not None and layer.kind not in _READ_WEIGHTS
        self._sized = _SIZED.get(str(layer.attributes.get("function"))) if layer.kind in ("view", "constant") else None

    def __call__(self, function: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the operation; what it reads whole is cut first."""
        if self._sized is not None:
            args, kwargs = self._sized(self._shorter, args, kwargs)
        if self._takes:
            args, kwargs = tree_map_only(torch.Tensor, self._taken, (args, kwargs))
        if self._layer.kind == "dropout" and self._layer.attributes["training"]:
            with self._random.used(args[0] if args else kwargs["input"]):
                return self._own.mark(function(*args, **kwargs), self._along, self._each)
        return self._own.mark(function(*args, **kwargs), self._along, self._each)

    def _taken(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self._along is not None
        dim = self._along.dim
        own_part = hasattr(tensor, self._own.told_by)
        if own_part or tensor.dim() < -dim or tensor.shape[dim] != self._own.length:
            return tensor
        return self._own.part(tensor, dim)

    def _shorter(self, sizes: list[int], behind: int = 0) -> list[int]:
        """Sizes of all dims but ``behind`` last ones with that of the tokens cut, if it is there; -1 finds itself."""
        assert self._along is not None
        at = len(sizes) + behind + self._along.dim
        if 0 <= at < len(sizes) and sizes[at] != -1:
            if sizes[at] % self._own.group.size:
                raise WorkError(f"layer {self._layer.name} is given {sizes[at]} positions, which don't split evenly")
            sizes[at] //= self._own.group.size
        return sizes


_NEW = ("new_empty", "new_ones", "new_zeros")
Shorter = Callable[..., list[int]]


def _whole_view(shorter: Shorter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """view, reshape, expand, a new tensor: sizes of all dims."""
    named = next((name for name in ("size", "shape") if name in kwargs), None)
    given = args[1:] if named is None else (kwargs[named],)
    sizes = list(given[0] if given and isinstance(given[0], (tuple, list)) else given)
    if not sizes or any(not isinstance(size, int) for size in sizes):
        # A view as another dtype.
        return args, kwargs
    return (args[0], shorter(sizes)), {name: value for name, value in kwargs.items() if name != named}


def _unflattened(shorter: Shorter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """unflatten: the dim, and the sizes that it is parted into."""
    given = dict(zip(("input", "dim", "sizes"), args, strict=False)) | kwargs
    tensor, dim = given["input"], given["dim"] % given["input"].dim()
    return (tensor, dim, shorter(list(given["sizes"]), tensor.dim() - 1 - dim)), {}


_SIZED = dict.fromkeys(("view", "reshape", "expand", *_NEW), _whole_view) | {"unflatten": _unflattened}
"""What is given sizes, of a view or of a new tensor."""
