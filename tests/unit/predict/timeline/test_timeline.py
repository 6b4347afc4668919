"""Timelines of single tasks against the prediction that they are the inside of, and against pipelines known by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from network_factory import NetworkFactory
from profile_factory import free_copies, make_network, make_profile, model_times, ring_fit, with_compute

from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.schedules.catalog import schedule_of, schedules
from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Collective, Compute, Stream, Work
from paradl_bench.strategies.data.fusion.rules import Fusion
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.pipeline.axis import PipelineOptions
from predict.costs.cost_model import CostModel
from predict.simulation.exposure import StreamTimes
from predict.simulation.prepared import price
from predict.timeline.timeline import IterationTimeline, place_actions, timeline_of
from predict.timeline.timeline_picture import draw
from predict.timeline.timeline_report import summarise
from predict.timeline.timeline_run import PredictedTimeline, predict_timeline
from predict.timeline.timeline_use import exposed_until, use_of
from predict.workload import Configuration

SHARED = ["f2", "c2", "s2", "s2x2", "d2f2", "d2s2", "d2c2"]
PIPELINED = [("p2", "gpipe"), ("p2", "1f1b"), ("p2", "interleaved"), ("d2p2", "gpipe"), ("p2d2", "1f1b")]
PIPELINED += [("p2", "zb"), ("d2p2", "zb"), ("p2f2", "gpipe"), ("d2p2s2", "1f1b"), ("f2p2", "interleaved")]
STRATEGIES = [(strategy, "gpipe") for strategy in ["serial", "d2", "d4", "z2d2", "z3d2", *SHARED]] + PIPELINED


def convolutional() -> ModelGraph:
    """4x16x16 -> five convolutions -> pool 2 -> flatten -> fc 6."""
    factory = NetworkFactory(4, 16, 16)
    for index in range(5):
        factory.conv(f"conv{index}", 8)
        factory.relu(f"relu{index}")
    factory.pool("pool", 2)
    factory.flatten("flatten")
    factory.linear("fc", 6)
    factory.loss()
    return factory.network("convolutional")


NETWORK = convolutional()
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "send_recv", "broadcast")
PROFILE = make_profile(
    NETWORK,
    communication=tuple(ring_fit(operation, alpha_s=2e-3) for operation in OPERATIONS),
    contexts=(with_compute(1.3, 1.6),),
    copies=free_copies(beta_s_per_byte=1e-9),
)


def predicted(
    strategy: str, schedule: str = "gpipe", *, model: CostModel | None = None, **changes: object
) -> PredictedTimeline:
    settings = {"batch": 16, "schedule": schedule, "first_bucket_bytes": 1000, "bucket_cap_bytes": 3000, **changes}
    point = Configuration(strategy=parse_strategy(strategy), settings=plan_settings(**settings))  # type: ignore[arg-type]
    return predict_timeline(model or CostModel(profile=PROFILE, network=NETWORK), point)


@pytest.mark.parametrize(("strategy", "schedule"), STRATEGIES)
def test_single_tasks_end_with_the_prediction_and_never_overlap(strategy: str, schedule: str) -> None:
    timeline, prediction = predicted(strategy, schedule)
    assert timeline.iteration_s == pytest.approx(prediction.iteration_s, rel=1e-9)
    assert sorted(role.role for role in timeline.roles) == list(range(len(timeline.plan.roles)))
    for role in timeline.roles:
        assert len(role.start_s) == role.of_plan.tasks
        for stream in Stream:
            times = role.on(stream)
            assert np.all(times.end_s >= times.start_s)
            assert np.all(times.start_s[1:] >= times.end_s[:-1] - 1e-15)


@pytest.mark.parametrize(
    ("strategy", "changes"),
    [
        ("f3", {}),
        ("s3", {}),
        ("s3x2", {}),
        ("d4", {"exchange": "leader", "ranks_per_node": 2}),
        ("d8", {"exchange": "leaders:2", "ranks_per_node": 4}),
    ],
)
def test_roles_that_differ_come_to_their_collectives_together(strategy: str, changes: dict[str, object]) -> None:
    timeline, prediction = predicted(strategy, **changes)
    assert len(timeline.roles) > 1
    assert timeline.iteration_s == pytest.approx(prediction.iteration_s, rel=1e-9)
    met: dict[tuple[str, str, int], list[float]] = {}
    for role in timeline.roles:
        times: dict[tuple[str, str], list[float]] = {}
        for task, index in enumerate(role.of_plan.work.tolist()):
            work = timeline.plan.works[index]
            # Each leader is in a group of its own between nodes.
            if isinstance(work, Collective) and work.scope != "between nodes":
                times.setdefault((work.operation, work.scope), []).append(float(role.start_s[task]))
        for kind, starts in times.items():
            for place, start_s in enumerate(starts):
                met.setdefault((*kind, place), []).append(start_s)
    assert {len(starts) for starts in met.values()} == {len(timeline.roles)}
    assert all(starts == pytest.approx([starts[0]] * len(starts), rel=1e-9) for starts in met.values())


@pytest.mark.parametrize(("strategy", "schedule"), STRATEGIES)
def test_no_task_starts_before_what_it_waits_for(strategy: str, schedule: str) -> None:
    timeline, _ = predicted(strategy, schedule)
    for role in timeline.roles:
        waiting = np.repeat(np.arange(role.of_plan.tasks), np.diff(role.of_plan.dependency_start))
        assert np.all(role.start_s[waiting] >= role.end_s[role.of_plan.dependencies] - 1e-12)
    for line in timeline.lines:
        for (sender, send), (receiver, receive) in line.messages:
            assert line.roles[receiver].start_s[receive] >= line.roles[sender].end_s[send] - 1e-12


@pytest.mark.parametrize(("strategy", "schedule"), STRATEGIES)
def test_use_of_the_slowest_role_is_the_predictions(strategy: str, schedule: str) -> None:
    timeline, prediction = predicted(strategy, schedule)
    slowest = max(timeline.roles, key=lambda role: role.finish_s).use(timeline.iteration_s)
    assert slowest.overlap_s == pytest.approx(prediction.time.overlap_s, abs=1e-12)
    assert slowest.exposed_communication_s == pytest.approx(
        prediction.time.breakdown_s["exposed_communication"], abs=1e-12
    )
    for role in summarise(timeline, prediction, None).roles:
        assert role.compute_s + role.exposed_communication_s + role.idle_s == pytest.approx(timeline.iteration_s)


SPREAD = make_profile(
    NETWORK,
    model_times=model_times(NETWORK, quantiles=(0.8, 0.95, 1.0, 1.1, 1.4), samples=1000),
    communication=PROFILE.communication,
    contexts=PROFILE.contexts,
    copies=PROFILE.copies,
)


@pytest.mark.parametrize(
    ("strategy", "changes"),
    [
        ("d4", {}),
        ("d2f2", {}),
        ("d2", {"accumulate": 4}),
        ("z3d2", {"accumulate": 2}),
        ("d2f2", {"recompute": ("conv1", "conv3")}),
        ("d2", {"accumulate": 2, "recompute": ("conv1", "conv3")}),
        ("p2", {"schedule": "zb", "micro_batches": 4}),
        ("d2p2", {"schedule": "zb", "micro_batches": 4}),
        ("d2", {"fusion": Fusion(rule="buffer", buffer_bytes=2500, timeout_s=1e-4)}),
        ("d2", {"fusion": Fusion(rule="none")}),
    ],
)
def test_single_tasks_of_late_ranks_end_when_the_prediction_does(strategy: str, changes: dict[str, object]) -> None:
    fusion = changes.get("fusion")
    settings = {name: value for name, value in changes.items() if name != "fusion"}
    model = CostModel(profile=SPREAD, network=NETWORK, fusion=fusion)  # type: ignore[arg-type]
    timeline, prediction = predicted(strategy, model=model, **settings)
    assert prediction.time.straggler > 1.01
    assert timeline.iteration_s == pytest.approx(prediction.iteration_s, rel=1e-9)


def test_something_overlaps_where_buckets_are_small() -> None:
    """Otherwise the tests above would compare nothing with nothing."""
    timeline, _ = predicted("d2")
    (role,) = timeline.roles
    use = role.use(timeline.iteration_s)
    assert use.overlap_s > 0
    assert use.exposed_communication_s > 0
    lasted = role.end_s - role.start_s
    alone = timeline.priced.costs.seconds[role.of_plan.work]
    assert np.any(lasted > 1.2 * alone)


def test_use_of_streams_known_by_hand() -> None:
    compute = StreamTimes(np.array([0.0, 3.0]), np.array([2.0, 4.0]))
    communication = StreamTimes(np.array([1.0, 5.0]), np.array([3.5, 6.0]))
    use = use_of(compute, communication, 8.0)
    assert (use.compute_s, use.communication_s, use.overlap_s) == pytest.approx((3.0, 3.5, 1.5))
    assert (use.exposed_communication_s, use.idle_s) == pytest.approx((2.0, 3.0))
    assert (use.utilisation, use.bubble) == pytest.approx((3 / 8, 3 / 8))
    moments = np.array([0.0, 2.0, 2.5, 3.0, 5.5, 8.0])
    assert exposed_until(compute, communication, moments) == pytest.approx([0.0, 0.0, 0.5, 1.0, 1.5, 2.0])


@pytest.mark.parametrize("schedule", schedules())
@pytest.mark.parametrize("strategy", ["p2", "d2p2", "p2f2"])
def test_every_scheduled_action_holds_the_layers_of_its_stage(strategy: str, schedule: str) -> None:
    timeline, _ = predicted(strategy, schedule, micro_batches=4)
    for line in timeline.lines:
        for rank, role in enumerate(line.roles):
            assert role.actions is not None
            assert role.actions.actions == schedule_of(schedule).order(rank, 2, 4)
            of_stage: dict[tuple[str, int], set[tuple[int, ...]]] = {}
            for index, action in enumerate(role.actions.actions):
                computing = (role.actions.of_task == index) & (role.of_plan.stream == Stream.COMPUTE)
                works = [work for work in role.of_plan.work[computing] if hasattr(timeline.plan.works[work], "layer")]
                # The first stage runs all of backward where the weights' turn comes.
                whole = action.direction == "BW_weight" and not action.stage
                direction = "BW" if whole else action.direction
                of_stage.setdefault((direction, action.stage), set()).add(tuple(works))
            # Every micro-batch runs the same layers of a stage, and no two stages run the same.
            assert all(len(alike) == 1 for alike in of_stage.values())
            assert len({next(iter(alike)) for alike in of_stage.values()}) == len(of_stage)


def test_actions_of_another_schedule_are_refused() -> None:
    strategy = parse_strategy("p2")
    plan = planner_for(strategy).plan(NETWORK, strategy, plan_settings(batch=8, micro_batches=4, schedule="gpipe"))
    with pytest.raises(ValueError, match="not those of schedule '1f1b'"):
        place_actions(plan, plan.roles[0], 0, 2, "1f1b")


def with_seconds(strategy: str, seconds: Callable[[Work], float], **changes: object) -> IterationTimeline:
    """A chain of two linear layers, each work of which takes so long."""
    network = make_network((64, 64, 64))
    settings = {"batch": 12, "first_bucket_bytes": 1000, "bucket_cap_bytes": 1000, **changes}
    point = Configuration(strategy=parse_strategy(strategy), settings=plan_settings(**settings))  # type: ignore[arg-type]
    profile = make_profile(network, communication=tuple(map(ring_fit, OPERATIONS)))
    priced = price(CostModel(profile=profile, network=network), point)
    of_works = np.array([seconds(work) for work in priced.plan.works])
    costs = dataclasses.replace(priced.costs, seconds=of_works)
    return timeline_of(dataclasses.replace(priced, costs=costs), point.settings.of(PipelineOptions).schedule)


def a_second_a_layer(work: Work) -> float:
    """Linear layers alone take time, and all-reduces half as long again."""
    if isinstance(work, Collective):
        return 1.5
    return float(isinstance(work, Compute) and work.layer.startswith("fc"))


def drawn(timeline: IterationTimeline, columns: int) -> list[str]:
    """The rows of a picture with so many columns, less their labels and the scale."""
    label = max(len(row.split("|")[0]) for row in draw(timeline, 100).rows[:-1])
    return [row.split("|")[1] for row in draw(timeline, columns + label + 2).rows[:-1]]


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "expected"),
    [
        ("gpipe", 2, ["F0ffF1ff........B0bbB1bb", "....F0ffF1ffB0bbB1bb...."]),
        ("1f1b", 3, ["F0ffF1ff....B0bbF2ffB1bb....B2bb", "....F0ffB0bbF1ffB1bbF2ffB2bb...."]),
        ("zb", 2, ["F0ffF1ff....W0ww....W1ww....", "....F0ffI0iiF1ffI1iiW0wwW1ww"]),
        ("gpipe", 12, ["ff" * 12 + ".." * 2 + "bb" * 12, ".." + "ff" * 12 + "bb" * 12 + ".."]),
    ],
)
def test_pictures_of_pipelines_known_by_hand(schedule: str, micro_batches: int, expected: list[str]) -> None:
    timeline = with_seconds("p2", a_second_a_layer, micro_batches=micro_batches, schedule=schedule)
    # Each part of backward takes a second too: three a micro-batch, and one until the first has come.
    assert timeline.iteration_s == pytest.approx(7.0 if schedule == "zb" else 2 * (micro_batches + 1))
    if micro_batches == 12:
        # Numbers stand where there is room for them: F0 to F9, in two columns each.
        expected = [_numbered(row, micro_batches) for row in expected]
    assert drawn(timeline, len(expected[0])) == expected


def _numbered(row: str, micro_batches: int) -> str:
    for number in range(min(micro_batches, 10)):
        row = row.replace("ff", f"F{number}", 1).replace("bb", f"B{number}", 1)
    return row


def test_the_picture_of_data_parallelism_known_by_hand() -> None:
    """Backward of the second layer ends at 3, and the two all-reduces run from then on, one after the other."""
    timeline = with_seconds("d2", a_second_a_layer)
    assert timeline.iteration_s == pytest.approx(6.0)
    assert drawn(timeline, 24) == ["ffffffffbbbbbbbb........", "............GGGGGGGGGGGG"]
    # Ranks that wait for an exchange are not idle, which the table says of them.
    assert ". nothing in this row" in draw(timeline, 24).legend
    assert ". idle" in draw(with_seconds("p2", a_second_a_layer, micro_batches=2), 40).legend


def test_a_twentieth_of_a_column_shows_in_lower_case() -> None:
    def seconds(work: Work) -> float:
        return 0.01 if isinstance(work, Collective) else a_second_a_layer(work)

    compute, communication = drawn(with_seconds("f2", seconds), 40)
    assert compute.count("f") == compute.count("b") == 20
    assert set(communication) == {".", "a", "r"}


def test_narrow_terminals_get_a_picture_too() -> None:
    rows = draw(with_seconds("p2", a_second_a_layer, micro_batches=2), 5).rows
    assert [len(row.split("|")[1]) for row in rows[:-1]] == [10, 10]


def test_nothing_takes_any_time() -> None:
    timeline = with_seconds("p2", lambda work: 0.0, micro_batches=2)
    assert drawn(timeline, 10) == ["." * 10] * 2
    assert timeline.roles[0].use(timeline.iteration_s).bubble == 0
