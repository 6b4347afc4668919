"""What replicas hold: all of the model each, or by ZeRO parts of it."""

from __future__ import annotations

from paradl_bench.plan.strategy import Axis
from paradl_bench.strategies.data.zero.memory import ZeroState


class DataMemory:
    """See :class:`~paradl_bench.strategies.memory.peak.AxisMemory`."""

    def state(self, axis: Axis, ranks: int, replicas: int, dtype: str) -> ZeroState | None:
        """That of the axis' stage of ZeRO; None without one."""
        return ZeroState(axis.prefix, ranks, replicas, dtype) if axis.prefix else None


MEMORY = DataMemory()
