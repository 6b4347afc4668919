"""Optimizers by name, and what their steps take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from paradl_bench.core.errors import unknown_choice


class Optimizer(NamedTuple):
    """What an optimizer's step takes, of every element of the parameters.

    Attributes:
        state_copies: tensors of a parameter's size that it keeps: SGD's momentum; Adam's two moments.
        flops: of the step. touched: tensors that it reads and writes at least.
        own_tensors: whether it makes tensors of its own meanwhile; one kernel for all of the step makes none.
    """

    state_copies: int
    flops: int
    touched: int
    own_tensors: bool


# SGD has momentum: v = mu v + g, p -= lr v. AdamW's parameters decay first: p *= 1 - lr lambda.
OPTIMIZERS: Mapping[str, Optimizer] = {
    "sgd": Optimizer(1, 4, 5, own_tensors=False),
    "adam": Optimizer(2, 12, 7, own_tensors=True),
    "adamw": Optimizer(2, 13, 7, own_tensors=True),
    "adamw-fused": Optimizer(2, 13, 7, own_tensors=False),
}
"""Optimizers that can be measured and trained with, as torch builds them: fused is one kernel, asked for by name."""


def optimizer_named(name: str) -> Optimizer:
    """The optimizer of a name.

    Raises:
        UserError: there is none.
    """
    if name not in OPTIMIZERS:
        raise unknown_choice("optimizer", name, OPTIMIZERS)
    return OPTIMIZERS[name]


def state_copies(optimizer: str) -> int:
    """Tensors of a parameter's size that an optimizer keeps.

    Raises:
        UserError: an optimizer that is not known.
    """
    return optimizer_named(optimizer).state_copies
