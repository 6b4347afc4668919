"""Optimizers by name, with the settings that every measurement and every run share."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from paradl_bench.spec.errors import unknown_choice

OPTIMIZERS = ("sgd", "adam")
# Small enough that losses on random data stay finite; the value does not change what a step costs.
LEARNING_RATE = 1e-4
MOMENTUM = 0.9


def build_optimizer(name: str, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum, or Adam, as torch builds them by default on the device (foreach or fused where it chooses).

    Raises:
        UserError: unknown name.
    """
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM)
    if name == "adam":
        return torch.optim.Adam(parameters, lr=LEARNING_RATE)
    raise unknown_choice("optimizer", name, OPTIMIZERS)
