"""OSF's closed form over the works of a plan: what the exchanges of its buffers take behind backward."""

from __future__ import annotations

import numpy as np

from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.tasks import Phase, Plan
from paradl_bench.strategies.data.fusion.buffers import Buffers, backward_tasks
from paradl_bench.strategies.data.fusion.rules import Fusion
from predict.closed_forms.osf import exposed_seconds, wait_seconds
from predict.costs.sourced import Floats, Ints
from predict.workload import Timing


class OverlapForm:
    """The closed form over one plan's works.

    Args:
        plan: of :func:`~paradl_bench.strategies.data.fusion.layerwise_plan.layerwise_plan`, with the buffers' sends.
    """

    def __init__(self, plan: Plan, network: ModelGraph, fusion: Fusion, buffers: Buffers) -> None:
        role = plan.roles[0]
        self._work, self._fusion, self._last = role.work, fusion, buffers.last
        self._forward, self._update = role.phase == Phase.FW, role.phase == Phase.WU
        self._backward, self._exchange = role.phase == Phase.BW, role.phase == Phase.GE
        task_of = backward_tasks(plan, network)
        self._gradients: Ints = np.array([task_of[layer] for layer in buffers.layers], np.int64)

    def timing(self, seconds: Floats) -> Timing:
        """Seconds per work to where they stand in an iteration; exchanges that are exposed are its GE."""
        tasks = seconds[self._work]
        done = np.cumsum(np.where(self._backward, tasks, 0.0))
        forward, backward = float(tasks[self._forward].sum()), float(done[-1])
        exchange = tasks[self._exchange]
        exposed = 0.0
        if len(exchange):
            ready = done[self._gradients]
            waits = wait_seconds(self._fusion, ready, self._last)
            exposed = exposed_seconds(ready[list(self._last)], waits, exchange, backward)
        return Timing(
            fw_s=forward,
            bw_s=backward,
            ge_s=exposed,
            wu_s=float(tasks[self._update].sum()),
            exposed_communication_s=exposed,
            overlap_s=max(float(exchange.sum()) - exposed, 0.0),
        )
