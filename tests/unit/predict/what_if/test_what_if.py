"""What-if: values of quantities, other ranks and batches, and rows that say what bounds an iteration."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as draw
from profile_factory import layer_times, make_network, make_profile, model_times, noisy_profile, ring_fit, with_compute

from calibrate.profile.profile import Dispatch, Profile
from paradl_bench.core.errors import UserError
from paradl_bench.plan.settings import PlanSettings, plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.records.cluster import Cluster
from predict.costs.cost_model import CostModel
from predict.costs.sourced import HOST_DISPATCH
from predict.ledger.ledger import exposed_effect_s
from predict.prediction.prediction import Predictor
from predict.prediction.request import Request
from predict.what_if.quantities import Setting, parse_varied, settings_of
from predict.what_if.what_if import BOUNDS, WhatIf, what_if
from predict.workload import Configuration, evaluator_named

CHAIN = make_network()
NOISY = noisy_profile(CHAIN)


def point(strategy: str, batch: int) -> Configuration:
    return Configuration(strategy=parse_strategy(strategy), settings=settings_at(batch))


def settings_at(batch: int) -> PlanSettings:
    return plan_settings(batch=batch, first_bucket_bytes=1 << 12, bucket_cap_bytes=1 << 16)


def request(
    profile: Profile, *points: Configuration, evaluator: str = "simulate", cluster: Cluster | None = None
) -> Request:
    return Request(
        costs=CostModel(profile=profile, network=CHAIN, cluster=cluster),
        evaluator=evaluator_named(evaluator),
        settings=settings_at,
        points=points,
        left_out=(),
    )


def seconds(rows: Sequence[WhatIf]) -> list[float]:
    return [row.iteration_s for row in rows]


@pytest.mark.parametrize("evaluator", ["simulate", "paradl", "csf", "dag"])
@pytest.mark.parametrize("strategy", ["serial", "d2", "f2", "p2", "d2f2"])
def test_factors_of_one_leave_the_prediction_exactly_as_it_is(evaluator: str, strategy: str) -> None:
    at = point(strategy, 8)
    asked = request(NOISY, at, evaluator=evaluator)
    if not asked.evaluator.covers(at.strategy):
        pytest.skip(f"{evaluator} has no closed form of {strategy}")
    plain = Predictor(asked.costs, asked.evaluator).predict(at)
    ones = dict.fromkeys(("bandwidth", "bandwidth@node", "latency", "peak-flops", "memory-bandwidth"), 1.0)
    base, row = what_if(asked, [ones]).rows
    for found in (base, row):
        for name in ("iteration_s", "interval_s", "breakdown_s", "sources", "extrapolated", "notes"):
            assert getattr(found, name) == plain.record()[name]
        assert found.speedup_over_base == 1


FACTORS = draw.floats(0.05, 20.0)


@settings(max_examples=25, deadline=None)
@given(
    alpha_s=draw.floats(1e-7, 1e-3),
    beta_s=draw.floats(1e-11, 1e-7),
    compute_slowdown=draw.floats(1.0, 2.0),
    communication_slowdown=draw.floats(1.0, 2.0),
    between_s=draw.just(0.0) | draw.floats(1e-9, 1e-2),
    peak_flops=draw.floats(1e9, 1e13),
    strategy=draw.sampled_from(["d2", "d4", "f2", "p2", "d2f2"]),
    quantity=draw.sampled_from(["bandwidth", "peak-flops", "memory-bandwidth"]),
    factors=draw.tuples(FACTORS, FACTORS),
)
def test_better_hardware_is_never_slower(
    alpha_s: float,
    beta_s: float,
    compute_slowdown: float,
    communication_slowdown: float,
    between_s: float,
    peak_flops: float,
    strategy: str,
    quantity: str,
    factors: tuple[float, float],
) -> None:
    # While both run, at most as much is lost as running one after the other would lose: 1/s_c + 1/s_m >= 1.
    profile = make_profile(
        model_times=model_times(CHAIN, between_s=between_s),
        communication=tuple(
            ring_fit(operation, alpha_s=alpha_s, beta_s_per_byte=beta_s)
            for operation in ("all_reduce", "all_gather", "send_recv", "broadcast")
        ),
        contexts=(with_compute(compute_slowdown, communication_slowdown),),
    )
    device = msgspec.structs.replace(profile.devices[0], peak_flops=peak_flops)
    asked = request(msgspec.structs.replace(profile, devices=(device,)), point(strategy, 16))
    _, worse, better = what_if(asked, [{quantity: factor} for factor in sorted(factors)]).rows
    assert better.iteration_s <= worse.iteration_s * (1 + 1e-12)


def test_latency_that_grows_is_never_faster() -> None:
    rows = what_if(request(NOISY, point("d4", 16)), [{"latency": factor} for factor in (0.1, 1, 10, 100)]).rows[1:]
    assert seconds(rows) == sorted(seconds(rows))
    assert rows[-1].bound_by == "exposed communication"


def test_seconds_add_up_and_the_largest_names_what_bounds() -> None:
    for strategy in ("serial", "d2", "f2", "p2", "d2f2"):
        for row in what_if(request(NOISY, point(strategy, 16)), [{"bandwidth": 0.01}]).rows:
            assert tuple(row.seconds_of) == BOUNDS
            assert sum(row.seconds_of.values()) == pytest.approx(row.iteration_s)
            assert min(row.seconds_of.values()) >= -1e-12
            assert row.seconds_of[row.bound_by] == max(row.seconds_of.values())
    assert what_if(request(NOISY, point("p3", 18)), [{"bandwidth": 1}]).rows[0].bound_by == "idle"


def on_gpu(dispatch_s: float, kernel_s: float, evaluator: str = "simulate") -> Request:
    """One GPU, whose kernels were timed alone and take as long on any batch."""
    times = layer_times(CHAIN, batches=(8, 16), seconds=lambda *_: kernel_s)
    made = make_profile(layer_times=tuple(msgspec.structs.replace(time, mode="isolated") for time in times))
    host = Dispatch(forward_s=dispatch_s, backward_s=dispatch_s, relative_sd=0.0, runs=("a run",))
    gpu = msgspec.structs.replace(made.devices[0], kind="cuda", dispatch=host)
    changed = msgspec.structs.replace(made, devices=(gpu,), model_times=(), shard_times=())
    return request(changed, point("serial", 8), evaluator=evaluator)


@pytest.mark.parametrize("evaluator", ["simulate", "csf", "dag"])
@pytest.mark.parametrize(("dispatch_s", "bound"), [(9.0, "host dispatch"), (1.5, "host dispatch"), (1e-3, "compute")])
def test_a_host_slower_than_kernels_bounds(dispatch_s: float, bound: str, evaluator: str) -> None:
    """Kernels take 1 s, so that a host of 1.5 s bounds although they wait for less than they take."""
    asked = on_gpu(dispatch_s, 1.0, evaluator)
    base, _ = what_if(asked, [{"batch": 16}]).rows
    assert base.bound_by == bound
    assert (base.seconds_of["host dispatch"] > base.seconds_of["compute"]) == (dispatch_s == 9.0)
    (role,) = Predictor(asked.costs, asked.evaluator).explain(asked.points[0]).roles
    assert base.seconds_of["host dispatch"] == pytest.approx(exposed_effect_s(role, HOST_DISPATCH))
    assert sum(base.seconds_of.values()) == pytest.approx(base.iteration_s)


def test_input_can_bound() -> None:
    model = CostModel(profile=make_profile(), network=CHAIN)
    slow = dataclasses.replace(model.input_options, io_s=100.0)
    asked = request(make_profile(), point("serial", 8), evaluator="dag")
    asked = dataclasses.replace(asked, costs=dataclasses.replace(asked.costs, input_options=slow))
    assert {row.bound_by for row in what_if(asked, [{"bandwidth": 2}]).rows} == {"input"}


def test_more_ranks_grow_the_outermost_axis_and_weak_scalings_batch() -> None:
    settings = [{"ranks": ranks} for ranks in (2, 4, 8)]
    weak = what_if(request(NOISY, point("d2f2", 16)), settings)
    assert [(row.strategy, row.batch) for row in weak.rows] == [("d2f2", 16), ("d1f2", 8), ("d2f2", 16), ("d4f2", 32)]
    strong = what_if(request(NOISY, point("d2f2", 16)), settings, strong_scaling=True)
    assert [row.batch for row in strong.rows] == [16] * 4
    assert weak.rows[0].iteration_s == weak.rows[2].iteration_s
    assert weak.rows[3].speedup_over_base == pytest.approx(2 * weak.rows[0].iteration_s / weak.rows[3].iteration_s)


def test_what_is_not_possible_is_left_out_and_said() -> None:
    found = what_if(request(NOISY, point("d2", 8)), [{"batch": 8}, {"batch": 9}, {"ranks": 3, "batch": 9}])
    assert [(row.strategy, row.batch) for row in found.rows] == [("d2", 8), ("d2", 8), ("d3", 9)]
    assert found.left_out == (
        "strategy d2: batch 9 does not split evenly over 2 ranks; the nearest that do are 8 and 10",
    )
    with pytest.raises(UserError, match="serial has one rank"):
        what_if(request(NOISY, point("serial", 8)), [{"ranks": 2}])


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("bandwidth=0.1:10:log", [10 ** (-1 + step / 4) for step in range(9)]),
        ("latency@node=0.5:2:log:3", [0.5, 1, 2]),
        ("peak-flops=1:8:x2", [1, 2, 4, 8]),
        ("memory-bandwidth=2,1e-1", [2, 0.1]),
        ("ranks=2:16:x2", [2, 4, 8, 16]),
        ("ranks=1:64:log:4", [1, 4, 16, 64]),
        ("batch=8,32", [8, 32]),
    ],
)
def test_values_are_read(text: str, values: list[float]) -> None:
    found = parse_varied(text)
    assert found.name == text.partition("=")[0]
    assert found.values == pytest.approx(values)


def test_the_middle_of_a_range_over_one_is_one() -> None:
    assert 1.0 in parse_varied("bandwidth=0.1:10:log").values


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("speed=1,2", "choices are bandwidth, "),
        ("bandwidth", "has no values"),
        ("bandwidth=", "has no values"),
        ("peak-flops@node=2", "only bandwidth and latency"),
        ("bandwidth@=2", "only bandwidth and latency"),
        ("bandwidth=0", "is not a factor"),
        ("bandwidth=-1", "is not a factor"),
        ("bandwidth=nan", "is not a factor"),
        ("bandwidth=1:2", "first:last:log"),
        ("bandwidth=1:2:lin", "not known"),
        ("bandwidth=1:2:log:1", "a range has 2 to"),
        ("bandwidth=4:2:x2", "has to rise by a factor of at least"),
        ("bandwidth=1:2:x2:5", "not known"),
        ("ranks=0.5", "not a positive whole number"),
        ("ranks=2:8:x2:3", "first:last"),
        ("batch=8:64:foo", r"--vary 'batch=8:64:foo': 'foo'"),
        ("batch=8:64:x1", r"--vary 'batch=8:64:x1': the factor"),
        ("batch=1:8:log:99999", "a range has 2 to"),
    ],
)
def test_values_that_do_not_parse_are_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        parse_varied(text)
    assert "\n" not in str(caught.value)


def test_quantities_vary_one_at_a_time_or_in_a_grid() -> None:
    varied = [parse_varied("bandwidth=1,2"), parse_varied("ranks=2,4,8")]
    alone: list[Setting] = [{"bandwidth": 1}, {"bandwidth": 2}, {"ranks": 2}, {"ranks": 4}, {"ranks": 8}]
    assert list(settings_of(varied, grid=False)) == alone
    grid = settings_of(varied, grid=True)
    assert len(grid) == 6
    assert {"bandwidth": 2, "ranks": 8} in grid
    with pytest.raises(UserError, match="given twice"):
        settings_of([*varied, *varied], grid=False)
    with pytest.raises(UserError, match="combinations"):
        settings_of([parse_varied(f"{q}=0.1:10:log:99") for q in ("bandwidth", "latency")], grid=True)
