"""What a step of a random module does: how it is drawn, what it holds, and how it runs.

A step reads the current value, and some read an earlier one of the same shape. Its arguments are plain JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import torch
from torch import nn

VECTOR, SEQUENCE, IMAGE = "vector", "sequence", "image"
"""Kinds of values: (batch, features), (batch, tokens, features), (batch, channels, *positions)."""
ANY = (VECTOR, SEQUENCE, IMAGE)

Parts = dict[str, nn.Module | nn.Parameter | torch.Tensor]
"""What a step holds, by name: modules, parameters, and tensors that are buffers."""


class Sight(NamedTuple):
    """What is known where a step is drawn.

    Attributes:
        kind, shape: of the current value; the shape begins with the batch.
        alike: names of earlier values of the same kind and shape.
    """

    kind: str
    shape: tuple[int, ...]
    alike: tuple[str, ...] = ()

    @property
    def features(self) -> int:
        return self.shape[self.dim]

    @property
    def dim(self) -> int:
        """Of features or channels."""
        return 2 if self.kind == SEQUENCE else 1

    @property
    def positions(self) -> tuple[int, ...]:
        return self.shape[2:] if self.kind == IMAGE else ()


class Operation(NamedTuple):
    """One kind of step.

    Attributes:
        run: takes what ``build`` made (by name, as ``own``), the value, then earlier values, then arguments by name.
        draw: arguments, or None where it does not fit; ``reads`` among them names earlier values.
        to: kind of the result, where it is another.
        weight: how often it is drawn, beside others.
    """

    run: Callable[..., Any]
    kinds: tuple[str, ...]
    draw: Callable[[Random, Sight], dict[str, Any] | None]
    build: Callable[..., Parts]
    to: str | None
    weight: float


OPERATIONS: dict[str, Operation] = {}


def nothing_drawn(rng: Random, sight: Sight) -> dict[str, Any]:
    return {}


def nothing_built(**arguments: Any) -> Parts:
    return {}


def operation(
    *kinds: str,
    draw: Callable[[Random, Sight], dict[str, Any] | None] = nothing_drawn,
    build: Callable[..., Parts] = nothing_built,
    to: str | None = None,
    weight: float = 1.0,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register what runs a step under its own name."""

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        OPERATIONS[run.__name__.rstrip("_")] = Operation(run, kinds or ANY, draw, build, to, weight)
        return run

    return register


def other(rng: Random, sight: Sight) -> dict[str, Any] | None:
    """An earlier value of the same shape."""
    return {"reads": [rng.choice(sight.alike)]} if sight.alike else None


def width(rng: Random, sight: Sight) -> int:
    """Features of a layer's result: often those that it reads, so that residuals fit."""
    return rng.choice([sight.features] * 3 + [4, 6, 8, 12])
