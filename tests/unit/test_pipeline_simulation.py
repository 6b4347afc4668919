"""Simulated pipelines against ParaDL's closed form, and against times known by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paradl_bench.schedules.catalog import schedule_of, schedules
from paradl_bench.spec.network import Layer, Network, Tensor
from paradl_bench.spec.plan import Between, Compute, Plan, PlanSettings, Transfer, WeightUpdate
from paradl_bench.spec.strategy import parse_strategy
from paradl_bench.strategies.catalog import planner_for
from predict.pipeline_closed_form import PipelineClosedForm
from predict.pipeline_simulation import PipelineSimulation


def chain(layers: int) -> Network:
    """Layers of one parameter and equal FLOPs, one after the other, and the loss."""
    names = ["input", *(f"fc{i}" for i in range(layers))]
    made = [
        Layer(
            name=name,
            kind="linear",
            inputs=(before,),
            input_shapes=((8,),),
            output_shape=(8,),
            parameters=(f"{name}.weight",),
            fw_flops=128,
            bw_input_flops=128,
            bw_weight_flops=128,
        )
        for before, name in itertools.pairwise(names)
    ]
    made.append(Layer(name="loss.cross_entropy", kind="loss", inputs=(names[-1],), input_shapes=((8,),)))
    parameters = tuple(Tensor(name=f"{name}.weight", shape=(8, 8)) for name in names[1:])
    return Network(name="chain", input_shape=(8,), layers=tuple(made), parameters=parameters)


def plan_of(text: str, micro_batches: int, schedule: str = "gpipe") -> Plan:
    strategy = parse_strategy(text)
    stages = schedule_of(schedule).stages(strategy.ranks)
    settings = PlanSettings(batch=micro_batches, micro_batches=micro_batches, schedule=schedule)
    return planner_for(strategy).plan(chain(stages), strategy, settings)


def seconds_of(plan: Plan, stage_s: float, transfer_s: float, update_s: float = 0.0) -> np.ndarray:
    """Each stage's forward and its backward take so long; the loss and what is between operations take nothing."""

    def of(work: object) -> float:
        if isinstance(work, Compute):
            return 0.0 if work.layer.startswith("loss.") else stage_s
        if isinstance(work, Transfer):
            return transfer_s if work.direction == "send" else 0.0
        if isinstance(work, WeightUpdate):
            return update_s
        assert isinstance(work, Between)
        return 0.0

    return np.array([of(work) for work in plan.works])


def simulated(plan: Plan, seconds: np.ndarray, *, overlapped: bool = True) -> float:
    ones = np.ones(len(plan.works))
    return PipelineSimulation(plan, ones, overlapped=overlapped).iteration_s(seconds, ones, ones)


def test_the_example_in_lock_step_and_with_transfers_beside_compute() -> None:
    plan = plan_of("p4", 8)
    seconds = seconds_of(plan, 1.0, 0.2)
    assert PipelineClosedForm(plan)(seconds).iteration_s == pytest.approx(26.0)
    assert simulated(plan, seconds, overlapped=False) == pytest.approx(26.0)
    assert simulated(plan, seconds) == pytest.approx(23.2)


@given(
    p=st.integers(2, 5),
    s=st.integers(1, 9),
    stage_s=st.floats(0.1, 10),
    transfer_s=st.floats(0, 5),
    update_s=st.floats(0, 1),
)
def test_it_is_paradls_closed_form_under_its_assumptions(
    p: int, s: int, stage_s: float, transfer_s: float, update_s: float
) -> None:
    plan = plan_of(f"p{p}", s)
    seconds = seconds_of(plan, stage_s, transfer_s, update_s)
    closed = PipelineClosedForm(plan)(seconds)
    assert closed.iteration_s == pytest.approx((p + s - 1) * 2 * stage_s + 2 * (p + s - 2) * transfer_s + update_s)
    assert closed.iteration_s == pytest.approx(simulated(plan, seconds, overlapped=False))


def test_lock_step_is_never_faster_than_stages_that_differ() -> None:
    """The largest stage sets the pace of all: with unequal stages the closed form is an upper bound."""
    plan = plan_of("p3", 4)
    slow = np.array([isinstance(work, Compute) and work.layer == "fc1" for work in plan.works])
    seconds = np.where(slow, 3.0, seconds_of(plan, 1.0, 0.2))
    assert simulated(plan, seconds, overlapped=False) < PipelineClosedForm(plan)(seconds).iteration_s


@pytest.mark.parametrize("schedule", schedules())
def test_overlap_never_costs_and_transfers_never_gain(schedule: str) -> None:
    plan = plan_of("p4", 8, schedule)
    free, overlapped, blocking = (
        simulated(plan, seconds_of(plan, 1.0, transfer_s), overlapped=beside)
        for transfer_s, beside in ((0.0, True), (0.2, True), (0.2, False))
    )
    assert free <= overlapped <= blocking


def test_free_transfers_leave_the_bubble_alone() -> None:
    """GPipe and 1F1B idle for (p - 1) micro-batches, interleaved over two stages a rank for half of that."""
    p, s = 4, 8
    for schedule, bubble in (("gpipe", p - 1), ("1f1b", p - 1), ("interleaved", (p - 1) / 2)):
        plan = plan_of(f"p{p}", s, schedule)
        stage_s = 1.0 / schedule_of(schedule).stages_per_rank
        assert simulated(plan, seconds_of(plan, stage_s, 0.0)) == pytest.approx(2 * (s + bubble))


def test_phases_and_idle_time_add_up() -> None:
    plan = plan_of("p2", 4)
    ones = np.ones(len(plan.works))
    timing = PipelineSimulation(plan, ones).timing(seconds_of(plan, 1.0, 0.5, 0.25), ones, ones)
    assert (timing.fw_s, timing.bw_s, timing.wu_s) == pytest.approx((4.0, 4.0, 0.25))
    # The first stage waits for the last micro-batch to go forth and back: two stages and two transfers.
    assert timing.idle_s == pytest.approx(3.0)
    assert timing.iteration_s == pytest.approx(11.25)


def test_lag_stretches_what_is_computed() -> None:
    plan = plan_of("p2", 4)
    ones = np.ones(len(plan.works))
    seconds = seconds_of(plan, 1.0, 0.0)
    assert PipelineSimulation(plan, 1.5 * ones).iteration_s(seconds, ones, ones) == pytest.approx(15.0)
