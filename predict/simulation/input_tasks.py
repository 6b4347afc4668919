"""The input of a simulated iteration: what it takes, how much of it is waited for."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from paradl_bench.plan.strategy import Strategy
from paradl_bench.plan.tasks import Phase, Plan
from paradl_bench.strategies.frameworks.presets import PRESETS
from paradl_bench.strategies.passes.input_tasks import readers_on_host
from predict.costs.cost_model import CostModel
from predict.costs.input.input_closed_form import InputWait
from predict.costs.input.input_terms import HostBatch, InputTerms, input_terms, refuse_unknown
from predict.costs.priced import PricedPlan
from predict.costs.sourced import Remark
from predict.costs.spread.assembly import join
from predict.simulation.simulator import Timeline
from predict.workload import Configuration

NO_WAIT = InputWait(0.0, 0.0)


def input_of(costs: CostModel, point: Configuration) -> InputTerms | None:
    """What reading and copying take, where that was measured or stated and takes any time."""
    terms = terms_of(costs, point.strategy, point.local_batch, ranks_on_host(costs, point))
    if not terms.known:
        refuse_unknown(costs.input_options)
        return None
    return terms if terms.costs.seconds.any() else None


def fed(priced: PricedPlan, plan: Plan, terms: InputTerms, preset: str, *, after_backward: bool = False) -> PricedPlan:
    """A plan with its input, priced: the costs of the plan without, then those of reading and copying.

    Args:
        after_backward: whether the plan exchanges gradients behind backward, as presets without overlap do.
    """
    priced.remarks.add(*terms.remarks)
    if not PRESETS[preset].wait_free and not after_backward:
        text = f"--preset {preset} applies to the input only: gradients are exchanged as the plan says"
        priced.remarks.add(Remark(text, False))
    return dataclasses.replace(
        priced,
        plan=plan,
        costs=join([priced.costs, terms.costs]),
        parts=[*priced.parts, *terms.parts],
        own_relative_sd=np.concatenate([priced.own_relative_sd, np.zeros(len(terms.works))]),
        batches_ahead_bytes=terms.ahead_bytes,
    )


def terms_of(costs: CostModel, strategy: Strategy, local_batch: int, ranks_on_host: int) -> InputTerms:
    """Seconds of a strategy's input, of a rank with so many samples, and what of it is done ahead."""
    batch = HostBatch(local_batch, readers_on_host(strategy, ranks_on_host))
    return input_terms(costs.profile, costs.network, costs.dtype, batch, costs.input_options)


def ahead_bytes(costs: CostModel, point: Configuration) -> int:
    """Bytes of the mini-batches that are copied to a device before the iteration that computes them."""
    return terms_of(costs, point.strategy, point.local_batch, ranks_on_host(costs, point)).ahead_bytes


def ranks_on_host(costs: CostModel, point: Configuration) -> int:
    """How many ranks of a point share a host."""
    return costs.place(point.strategy, point.local_batch).ranks_on_host


def waits_for_input(
    line: Timeline, phase: NDArray[np.integer], fetching: NDArray[np.bool_], reads: NDArray[np.bool_]
) -> tuple[float, InputWait]:
    """When computing begins, and what an iteration waits for input before that and at the end.

    Args:
        fetching: per task, whether it is of the input. reads: whether it is on a rank that reads it.
    """
    if not fetching.any():
        return 0.0, NO_WAIT
    begin_s, end_s = float(line.start_s[~fetching & reads].min()), float(line.end_s[~fetching].max())
    copying = phase == Phase.H2D
    starts, ends = line.start_s[copying], line.end_s[copying]
    copied_s = float(np.sum(np.minimum(ends, begin_s) - np.minimum(starts, begin_s)))
    copied_s += float(np.sum(np.maximum(ends, end_s) - np.maximum(starts, end_s)))
    return begin_s, InputWait(begin_s + max(line.iteration_s - end_s, 0.0), copied_s)
