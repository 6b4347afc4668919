"""Ledgers of closed forms: each term of an equation, by layer or message, in the paper's letters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from paradl_bench.plan.strategy import Strategy
from paradl_bench.plan.tasks import Phase, Work
from predict.closed_forms.pipeline_closed_form import PipelineClosedForm
from predict.closed_forms.shared_closed_form import Term
from predict.costs.priced import PricedPlan
from predict.costs.sourced import Adjustment, Floats
from predict.costs.spread.assembly import Priced, assemble
from predict.ledger.ledger import LedgerEntry, PricedWorks, RoleLedger, most_exposed_first


def ledger_of_ranks(strategy: Strategy, entries: Iterable[LedgerEntry]) -> tuple[RoleLedger, ...]:
    """Of a closed form, for which all ranks are alike."""
    return (RoleLedger(role="rank", ranks=strategy.ranks, entries=most_exposed_first(entries)),)


def ledger_of_sums(
    strategy: Strategy, groups: Sequence[tuple[str, str, Sequence[tuple[Work, Priced]]]], common_relative_sd: float
) -> tuple[RoleLedger, ...]:
    """Of sums over works, one after the other: the phase of each, its term (without one it is not read), its works."""
    entries: list[LedgerEntry] = []
    for phase, term, group in groups:
        if not term:
            continue
        works, parts = [work for work, _ in group], [part for _, part in group]
        costs = assemble(parts, common_relative_sd)
        priced = PricedWorks(strategy=strategy, works=works, parts=parts, costs=costs)
        entries += [priced.entry(index, phase, part.occurrences, term=term) for index, part in enumerate(parts)]
    return ledger_of_ranks(strategy, entries)


def ledger_of_terms(priced: PricedPlan, terms: Sequence[Term], index_of: Mapping[Work, int]) -> tuple[RoleLedger, ...]:
    """Of a sum over works, each in a part or whole; ``index_of`` each work in the plan."""
    works, grouped = PricedWorks.of_plan(priced), dict[tuple[int, str, str], list[float]]()
    for term in terms:
        grouped.setdefault((index_of[term.work], term.phase, term.symbol), []).append(term.times)
    entries = []
    for (work, phase, symbol), times in grouped.items():
        share_s = sum(share - 1 for share in times) * float(priced.costs.seconds[work])
        shared = Adjustment("shared out over ranks", share_s)
        entries.append(works.entry(work, phase, len(times), changes=(shared,), term=symbol))
    return ledger_of_ranks(priced.plan.strategy, entries)


def ledger_of_lock_step(priced: PricedPlan, form: PipelineClosedForm) -> tuple[RoleLedger, ...]:
    """Of a pipeline in lock-step: what the largest stage of each phase does in all steps."""
    works, entries = PricedWorks.of_plan(priced), []
    for phase, term, counts in form.terms(priced.costs.seconds):
        for work in np.flatnonzero(counts).tolist():
            entries.append(works.entry(work, phase, float(counts[work]), term=term))
    return ledger_of_ranks(priced.plan.strategy, entries)


def entries_beside_backward(
    priced: PricedPlan, exchange_exposed_s: Floats, terms: Mapping[Phase, str]
) -> list[LedgerEntry]:
    """Entries of a plan whose exchanges go on beside backward: all is exposed but what backward hides of these."""
    (role,) = priced.plan.roles
    exposed = priced.costs.seconds[role.work]
    exposed[role.phase == Phase.GE] = exchange_exposed_s
    return PricedWorks.of_plan(priced).entries_of_tasks(role.work, role.phase, exposed, terms=terms)


def exposed_in_turn(ready_s: Floats, wait_s: Floats, exchange_s: Floats, backward_s: float) -> tuple[Floats, Floats]:
    """What is seen behind backward of each wait, and of each exchange behind it; both of shape (exchanges,).

    Args:
        ready_s: since the start of backward. wait_s: before each is sent. backward_s: all of backward.
    """
    # The exchanges that end last are those without a pause from one of them on.
    remaining = np.append(np.cumsum((wait_s + exchange_s)[::-1])[::-1], 0.0)
    waits, exchanges = np.zeros(len(ready_s)), np.zeros(len(ready_s))
    if not len(ready_s):
        return waits, exchanges
    first = int(np.argmax(ready_s + remaining[:-1]))
    end_s = float(ready_s[first] + remaining[first])
    begins, ends = end_s - remaining[first:-1], end_s - remaining[first + 1 :]
    sent = ends - exchange_s[first:]
    waits[first:] = np.maximum(sent, backward_s) - np.maximum(begins, backward_s)
    exchanges[first:] = np.maximum(ends, backward_s) - np.maximum(sent, backward_s)
    return waits, exchanges
