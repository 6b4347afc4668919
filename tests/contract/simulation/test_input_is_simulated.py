"""Reading and copying in the simulation: the closed form's number where its assumptions hold, and nothing elsewhere."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from network_factory import small_cnn
from profile_factory import (
    affine_seconds,
    free_copies,
    layer_times,
    make_network,
    make_profile,
    model_times,
    ring_fit,
    with_compute,
)

from calibrate.profile.input_side import HostCopy, InputSide, LoaderRate
from calibrate.profile.profile import Profile
from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.settings import PlanSettings, plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import InputCopy, InputRead, Phase, Stream
from paradl_bench.records.cluster import Cluster, Level
from paradl_bench.records.slow_rank import SlowRank
from paradl_bench.strategies.passes.input_tasks import Fetch
from predict.costs.cost_model import CostModel
from predict.costs.input.input_closed_form import input_wait, iteration_seconds
from predict.costs.input.input_terms import NO_INPUT, InputOptions
from predict.costs.memory_estimate import BATCHES_AHEAD
from predict.prediction.prediction import Prediction, Predictor
from predict.simulation.prepared import price
from predict.simulation.simulator import simulate, task_graph
from predict.timeline.timeline import timeline_of
from predict.timeline.timeline_picture import draw
from predict.workload import Configuration, evaluator_named

CHAIN = make_network([32, 48, 24])
seconds = st.sampled_from([0.0, 1e-4, 1e-3, 4e-3, 0.1]) | st.floats(1e-6, 0.2)


CNN = small_cnn(convolutions=4, classes=6)


def late_profile(network: ModelGraph) -> Profile:
    """With all that the closed form leaves out: late ranks, interference, copies of buckets."""
    return make_profile(
        network,
        layer_times=layer_times(network, seconds=affine_seconds),
        model_times=model_times(network, seconds=affine_seconds),
        communication=tuple(map(ring_fit, ("all_reduce", "all_gather", "reduce_scatter", "send_recv", "broadcast"))),
        contexts=(with_compute(1.3, 1.6),),
        copies=free_copies(beta_s_per_byte=1e-9),
    )


LATE = late_profile(CNN)


def predicted(
    strategy: str,
    batch: int,
    evaluator: str = "simulate",
    *,
    network: ModelGraph = CNN,
    profile: Profile = LATE,
    bucket_bytes: int = 1 << 40,
    schedule: str = "gpipe",
    cluster: Cluster | None = None,
    slow_rank: SlowRank | None = None,
    **options: object,
) -> Prediction:
    costs = CostModel(
        profile=profile,
        network=network,
        cluster=cluster,
        slow_rank=slow_rank,
        input_options=InputOptions(**options),  # type: ignore[arg-type]
    )
    settings = plan_settings(
        batch=batch, first_bucket_bytes=bucket_bytes, bucket_cap_bytes=bucket_bytes, schedule=schedule
    )
    return Predictor(costs, evaluator_named(evaluator)).predict(
        Configuration(strategy=parse_strategy(strategy), settings=settings)
    )


def free_profile(network: ModelGraph) -> Profile:
    return make_profile(
        network,
        layer_times=layer_times(network, seconds=affine_seconds),
        model_times=model_times(network, seconds=affine_seconds),
    )


@given(
    st.integers(2, 120),
    st.integers(1, 4),
    st.integers(1, 16),
    st.integers(1, 32),
    seconds,
    seconds,
    st.sampled_from(["caffe-mpi", "mxnet", "pytorch"]),
    st.integers(0, 3),
)
def test_where_its_assumptions_hold_the_simulation_is_dag(
    width: int, layers: int, local: int, ranks: int, io_s: float, h2d_s: float, preset: str, prefetch: int
) -> None:
    network = make_network([width] * (layers + 1))
    profile = free_profile(network)
    fed = {"io_s": io_s, "h2d_s": h2d_s, "preset": preset, "prefetch": prefetch}
    # A bucket is full with a layer's weight and not with its bias.
    dag, simulated = (
        predicted(f"d{ranks}", local * ranks, name, network=network, profile=profile, bucket_bytes=4 * width + 1, **fed)
        for name in ("dag", "simulate")
    )
    assert simulated.iteration_s == pytest.approx(dag.iteration_s, rel=1e-9)
    for part in ("FW", "BW", "GE", "WU", "input", "h2d"):
        wanted, tolerance = dag.time.breakdown_s.get(part, 0.0), 1e-12 * dag.iteration_s
        assert simulated.time.breakdown_s.get(part, 0.0) == pytest.approx(wanted, rel=1e-9, abs=tolerance), part
    assert simulated.memory.memory_bytes == dag.memory.memory_bytes


@given(st.integers(1, 16), st.integers(2, 16), seconds, seconds)
def test_sequential_input_in_one_bucket_is_the_naive_preset(local: int, ranks: int, io_s: float, h2d_s: float) -> None:
    profile = free_profile(CHAIN)
    dag, simulated = (
        predicted(
            f"d{ranks}",
            local * ranks,
            name,
            network=CHAIN,
            profile=profile,
            bucket_bytes=bucket,
            io_s=io_s,
            h2d_s=h2d_s,
            preset="naive",
        )
        for name, bucket in (("dag", 1), ("simulate", 1 << 40))
    )
    # One bucket leaves behind backward what it takes; layer by layer each exchange has a start-up of its own.
    assert simulated.time.breakdown_s.get("input", 0.0) == pytest.approx(
        dag.time.breakdown_s.get("input", 0.0), abs=1e-12
    )
    assert simulated.time.breakdown_s.get("h2d", 0.0) == pytest.approx(dag.time.breakdown_s.get("h2d", 0.0), abs=1e-12)
    assert simulated.iteration_s - simulated.time.breakdown_s["GE"] == pytest.approx(
        dag.iteration_s - dag.time.breakdown_s["GE"], rel=1e-9
    )


def unrolled(fetch: Fetch, io_s: float, h2d_s: float, rest_s: float, iterations: int) -> list[float]:
    """When iterations end, one after the other from an empty pipeline: a reader, a copier, and so many slots ahead."""
    taken, ends, read, copied = [], [0.0], 0.0, 0.0
    for n in range(iterations):
        if not fetch.ahead:
            ends.append(ends[-1] + io_s + h2d_s + rest_s)
            continue
        # A slot is free again once the batch in it was taken.
        read = max(read, taken[n - fetch.ahead] if n >= fetch.ahead else 0.0) + io_s
        copied = max(copied, read) + h2d_s
        taken.append(max(ends[-1], copied if fetch.to_device else read))
        ends.append(taken[-1] + rest_s + (0.0 if fetch.to_device else h2d_s))
    return ends


@given(st.integers(0, 3), st.booleans(), *(st.floats(0.01, 3) for _ in range(3)))
def test_the_closed_form_is_the_steady_state_of_single_iterations(
    ahead: int, to_device: bool, io_s: float, h2d_s: float, rest_s: float
) -> None:
    fetch = Fetch(ahead, to_device)
    ends = unrolled(fetch, io_s, h2d_s, rest_s, 4000)
    # A mean over many: in the steady state of several slots iterations may take turns.
    period = (ends[-1] - ends[1000]) / 3000
    assert iteration_seconds(fetch, io_s, h2d_s, rest_s) == pytest.approx(period, rel=2e-3)
    waiting = input_wait(fetch, io_s, h2d_s, rest_s)
    assert 0 <= waiting.h2d_s <= waiting.input_s + 1e-12


@pytest.mark.parametrize(
    "strategy",
    ["serial", "d4", "z2d4", "z3d2", "f2", "c2", "s2", "d2s2", "d2f2", "p2", "p2 1f1b", "p2 interleaved", "d2p2f2"],
)
@pytest.mark.parametrize(("io_s", "h2d_s"), [(1e-6, 2e-3), (1.0, 2e-3), (1.0, 0.0), (1e-6, 0.0)])
def test_every_strategy_is_fed(strategy: str, io_s: float, h2d_s: float) -> None:
    kind, *schedule = strategy.split()
    chosen = {"schedule": schedule[0]} if schedule else {}
    free = predicted(kind, 16, **chosen)
    # Of a pipeline that fills a host one rank reads.
    io_host_s = io_s * (1 if kind in ("p2", "serial") else 2)
    ahead, copied, in_turn = (
        predicted(kind, 16, io_s=io_s, h2d_s=h2d_s, preset=preset, **chosen)
        for preset in ("pytorch", "caffe-mpi", "naive")
    )
    assert ahead.iteration_s == pytest.approx(max(io_host_s, h2d_s + free.iteration_s), rel=1e-9)
    assert copied.iteration_s == pytest.approx(max(io_host_s + h2d_s, free.iteration_s), rel=1e-9)
    assert in_turn.iteration_s == pytest.approx(io_host_s + h2d_s + free.iteration_s, rel=1e-9)
    for fed in (ahead, copied, in_turn):
        parts = {name: value for name, value in fed.time.breakdown_s.items() if name != "exposed_communication"}
        assert sum(parts.values()) == pytest.approx(fed.iteration_s)
        assert min(parts.values()) >= -1e-12
        waiting = {name: parts.pop(name, 0.0) for name in ("input", "h2d")}
        assert sum(waiting.values()) == pytest.approx(fed.iteration_s - free.iteration_s, rel=1e-9, abs=1e-12)
        assert parts == pytest.approx({name: free.time.breakdown_s[name] for name in parts}, rel=1e-6, abs=1e-12)
        assert fed.time.pipeline_stage == free.time.pipeline_stage
        assert (fed.time.compute_s, fed.time.communication_s) == pytest.approx(
            (free.time.compute_s, free.time.communication_s)
        )
        assert fed.provenance.sources == pytest.approx(free.provenance.sources)
        assert fed.time.overlap_s == pytest.approx(free.time.overlap_s, abs=1e-12)
        assert fed.time.straggler == pytest.approx(free.time.straggler)
    assert in_turn.time.breakdown_s.get("h2d", 0.0) == pytest.approx(h2d_s)


@pytest.mark.parametrize("strategy", ["serial", "d4", "z3d2", "p2", "d2f2"])
def test_without_an_input_nothing_changes(strategy: str) -> None:
    measured = msgspec.structs.replace(LATE, input_side=(LOADED,))
    free, none = predicted(strategy, 16), predicted(strategy, 16, profile=measured, io_s=0.0, h2d_s=0.0)
    assert msgspec.structs.asdict(free) == msgspec.structs.asdict(none)
    point = Configuration(strategy=parse_strategy(strategy), settings=PlanSettings(batch=16))
    plan = price(CostModel(profile=measured, network=CNN, input_options=NO_INPUT), point).plan
    assert not any(isinstance(work, InputRead | InputCopy) for work in plan.works)


LOADED = InputSide(
    source="synthetic",
    loader=(LoaderRate(workers=2, batch=8, sample_s=0.01, relative_sd=0.1),),
    copies=(HostCopy(how="pinned", alpha_s=1e-3, beta_s_per_byte=1e-9, relative_sd=0.1, bytes_range=(1, 1 << 30)),),
)


def test_measured_input_is_read_for_all_ranks_of_a_host() -> None:
    profile = msgspec.structs.replace(LATE, input_side=(LOADED,))
    free, fed = predicted("d4", 32), predicted("d4", 32, profile=profile)
    copy_s = 1e-3 + 8 * 4 * 16 * 16 * 4 * 1e-9
    assert fed.iteration_s == pytest.approx(max(2 * 8 * 0.01, copy_s + free.iteration_s))
    assert fed.time.breakdown_s["h2d"] == pytest.approx(copy_s)
    assert "input, io" in fed.provenance.spread_s
    assert any("a loader with 2 workers" in note for note in fed.provenance.notes)
    assert fed.memory.memory_bytes == free.memory.memory_bytes
    two = msgspec.structs.replace(LATE, input_side=(LOADED, msgspec.structs.replace(LOADED, source="photos")))
    with pytest.raises(UserError, match=r"several inputs \(synthetic, photos\): say which by --input"):
        predicted("d4", 32, profile=two)


@pytest.mark.parametrize(
    ("strategy", "on_host", "readers"),
    [("d4p2", 4, 2), ("p2d4", 4, 4), ("p2d4", 8, 4), ("d4p2", 8, 4), ("d2p4", 2, 1), ("d2p2f2", 4, 2), ("d8", 4, 4)],
)
def test_of_a_pipeline_the_ranks_of_the_first_stage_read(strategy: str, on_host: int, readers: int) -> None:
    level = {"alpha_s": 1e-5, "beta_s_per_byte": 1e-10}
    cluster = Cluster(
        name="nodes", levels=(Level(name="node", ranks=on_host, **level), Level(name="rack", ranks=64, **level))
    )
    fed = predicted(strategy, 32, cluster=cluster, io_s=1.0, h2d_s=0.0)
    assert fed.iteration_s == pytest.approx(readers)


def test_batches_that_were_copied_ahead_lie_on_the_device() -> None:
    free = predicted("d4", 32)
    for preset, prefetch, ahead in (
        ("pytorch", 3, 0),
        ("caffe-mpi", None, 1),
        ("caffe-mpi", 3, 3),
        ("caffe-mpi", 0, 0),
    ):
        fed = predicted("d4", 32, io_s=1e-3, h2d_s=1e-3, preset=preset, prefetch=prefetch)
        assert fed.memory.memory_bytes - free.memory.memory_bytes == ahead * 8 * 4 * 16 * 16 * 4
        assert sum(fed.memory.memory_parts_bytes.values()) == fed.memory.memory_bytes
        assert (BATCHES_AHEAD in fed.memory.memory_parts_bytes) == bool(ahead)


def test_a_slow_rank_waits_for_its_input_like_the_others() -> None:
    slow = SlowRank(rank=1, factor=2.0)
    free = predicted("d4", 16, slow_rank=slow)
    assert predicted("d4", 16, slow_rank=slow, io_s=1e-6, h2d_s=2e-3).iteration_s == pytest.approx(
        2e-3 + free.iteration_s, rel=1e-9
    )


def test_without_workers_nothing_is_read_ahead() -> None:
    free = predicted("d2", 16)
    for evaluator in ("simulate", "dag"):
        fed = predicted("d2", 16, evaluator, io_s=1e-3, h2d_s=0.0, workers=0)
        assert fed.time.breakdown_s["input"] == pytest.approx(2e-3)
    assert predicted("d2", 16, io_s=1e-6, h2d_s=0.0, workers=1).iteration_s == pytest.approx(free.iteration_s)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "mxnet"}, "the profile holds no times of reading and copying this model's input"),
        ({"workers": 4}, "paradl-bench io PATH -o DIR"),
        ({"prefetch": 2}, "give --io-seconds and --h2d-seconds"),
        ({"preset": "keras", "io_s": 1.0}, "--preset keras: choices are naive, caffe-mpi"),
        ({"preset": "naive", "prefetch": 2, "io_s": 1.0}, "--prefetch 2: --preset naive fetches nothing ahead"),
        ({"workers": 0, "prefetch": 1, "io_s": 1.0}, "--prefetch 1: --io-workers 0 fetches nothing ahead"),
        ({"source": "films"}, "--input films: the profile does not hold this input"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        predicted("d2", 16, **options)


@pytest.mark.parametrize("strategy", ["d2", "p2", "z3d2"])
@pytest.mark.parametrize("preset", ["naive", "pytorch", "caffe-mpi"])
def test_the_timeline_has_a_lane_of_each(strategy: str, preset: str) -> None:
    options = InputOptions(io_s=0.01, h2d_s=2e-3, preset=preset)
    costs = CostModel(profile=LATE, network=CNN, input_options=options)
    point = Configuration(strategy=parse_strategy(strategy), settings=plan_settings(batch=16, schedule="1f1b"))
    priced = price(costs, point)
    drawn = timeline_of(priced, "1f1b")
    iteration_s = Predictor(costs, evaluator_named("simulate")).predict(point).iteration_s
    assert drawn.iteration_s == pytest.approx(iteration_s, rel=1e-9)
    first = drawn.roles[0]
    reading, copying = first.on(Stream.INPUT, Phase.IO), first.on(Stream.COPY_ENGINE, Phase.H2D)
    assert reading.busy_s == pytest.approx(0.01 * (1 if strategy == "p2" else 2))
    assert copying.busy_s == pytest.approx(2e-3)
    own = ~np.isin(first.of_plan.phase, (Phase.IO, Phase.H2D))
    begins_s = {"naive": copying.end_s[0], "pytorch": copying.end_s[0], "caffe-mpi": 0.0}[preset]
    assert first.start_s[own].min() == pytest.approx(begins_s)
    assert copying.start_s[0] == pytest.approx(0.0 if preset == "pytorch" else reading.end_s[0])
    assert [role.on(Stream.INPUT).busy_s > 0 for role in drawn.roles] == [True, *[False] * (len(drawn.roles) - 1)]
    text = draw(drawn, 100)
    rows = [row for row in text.rows if row.startswith(f"{first.name} input")]
    assert len(rows) == 1
    assert "r" in rows[0].partition("|")[2]
    assert "reading a mini-batch" in text.legend


@given(st.integers(0, 3), st.booleans(), seconds, seconds)
def test_input_tasks_gate_the_first_task_of_every_stream(
    ahead: int, to_device: bool, io_s: float, h2d_s: float
) -> None:
    """Task by task, by an order of starts that is found without the simulator."""
    preset = ("caffe-mpi" if to_device else "pytorch") if ahead else "naive"
    options = InputOptions(io_s=io_s, h2d_s=h2d_s, preset=preset, prefetch=ahead)
    point = Configuration(strategy=parse_strategy("z3d2"), settings=PlanSettings(batch=16))
    priced = price(CostModel(profile=LATE, network=CNN, input_options=options), point)
    (role,) = priced.plan.roles
    lasting = priced.costs.seconds[role.work]
    ones = np.ones(role.tasks)
    line = simulate(task_graph(role), lasting, ones, ones)
    free, ends = dict.fromkeys(Stream, 0.0), []
    rows = itertools.pairwise(role.dependency_start.tolist())
    for task, (begin, end) in enumerate(rows):
        blocking = [ends[other] for other in role.dependencies[begin:end].tolist()]
        start = max([free[Stream(int(role.stream[task]))], *blocking])
        ends.append(start + float(lasting[task]))
        free[Stream(int(role.stream[task]))] = ends[-1]
    assert line.end_s == pytest.approx(ends)
    of_input = np.isin(role.phase, (Phase.IO, Phase.H2D))
    gate = (2 * io_s + h2d_s) if not ahead else 0.0 if to_device else h2d_s
    assert line.start_s[~of_input].min() == pytest.approx(gate)
