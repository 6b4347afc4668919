"""Timelines in which one rank computes slower: it ends when the prediction does, and the others wait for it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from network_factory import NetworkFactory
from profile_factory import free_copies, make_network, make_profile, model_times, ring_fit, with_compute

from calibrate.profile.profile import write_profile
from paradl_bench.core.errors import UserError
from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import BucketCopy, Stream
from paradl_bench.records.slow_rank import SlowRank
from paradl_bench.strategies.data.fusion.rules import Fusion
from predict.cli import group
from predict.costs.cost_model import CostModel
from predict.simulation.exposure import StreamTimes
from predict.simulation.prepared import price
from predict.timeline.slow_timeline import collectives_of, comes_late, waiting_times
from predict.timeline.timeline import IterationTimeline, timeline_of
from predict.timeline.timeline_run import PredictedTimeline, predict_timeline
from predict.workload import Configuration

CHAIN = make_network((64, 128, 256, 32))
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "send_recv", "broadcast")
PROFILE = make_profile(
    CHAIN,
    model_times=model_times(CHAIN, quantiles=tuple(0.9 + 0.02 * i for i in range(11)), samples=1000),
    communication=tuple(ring_fit(operation, alpha_s=2e-4) for operation in OPERATIONS),
    contexts=(with_compute(1.3, 1.6),),
    copies=free_copies(beta_s_per_byte=1e-9),
)


def point(text: str, **changes: object) -> Configuration:
    small = {"batch": 16, "first_bucket_bytes": 20_000, "bucket_cap_bytes": 50_000}
    settings = plan_settings(**(small | changes))  # type: ignore[arg-type]
    return Configuration(strategy=parse_strategy(text), settings=settings)


def shown(text: str, slow: SlowRank | None, *, fusion: Fusion | None = None, **changes: object) -> PredictedTimeline:
    model = CostModel(profile=PROFILE, network=CHAIN, slow_rank=slow, fusion=fusion)
    return predict_timeline(model, point(text, **changes))


@pytest.mark.parametrize("text", ["serial", "d4", "z2d4", "z3d4", "f4", "c4", "p2", "p3"])
@pytest.mark.parametrize("factor", [1.03, 1.7])
def test_the_slow_rank_ends_when_the_prediction_does(text: str, factor: float) -> None:
    rank = parse_strategy(text).ranks - 1
    parts = {"micro_batches": 4} if "p" in text else {}
    timeline, prediction = shown(text, SlowRank(factor=factor, rank=rank), **parts)
    assert timeline.iteration_s == pytest.approx(prediction.iteration_s, rel=1e-9)
    assert prediction.iteration_s > shown(text, None, **parts).prediction.iteration_s
    assert [role.rank for role in timeline.roles].count(rank) == 1
    assert sum(role.ranks for role in timeline.roles) == prediction.ranks


@pytest.mark.parametrize("text", ["d4", "z3d4", "f4"])
def test_the_others_compute_at_their_pace_and_wait_in_collectives(text: str) -> None:
    timeline, _ = shown(text, SlowRank(factor=1.7, rank=2))
    slow, others = timeline.roles
    assert (slow.rank, others.apart, others.ranks) == (2, 2, 3)
    met = collectives_of(timeline.plan, slow.of_plan)
    assert len(met)
    assert others.start_s[met] == pytest.approx(slow.start_s[met])
    assert others.end_s[met] == pytest.approx(slow.end_s[met])
    # Nobody comes to a collective after it began, and nothing ends behind the slow rank's.
    role, waits = others.of_plan, 0.0
    for task in met.tolist():
        blocking = role.dependencies[role.dependency_start[task] : role.dependency_start[task + 1]]
        ready_s = float(others.end_s[blocking].max(initial=0.0))
        assert ready_s <= others.start_s[task] + 1e-12
        waits = max(waits, others.start_s[task] - ready_s)
    assert waits > 0
    assert np.all(others.end_s <= slow.end_s + 1e-12)
    computing = role.stream == Stream.COMPUTE
    alone = timeline.priced.costs.seconds[role.work]
    lasted = others.end_s - others.start_s
    # Beside collectives by 1.3 times longer at most.
    assert np.all(lasted[computing] >= alone[computing] * (1 - 1e-9) - 1e-12)
    assert np.all(lasted[computing] <= 1.3 * alone[computing] * (1 + 1e-9) + 1e-12)


@pytest.mark.parametrize("text", ["d4", "z2d4", "z3d4", "f4"])
def test_beside_a_rank_that_is_not_slow_nothing_changes(text: str) -> None:
    """The simulator itself says when tasks run; told of its collectives, the others' tasks end when its do."""
    still = make_profile(
        CHAIN,
        communication=tuple(ring_fit(operation, alpha_s=2e-4) for operation in OPERATIONS),
        contexts=(with_compute(1.3, 1.6),),
        copies=free_copies(beta_s_per_byte=1e-9),
    )
    asked = point(text)
    priced = price(CostModel(profile=still, network=CHAIN), asked)
    (role,) = timeline_of(priced, "gpipe").roles
    assert role.use(role.finish_s).overlap_s > 0 or text == "f4"
    met, work = collectives_of(priced.plan, role.of_plan), role.of_plan.work
    windows = StreamTimes(role.start_s[met], role.end_s[met])
    found = waiting_times(
        priced.plan, role.of_plan, priced.costs.seconds[work], priced.costs.compute_slowdown[work], windows
    )
    np.testing.assert_allclose(found.start_s, role.start_s, rtol=0, atol=1e-12)
    np.testing.assert_allclose(found.end_s, role.end_s, rtol=0, atol=1e-12)


def test_a_slow_rank_copies_slowly_on_the_communication_stream_too() -> None:
    timeline, _ = shown("d2", SlowRank(factor=2.0), fusion=Fusion(rule="ada"))
    slow, others = timeline.roles
    copies = [
        task
        for task, work in enumerate(slow.of_plan.work.tolist())
        if isinstance(timeline.plan.works[work], BucketCopy) and slow.of_plan.stream[task] == Stream.COMMUNICATION
    ]
    assert copies
    lasted = [role.end_s[copies] - role.start_s[copies] for role in (slow, others)]
    assert lasted[0] == pytest.approx(2 * lasted[1])


def test_ranks_with_larger_blocks_than_the_slow_keep_their_pace() -> None:
    """The outer blocks of an image have one neighbour, the inner ones two, and more rows to compute."""
    factory = NetworkFactory(4, 24, 4)
    for index in range(3):
        factory.conv(f"conv{index}", 8)
    factory.flatten("flatten")
    factory.linear("fc", 6)
    factory.loss()
    network = factory.network("tall")
    profile = make_profile(network, communication=tuple(ring_fit(operation) for operation in OPERATIONS))

    def timeline(slow: SlowRank | None) -> IterationTimeline:
        model = CostModel(profile=profile, network=network, slow_rank=slow)
        return predict_timeline(model, point("s4", batch=4)).timeline

    plain, little, much = (timeline(slow) for slow in (None, SlowRank(factor=1.001), SlowRank(factor=3.0)))
    outer, inner = plain.roles
    assert outer.ranks == inner.ranks == 2
    for found in (little, much):
        assert [(role.role, role.ranks) for role in found.roles] == [(outer.role, 1), (outer.role, 1), (inner.role, 2)]
        for role in found.roles:
            met = collectives_of(found.plan, role.of_plan)
            starts = role.start_s[met]
            assert not comes_late(found.plan, role.of_plan, StreamTimes(role.start_s, role.end_s))
            assert np.all(np.diff(starts) >= 0)
    # Two messages take longer than one.
    assert inner.finish_s > little.roles[0].finish_s
    assert little.roles[2].end_s == pytest.approx(inner.end_s)
    assert little.iteration_s == pytest.approx(inner.finish_s)
    assert much.roles[2].finish_s > inner.finish_s
    assert much.iteration_s == much.roles[0].finish_s


@pytest.mark.parametrize("text", ["d2f2", "d2p2", "p2f2"])
def test_nested_strategies_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=rf"as d4, f4 or p4, not {text}, whose groups meet rank 1 in different"):
        shown(text, SlowRank(factor=2.0, rank=1))
    # A factor of 1 slows nobody.
    assert shown(text, SlowRank(factor=1.0, rank=1)).timeline.roles[0].rank is None


@pytest.mark.parametrize(("every", "processes"), [("roles", [0, 3]), ("all", [0, 1, 2, 3])])
def test_the_command_draws_the_slow_rank_and_those_that_wait(tmp_path: Path, every: str, processes: list[int]) -> None:
    path, trace = tmp_path / "p.json", tmp_path / "trace.json"
    write_profile(path, PROFILE)
    asked = ["timeline", "--from-profile", str(path), "--model", "chain", "--batch", "16", "--strategy", "d4"]
    asked += ["--slow-rank", "1.5@3", "-o", str(trace), "--ranks-shown", every]
    result = CliRunner().invoke(group, [*asked, "--why"])
    assert result.exit_code == 0, result.output
    assert "slow rank 3" in result.output
    assert "rank 3 computes 1.5 times as long as measured (--slow-rank)" in result.output
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name"}
    assert sorted(names) == processes
    assert ", slow" in names[3]
    assert ("stands for 3 ranks" in names[0]) == (every == "roles")
    wrong = CliRunner().invoke(group, [*asked[:-4], "--slow-rank", "1.5@4"])
    assert "d4 has ranks 0 to 3" in str(wrong.exception)
