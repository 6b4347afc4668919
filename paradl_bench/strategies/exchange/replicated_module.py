"""Gradient exchange between replicas: torch's DistributedDataParallel over the ranks that hold the same parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.ranks.groups.process_group import is_silent
from paradl_bench.strategies.exchange.gradients import GradientBuckets
from paradl_bench.strategies.exchange.node_exchange import NodeExchange
from paradl_bench.strategies.exchange.options import ExchangeOptions

_MIB = 1024 * 1024


def exchange_gradients(
    module: torch.nn.Module,
    network: ModelGraph,
    settings: PlanSettings,
    device: torch.device,
    process_group: dist.ProcessGroup,
    over_nodes: NodeExchange | None = None,
    *,
    model: torch.nn.Module | None = None,
    apart: frozenset[str] = frozenset(),
    of_apart: bool = False,
) -> torch.nn.Module:
    """The module with its gradients averaged over the group; collective over it.

    Batch norm's statistics are each rank's own, its buffers the first rank's.

    Args:
        network: with the parameters that this rank holds of it.
        over_nodes: what sends the buckets, where the exchange knows nodes.
        model: the user's, which ``module`` runs; what it has beside the network's is left as it is. None where it has
            nothing beside. apart, of_apart: which of its parameters, as of
            :class:`~paradl_bench.strategies.exchange.gradients.GradientBuckets`; the others are left as they are.

    Raises:
        UserError: bucket limits that torch cannot be given.
    """
    buckets = GradientBuckets(network, settings, apart, of_apart=of_apart)
    if model is not None:
        _leave_out(module, model, {tensor.name for tensor in (*buckets.held, *buckets.buffers)})
    exchanging = DistributedDataParallel(
        module,
        device_ids=[device.index] if device.type == "cuda" else None,
        process_group=process_group,
        bucket_cap_mb=_bucket_cap_mb(settings),
        find_unused_parameters=bool(buckets.unused),
    )
    if over_nodes is not None:
        over_nodes.register(exchanging)
    elif is_silent(process_group):
        # torch's own exchange reads what the group's call gives back, and such a call gives nothing back.
        exchanging.register_comm_hook(None, lambda _, bucket: _as_it_is(bucket.buffer()))
    return exchanging


def _leave_out(module: torch.nn.Module, model: torch.nn.Module, names: set[str]) -> None:
    """Have DistributedDataParallel pass over all of the model's parameters and buffers but some.

    What is tied has several names.
    """
    kept = {id(tensor) for name, tensor in _held_by(model) if name in names}
    left_out = [name for name, tensor in _held_by(module) if id(tensor) not in kept]
    leave_out: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    leave_out(module, left_out)


def _held_by(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _as_it_is(gradients: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(gradients)
    return done


def _bucket_cap_mb(settings: PlanSettings) -> float | None:
    options = settings.of(ExchangeOptions)
    if options.has_default_limits:
        return None
    limits = (options.first_bucket_bytes, options.bucket_cap_bytes)
    if options.first_bucket_bytes != options.bucket_cap_bytes:
        raise UserError(
            f"bucket limits {limits} bytes: torch's first bucket is smaller only under its default cap of 25 MiB"
        )
    return options.bucket_cap_bytes / _MIB
