"""Optimizers by name, with the settings that every measurement and every run share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

from paradl_bench.core.errors import unknown_choice
from paradl_bench.emulation.twin import GhostTwin
from paradl_bench.plan.settings import PlanSettings

OPTIMIZERS = ("sgd", "adam")
# Small enough that losses on random data stay finite; the value does not change what a step costs.
LEARNING_RATE = 1e-4
MOMENTUM = 0.9


def build_optimizer(
    name: str, parameters: Iterable[torch.nn.Parameter], group: dist.ProcessGroup | None = None
) -> torch.optim.Optimizer:
    """SGD with momentum, or Adam, as torch builds them by default on the device (foreach or fused where it chooses).

    Args:
        group: ranks that share out its state (ZeRO stage 1): each updates some parameters and broadcasts them. None
            where each rank keeps all of it.

    Raises:
        UserError: unknown name.
    """
    if name not in OPTIMIZERS:
        raise unknown_choice("optimizer", name, OPTIMIZERS)
    classes: dict[str, type[torch.optim.Optimizer]] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    arguments: dict[str, Any] = {"lr": LEARNING_RATE} | ({"momentum": MOMENTUM} if name == "sgd" else {})
    if group is None:
        return classes[name](parameters, **arguments)
    return share_out_optimizer(classes[name], parameters, group, **arguments)


def optimizer_of(
    settings: PlanSettings,
    parameters: Iterable[torch.nn.Parameter],
    group: dist.ProcessGroup | None,
    twin: GhostTwin | None = None,
) -> torch.optim.Optimizer:
    """The optimizer of a run.

    Args:
        group: as :func:`build_optimizer` takes it. twin: of an emulated run, whose weight update sleeps.

    Raises:
        UserError: unknown name.
    """
    if twin is not None:
        return twin.optimizer(parameters, group)
    return build_optimizer(settings.optimizer, parameters, group)


def share_out_optimizer(
    optimizer: type[torch.optim.Optimizer],
    parameters: Iterable[torch.nn.Parameter],
    group: dist.ProcessGroup,
    **arguments: Any,
) -> torch.optim.Optimizer:
    """torch's ZeroRedundancyOptimizer; a rank's parameters lie in one buffer, so that it sends them at once."""
    return ZeroRedundancyOptimizer(
        [parameter for parameter in parameters if parameter.requires_grad],
        optimizer_class=optimizer,
        process_group=group,
        parameters_as_bucket_view=True,
        **arguments,
    )
