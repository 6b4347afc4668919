"""The embedding of tokens and the cross-entropy of logits on this rank's tokens of the vocabulary (Megatron-LM)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from paradl_bench.core.errors import WorkError
from paradl_bench.network.graph import Layer
from paradl_bench.network.partition import Interval
from paradl_bench.strategies.running.autocast import as_loss_reads_it
from paradl_bench.strategies.running.group_functions import Group, reduce
from paradl_bench.strategies.running.sharded_module import Call, beside, instead

_LOOK_UP = {"input": None, "weight": None, "padding_idx": None, "max_norm": None, "norm_type": 2.0,
            "scale_grad_by_freq": False, "sparse": False}  # fmt: skip
_ENTROPY = {"input": None, "target": None, "weight": None, "size_average": None, "ignore_index": -100, "reduce": None,
            "reduction": "mean", "label_smoothing": 0.0}  # fmt: skip


def _bind(
    layer: Layer, defaults: dict[str, Any], free: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Arguments by name, of which those that are not free are the defaults.

    Raises:
        WorkError: another one is given, which would be computed otherwise.
    """
    given = defaults | dict(zip(defaults, args, strict=False)) | kwargs
    for name, value in given.items():
        if name not in free and name != "norm_type" and value != defaults.get(name):
            raise _cannot(layer, name, value)
    return given


def _cannot(layer: Layer, name: str, value: object) -> WorkError:
    return WorkError(
        f"layer {layer.name} is called with {name}={value}: tensor parallelism cannot run it so; leave the head"
        " whole by --split"
    )


class LookUp:
    """Rows of this rank's tokens, and zeros for all other tokens; forward sums over the ranks."""

    def __init__(self, layer: Layer, interval: Interval, summed: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._layer, self._own, self._summed = layer, interval, summed

    def __call__(self, function: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """As ``embedding``, for whole tokens."""
        given = _bind(self._layer, _LOOK_UP, ("input", "weight", "padding_idx"), args, kwargs)
        padding = given["padding_idx"]
        part = instead(function, _look_up)(given["input"], given["weight"], self._own.start, padding)
        return self._summed(part)


def _look_up(tokens: torch.Tensor, weight: torch.Tensor, first: int, padding: int | None) -> torch.Tensor:
    places = tokens - first
    elsewhere = (places < 0) | (places >= len(weight))
    own_padding = None if padding is None or not 0 <= padding - first < len(weight) else padding - first
    rows = F.embedding(places.masked_fill_(elsewhere, 0), weight, own_padding)
    return rows.masked_fill_(elsewhere.unsqueeze(-1), 0)


class PartedEntropy:
    """The cross-entropy from this rank's logits; forward all-reduces three numbers a position."""

    def __init__(self, layer: Layer, interval: Interval, group: Group) -> None:
        self._layer, self._own, self._group = layer, interval, group

    def __call__(self, function: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """As ``cross_entropy``, of logits that are parts."""
        given = _bind(self._layer, _ENTROPY, ("input", "target", "ignore_index", "reduction"), args, kwargs)
        if given["reduction"] not in _REDUCED:
            raise _cannot(self._layer, "reduction", given["reduction"])
        logits, targets = as_loss_reads_it(given["input"]), given["target"]
        largest = beside(function, _largest)(logits.detach())
        self._group.all_reduce(largest, dist.ReduceOp.MAX)
        sums, hits = instead(function, _exponents)(logits, largest, targets - self._own.start)
        sums, hits = reduce(sums, self._group), reduce(hits, self._group)
        reduced: torch.Tensor = beside(function, _REDUCED[given["reduction"]])(
            sums, hits, targets, given["ignore_index"]
        )
        return reduced


def _largest(logits: torch.Tensor) -> torch.Tensor:
    return logits.amax(-1)


def _sum(sums: torch.Tensor, hits: torch.Tensor, targets: torch.Tensor, ignored: int) -> torch.Tensor:
    return (sums.log() - hits).masked_fill(targets == ignored, 0).sum()


def _mean(sums: torch.Tensor, hits: torch.Tensor, targets: torch.Tensor, ignored: int) -> torch.Tensor:
    return _sum(sums, hits, targets, ignored) / (targets != ignored).sum()


_REDUCED = {"mean": _mean, "sum": _sum}


def _exponents(logits: torch.Tensor, largest: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Per position, the sum of this rank's exponents, and the target's logit, or 0 where another rank has that."""
    sums_and_hits: tuple[torch.Tensor, torch.Tensor] = _Exponents.apply(logits, largest, places)  # type: ignore[no-untyped-call]
    return sums_and_hits


class _Exponents(torch.autograd.Function):
    """Keeps the exponents alone; backward makes one tensor as large as they are."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, largest: torch.Tensor, places: torch.Tensor) -> Any:
        here = (places >= 0) & (places < logits.shape[-1])
        own_places = places.masked_fill(~here, 0)
        shifted = logits - largest.unsqueeze(-1)
        hits = shifted.gather(-1, own_places.unsqueeze(-1)).squeeze(-1).masked_fill(~here, 0)
        exponents = shifted.exp_()
        ctx.save_for_backward(exponents, own_places, here)
        return exponents.sum(-1), hits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_sums: torch.Tensor, of_hits: torch.Tensor) -> Any:
        exponents, own_places, here = ctx.saved_tensors
        gradient = exponents * of_sums.unsqueeze(-1)
        gradient.scatter_add_(-1, own_places.unsqueeze(-1), (of_hits * here).unsqueeze(-1))
        return gradient, None, None
