"""Simulated pipelines against ParaDL's closed form, and against times known by hand."""

from __future__ import annotations

import gc
import itertools
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paradl_bench.network.graph import Layer, ModelGraph, Tensor
from paradl_bench.plan.schedules.catalog import schedule_of, schedules
from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import BucketCopy, Compute, FrameworkOverhead, Plan, Transfer, WeightUpdate
from paradl_bench.strategies.nesting.catalog import planner_for
from predict.closed_forms.pipeline_closed_form import PipelineClosedForm
from predict.simulation.pipelines.pipeline_simulation import PipelineSimulation


def chain(layers: int) -> ModelGraph:
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
    return ModelGraph(name="chain", input_shape=(8,), layers=tuple(made), parameters=parameters)


def plan_of(text: str, micro_batches: int, schedule: str = "gpipe") -> Plan:
    strategy = parse_strategy(text)
    stages = schedule_of(schedule).placement.stages(strategy.ranks)
    settings = plan_settings(batch=micro_batches, micro_batches=micro_batches, schedule=schedule)
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
        assert isinstance(work, FrameworkOverhead | BucketCopy)
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
        stage_s = 1.0 / schedule_of(schedule).placement.stages_per_rank
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


@pytest.mark.parametrize("schedule", schedules())
def test_alike_segments_take_what_their_tasks_do(schedule: str) -> None:
    plan = plan_of("p2", 8, schedule)
    generator, ones = np.random.default_rng(0), np.ones(len(plan.works))
    seconds, straggler = generator.random((2, len(plan.works)))
    (line,) = PipelineSimulation(plan, 1 + straggler).lines
    of_tasks = line.run(seconds, ones, ones, added_s=np.zeros(len(line.tasks.work)))
    assert line.run(seconds, ones, ones).end_s.tolist() == of_tasks.end_s.tolist()


def test_a_plan_and_its_lines_are_freed_without_the_collector() -> None:
    """A search predicts plans of gigabytes one after the other: held in a circle, all would lie in memory."""
    gc.collect()
    gc.disable()
    try:
        plan = plan_of("p2", 4)
        ones = np.ones(len(plan.works))
        simulation = PipelineSimulation(plan, ones)
        simulation.lines[0].stretch_stages([1.0, 2.0], copies=True)
        simulation.timing(seconds_of(plan, 1.0, 0.0), ones, ones)
        tasks = weakref.ref(simulation.lines[0].tasks)
        del plan, simulation
        assert tasks() is None
    finally:
        gc.enable()


def listed(schedule: str, ranks: int, count: int, costs: dict[str, float], transfer_s: float) -> float:
    """When the last action of a schedule ends: actions placed one by one, each at the first time that it can start."""
    queues = [list(schedule_of(schedule).order(rank, ranks, count)) for rank in range(ranks)]
    free = [0.0] * ranks
    sent: dict[tuple[str, int, int], float] = {}
    of_step: list[list[tuple[str, int, int]]] = [[] for _ in range(ranks)]
    while any(queues):
        for rank, (queue, messages) in enumerate(zip(queues, of_step, strict=True)):
            while queue:
                action = queue[0]
                near = schedule_of(schedule).neighbours(action, ranks)
                message = action.way, near.source, action.micro_batch
                if near.source is not None and message not in sent:
                    break
                # The first stage runs all of backward where the weights' turn comes.
                seconds = costs[action.direction]
                if action.stage == 0 and action.direction != "FW":
                    seconds = 0.0 if action.direction == "BW_input" else costs["BW_input"] + costs["BW_weight"]
                free[rank] = max(free[rank], sent.get(message, 0.0)) + seconds
                if near.target is not None:
                    messages.append((action.way, action.stage, action.micro_batch))
                queue.pop(0)
                if not (queue and queue[0].joins):
                    # One behind the other.
                    arrive = (free[rank] + place * transfer_s for place in itertools.count(1))
                    sent |= dict(zip(messages, arrive, strict=False))
                    messages.clear()
    return max(free)


def seconds_of_parts(plan: Plan, costs: dict[str, float], transfer_s: float) -> np.ndarray:
    def of(work: object) -> float:
        if isinstance(work, Compute) and not work.layer.startswith("loss."):
            return costs[work.phase]
        return transfer_s if isinstance(work, Transfer) and work.direction == "send" else 0.0

    return np.array([of(work) for work in plan.works])


@given(
    schedule=st.sampled_from(("zb", "zbv", "dualpipev")),
    p=st.integers(2, 6),
    rounds=st.integers(1, 4),
    forward_s=st.floats(0.1, 3),
    input_s=st.floats(0.1, 3),
    weight_s=st.floats(0.1, 3),
    transfer_s=st.floats(0, 0.05),
)
def test_zero_bubble_equals_its_actions_placed_one_by_one(
    schedule: str, p: int, rounds: int, forward_s: float, input_s: float, weight_s: float, transfer_s: float
) -> None:
    """Messages are shorter than any action, so that none waits for the one before it."""
    costs = {"FW": forward_s, "BW_input": input_s, "BW_weight": weight_s, "BW": input_s + weight_s}
    count = p * (rounds + 1)
    plan = plan_of(f"p{p}", count, schedule)
    found = simulated(plan, seconds_of_parts(plan, costs, transfer_s))
    assert found == pytest.approx(listed(schedule, p, count, costs, transfer_s))


@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [2, 3])
def test_the_bubbles_are_the_papers(p: int, rounds: int) -> None:
    """Qi et al., Table 2: (p - 1)(F + I + W) under 1F1B, (p - 1)(F + I - W) under ZB-H1, of equal F, I and W."""
    costs = {"FW": 1.0, "BW_input": 1.0, "BW_weight": 1.0, "BW": 2.0}
    for schedule, bubble in (("1f1b", 3.0 * (p - 1)), ("zb", 1.0 * (p - 1))):
        plan = plan_of(f"p{p}", p * rounds, schedule)
        found = simulated(plan, seconds_of_parts(plan, costs, 0.0))
        assert found == pytest.approx(3.0 * p * rounds + bubble)


@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [2, 3])
def test_zero_bubble_v_idles_until_the_last_rank_begins(p: int, rounds: int) -> None:
    """Qi et al. 2023, section 6: ranks idle only before their first action, the last p - 1 forwards."""
    costs = {"FW": 1.0, "BW_input": 1.0, "BW_weight": 1.0, "BW": 2.0}
    plan = plan_of(f"p{p}", p * rounds, "zbv")
    assert simulated(plan, seconds_of_parts(plan, costs, 0.0)) == pytest.approx(6.0 * p * rounds + p - 1)


def test_the_first_stage_runs_backward_whole_at_its_weights_turn() -> None:
    plan = plan_of("p2", 2, "zb")
    first, second = (
        {work.phase for work in (plan.works[i] for i in set(role.work.tolist())) if isinstance(work, Compute)}
        for role in plan.roles
    )
    assert first == {"FW", "BW"}
    # The loss has no parameters to part it by.
    assert second == {"FW", "BW", "BW_input", "BW_weight"}
