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

MARK = "_paradl_tokens"
"""Attribute of a tensor that is a rank's part of the tokens: along which dim, and in how many parts."""
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


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

    def mark(self, result: Any, along: Cut) -> Any:
        """The result, so that the module's code is told whole shapes of it."""
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            setattr(tensor, self.told_by, (along.dim, self.group.size))
        return result

    def parted_along(self, tensor: torch.Tensor) -> int | None:
        """The dim along which a tensor is this rank's part, counted from the end; None where it is none."""
        mark: tuple[int, int] | None = getattr(tensor, self.told_by, None)
        return mark[0] if mark else None

    def whole_shape(self, tensor: torch.Tensor) -> torch.Size | None:
        """The shape with all of these tokens, where a tensor is this rank's part."""
        return whole_shape_of_tokens(tensor, self.told_by)


def whole_shape_of_tokens(tensor: torch.Tensor, told_by: str = MARK) -> torch.Size | None:
    """The shape of all tokens, where a tensor is a part of them."""
    mark: tuple[int, int] | None = getattr(tensor, told_by, None)
    if mark is None:
        return None
    shape = list(tensor.shape)
    shape[mark[0]] *= mark[1]
    return torch.Size(shape)


class OnTokens:
    """An operation that runs token by token."""

    def __init__(self, layer: Layer, along: Cut, own_tokens: OwnTokens, random: OwnRandomness) -> None:
        self._layer, self._along, self._own, self._random = layer, along, own_tokens, random
        # What lines tensors up with each other may meet one that is whole; others read weights, which stay so.
        self._takes = layer.kind not in ("linear", "addmm", "matmul", "mm", "norm", "embedding", "reduction")
        self._sized = _SIZED.get(str(layer.attributes.get("function"))) if layer.kind == "view" else None

    def __call__(self, function: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the operation; what it reads whole is cut first."""
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
        own_part = self._own.parted_along(tensor) is not None
        if own_part or tensor.dim() < -dim or tensor.shape[dim] != self._own.length:
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
