"""Closed forms over arrays: the same numbers as point by point, whatever is drawn."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "speed"))

from closed_form_tables import ClosedFormTables
from hypothesis import given, settings
from hypothesis import strategies as st
from network_factory import NetworkFactory
from profile_factory import affine_seconds, in_context, layer_times, make_profile, model_times, ring_fit

from calibrate.profile.collectives.communication_time import Piece, piecewise_seconds
from calibrate.profile.profile import Profile
from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.collectives.catalog import operations
from paradl_bench.plan.settings import PlanSettings, plan_settings
from paradl_bench.plan.strategy import Axis, Strategy
from paradl_bench.records.cluster import Cluster, Level
from predict.costs.communication.collective_times import fitted_seconds
from predict.costs.cost_model import CostModel
from predict.costs.hardware.what_if_hardware import Hardware
from predict.workload import Configuration, evaluator_named

NODE_RANKS = 4


def convolutional() -> ModelGraph:
    """3x32x32 -> conv 8 -> relu -> conv 12 -> pool 2 -> conv 12 -> flatten -> fc 16 -> fc 6."""
    factory = NetworkFactory(3, 32, 32)
    factory.conv("conv1", 8)
    factory.relu("relu")
    factory.conv("conv2", 12)
    factory.pool("pool", 2)
    factory.conv("conv3", 12)
    factory.flatten("flatten")
    factory.linear("fc1", 16)
    factory.linear("fc2", 6)
    factory.loss()
    return factory.network("convolutional")


NETWORK = convolutional()


def fits_of(operation: str) -> list[object]:
    """Two regimes a level, with a gap between them, and a level outside that is slower."""
    return [
        ring_fit(
            operation,
            level=level,
            alpha_s=alpha_s * slow,
            beta_s_per_byte=1e-9 * slow,
            gamma_s_per_byte=2e-10,
            bytes_range=bytes_range,
            regime=regime,
        )
        for level, slow in (("node", 1.0), ("rack", 3.0))
        for regime, alpha_s, bytes_range in (("small", 2e-5, (16, 4096)), ("large", 9e-5, (65536, 1 << 30)))
    ]


def profile_of(network: ModelGraph) -> Profile:
    contention = tuple(
        in_context("groups", level="rack", groups=groups, factor=factor) for groups, factor in ((2, 1.5), (4, 2.75))
    )
    return make_profile(
        network,
        cluster=Cluster(name="test", levels=(Level(name="node", ranks=NODE_RANKS), Level(name="rack", ranks=16))),
        layer_times=layer_times(network, seconds=affine_seconds, ranks_on_host={1: 1.0, 2: 1.2, 4: 1.5}),
        model_times=model_times(network, seconds=affine_seconds, between_s=1e-4, ranks_on_host=(1, 2, 4)),
        communication=tuple(fit for name in ("all_reduce", "all_gather", "send_recv") for fit in fits_of(name)),
        contexts=contention,
    )


PROFILE = profile_of(NETWORK)


def one_by_one(
    strategy: Strategy, batch: int, *, cluster: Cluster | None = None, **changes: object
) -> tuple[float, ClosedFormTables]:
    """What ``paradl`` says of a point, and tables with its settings."""
    model = CostModel(profile=PROFILE, network=NETWORK, cluster=cluster)
    wanted = plan_settings(batch=batch, **changes)  # type: ignore[arg-type]
    seconds = (
        evaluator_named("paradl").prepare(model, Configuration(strategy=strategy, settings=wanted)).timing().iteration_s
    )
    return seconds, ClosedFormTables(model, wanted)


def strategy_of(kind: str, groups: int, parts: tuple[int, ...]) -> Strategy:
    axes = [Axis(kind="data", extents=(groups,))] if groups > 1 or kind == "data" else []
    # A group of one rank shares nothing: its point is that of data parallelism, or serial.
    axes += [Axis(kind=kind, extents=parts)] if kind != "data" and math.prod(parts) > 1 else []  # type: ignore[arg-type]
    return Strategy(axes=tuple(axes))


degrees = st.sampled_from([1, 2, 3, 4, 6, 8])


@settings(max_examples=60)
@given(st.sampled_from(["data", "filter", "channel"]), degrees, st.sampled_from([1, 2, 3, 4, 6]), st.integers(1, 40))
def test_rows_are_those_of_single_points(kind: str, groups: int, ranks: int, local: int) -> None:
    ranks = 1 if kind == "data" else ranks
    batch = local * groups
    # The network's first layer has three channels, so channel parallelism leaves it whole.
    split = ("conv2", "conv3", "fc*") if kind == "channel" else ()
    seconds, tables = one_by_one(strategy_of(kind, groups, (ranks,)), batch, split=split)
    found = tables.iteration_s(kind, batch=batch, groups=groups, ranks=ranks)
    assert float(found) == pytest.approx(seconds, rel=1e-9)


@settings(max_examples=60)
@given(
    degrees,
    st.sampled_from([(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (3, 2)]),
    st.integers(1, 40),
    st.sampled_from([None, "pool", "flatten"]),
)
def test_spatial_rows_are_those_of_single_points(
    groups: int, parts: tuple[int, int], local: int, until: str | None
) -> None:
    batch = local * groups
    seconds, tables = one_by_one(strategy_of("spatial", groups, parts), batch, spatial_until=until)
    assert float(tables.iteration_s("spatial", batch=batch, groups=groups, ranks=parts)) == pytest.approx(
        seconds, rel=1e-9
    )


@settings(max_examples=30)
@given(st.integers(2, 4), st.integers(1, 8), st.integers(1, 8))
def test_pipeline_rows_are_those_of_single_points(ranks: int, micro_batches: int, samples: int) -> None:
    batch = micro_batches * samples
    seconds, tables = one_by_one(strategy_of("pipeline", 1, (ranks,)), batch, micro_batches=micro_batches)
    found = tables.iteration_s("pipeline", batch=batch, ranks=ranks, micro_batches=micro_batches)
    assert float(found) == pytest.approx(seconds, rel=1e-9)


@settings(max_examples=20)
@given(st.integers(1, 8), st.integers(1, 8))
def test_a_pipeline_of_one_rank_runs_micro_batches_in_turn(micro_batches: int, samples: int) -> None:
    model = CostModel(profile=PROFILE, network=NETWORK)
    point = Configuration(strategy=Strategy(), settings=PlanSettings(batch=samples))
    alone = evaluator_named("paradl").prepare(model, point).timing()
    found = ClosedFormTables(model).iteration_s("pipeline", batch=micro_batches * samples, micro_batches=micro_batches)
    assert float(found) == pytest.approx(micro_batches * (alone.fw_s + alone.bw_s) + alone.wu_s, rel=1e-9)


def test_arrays_are_broadcast_and_keep_their_shape() -> None:
    tables = ClosedFormTables(CostModel(profile=PROFILE, network=NETWORK))
    groups, ranks = np.array([[1], [2], [4]]), np.array([2, 4])
    found = tables.iteration_s("filter", batch=32, groups=groups, ranks=ranks)
    assert found.shape == (3, 2)
    for row in range(3):
        for column in range(2):
            one = tables.iteration_s("filter", batch=32, groups=groups[row, 0], ranks=ranks[column])
            assert found[row, column] == one
    assert tables.iteration_s("data", batch=np.array([], int), groups=1).shape == (0,)


def test_one_rank_groups_are_data_parallel_and_one_group_serial() -> None:
    tables = ClosedFormTables(CostModel(profile=PROFILE, network=NETWORK))
    for kind in ("filter", "channel", "spatial"):
        assert tables.iteration_s(kind, batch=32, groups=4) == pytest.approx(
            tables.iteration_s("data", batch=32, groups=4)
        )
    serial, _ = one_by_one(Strategy(), 32)
    assert float(tables.iteration_s("data", batch=32)) == pytest.approx(serial, rel=1e-9)


@pytest.mark.parametrize(
    ("kind", "groups", "ranks"), [("data", 4, 1), ("filter", 2, 4), ("spatial", 2, 2), ("pipeline", 1, 3)]
)
def test_other_hardware_changes_rows_as_it_changes_single_points(kind: str, groups: int, ranks: int) -> None:
    hardware = Hardware(bandwidth=2.0, latency=0.5, latency_at={"rack": 3.0}, peak_flops=3.0, memory_bandwidth=1.5)
    model, other = (CostModel(profile=PROFILE, network=NETWORK, hardware=each) for each in (Hardware(), hardware))
    point = Configuration(strategy=strategy_of(kind, groups, (ranks,)), settings=PlanSettings(batch=24))
    seconds = evaluator_named("paradl").prepare(other, point).timing().iteration_s
    found, before = (
        ClosedFormTables(each).iteration_s(kind, batch=24, groups=groups, ranks=ranks) for each in (other, model)
    )
    assert float(found) == pytest.approx(seconds, rel=1e-9)
    assert found < before


def test_a_cluster_that_is_given_states_levels_and_contention() -> None:
    cluster = Cluster(
        name="given",
        levels=(
            Level(name="node", ranks=2, alpha_s=1e-5, beta_s_per_byte=1e-10),
            Level(name="rack", ranks=8, contention=3.0),
        ),
    )
    seconds, tables = one_by_one(strategy_of("filter", 2, (4,)), 16, cluster=cluster)
    assert float(tables.iteration_s("filter", batch=16, groups=2, ranks=4)) == pytest.approx(seconds, rel=1e-9)
    with pytest.raises(UserError, match="16 ranks do not fit cluster 'given'"):
        tables.iteration_s("data", batch=32, groups=[2, 16])


@pytest.mark.parametrize(
    ("kind", "point", "message"),
    [
        ("tensor", {}, "unknown closed form 'tensor'"),
        ("data", {"ranks": 2}, "ranks of data parallelism are groups"),
        ("data", {"groups": 3}, "batch 8 does not split evenly over 3 groups"),
        ("data", {"groups": 0}, "have to be at least 1"),
        ("filter", {"ranks": (2, 2)}, "spatial parallelism alone parts several dims, not filter"),
        ("pipeline", {"ranks": 2, "groups": 2}, "of pipelines alone"),
        ("pipeline", {"ranks": 2, "micro_batches": 3}, "batch 8 does not split evenly into 3 micro-batches"),
        ("pipeline", {"ranks": 2, "micro_batches": 0}, "micro-batches have to be at least 1"),
        ("pipeline", {"ranks": 2, "micro_batches": -2}, "micro-batches have to be at least 1"),
        ("filter", {"ranks": 2, "micro_batches": 2}, "micro_batches are of pipelines, not of filter"),
        ("filter", {"ranks": 1.5}, "ranks has to be of whole numbers"),
        ("data", {"groups": [2, math.nan]}, "groups has to be of whole numbers"),
        ("data", {"groups": math.inf}, "groups has to be of whole numbers"),
        ("data", {"groups": "2"}, "groups has to be of whole numbers"),
        ("data", {"groups": [[1, 2], [4]]}, "groups: rows of unlike lengths are no array"),
        ("filter", {"groups": [1, 2], "ranks": [2, 2, 2]}, r"of the shapes \(2,\), \(3,\) do not broadcast"),
        ("spatial", {"ranks": ()}, "ranks are an empty tuple"),
    ],
)
def test_points_without_a_row_are_refused(kind: str, point: dict[str, object], message: str) -> None:
    tables = ClosedFormTables(CostModel(profile=PROFILE, network=NETWORK))
    with pytest.raises(UserError, match=message):
        tables.iteration_s(kind, batch=8, **point)  # type: ignore[arg-type]


def test_whole_numbers_may_come_as_floats() -> None:
    tables = ClosedFormTables(CostModel(profile=PROFILE, network=NETWORK))
    assert tables.iteration_s("data", batch=np.array([8.0]), groups=2.0) == tables.iteration_s(
        "data", batch=8, groups=2
    )


def test_a_layer_that_there_is_none_of_is_refused() -> None:
    with pytest.raises(UserError, match="to end spatial parallelism before 'flaten': did you mean flatten"):
        ClosedFormTables(CostModel(profile=PROFILE, network=NETWORK), plan_settings(batch=1, spatial_until="flaten"))


@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", ("conv2",)), ("interleaved", ("relu", "conv2", "conv3"))])
def test_given_stages_count_in_closed_forms_that_know_them(schedule: str, stages: tuple[str, ...]) -> None:
    seconds, tables = one_by_one(strategy_of("pipeline", 1, (2,)), 8, schedule=schedule, stages=stages)
    assert float(tables.iteration_s("pipeline", batch=8, ranks=2)) == pytest.approx(seconds, rel=1e-9)


regimes = st.lists(st.integers(1, 10**6), min_size=2, max_size=8, unique=True).filter(lambda ends: len(ends) % 2 == 0)


@given(
    regimes, st.lists(st.integers(0, 2 * 10**6), min_size=1, max_size=20), st.booleans(), st.booleans(), st.randoms()
)
def test_each_message_by_its_own_regime_is_the_piecewise_time(
    ends: list[int], messages: list[int], by_ranks: bool, of_step: bool, draw: object
) -> None:
    ends = sorted(ends)
    ring = dict(operations()["all_reduce"].algorithms)["ring"]
    pieces = [
        Piece(
            *(ring, low, high, draw.random(), draw.random(), 0.0),  # type: ignore[attr-defined]
            at_ranks=4.0 if by_ranks else 0.0,
            of_step=of_step,
        )
        for low, high in zip(ends[::2], ends[1::2], strict=True)
    ]
    sizes = np.array([messages, ends[:1] * len(messages), ends[-1:] * len(messages)], float)
    ranks = np.array([2 + index % 7 for index in range(len(messages))])
    found = fitted_seconds(pieces, ranks, sizes, np.ones_like(ranks))
    wanted = [
        [float(piecewise_seconds(pieces, rank, size)) for rank, size in zip(ranks, row, strict=True)] for row in sizes
    ]
    np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_layers_that_do_not_split_count_whole() -> None:
    """Of two ranks, half of conv2's time goes; the rest stays, and the update is halved."""
    model = CostModel(profile=PROFILE, network=NETWORK)
    whole = ClosedFormTables(model, plan_settings(batch=1, split=("conv2",)))
    nothing = model.sums(model.place(strategy_of("filter", 1, (2,)), 8)).costs.seconds
    (conv2,) = [layer for layer in NETWORK.layers if layer.name == "conv2"]
    layer_s = sum(1.2 * affine_seconds(conv2, phase, 8) for phase in ("FW", "BW"))
    size = 4 * 8 * conv2.output_elements

    def ring(message: float, alpha_s: float) -> float:
        return alpha_s + message * 1e-9

    gathered = ring(size / 2, 9e-5)
    reduced = 2 * ring(size / 2, 9e-5) + size / 2 * 2e-10
    wanted = nothing[0] + nothing[1] - layer_s / 2 + nothing[4] / 2 + gathered + reduced
    assert size / 2 > 65536
    assert float(whole.iteration_s("filter", batch=8, ranks=2)) == pytest.approx(wanted, rel=1e-9)
    assert math.isfinite(wanted)
