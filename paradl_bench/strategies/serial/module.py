"""Serial training: the module as it is."""

from __future__ import annotations

import torch

from paradl_bench.spec.network import Network
from paradl_bench.spec.plan import PlanSettings


class SerialRunner:
    """Trains on one device."""

    name = "serial"
    needs_process_group = False

    def build(
        self, module: torch.nn.Module, network: Network, settings: PlanSettings, device: torch.device
    ) -> torch.nn.Module:
        """The module itself."""
        return module


RUNNER = SerialRunner()
