"""Calls beside an all-reduce in flight: what a sweep holds, its fit, and how predictions take it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from network_factory import NetworkFactory
from profile_factory import in_context, make_profile, ring_fit

from calibrate.fitting.contexts.context_fit import fit_contexts
from calibrate.fitting.reading import Placed
from calibrate.profile.collectives.contexts import InContext
from calibrate.profile.emulated_profile import emulated
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.collectives.catalog import operations
from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Collective, HaloExchange, Phase, RoleBuilder, Stream
from paradl_bench.records.contexts.context import ContextSamples
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.pipeline.axis import PipelineOptions
from predict.costs.communication.calls import works_with_all_reduce
from predict.costs.communication.context_costs import ContextCosts, Wanted
from predict.costs.cost_model import CostModel
from predict.costs.priced import blocking_tasks
from predict.prediction.prediction import Prediction, Predictor
from predict.simulation.prepared import price
from predict.simulation.simulator import coalesce, simulate, sums_within, task_graph
from predict.timeline.timeline import timeline_of
from predict.workload import Configuration, evaluator_named

ADDED_S, FACTOR = 2e-3, 1.5
SIZES = (1 << 13, 1 << 16, 1 << 18, 1 << 20)
CALLS, REPETITIONS = 4, 6


def sweep(
    added_s: float = ADDED_S, factor: float = FACTOR, *, seed: int = 0, noise: float = 0.1, waits: bool = False
) -> list[Placed[ContextSamples]]:
    """Messages of two ranks; the second comes later by up to 50 us; the last call of four finds the all-reduce done."""
    generator = np.random.default_rng(seed)
    found = []
    for block in range(4):
        for size in SIZES:
            shape = (REPETITIONS, CALLS)
            usual = 100e-6 + size * 2e-9
            apart, beside = (
                taken * np.exp(noise * generator.standard_normal(shape)) for taken in (usual, added_s + factor * usual)
            )
            beside[:, -1] = usual
            late = generator.uniform(0, 50e-6, shape)
            begun = np.broadcast_to(np.arange(CALLS) < CALLS - 1, shape)
            both = {
                "start_s": rows(np.zeros(shape), late),
                "end_s": rows(late + beside, late + beside - 1e-6),
                "begun": rows(begun, begun),
                "outlived": rows(*[begun & (not waits)] * 2),
            }
            record = ContextSamples(
                library="gloo",
                operation="send_recv",
                level="node",
                ranks=2,
                message_bytes=size,
                context="with-all-reduce",
                neighbour_bytes=25 << 20,
                dtype="fp32",
                block=block,
                neighbour="layers",
                calls=CALLS,
                one_clock=True,
                idle_start_s=rows(np.zeros(shape), late),
                idle_end_s=rows(late + apart, late + apart - 1e-6),
                neighbour_s=((0.03,) * REPETITIONS,) * 2,
                **both,
            )
            found.append(Placed(0, record))
    return found


def rows(*of_ranks: np.ndarray) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(each.ravel().tolist()) for each in of_ranks)


def fitted(records: Sequence[Placed[ContextSamples]]) -> InContext:
    (entry,), notes = fit_contexts(records, (), operations())
    assert notes == ()
    return entry


def test_known_latency_and_factor_are_recovered_within_their_intervals() -> None:
    held = np.zeros(2)
    for seed in range(8):
        entry = fitted(sweep(seed=seed))
        assert entry.added_s == pytest.approx(ADDED_S, rel=0.1)
        assert entry.factor == pytest.approx(FACTOR, rel=0.1)
        assert not entry.waits
        held += np.abs([entry.added_s - ADDED_S, entry.factor - FACTOR]) <= 1.645 * np.sqrt(np.diag(entry.covariance))
    assert np.all(held >= 5)


def test_calls_that_find_the_all_reduce_done_are_not_counted() -> None:
    entry = fitted(sweep(noise=1e-4))
    assert entry.added_s == pytest.approx(ADDED_S, rel=0.01)
    landed = [
        Placed(each.directory, msgspec.structs.replace(each.record, begun=rows(*[np.zeros((6, 4), bool)] * 2)))
        for each in sweep()
    ]
    entries, notes = fit_contexts(landed, (), operations())
    assert entries == ()
    assert notes == ("gloo send_recv node with-all-reduce: no call began before the other work ended: left out",)


def test_calls_that_end_after_the_all_reduce_wait_for_it() -> None:
    assert fitted(sweep(waits=True)).waits
    assert fitted(sweep(waits=True)).waiting == 1.0


def test_an_all_reduce_makes_nothing_faster() -> None:
    entry = fitted(sweep(-40e-6, 0.9))
    assert (entry.added_s, entry.factor) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"calls": 5}, "has not 5 calls a repetition"),
        ({"begun": ((True,), (True,))}, "not as many samples"),
        ({"end_s": ((0.0,) * 24,) * 2}, "ends before it starts"),
    ],
)
def test_records_that_do_not_fit_together_are_refused(change: dict[str, object], said: str) -> None:
    (_, record), *_ = sweep()
    with pytest.raises(ValueError, match=said):
        msgspec.structs.replace(record, **change)


# Predictions


def test_a_call_is_slowed_only_while_an_all_reduce_runs() -> None:
    # An all-reduce of 4 s is issued at 1 s; compute of 2 s goes on at 1/2 beside it, which goes on at 1/4: from 1 to
    # 5 s, when 3 s of it are left. A call of 2 s beside it takes four times as long: 0.75 s of it are done at 8 s, and
    # the other 1.25 s take as long as they are.
    builder = RoleBuilder()
    exchange = Collective(operation="all_reduce", message_bytes=1, ranks=2)
    halo = HaloExchange(sends_bytes=(1,), receives_bytes=(1,), axes=(0,))
    first = builder.add(halo, Phase.BW, Stream.COMPUTE, ())
    builder.add(exchange, Phase.GE, Stream.COMMUNICATION, (first,))
    second = builder.add(halo, Phase.BW, Stream.COMPUTE, (first,))
    call = builder.add(halo, Phase.BW, Stream.COMMUNICATION, (second,))
    builder.add(halo, Phase.WU, Stream.COMPUTE, (call,))
    role = builder.build("role", 2)
    costs = np.array([1.0, 4.0, 2.0, 2.0, 1.0]), np.array([1.0, 2.0, 1.0, 1.0, 1.0]), np.array([1.0, 4.0, 1, 4.0, 1])
    blocking = np.arange(5) == 3
    line = simulate(task_graph(role, blocking=blocking), *costs)
    assert line.end_s.tolist() == pytest.approx([1.0, 8.0, 5.0, 9.25, 10.25])
    assert (line.overlap_s, line.exposed_communication_s) == pytest.approx((4.0, 4.25))
    # On the stream of the all-reduce it waits for all of it.
    assert simulate(task_graph(role), *costs).end_s.tolist() == pytest.approx([1.0, 8.0, 5.0, 10.0, 11.0])
    merged = coalesce(role, blocking=blocking)
    segments = simulate(
        merged.graph,
        sums_within(merged.segment, costs[0], len(merged.first)),
        *(each[merged.first] for each in costs[1:]),
    )
    assert segments.iteration_s == pytest.approx(10.25)


def convolutional() -> ModelGraph:
    factory = NetworkFactory(4, 16, 16)
    for index in range(4):
        factory.conv(f"conv{index}", 8)
    factory.flatten("flatten")
    factory.linear("fc", 64)
    factory.loss()
    return factory.network("convolutional")


NETWORK = convolutional()


def measured(operation: str = "send_recv", **more: object) -> InContext:
    return in_context("with-all-reduce", operation, **{"added_s": ADDED_S, **more})


def predicted(strategy: str, *entries: InContext, dilate: float | None = None) -> Prediction:
    names = ("all_reduce", "all_gather", "broadcast", "send_recv", "reduce_scatter")
    profile = make_profile(NETWORK, communication=tuple(map(ring_fit, names)), contexts=entries)
    settings = plan_settings(batch=8, first_bucket_bytes=64, bucket_cap_bytes=64)
    asked = Configuration(strategy=parse_strategy(strategy), settings=settings)
    model = CostModel(profile=profile if dilate is None else emulated(profile, dilate), network=NETWORK)
    return Predictor(model, evaluator_named("simulate")).predict(asked)


@pytest.mark.parametrize(
    ("strategy", "beside"),
    [
        ("s2", {"HaloExchange"}),
        ("d2s2", {"HaloExchange"}),
        ("d2f2", {"all_gather", "all_reduce"}),
        ("f2", set()),
        ("d2", set()),
        ("p2", set()),
        ("d2p2", {"Transfer"}),
        ("d2p2f2", {"all_gather", "all_reduce", "Transfer"}),
        ("p2f2", set()),
        ("z3d2", set()),
    ],
)
def test_layer_communication_is_beside_all_reduces_only_with_gradient_exchange(strategy: str, beside: set[str]) -> None:
    parsed = parse_strategy(strategy)
    plan = planner_for(parsed).plan(NETWORK, parsed, plan_settings(batch=8, first_bucket_bytes=64))
    found = {
        getattr(work, "operation", type(work).__name__)
        for work, chosen in zip(plan.works, works_with_all_reduce(plan), strict=True)
        if chosen
    }
    assert found - {"all_gather"} == beside - {"all_gather"}
    assert beside <= found
    for role in plan.roles:
        assert not works_with_all_reduce(plan)[role.work[role.phase == Phase.GE]].any()


def test_calls_of_stages_leave_their_stream_behind_the_first_exchange() -> None:
    parsed = parse_strategy("d2p2f2")
    plan = planner_for(parsed).plan(NETWORK, parsed, plan_settings(batch=8, first_bucket_bytes=64, micro_batches=4))
    calls = frozenset(np.flatnonzero(works_with_all_reduce(plan)).tolist())
    for role in plan.roles:
        of_calls, apart = np.isin(role.work, sorted(calls)), blocking_tasks(parsed, role.arrays.whole, calls)
        first = int(np.flatnonzero((role.phase == Phase.GE) & (role.stream == Stream.COMMUNICATION))[0])
        assert not apart[:first].any()
        assert of_calls[:first].any()
        assert apart[first:].tolist() == of_calls[first:].tolist()


def test_only_halos_take_longer_beside_a_slower_all_reduce() -> None:
    # Of an emulated run as well, whose messages are real.
    for dilate in (None, 1.0):
        none, some, more = (
            predicted("s2", measured(added_s=added), dilate=dilate).iteration_s for added in (0.0, ADDED_S, 2 * ADDED_S)
        )
        assert none < some < more
    for strategy in ("f2", "p2", "d2"):
        assert predicted(strategy, measured()).iteration_s == predicted(strategy).iteration_s


def test_calls_queue_only_where_that_was_measured() -> None:
    plain = predicted("s2")
    assert predicted("s2", measured(waiting=0.9)).iteration_s > plain.iteration_s
    # On the links of the all-reduce, they have half of these.
    alone_s, factor = (
        predicted("s2", measured(added_s=0.0, factor=1.0)).iteration_s,
        predicted("s2", measured(added_s=0.0, factor=2.0)),
    )
    assert alone_s < plain.iteration_s == pytest.approx(factor.iteration_s)
    assert any("--contexts with-all-reduce" in line for line in plain.provenance.extrapolated)
    assert not any(
        "beside" in line and "--contexts with-all-reduce" in line
        for line in predicted("s2", measured()).provenance.extrapolated
    )


def test_a_timeline_shows_halos_beside_the_exchange_without_double_counting() -> None:
    names = ("all_reduce", "all_gather", "broadcast", "send_recv", "reduce_scatter")
    # Slow enough links that the exchange is in flight for as long as backward lasts.
    fits = tuple(ring_fit(name, beta_s_per_byte=2e-6 if name == "all_reduce" else 1e-9) for name in names)
    profile = make_profile(NETWORK, communication=fits, contexts=(measured(added_s=1e-4),))
    model = CostModel(profile=profile, network=NETWORK)
    settings = plan_settings(batch=8, first_bucket_bytes=64, bucket_cap_bytes=64)
    point = Configuration(strategy=parse_strategy("s2"), settings=settings)
    (line, *_) = timeline_of(price(model, point), settings.of(PipelineOptions).schedule).lines
    (role,) = line.roles
    halos = np.isin(role.of_plan.work, sorted(role.blocking))
    exchange = role.of_plan.phase == Phase.GE
    beside = [
        np.any(exchange & (role.start_s < role.end_s[halo]) & (role.end_s > role.start_s[halo]))
        for halo in np.flatnonzero(halos)
    ]
    assert any(beside)
    assert set(role.threads[halos].tolist()).isdisjoint(role.threads[~halos].tolist())
    use = role.use(role.finish_s)
    assert use.compute_s + use.exposed_communication_s + use.idle_s == pytest.approx(role.finish_s)
    moments = np.unique(np.concatenate([role.start_s, role.end_s]))
    middle = (moments[1:] + moments[:-1]) / 2
    talks = role.of_plan.stream == Stream.COMMUNICATION
    active = np.any((role.start_s[talks, None] < middle) & (role.end_s[talks, None] > middle), axis=0)
    assert use.communication_s == pytest.approx(np.diff(moments)[active].sum())


def test_the_interval_takes_in_what_the_fit_leaves_open() -> None:
    sure, unsure = predicted("s2", measured()), predicted("s2", measured(covariance=((1e-6, 0.0), (0.0, 0.0))))
    assert np.subtract(*unsure.time.interval_s) < np.subtract(*sure.time.interval_s)


def test_measurements_beside_all_reduces_of_the_same_level_come_first() -> None:
    """Halos inside of a node, gradients over two: beside those of the node they would take much less."""
    near, far = measured(), measured(added_s=5 * ADDED_S, neighbour_level="system")
    costs = ContextCosts(make_profile(NETWORK, contexts=(near, far)), "gloo")
    for spanned, entry in (("node", near), ("system", far)):
        assert costs.likest(Wanted("with-all-reduce", "send_recv", "node", spanned)) == (entry, ())
    assert far.slowdown(1e-3)[0] == pytest.approx(1 + 5 * ADDED_S / 1e-3)
    assert all(map(math.isfinite, far.slowdown(1e-300)))
    found, (remark,) = costs.likest(Wanted("with-all-reduce", "exchange", "node", "system"))
    assert found == far
    assert "exchange at level 'node' with-all-reduce at level 'system'" in remark.text
    assert "--side-by-side" in remark.text
    alone = ContextCosts(make_profile(NETWORK, contexts=(near,)), "gloo")
    _, (remark,) = alone.likest(Wanted("with-all-reduce", "send_recv", "node", "system"))
    assert "as send_recv at level 'node' with-all-reduce at level 'node'" in remark.text
