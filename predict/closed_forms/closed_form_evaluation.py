"""Closed forms per iteration: ParaDL's rows for serial and data, and compute followed by one exchange (CSF).

Each reads the same sums and is written for arrays: ``sums[..., i]`` are the seconds of one point's part i, for the
local batch and the ranks of that point. From the sixth on they are steps of the exchange.

    serial    B FB + WU                       ParaDL, Table 3 of the paper
    data      (B/p) FB + WU + AR(p, W e)

FB is the sum of the layers' forward and backward; time between operations is no part of the paper's model. CSF (OSF's
paper) includes it, then one all-reduce of all gradients. Where gradients are exchanged by leaders of nodes or in
segments (sections 4.5.1 and 5.3.1 of ParaDL's paper), AR is the sum of the steps that a leader takes, one after the
other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.mesh import divides_batch_alone, zero_stage
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.plan.tasks import Collective
from paradl_bench.strategies.exchange.node_groups import node_groups
from paradl_bench.strategies.exchange.options import ExchangeOptions
from paradl_bench.strategies.nesting.catalog import planner_for
from predict.closed_forms.ledgers import ledger_of_sums
from predict.costs.cost_model import SUMS, CostModel
from predict.costs.memory_estimate import EstimatedMemory
from predict.costs.priced import PricedSums
from predict.costs.sourced import Floats, Remark, Remarks
from predict.costs.spread.assembly import Priced, join
from predict.ledger.ledger import RoleLedger
from predict.workload import Configuration, PreparedEvaluation, Timing

FW, BW, FW_BETWEEN, BW_BETWEEN, WU, EXCHANGE = range(6)

ClosedForm = Callable[[Floats], tuple[Floats, Floats, Floats, Floats]]
"""From sums of shape (..., 6 or more): seconds of FW, BW, GE and WU, each of shape (...); they make the iteration."""


def paradl(sums: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """ParaDL's serial and data rows; serial is the case without an all-reduce."""
    return sums[..., FW], sums[..., BW], sums[..., EXCHANGE:].sum(axis=-1), sums[..., WU]


def csf(sums: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """All of compute, then one all-reduce of everything."""
    forward = np.asarray(sums[..., FW] + sums[..., FW_BETWEEN])
    backward = np.asarray(sums[..., BW] + sums[..., BW_BETWEEN])
    return forward, backward, sums[..., EXCHANGE:].sum(axis=-1), sums[..., WU]


TERMS: dict[ClosedForm, tuple[str, ...]] = {
    paradl: ("(B/p) FB", "(B/p) FB", "", "", "WU", "AR(p, W e)"),
    csf: ("T_comp", "T_comp", "T_comp", "T_comp", "WU", "t(sum of g)"),
}
"""Of each form, the terms that its sums are in, in the papers' letters; empty where it reads none."""


def gradient_exchange(network: ModelGraph, ranks: int) -> Collective:
    """AR(p, W e): one all-reduce of all gradients."""
    return Collective(operation="all_reduce", message_bytes=network.parameter_bytes, ranks=ranks)


def gradient_exchanges(network: ModelGraph, strategy: Strategy, settings: PlanSettings) -> list[Collective]:
    """AR(p, W e) under the settings: one all-reduce, or the steps of a leader of a node; none on one rank.

    Raises:
        UserError: the strategy does not exchange so.
    """
    groups = node_groups(strategy, settings)
    if groups is not None:
        return groups.collectives(network.parameters, local=0)
    return [gradient_exchange(network, strategy.ranks)] if strategy.ranks > 1 else []


def has_closed_form(strategy: Strategy) -> bool:
    """Serial and data, without ZeRO stages."""
    return divides_batch_alone(strategy) and not zero_stage(strategy)


def has_closed_settings(settings: PlanSettings) -> bool:
    """Whether closed forms have all of the settings."""
    return not settings.simulated_alone


def refuse_what_is_simulated(name: str, settings: PlanSettings) -> None:
    """Raise a UserError where a setting is asked for that no closed form has."""
    for option, text in settings.simulated_alone.items():
        raise UserError(f"{name} cannot predict --{option.replace('_', '-')} {text}: give --evaluator simulate")


def prepare_closed_form(
    name: str, form: ClosedForm, costs: CostModel, point: Configuration, memory: Callable[[], EstimatedMemory]
) -> PreparedEvaluation:
    """A workload of six sums; a UserError of strategies and settings that have no closed form."""
    if not has_closed_form(point.strategy):
        raise UserError(
            f"{name} has closed forms for serial and data parallelism, not for {point.strategy}: give --evaluator"
            " simulate"
        )
    refuse_what_is_simulated(name, point.settings)
    sums = costs.sums(costs.place(point.strategy, point.local_batch))
    steps = gradient_exchanges(costs.network, point.strategy, point.settings)
    priced = [costs.collective(work, point.strategy) for work in steps]
    remarks = Remarks()
    remarks.add(*sums.remarks, *(remark for _, of_step in priced for remark in of_step))

    def time(seconds: Floats, *_: Floats) -> Timing:
        forward, backward, exchanged, update = map(float, form(np.asarray(seconds)))
        return Timing(forward, backward, exchanged, update, exposed_communication_s=exchanged, overlap_s=0.0)

    parts = join([sums.costs, *(step for step, _ in priced)])
    return PreparedEvaluation(
        costs=dataclasses.replace(parts, counts=_used(form, len(parts.seconds))),
        spread=sums.spread,
        remarks=remarks,
        memory=memory,
        limits=tuple(map(str, planner_for(point.strategy).limits(costs.network, point.settings))),
        time=time,
        ledger=lambda: _ledger(costs, point.strategy, sums, TERMS[form], steps),
    )


def _ledger(
    costs: CostModel, strategy: Strategy, sums: PricedSums, terms: Sequence[str], steps: Sequence[Collective]
) -> tuple[RoleLedger, ...]:
    """Works of the sums that are read, and the exchange: nothing hides another."""
    groups = [(name.split()[0], term, group) for name, term, group in zip(SUMS, terms, sums.groups, strict=False)]
    for step in steps:
        cost, modes = costs.communication.cost(step, strategy)
        groups.append(("GE", terms[-1], [(step, Priced(cost, 1, step, True, modes))]))
    return ledger_of_sums(strategy, groups, sums.spread.common_relative_sd)


def flat_exchange(settings: PlanSettings) -> tuple[Remark, ...]:
    """That closed forms know one exchange, where the settings ask for another."""
    exchange = settings.of(ExchangeOptions).exchange
    if exchange == "flat":
        return ()
    return (Remark(f"the closed form assumes --exchange flat instead of --exchange {exchange}", True),)


def _used(form: ClosedForm, parts: int) -> Floats:
    """Which of the sums a form reads, as 1 and 0: a form is linear, so ask it about each alone."""
    return np.asarray(sum(form(np.eye(parts))), float)
