"""What replicas hold: all of the model each, or by ZeRO parts of it."""

from __future__ import annotations

from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Axis
from paradl_bench.strategies.data.zero.memory import ZeroState
from paradl_bench.strategies.exchange.options import ExchangeOptions


class DataMemory:
    """See :class:`~paradl_bench.strategies.memory.peak.AxisMemory`."""

    def state(self, axis: Axis, ranks: int, replicas: int, settings: PlanSettings) -> ZeroState | None:
        """That of the axis' stage of ZeRO; None without one."""
        if not axis.prefix:
            return None
        return ZeroState(axis.prefix, ranks, replicas, settings.dtype, settings.of(ExchangeOptions).reduce_dtype)


MEMORY = DataMemory()
