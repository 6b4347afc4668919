"""Stages of a pipeline that compute while others of their host wait, on hosts whose ranks slow each other."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from profile_factory import free_copies, layer_times, make_network, make_profile, model_times, ring_fit, summary

from calibrate.profile.profile import LayerTime
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Compute
from paradl_bench.strategies.nesting.catalog import planner_for
from predict.costs.cost_model import CostModel
from predict.evaluators.simulate import EVALUATOR
from predict.simulation.pipelines.host_sharing import busy_beside, ranks_beside
from predict.simulation.pipelines.pipeline_simulation import Computing, PipelineSimulation
from predict.simulation.prepared import price
from predict.workload import Configuration

NETWORK = make_network((64, 128, 128, 128, 32))
TOGETHER = 1.6


def model(*, together: float = TOGETHER, hosts: dict[int, float] | None = None) -> CostModel:
    times = layer_times(NETWORK, batches=(2, 4, 8), ranks_on_host=hosts or {1: 1.0, 2: together})
    profile = make_profile(
        NETWORK,
        layer_times=times,
        model_times=model_times(NETWORK, batches=(2, 4, 8), wu_s=0.0),
        communication=(ring_fit(), ring_fit("send_recv", alpha_s=1e-15, beta_s_per_byte=0.0)),
    )
    return CostModel(profile=profile, network=NETWORK)


def point(strategy: str, micro_batches: int) -> Configuration:
    settings = plan_settings(batch=8, micro_batches=micro_batches)
    return Configuration(strategy=parse_strategy(strategy), settings=settings)


def iteration_s(costs: CostModel, at: Configuration) -> float:
    return EVALUATOR.prepare(costs, at).timing().iteration_s


def test_stages_that_take_turns_take_what_one_rank_takes() -> None:
    # One micro-batch: no two stages ever compute at once, whatever the ranks together were measured to take.
    at = point("p2", 1)
    assert iteration_s(model(), at) == pytest.approx(iteration_s(model(together=1.0), at))
    assert any("stages that compute while others" in note for note in price(model(), at).remarks.notes())


@pytest.mark.parametrize("batch", [2, 8])
def test_host_sharing_is_measured_on_the_networks_own_micro_batch(batch: int) -> None:
    other = make_network((64, 32, 64), name="other")
    together = {2: 1.2, 8: 3.0}

    def measured(network: ModelGraph, at: int, factor: float) -> tuple[LayerTime, ...]:
        return layer_times(network, batches=(at,), ranks_on_host={1: 1.0, 2: factor})

    own = [time for at, factor in together.items() for time in measured(NETWORK, at, factor)]
    alien = [time for time in measured(other, batch, 2.0) if time.operation not in {own.operation for own in own}]
    communication = (ring_fit(), ring_fit("send_recv", alpha_s=1e-15, beta_s_per_byte=0.0))
    whole = model_times(NETWORK, batches=(2, 8), wu_s=0.0)
    profile = make_profile(
        NETWORK, layer_times=(*own, *alien), model_times=whole, communication=communication, copies=free_copies()
    )
    at = Configuration(strategy=parse_strategy("p2"), settings=plan_settings(batch=batch, micro_batches=1))
    found = iteration_s(CostModel(profile=profile, network=NETWORK), at)
    assert alien
    assert found == pytest.approx(iteration_s(model(together=1.0), at))


def test_stages_that_overlap_in_part_lie_between_alone_and_together() -> None:
    at = point("p2", 4)
    alone, found = iteration_s(model(together=1.0), at), iteration_s(model(), at)
    # Where one rank was not measured, all seconds are those of two at once.
    together = iteration_s(model(hosts={2: TOGETHER}), at)
    assert together == pytest.approx(TOGETHER * alone)
    assert alone * 1.02 < found < together * 0.98


def test_seconds_follow_the_share_in_which_other_ranks_compute() -> None:
    costs, at = model(), point("p2", 4)
    priced = price(costs, at)
    whole = costs.price(priced.plan).costs.seconds
    computes = np.array([not is_message for is_message in priced.costs.is_communication]) & (whole > 0)
    share = priced.costs.seconds[computes] / whole[computes]
    assert np.all(share <= 1 + 1e-12)
    assert np.all(share >= 1 / TOGETHER - 1e-12)
    assert priced.costs.seconds[priced.costs.is_communication] == pytest.approx(whole[priced.costs.is_communication])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb"])
@pytest.mark.parametrize("together", [1.2, TOGETHER, 4.0])
def test_seconds_and_shares_follow_from_each_other(together: float, schedule: str) -> None:
    costs, asked = model(together=together), parse_strategy("p2")
    settings = plan_settings(batch=8, micro_batches=4, schedule=schedule)
    priced = price(costs, Configuration(strategy=asked, settings=settings))
    plan, seconds = priced.plan, priced.costs.seconds
    ones = np.ones(len(plan.works))
    computing = [line.computing(seconds, ones, ones) for line in PipelineSimulation(plan, ones).lines]
    busy = busy_beside(plan, computing, ranks_beside(plan, 2))
    whole = costs.price(plan).costs.seconds
    computes = ~priced.costs.is_communication & (whole > 0)
    expected = whole * (1 - (1 - 1 / together) * (1 - busy))
    assert seconds[computes] == pytest.approx(expected[computes], rel=4e-3)


def test_data_parallelism_has_all_ranks_compute_at_once() -> None:
    at = point("d2", 1)
    assert iteration_s(model(), at) > 1.3 * iteration_s(model(together=1.0), at)


@pytest.mark.parametrize(
    ("strategy", "on_host", "expected"),
    [
        ("p2", 2, [[0, 1], [1, 0]]),
        ("p4", 2, [[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]]),
        ("d2p2", 4, [[1, 2], [2, 1]]),
        ("p2d2", 2, [[1, 0], [0, 1]]),
    ],
)
def test_ranks_fill_hosts_in_order(strategy: str, on_host: int, expected: list[list[int]]) -> None:
    asked = parse_strategy(strategy)
    plan = planner_for(asked).plan(NETWORK, asked, plan_settings(batch=8, micro_batches=2))
    assert ranks_beside(plan, on_host).tolist() == expected


def test_the_busy_share_equals_one_counted_in_small_steps() -> None:
    asked = parse_strategy("p2")
    plan = planner_for(asked).plan(NETWORK, asked, plan_settings(batch=8, micro_batches=2))
    random = np.random.default_rng(3)
    starts, ends = [], []
    for _ in range(2):
        edges = np.cumsum(random.uniform(0.05, 1.0, 12))
        starts.append(edges[::2])
        ends.append(edges[1::2])
    found = Computing(
        stage=np.repeat(np.arange(2, dtype=np.int32), 6),
        start_s=np.concatenate(starts),
        end_s=np.concatenate(ends),
        task_work=np.arange(12, dtype=np.int32),
        task_segment=np.arange(12, dtype=np.int32),
    )
    shares = busy_beside(plan, [found], np.array([[0.0, 1.0], [1.0, 0.0]]))
    for segment in range(12):
        other = 1 - int(found.stage[segment])
        clock = np.linspace(found.start_s[segment], found.end_s[segment], 20_001)
        beside = np.zeros(len(clock), bool)
        for start, end in zip(starts[other], ends[other], strict=True):
            beside |= (clock >= start) & (clock < end)
        assert shares[segment] == pytest.approx(beside.mean(), abs=1e-3)


def test_parts_of_backward_are_faster_alone_as_backward_is() -> None:
    # Forward takes as long beside another rank as alone, backward 1.6 times as long.
    times = tuple(
        msgspec.structs.replace(time, time=summary(time.time.median_s * TOGETHER))
        if (time.ranks_on_host, time.phase) == (2, "BW")
        else time
        for time in layer_times(NETWORK, batches=(2, 4, 8))
    )
    communication = (ring_fit(), ring_fit("send_recv"))
    costs = CostModel(profile=make_profile(NETWORK, layer_times=times, communication=communication), network=NETWORK)
    asked = parse_strategy("p2")
    plan = planner_for(asked).plan(NETWORK, asked, plan_settings(batch=8, micro_batches=2, schedule="zb"))
    found = costs.alone_on_host(plan, costs.place(asked, 4))
    assert found is not None
    ratio_of = {
        work.phase: ratio for work, ratio in zip(plan.works, found[0], strict=True) if isinstance(work, Compute)
    }
    assert ratio_of == pytest.approx(
        {"FW": 1.0, "BW": 1 / TOGETHER, "BW_input": 1 / TOGETHER, "BW_weight": 1 / TOGETHER}
    )
