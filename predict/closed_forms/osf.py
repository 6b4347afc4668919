"""OSF: a scaling factor that considers overlap, and tensor fusion (the paper's equations 3 to 17).

Gradients are counted in the order of backward. With ready_i, when gradient i is there, and t(m) the all-reduce of m
bytes:

    start_i = max(start_(i-1) + wait_(i-1) + t(sent_(i-1)), ready_i)      eq. 8 and 15
    exposed = max(0, start_(n-1) + t(sent_(n-1)) - backward)              T_update - T_overlap of eq. 3 and 11
    OSF     = T_comp / (T_comp + exposed)                                 T_comp: all of forward and backward
    CSF     = T_comp / (T_comp + t(sum of g))                             no overlap, one all-reduce

Mended: eq. 15 as printed starts its inner sum at j = 1 instead of i. Kept as printed: it adds the wait behind the
exchange before it, so a channel that is busy all the time waits twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paradl_bench.plan.tasks import Phase, Plan
from paradl_bench.strategies.data.fusion.buffers import Buffers, backward_tasks
from paradl_bench.strategies.data.fusion.layerwise_plan import layerwise_plan
from paradl_bench.strategies.data.fusion.rules import Fusion
from paradl_bench.strategies.nesting.catalog import planner_for
from predict.closed_forms.closed_form_evaluation import flat_exchange, refuse_what_is_simulated
from predict.closed_forms.ledgers import entries_beside_backward, exposed_in_turn, ledger_of_ranks
from predict.costs.cost_model import CostModel
from predict.costs.priced import PricedPlan
from predict.costs.sourced import Floats, Ints, Remark
from predict.ledger.ledger import RoleLedger, waiting_entry
from predict.workload import Configuration, PreparedEvaluation, Timing

_TERMS = {Phase.FW: "T_comp", Phase.BW: "T_comp", Phase.GE: "t(sent_i)", Phase.WU: "WU"}


def wait_seconds(fusion: Fusion, gradients_ready_s: Floats, last: Sequence[int]) -> Floats:
    """Seconds that each buffer waits behind its last gradient, shape (buffers,): the gap, but at most the timeout."""
    waits = np.zeros(len(last))
    if fusion.rule == "buffer" and len(last) > 1:
        before = np.asarray(last[:-1], np.intp)
        waits[:-1] = np.minimum(gradients_ready_s[before + 1] - gradients_ready_s[before], fusion.timeout_s)
    return waits


def exposed_seconds(ready_s: Floats, wait_s: Floats, exchange_s: Floats, backward_s: float) -> float:
    """T_update - T_overlap: what the exchanges add behind backward.

    Args:
        ready_s, wait_s, exchange_s: (buffers,) since the start of backward, when the last gradient of each is there;
            its wait before it is sent; its all-reduce.
    """
    # Eq. 15 unrolled: the last exchange ends at the latest of: buffer k ready, then all from k on without a pause.
    remaining = np.cumsum((wait_s + exchange_s)[::-1])[::-1]
    return max(0.0, float(np.max(ready_s + remaining, initial=0.0)) - backward_s)


def scaling_factor(compute_s: float, added_s: float) -> float:
    """OSF of what is exposed, CSF of one all-reduce of everything; 1 where nothing takes time."""
    whole_s = compute_s + added_s
    return compute_s / whole_s if whole_s else 1.0


class PhaseSeconds(NamedTuple):
    """Seconds of a plan's phases: all of forward, backward up to each task, each exchange, the weight update."""

    forward_s: float
    done_s: Floats
    exchange_s: Floats
    update_s: float

    @property
    def backward_s(self) -> float:
        """All of backward."""
        return float(self.done_s[-1])

    def timing(self, exposed_s: float, input_s: float = 0.0, h2d_s: float = 0.0) -> Timing:
        """The iteration of which so much of the exchange is exposed."""
        return Timing(
            fw_s=self.forward_s,
            bw_s=self.backward_s,
            ge_s=exposed_s,
            wu_s=self.update_s,
            exposed_communication_s=exposed_s,
            overlap_s=max(float(self.exchange_s.sum()) - exposed_s, 0.0),
            input_s=input_s,
            h2d_s=h2d_s,
        )


class LayerwisePhases:
    """The phases of a plan whose exchanges go on beside backward (:func:`layerwise_plan`), under any costs."""

    def __init__(self, plan: Plan) -> None:
        (role,) = plan.roles
        self._work = role.work
        self._forward, self._update = role.phase == Phase.FW, role.phase == Phase.WU
        self._backward, self.exchange = role.phase == Phase.BW, role.phase == Phase.GE

    def of(self, seconds: Floats) -> PhaseSeconds:
        """From seconds per work."""
        tasks = seconds[self._work]
        return PhaseSeconds(
            float(tasks[self._forward].sum()),
            np.cumsum(np.where(self._backward, tasks, 0.0)),
            tasks[self.exchange],
            float(tasks[self._update].sum()),
        )


class OverlapForm:
    """The closed form over the works of a :func:`layerwise_plan` with the buffers' sends."""

    def __init__(self, plan: Plan, costs: CostModel, buffers: Buffers) -> None:
        self._phases, self._fusion, self._last = LayerwisePhases(plan), fusion_of(costs), list(buffers.last)
        task_of = backward_tasks(plan, costs.network)
        self._gradients: Ints = np.array([task_of[layer] for layer in buffers.layers], np.int64)

    def _ready_and_waits(self, phases: PhaseSeconds) -> tuple[Floats, Floats]:
        """Of each buffer that is sent, when its last gradient is there, and how long it then waits."""
        if not len(phases.exchange_s):
            return np.zeros(0), np.zeros(0)
        ready = phases.done_s[self._gradients]
        return ready[self._last], wait_seconds(self._fusion, ready, self._last)

    def timing(self, seconds: Floats) -> Timing:
        """Seconds per work to where they stand in an iteration; exchanges that are exposed are its GE."""
        phases = self._phases.of(seconds)
        return phases.timing(exposed_seconds(*self._ready_and_waits(phases), phases.exchange_s, phases.backward_s))

    def ledger(self, priced: PricedPlan) -> tuple[RoleLedger, ...]:
        """Its terms: all of compute, and of each buffer its wait and its all-reduce."""
        phases = self._phases.of(priced.costs.seconds)
        ready, waits = self._ready_and_waits(phases)
        of_waits, of_exchanges = exposed_in_turn(ready, waits, phases.exchange_s, phases.backward_s)
        entries = entries_beside_backward(priced, of_exchanges, _TERMS)
        if waits.any():
            seen_s, spans = float(of_waits.sum()), int(np.count_nonzero(waits))
            name = "wait for another gradient"
            entries.append(waiting_entry(name, float(waits.sum()), spans, exposed_s=seen_s, phase="GE", term="wait_i"))
        return ledger_of_ranks(priced.plan.strategy, entries)


def workload_of(costs: CostModel, point: Configuration, buffers: Buffers) -> PreparedEvaluation:
    """Plan and price these buffers; remarks are those of every grouping."""
    refuse_what_is_simulated("osf", point.settings)
    plan = layerwise_plan(costs.network, point.strategy, point.settings, buffers.sends)
    priced = costs.price(plan)
    form = OverlapForm(plan, costs, buffers)
    if point.strategy.ranks > 1:
        text = "osf assumes that overlap and copies are free and that all ranks are equally fast"
        priced.remarks.add(Remark(text, False), *flat_exchange(point.settings))
    return PreparedEvaluation(
        costs=priced.costs,
        spread=priced.spread,
        remarks=priced.remarks,
        memory=lambda: costs.memory(point.strategy, point.settings),
        limits=tuple(map(str, planner_for(point.strategy).limits(costs.network, point.settings))),
        time=lambda seconds, *_: form.timing(np.asarray(seconds)),
        ledger=lambda: form.ledger(priced),
        overlap_is_unmeasured=costs.overlap_is_unmeasured,
    )


def fusion_of(costs: CostModel) -> Fusion:
    """The model's rule of fusion; none where it has none."""
    return costs.fusion or Fusion()
