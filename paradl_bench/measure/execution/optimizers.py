"""Optimizers by name, with the settings that every measurement and every run share."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

from paradl_bench.emulation.twin import GhostTwin
from paradl_bench.measure.execution.master_weights import MasterWeights
from paradl_bench.network.kinds.autocast import has_masters
from paradl_bench.network.optimizers import optimizer_named
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.strategies.running.parameters import StateGroups

# Small enough that losses on random data stay finite; the value does not change what a step costs.
LEARNING_RATE = 1e-4
MOMENTUM = 0.9


def build_optimizer(
    name: str,
    parameters: Iterable[torch.nn.Parameter],
    groups: StateGroups | None = None,
    *,
    dtype: str = "fp32",
) -> torch.optim.Optimizer:
    """SGD with momentum, Adam or AdamW, as torch builds them by default on the device, or fused where the name says so.

    Args:
        groups: ranks that share out its state (ZeRO stage 1): each updates some parameters and broadcasts them. None
            where each rank keeps all of it.
        dtype: that is trained in, which says whether parameters have fp32 copies
            (:class:`~paradl_bench.measure.execution.master_weights.MasterWeights`).

    Raises:
        UserError: unknown name.
    """
    optimizer_named(name)
    family, _, fused = name.partition("-")
    classes: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": torch.optim.SGD,
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
    }
    arguments: dict[str, Any] = {"lr": LEARNING_RATE} | ({"momentum": MOMENTUM} if name == "sgd" else {})
    arguments |= {"fused": True} if fused else {}
    made = functools.partial(MasterWeights, of=classes[family]) if has_masters(dtype) else classes[family]
    return make_optimizer(made, parameters, groups, **arguments)


def optimizer_of(
    settings: PlanSettings,
    parameters: Iterable[torch.nn.Parameter],
    groups: StateGroups | None,
    twin: GhostTwin | None,
) -> torch.optim.Optimizer:
    """The optimizer of a run; that of an emulated one, which has a twin, sleeps. As :func:`build_optimizer`."""
    if twin is not None:
        # A request refuses both together.
        assert settings.offload == "none"
        return make_optimizer(twin.optimizer_class(), parameters, groups)
    optimizer = build_optimizer(settings.optimizer, parameters, groups, dtype=settings.dtype)
    if settings.offload != "none":
        for own in own_optimizers(optimizer):
            offload_state(own)
    return optimizer


class InTurn(torch.optim.Optimizer):
    """Several optimizers of a model, which step one behind the other."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        super().__init__([{"params": group["params"]} for each in optimizers for group in each.param_groups], {})
        self.optimizers = optimizers

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step each."""
        assert closure is None
        for optimizer in self.optimizers:
            optimizer.step()


def own_optimizers(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """What keeps state on this rank: one whose state is shared out keeps its part in one of its own."""
    several = optimizer.optimizers if isinstance(optimizer, InTurn) else (optimizer,)
    return tuple(getattr(each, "optim", each) for each in several)


def offload_state(optimizer: torch.optim.Optimizer) -> None:
    """Keep an optimizer's state in host memory but while it steps; on the device its tensors hold no memory then."""
    hosts: dict[torch.Tensor, torch.Tensor] = {}

    def fetch(*_: object) -> None:
        for tensor, host in hosts.items():
            fetch_values(tensor, host)

    def store(*_: object) -> None:
        for tensor in _state_tensors(optimizer):
            if tensor not in hosts:
                hosts[tensor] = host_copy(tensor)
            store_values(tensor, hosts[tensor])

    optimizer.register_step_pre_hook(fetch)
    optimizer.register_step_post_hook(store)


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Tensors of parameters' sizes, a rank's own part of each; counts of steps are numbers."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.dim():
                yield value.to_local() if isinstance(value, DTensor) else value


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Its values in host memory, laid out alike, in pages that stay there where a device reads them."""
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    _copy(host, tensor)
    return host


def fetch_values(tensor: torch.Tensor, host: torch.Tensor) -> None:
    """Give a tensor its memory on the device, and the values that lie in host memory."""
    tensor.untyped_storage().resize_(host.nbytes)
    _copy(tensor, host)


def store_values(tensor: torch.Tensor, host: torch.Tensor) -> None:
    """Copy a tensor's values to host memory, and take its memory on the device from it."""
    _copy(host, tensor)
    tensor.untyped_storage().resize_(0)


def _copy(to: torch.Tensor, of: torch.Tensor) -> None:
    """Copy between host and device, in the order of the device's stream.

    A CPU's memory is the host's: no call of torch copies there, whose tensors a tracker of the device's memory counts.
    """
    if to.is_cuda or of.is_cuda:
        to.copy_(of, non_blocking=True)
    else:
        ctypes.memmove(to.data_ptr(), of.data_ptr(), of.nbytes)


def make_optimizer(
    optimizer: Callable[..., torch.optim.Optimizer],
    parameters: Iterable[torch.nn.Parameter],
    groups: StateGroups | None = None,
    **arguments: Any,
) -> torch.optim.Optimizer:
    """An optimizer of a class; with groups, whose ranks share out its state, torch's ZeroRedundancyOptimizer.

    A rank's parameters lie in one buffer then, so that it sends them at once. Parameters that fewer ranks hold alike
    have an optimizer of their own.
    """
    if groups is None:
        return optimizer(parameters, **arguments)
    held_apart = {id(parameter) for parameter in groups.apart}
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    apart = [parameter for parameter in trained if id(parameter) in held_apart]
    others = [parameter for parameter in trained if id(parameter) not in held_apart]
    everyone = _shared_out(optimizer, others, groups.everyone, arguments)
    if not apart:
        return everyone
    if groups.alike is None:
        return InTurn(everyone, optimizer(apart, **arguments))
    return InTurn(everyone, _shared_out(optimizer, apart, groups.alike, arguments))


def _shared_out(
    optimizer: Callable[..., torch.optim.Optimizer],
    parameters: list[torch.nn.Parameter],
    group: dist.ProcessGroup,
    arguments: dict[str, Any],
) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(
        parameters,
        optimizer_class=optimizer,  # type: ignore[arg-type]
        process_group=group,
        parameters_as_bucket_view=True,
        **arguments,
    )
