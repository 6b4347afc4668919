"""Data parallel training: torch's DistributedDataParallel over the default process group."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from paradl_bench.spec.errors import UserError
from paradl_bench.spec.network import Network
from paradl_bench.spec.plan import PlanSettings
from paradl_bench.strategies.data.plan import GradientBuckets

_MIB = 1024 * 1024


class DataRunner:
    """Trains replicas that exchange gradients; batch norm's statistics are each rank's own, its buffers rank 0's."""

    name = "data"
    needs_process_group = True

    def build(
        self, module: torch.nn.Module, network: Network, settings: PlanSettings, device: torch.device
    ) -> torch.nn.Module:
        """The module wrapped; collective over all ranks.

        Raises:
            UserError: bucket limits that torch cannot be given.
        """
        return DistributedDataParallel(
            module,
            device_ids=[device.index] if device.type == "cuda" else None,
            bucket_cap_mb=_bucket_cap_mb(settings),
            find_unused_parameters=bool(GradientBuckets(network, settings).unused),
        )


def _bucket_cap_mb(settings: PlanSettings) -> float | None:
    limits = (settings.first_bucket_bytes, settings.bucket_cap_bytes)
    if limits == (PlanSettings(batch=1).first_bucket_bytes, PlanSettings(batch=1).bucket_cap_bytes):
        return None
    if settings.first_bucket_bytes != settings.bucket_cap_bytes:
        raise UserError(
            f"bucket limits {limits} bytes: torch's first bucket is smaller only under its default cap of 25 MiB"
        )
    return settings.bucket_cap_bytes / _MIB


RUNNER = DataRunner()
