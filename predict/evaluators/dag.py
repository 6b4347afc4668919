"""``dag``: an iteration with its input, as in S-SGD's DAG: reading, copying, and an exchange for every layer.

Closed forms of :mod:`predict.costs.input.input_closed_form`. As in the paper overlap is free, and no rank is later than
another; what ``simulate`` adds (buckets, their copies, interference, the slowest rank) is not in it.
"""

from __future__ import annotations

import numpy as np

from paradl_bench.core.errors import UserError
from paradl_bench.plan.tasks import Phase, Plan
from paradl_bench.strategies.data.fusion.layerwise_plan import layerwise_plan
from paradl_bench.strategies.frameworks.presets import PRESETS
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.passes.input_tasks import Fetch
from predict.closed_forms.closed_form_evaluation import (
    flat_exchange,
    has_closed_form,
    has_closed_settings,
    refuse_what_is_simulated,
)
from predict.closed_forms.ledgers import entries_beside_backward, exposed_in_turn, ledger_of_ranks
from predict.closed_forms.osf import LayerwisePhases
from predict.costs.cost_model import CostModel
from predict.costs.input.input_closed_form import exposed_exchange_seconds, input_wait
from predict.costs.input.input_terms import HostBatch, InputTerms, input_terms
from predict.costs.input.shared_cores import on_shared_cores
from predict.costs.priced import PricedPlan
from predict.costs.sourced import Floats, Remark
from predict.costs.spread.assembly import join
from predict.ledger.ledger import PricedWorks, RoleLedger
from predict.workload import Configuration, Evaluator, PreparedEvaluation, Timing


def prepare(costs: CostModel, point: Configuration) -> PreparedEvaluation:
    """Plan, price, and add the input."""
    if not has_closed_form(point.strategy):
        raise UserError(
            f"dag has closed forms for serial and data parallelism, not for {point.strategy}: give --evaluator simulate"
        )
    refuse_what_is_simulated("dag", point.settings)
    options = costs.input_options
    planner = planner_for(point.strategy)
    planner.check(costs.network, point.strategy, point.settings)
    plan = layerwise_plan(costs.network, point.strategy, point.settings)
    priced = costs.price(plan)
    batch = HostBatch(point.local_batch, priced.place.ranks_on_host)
    terms = input_terms(costs.profile, costs.network, costs.dtype, batch, options)
    if point.strategy.ranks > 1:
        text = "dag exchanges each layer separately, and assumes that overlap is free and all ranks are equally fast"
        priced.remarks.add(Remark(text, False))
    form = ClosedForm(plan, terms.fetch, wait_free=PRESETS[options.preset].wait_free)
    terms = on_shared_cores(terms, costs.profile, form.rest_s(priced.costs.seconds), batch.ranks_on_host)
    priced.remarks.add(*terms.remarks, *flat_exchange(point.settings))
    return PreparedEvaluation(
        costs=join([priced.costs, terms.costs]),
        spread=priced.spread,
        remarks=priced.remarks,
        memory=lambda: costs.memory(point.strategy, point.settings).beside_batches(terms.ahead_bytes),
        limits=tuple(map(str, planner.limits(costs.network, point.settings))),
        time=lambda seconds, *_: form.timing(np.asarray(seconds)),
        ledger=lambda: form.ledger(priced, terms),
        overlap_is_unmeasured=costs.overlap_is_unmeasured,
    )


_TERMS = {Phase.FW: "t_f", Phase.BW: "t_b", Phase.GE: "t_c", Phase.WU: "t_u"}


class ClosedForm:
    """The closed form over one plan's works; behind them, in the costs, come reading and copying."""

    def __init__(self, plan: Plan, fetch: Fetch, *, wait_free: bool) -> None:
        self._phases, self._works = LayerwisePhases(plan), len(plan.works)
        self._fetch, self._wait_free = fetch, wait_free

    def rest_s(self, seconds: Floats) -> float:
        """An iteration without its input, from seconds per work of the plan."""
        return self.timing(np.concatenate([seconds, [0.0, 0.0]])).iteration_s

    def timing(self, seconds: Floats) -> Timing:
        """Seconds per work, then of reading and of copying, to where they stand in an iteration."""
        phases = self._phases.of(seconds)
        ready, backward_s = phases.done_s[self._phases.exchange], phases.backward_s
        exposed_s = exposed_exchange_seconds(ready, phases.exchange_s, backward_s, wait_free=self._wait_free)
        computed_s = phases.forward_s + backward_s + exposed_s + phases.update_s
        io_s, h2d_s = map(float, seconds[self._works :])
        return phases.timing(exposed_s, *input_wait(self._fetch, io_s, h2d_s, computed_s))

    def ledger(self, priced: PricedPlan, terms: InputTerms) -> tuple[RoleLedger, ...]:
        """Its terms, those of the input included."""
        phases = self._phases.of(priced.costs.seconds)
        exposed = phases.exchange_s
        if self._wait_free:
            ready, none = phases.done_s[self._phases.exchange], np.zeros(len(exposed))
            exposed = exposed_in_turn(ready, none, exposed, phases.backward_s)[1]
        entries = entries_beside_backward(priced, exposed, _TERMS)
        waiting = self.timing(np.concatenate([priced.costs.seconds, terms.costs.seconds]))
        fetched = PricedWorks(strategy=priced.plan.strategy, works=terms.works, parts=terms.parts, costs=terms.costs)
        entries.append(fetched.entry(0, "IO", 1, exposed_s=waiting.input_s - waiting.h2d_s, term="t_io"))
        entries.append(fetched.entry(1, "H2D", 1, exposed_s=waiting.h2d_s, term="t_h2d"))
        return ledger_of_ranks(priced.plan.strategy, entries)


EVALUATOR = Evaluator(name="dag", prepare=prepare, covers=has_closed_form, knows=has_closed_settings)
