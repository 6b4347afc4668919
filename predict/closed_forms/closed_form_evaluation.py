"""What the closed forms share: sums, one all-reduce, and the limits of serial and data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from paradl_bench.core.errors import UserError
from paradl_bench.plan.mesh import divides_batch_alone, zero_stage
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.strategies.exchange.options import ExchangeOptions
from paradl_bench.strategies.nesting.catalog import planner_for
from predict.closed_forms.iteration import TERMS, ClosedForm, gradient_exchange
from predict.closed_forms.ledgers import ledger_of_sums
from predict.costs.cost_model import SUMS, CostModel
from predict.costs.memory_estimate import EstimatedMemory
from predict.costs.priced import PricedSums
from predict.costs.sourced import Floats, Remark, Remarks
from predict.costs.spread.assembly import Priced, join
from predict.ledger.ledger import RoleLedger
from predict.workload import Configuration, PreparedEvaluation, Timing


def has_closed_form(strategy: Strategy) -> bool:
    """Serial and data, without ZeRO stages."""
    return divides_batch_alone(strategy) and not zero_stage(strategy)


def has_closed_settings(settings: PlanSettings) -> bool:
    """Neither accumulated gradients nor activations that are computed again: closed forms have none of these."""
    return not settings.simulated_alone


def refuse_what_is_simulated(name: str, settings: PlanSettings) -> None:
    """Raises:
    UserError: gradients are to be accumulated, or activations to be computed again, which no closed form has.
    """
    for option, text in settings.simulated_alone.items():
        raise UserError(f"{name} knows no --{option} {text}: take --evaluator simulate")


def prepare_closed_form(
    name: str, form: ClosedForm, costs: CostModel, point: Configuration, memory: Callable[[], EstimatedMemory]
) -> PreparedEvaluation:
    """A workload of six sums.

    Raises:
        UserError: the strategy is neither serial nor data.
    """
    if not has_closed_form(point.strategy):
        raise UserError(f"{name} has closed forms of serial and data, not of {point.strategy}: take simulate")
    refuse_what_is_simulated(name, point.settings)
    sums = costs.sums(costs.place(point.strategy, point.local_batch))
    exchange, exchange_remarks = costs.collective(
        gradient_exchange(costs.network, point.strategy.ranks), point.strategy
    )
    remarks = Remarks()
    remarks.add(*sums.remarks, *exchange_remarks, *flat_exchange(point.settings))

    def time(seconds: Floats, compute_slowdown: Floats, communication_slowdown: Floats) -> Timing:
        forward, backward, exchanged, update = map(float, form(np.asarray(seconds)))
        return Timing(forward, backward, exchanged, update, exposed_communication_s=exchanged, overlap_s=0.0)

    parts = join([sums.costs, exchange])
    return PreparedEvaluation(
        costs=dataclasses.replace(parts, counts=_used(form, len(parts.seconds))),
        spread=sums.spread,
        remarks=remarks,
        memory=memory,
        limits=tuple(map(str, planner_for(point.strategy).limits(costs.network, point.settings))),
        time=time,
        iteration_s=lambda *shifted: time(*shifted).iteration_s,
        ledger=lambda: _ledger(costs, point.strategy, sums, TERMS[form]),
    )


def _ledger(costs: CostModel, strategy: Strategy, sums: PricedSums, terms: Sequence[str]) -> tuple[RoleLedger, ...]:
    """Works of the sums that are read, and the exchange: nothing hides another."""
    groups = [(name.split()[0], term, group) for name, term, group in zip(SUMS, terms, sums.groups, strict=False)]
    if strategy.ranks > 1:
        exchange = gradient_exchange(costs.network, strategy.ranks)
        cost, modes = costs.communication.cost(exchange, strategy)
        groups.append(("GE", terms[-1], [(exchange, Priced(cost, 1, exchange, True, modes))]))
    return ledger_of_sums(strategy, groups, sums.spread.common_relative_sd)


def flat_exchange(settings: PlanSettings) -> tuple[Remark, ...]:
    """That closed forms know one exchange, where the settings ask for another."""
    exchange = settings.of(ExchangeOptions).exchange
    if exchange == "flat":
        return ()
    return (Remark(f"the closed form exchanges gradients flat, and stands for {exchange}", True),)


def _used(form: ClosedForm, parts: int) -> Floats:
    """Which of the sums a form reads, as 1 and 0: a form is linear, so ask it about each alone."""
    return np.asarray(sum(form(np.eye(parts))), float)
