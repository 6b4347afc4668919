"""OSF's closed form over the works of a plan: what the exchanges of its buffers take behind backward."""

from __future__ import annotations

import numpy as np

from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.tasks import Phase, Plan
from paradl_bench.strategies.data.fusion.buffers import Buffers, backward_tasks
from paradl_bench.strategies.data.fusion.rules import Fusion
from predict.closed_forms.ledgers import entries_beside_backward, exposed_in_turn, ledger_of_ranks
from predict.closed_forms.osf import exposed_seconds, wait_seconds
from predict.costs.priced import PricedPlan
from predict.costs.sourced import Floats, Ints
from predict.ledger.ledger import RoleLedger, waiting_entry
from predict.workload import Timing

_TERMS = {Phase.FW: "T_comp", Phase.BW: "T_comp", Phase.GE: "t(sent_i)", Phase.WU: "WU"}


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

    def ledger(self, priced: PricedPlan) -> tuple[RoleLedger, ...]:
        """Its terms: all of compute, and of each buffer its wait and its all-reduce."""
        seconds = priced.costs.seconds
        tasks = seconds[self._work]
        done, exchange = np.cumsum(np.where(self._backward, tasks, 0.0)), tasks[self._exchange]
        ready = done[self._gradients]
        waits = wait_seconds(self._fusion, ready, self._last) if len(exchange) else np.zeros(0)
        exposed = exposed_in_turn(ready[list(self._last)][: len(exchange)], waits, exchange, float(done[-1]))
        found = entries_beside_backward(priced, exposed[1], _TERMS)
        if waits.any():
            seen_s, spans = float(exposed[0].sum()), int(np.count_nonzero(waits))
            name = "wait for another gradient"
            found.append(waiting_entry(name, float(waits.sum()), spans, exposed_s=seen_s, phase="GE", term="wait_i"))
        return ledger_of_ranks(priced.plan.strategy, found)
