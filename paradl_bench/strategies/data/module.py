"""Replicas as they run: torch's DistributedDataParallel exchanges gradients, or ZeRO shards the parameters."""

from __future__ import annotations

import torch

from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Axis
from paradl_bench.strategies.data.zero.module import kept_through_stages, shard_parameters
from paradl_bench.strategies.exchange.options import ExchangeOptions
from paradl_bench.strategies.running.axis_runners import Sharers
from paradl_bench.strategies.running.group_functions import Reduce


class DataRunner:
    """What ranks do beside the exchange of gradients."""

    def shard_parameters(
        self,
        module: torch.nn.Module,
        network: ModelGraph,
        axis: Axis,
        device: torch.device,
        sharers: Sharers,
        settings: PlanSettings,
        in_stages: bool,
    ) -> Reduce | None:
        """See :class:`~paradl_bench.strategies.running.axis_runners.ParameterRunner`."""
        if axis.prefix < 2:
            return None
        reduce_dtype = settings.of(ExchangeOptions).reduce_dtype
        shard_parameters(module, network, axis.prefix, device, sharers, in_stages=in_stages, reduce_dtype=reduce_dtype)
        return kept_through_stages(module) if in_stages else None


RUNNER = DataRunner()
