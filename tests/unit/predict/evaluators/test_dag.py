"""The evaluator ``dag``: against values worked out by hand, against the simulation, and from an imported trace."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from profile_factory import affine_seconds, free_copies, layer_times, make_network, make_profile, model_times

from calibrate.fitting.fit import fit_profile
from calibrate.profile.input_side import HostCopy, InputSide, LoaderRate
from calibrate.profile.profile import Profile, write_profile
from paradl_bench.cli import group as bench
from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.settings import PlanSettings, plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.strategies.data.fusion.fusion_file import AskedFusion
from paradl_bench.strategies.data.fusion.layerwise_plan import layerwise_plan
from paradl_bench.strategies.exchange.options import ExchangeOptions
from paradl_bench.strategies.passes.input_tasks import Fetch
from predict.cli import group
from predict.costs.cost_model import CostModel
from predict.costs.input.input_closed_form import exposed_exchange_seconds, iteration_seconds
from predict.costs.input.input_terms import InputOptions, fetch_of, input_options
from predict.evaluators.dag import ClosedForm
from predict.prediction.prediction import Prediction, Predictor
from predict.simulation.simulator import simulate, task_graph
from predict.workload import Configuration, evaluator_named

times = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=8)


def predicted(
    profile: Profile,
    network: ModelGraph,
    strategy: str,
    batch: int,
    evaluator: str = "dag",
    *,
    bucket_bytes: int = 1,
    **options: object,
) -> Prediction:
    wanted = plan_settings(batch=batch, first_bucket_bytes=bucket_bytes, bucket_cap_bytes=bucket_bytes)
    costs = CostModel(profile=profile, network=network, input_options=InputOptions(**options))  # type: ignore[arg-type]
    point = Configuration(strategy=parse_strategy(strategy), settings=wanted)
    return Predictor(costs, evaluator_named(evaluator)).predict(point)


def profile_of(network: ModelGraph, **changes: object) -> Profile:
    base = make_profile(
        network,
        layer_times=layer_times(network, seconds=affine_seconds),
        model_times=model_times(network, seconds=affine_seconds),
    )
    return msgspec.structs.replace(base, **changes)


def test_wait_free_backward_worked_out_by_hand() -> None:
    """Backward of 3, 2 and 4 s; exchanges of 1, 6 and 2 s: they end at 4, 11 and 13, backward at 9."""
    ready, exchange = np.array([3.0, 5.0, 9.0]), np.array([1.0, 6.0, 2.0])
    assert exposed_exchange_seconds(ready, exchange, 9.0, wait_free=True) == 4.0
    assert exposed_exchange_seconds(ready, exchange, 9.0, wait_free=False) == 9.0
    assert exposed_exchange_seconds(np.array([]), np.array([]), 9.0, wait_free=True) == 0.0
    # A channel that waits: the last exchange alone is seen.
    assert exposed_exchange_seconds(np.array([1.0, 9.0]), np.array([1.0, 0.5]), 9.0, wait_free=True) == 0.5


@given(times)
def test_wait_free_backward_is_the_recursion_of_the_paper(layers: Sequence[tuple[float, float]]) -> None:
    backward, exchange = np.array(layers).T
    ready = np.cumsum(backward)
    free = 0.0
    for at, takes in zip(ready, exchange, strict=True):
        free = max(free, float(at)) + float(takes)
    total = float(ready[-1])
    exposed = exposed_exchange_seconds(ready, exchange, total, wait_free=True)
    assert exposed == pytest.approx(max(0.0, free - total), abs=1e-12)


@pytest.mark.parametrize(
    ("preset", "seconds"),
    [("naive", 19.0), ("caffe-mpi", 10.0), ("mxnet", 12.0), ("tensorflow", 12.0), ("cntk", 12.0), ("pytorch", 12.0)],
)
def test_presets_worked_out_by_hand(preset: str, seconds: float) -> None:
    """Reading 7, copying 2, the rest 10; and where reading is the bottleneck."""
    fetch = fetch_of(InputOptions(preset=preset))
    assert iteration_seconds(fetch, 7.0, 2.0, 10.0) == seconds
    slow = {"naive": 32.0, "caffe-mpi": 22.0}.get(preset, 20.0)
    assert iteration_seconds(fetch, 20.0, 2.0, 10.0) == slow


@given(st.floats(0.01, 5), st.floats(0.01, 5), st.floats(0.01, 5))
def test_reading_ahead_is_the_steady_state_of_one_prefetched_batch(io_s: float, h2d_s: float, rest_s: float) -> None:
    """Iteration by iteration: the next batch is fetched once computing has taken the last one."""

    def period(fetch_s: float, compute_s: float, iterations: int = 50) -> float:
        fetched, ends = fetch_s, [0.0]
        for _ in range(iterations):
            start = max(fetched, ends[-1])
            ends.append(start + compute_s)
            fetched = max(fetched, start) + fetch_s
        return ends[-1] - ends[-2]

    ahead = iteration_seconds(Fetch(1, to_device=True), io_s, h2d_s, rest_s)
    assert ahead == pytest.approx(period(io_s + h2d_s, rest_s))
    assert iteration_seconds(Fetch(1, to_device=False), io_s, h2d_s, rest_s) == pytest.approx(
        period(io_s, h2d_s + rest_s)
    )


@settings(max_examples=25)
@given(st.integers(2, 120), st.integers(1, 5), st.integers(1, 32), st.integers(2, 32))
def test_one_bucket_a_layer_without_interference_is_what_simulate_gives(
    width: int, layers: int, local: int, ranks: int
) -> None:
    network = make_network([width] * (layers + 1))
    profile = profile_of(network)
    # A bucket is full with a layer's weight and not with its bias.
    dag, simulated = (
        predicted(profile, network, f"d{ranks}", local * ranks, name, bucket_bytes=4 * width + 1)
        for name in ("dag", "simulate")
    )
    assert dag.iteration_s == pytest.approx(simulated.iteration_s, rel=1e-9)
    for phase in ("FW", "BW", "GE", "WU"):
        assert dag.time.breakdown_s[phase] == pytest.approx(simulated.time.breakdown_s[phase], rel=1e-9, abs=1e-15)
    assert dag.time.overlap_s == pytest.approx(simulated.time.overlap_s, rel=1e-6, abs=1e-12)
    if 4 <= local <= 8:
        assert dag.time.interval_s == pytest.approx(simulated.time.interval_s, rel=1e-9)


@given(st.lists(st.integers(1, 200), min_size=2, max_size=6), st.integers(2, 16), st.randoms())
def test_the_closed_form_is_the_simulation_of_its_own_plan(widths: list[int], ranks: int, draw: object) -> None:
    network = make_network(widths)
    point = Configuration(strategy=parse_strategy(f"d{ranks}"), settings=PlanSettings(batch=ranks))
    plan = layerwise_plan(network, point.strategy, point.settings)
    assert sum(size * count for (_, size, _), count in plan.collectives().items()) == network.parameter_bytes
    (role,) = plan.roles
    seconds = np.array([draw.uniform(0, 1) for _ in plan.works])  # type: ignore[attr-defined]
    timing = ClosedForm(plan, Fetch(1, to_device=True), wait_free=True).timing(np.concatenate([seconds, [0.0, 0.0]]))
    ones = np.ones(role.tasks)
    line = simulate(task_graph(role), seconds[role.work], ones, ones)
    assert timing.iteration_s == pytest.approx(line.iteration_s)
    assert timing.exposed_communication_s == pytest.approx(line.exposed_communication_s)


LOADED = InputSide(
    source="synthetic",
    loader=(LoaderRate(workers=2, batch=8, sample_s=0.01, relative_sd=0.1),),
    copies=(HostCopy(how="pinned", alpha_s=1e-3, beta_s_per_byte=1e-6, relative_sd=0.1, bytes_range=(1, 1 << 30)),),
)


def test_input_measured_in_the_profile_is_read_for_the_host() -> None:
    network = make_network()
    profile = profile_of(network, input_side=(LOADED,))
    free = predicted(profile_of(network), network, "d2", 16)
    assert any("reading a mini-batch was not measured" in line for line in free.provenance.extrapolated)
    fed = predicted(profile, network, "d2", 16, preset="naive")
    copy = 1e-3 + 8 * 64 * 4 * 1e-6
    exposed = free.time.breakdown_s["exposed_communication"]
    naive = free.iteration_s - exposed + fed.time.communication_s + 16 * 0.01 + copy
    assert fed.iteration_s == pytest.approx(naive)
    assert fed.time.breakdown_s["input"] == pytest.approx(16 * 0.01)
    assert fed.time.breakdown_s["h2d"] == pytest.approx(copy)
    assert fed.time.compute_s == pytest.approx(free.time.compute_s)
    low, high = fed.time.interval_s
    assert high - fed.iteration_s >= 1.6 * 0.1 * 16 * 0.01
    assert low < fed.iteration_s
    bound_by_reading = predicted(profile, network, "d2", 16, preset="mxnet")
    assert bound_by_reading.iteration_s == pytest.approx(max(0.16, copy + free.iteration_s))
    stated = predicted(profile, network, "d2", 16, preset="naive", io_s=0.5, h2d_s=0.25)
    assert stated.time.breakdown_s["input"] == pytest.approx(2 * 0.5)
    assert stated.time.breakdown_s["h2d"] == pytest.approx(0.25)


@pytest.mark.parametrize("evaluator", ["dag", "simulate"])
def test_a_loader_without_workers_reads_nothing_ahead(evaluator: str) -> None:
    network = make_network()
    alone = msgspec.structs.replace(
        LOADED, loader=(LoaderRate(workers=0, batch=8, sample_s=0.01, relative_sd=0.1),), copies=()
    )
    profile = profile_of(network, input_side=(alone,))
    free = predicted(profile_of(network), network, "d2", 16, evaluator=evaluator)
    fed = predicted(profile, network, "d2", 16, evaluator=evaluator)
    # Both ranks read at once, each its own 8.
    assert fed.iteration_s == pytest.approx(8 * 0.01 + free.iteration_s)
    with pytest.raises(UserError, match="--prefetch 2: a loader without workers, the only one measured, fetches"):
        predicted(profile, network, "d2", 16, evaluator=evaluator, prefetch=2)
    # With workers beside it reading is hidden as far as it can be, though theirs is slower.
    slower = LoaderRate(workers=1, batch=8, sample_s=0.011, relative_sd=0.1)
    helped = msgspec.structs.replace(alone, loader=(*alone.loader, slower))
    hidden = predicted(profile_of(network, input_side=(helped,)), network, "d2", 16, evaluator=evaluator)
    assert hidden.iteration_s == pytest.approx(max(16 * 0.011, free.iteration_s))


@pytest.mark.parametrize("evaluator", ["dag", "simulate"])
def test_readers_share_the_cores_of_ranks_that_compute(evaluator: str) -> None:
    """Two cores, 2 ranks with a worker each; reading takes a process 3 ms a sample, and half of that with two."""
    network = make_network()
    rates = ((0, 3e-3), (1, 3e-3), (2, 1.5e-3))
    loader = tuple(LoaderRate(workers=n, batch=8, sample_s=s, relative_sd=0.1) for n, s in rates)
    memcpy = HostCopy(how="memcpy", alpha_s=0.0, beta_s_per_byte=1e-10, relative_sd=0.1, bytes_range=(1, 1 << 30))
    side = InputSide(source="images", loader=loader, copies=(memcpy,))
    profile = profile_of(network, input_side=(side,))
    assert profile.environments[0].device_count == 2
    rest = predicted(profile_of(network), network, "d2", 32, evaluator).iteration_s
    fed = predicted(profile, network, "d2", 32, evaluator, rank_workers=1)
    assert fed.iteration_s == pytest.approx((2 * rest + 32 * 3e-3) / 2, rel=1e-6)
    # A single rank leaves the other core to its worker.
    alone = predicted(profile_of(network), network, "serial", 32, evaluator).iteration_s
    assert alone < 32 * 3e-3
    assert predicted(profile, network, "serial", 32, evaluator, rank_workers=1).iteration_s == pytest.approx(32 * 3e-3)
    # Without workers each rank reads for itself, before it computes.
    by_itself = predicted(profile, network, "d2", 32, evaluator, rank_workers=0)
    assert by_itself.iteration_s == pytest.approx(16 * 3e-3 + rest)


@pytest.mark.parametrize("ranks", [2, 5])
def test_messages_behind_backward_are_the_unoverlapped_closed_form(ranks: int) -> None:
    network = make_network([96, 64, 32])
    profile = profile_of(network, copies=free_copies(beta_s_per_byte=0.0))
    point = parse_strategy(f"d{ranks}")
    exchange = ExchangeOptions(
        fused_bytes=AskedFusion(rule="none").messages(network), fused_by="each layer", after_backward=True
    )
    wanted = PlanSettings(batch=4 * ranks, axes=(exchange,))
    costs = CostModel(profile=profile, network=network, input_options=InputOptions(preset="cntk", io_s=0.0, h2d_s=0.0))
    dag, simulated = (
        Predictor(costs, evaluator_named(name)).predict(Configuration(strategy=point, settings=wanted))
        for name in ("dag", "simulate")
    )
    assert dag.time.breakdown_s["GE"] == pytest.approx(dag.time.communication_s)
    assert simulated.time.breakdown_s["GE"] == pytest.approx(dag.time.breakdown_s["GE"], rel=1e-6)
    assert simulated.time.overlap_s == pytest.approx(0.0, abs=1e-12)


def test_input_options_are_refused_without_a_matching_evaluator_or_input() -> None:
    with pytest.raises(UserError, match="--preset is for --evaluator simulate and dag; osf does not predict the input"):
        input_options("osf", {"preset": "naive", "from_disk": False})
    assert input_options("simulate", {"preset": None, "from_disk": False}) == InputOptions()
    network = make_network()
    two = profile_of(network, input_side=(LOADED, msgspec.structs.replace(LOADED, source="photos")))
    with pytest.raises(UserError, match=r"several inputs \(synthetic, photos\): say which by --input"):
        predicted(two, network, "d2", 16)
    assert predicted(two, network, "d2", 16, source="photos").time.breakdown_s
    with pytest.raises(
        UserError, match="--input films: the profile does not hold this input; it holds synthetic, photos"
    ):
        predicted(two, network, "d2", 16, source="films")
    with pytest.raises(UserError, match="--preset keras: choices are naive, caffe-mpi"):
        predicted(two, network, "d2", 16, preset="keras")
    with pytest.raises(UserError, match="not for f2: give --evaluator simulate"):
        predicted(two, network, "f2", 16)


ALPHA, BETA, RANKS = 50e-6, 1e-9, 4
LAYERS = (("conv1", 3e-3, 5e-3, 140_000), ("conv2", 2e-3, 4e-3, 2_000_000), ("fc1", 1e-3, 2e-3, 16_000_000))


def ring(size: int) -> float:
    return 2 * (RANKS - 1) * (ALPHA + size / RANKS * BETA)


def write_trace(path: Path, io_s: float) -> None:
    lines = []
    for _ in range(5):
        lines.append(f"0 data {io_s * 1e6} 0 0 0")
        for number, (name, forward, backward, size) in enumerate(LAYERS, start=1):
            lines.append(f"{number} {name} {forward * 1e6} {backward * 1e6} {ring(size) * 1e6:.9g} {size}")
        lines.append("")
    path.write_text("\n".join(lines))


def test_an_imported_trace_is_predicted_with_its_input(tmp_path: Path) -> None:
    write_trace(tmp_path / "t.txt", 0.03)
    arguments = ["import", "ssgd-trace", str(tmp_path / "t.txt"), "--batch", "32", "--model", "net"]
    arguments += ["--ranks", str(RANKS), "--level", "node", "-o", str(tmp_path / "m")]
    assert CliRunner().invoke(bench, arguments).exit_code == 0
    profile = fit_profile([tmp_path / "m"], command_line=(), force=False)
    (side,) = profile.input_side
    assert (side.model, side.batches[0].batch, side.batches[0].median_s) == ("net", 32, pytest.approx(0.03))
    write_profile(tmp_path / "p.json", profile)
    free = 0.0
    at = 0.0
    for _, _, backward, size in reversed(LAYERS):
        at += backward
        free = max(free, at) + ring(size)
    forward = sum(layer[1] for layer in LAYERS)
    rest = forward + free
    for preset, reading, wanted in (
        ("caffe-mpi", ["--io-seconds", "0"], rest),
        ("naive", ["--io-seconds", "0.01"], 0.04 + forward + at + sum(ring(layer[3]) for layer in LAYERS)),
        ("mxnet", [], 4 * 0.03),
    ):
        options = ["--from-profile", str(tmp_path / "p.json"), "--model", "net", "--strategy", "d4", "--batch", "128"]
        options += ["--evaluator", "dag", "--preset", preset, *reading, "--json"]
        result = CliRunner().invoke(group, options)
        assert result.exit_code == 0, result.output
        (found,) = json.loads(result.output)
        assert found["iteration_s"] == pytest.approx(wanted, rel=0.01)
        assert any("weight update: the profile holds only layers" in line for line in found["extrapolated"])
    simulated = CliRunner().invoke(
        group, [option if option != "dag" else "simulate" for option in options[:-3]] + ["--json"]
    )
    assert simulated.exit_code == 0, simulated.output
    (found,) = json.loads(simulated.output)
    assert found["iteration_s"] >= forward + at
    assert any("copies of gradients" in line for line in found["extrapolated"])
