"""What replicas hold: all of the model each, or by ZeRO parts of it."""

from __future__ import annotations

from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Axis, Strategy
from paradl_bench.strategies.data.zero.memory import ZeroState
from paradl_bench.strategies.data.zero.sharing import Sharing
from paradl_bench.strategies.exchange.options import ExchangeOptions


class DataMemory:
    """See :class:`~paradl_bench.strategies.memory.peak.AxisMemory`."""

    def state(self, strategy: Strategy, axis: Axis, settings: PlanSettings, apart: frozenset[str]) -> ZeroState | None:
        """That of the axis' stage of ZeRO; None without one."""
        if not axis.prefix:
            return None
        sharing = Sharing(strategy, apart)
        reduce_dtype = settings.of(ExchangeOptions).reduce_dtype
        return ZeroState(axis.prefix, sharing.shares, sharing.groups[False].replicas, settings.dtype, reduce_dtype)


MEMORY = DataMemory()
