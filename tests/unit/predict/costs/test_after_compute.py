"""What compute adds to collectives comes back from pairs, and predictions add it where compute waits for them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from network_factory import two_convolutions
from profile_factory import in_context, make_profile, ring_fit

from calibrate.fitting.contexts.context_fit import fit_contexts
from calibrate.fitting.reading import Placed
from calibrate.profile.collectives.contexts import ContextPoint, InContext
from calibrate.profile.profile import Profile
from paradl_bench.plan.collectives.catalog import operations
from paradl_bench.plan.settings import PlanSettings, plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Collective, HaloExchange, Phase, Scope, Stream, Transfer
from paradl_bench.records.contexts.context import ContextSamples
from paradl_bench.strategies.nesting.catalog import planner_for
from predict.costs.communication.calls import works_after_compute
from predict.costs.communication.communication_costs import Call, CommunicationCosts
from predict.costs.cost_model import CostModel
from predict.prediction.prediction import Prediction, Predictor
from predict.workload import Configuration, evaluator_named

ADDED_S, FACTOR = 150e-6, 1.2
SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24)


def pairs(
    added_s: float = ADDED_S, factor: float = FACTOR, *, seed: int = 0, noise: float = 0.1, sizes: Sequence[int] = SIZES
) -> list[Placed[ContextSamples]]:
    """All-reduces of two ranks; the second rank comes later by up to 50 us, and the time runs from there."""
    generator = np.random.default_rng(seed)
    found = []
    for block in range(5):
        drift = 1 + 0.05 * generator.standard_normal()
        for size in sizes:
            alone = drift * 2 * (50e-6 + size / 2 * 1e-9) * np.exp(noise * generator.standard_normal((2, 12)))
            usual = drift * 2 * (50e-6 + size / 2 * 1e-9)
            behind = (added_s + factor * usual) * np.exp(noise * generator.standard_normal(12))
            late = generator.uniform(0, 50e-6, 12)
            start = np.stack([np.zeros(12), late])
            end = late + behind
            record = ContextSamples(
                library="gloo",
                operation="all_reduce",
                level="node",
                ranks=2,
                message_bytes=size,
                dtype="fp32",
                block=block,
                context="after-compute",
                neighbour="layers",
                one_clock=True,
                idle_end_s=tuple(map(tuple, (alone * [[1.0], [0.0]] + 1e-9).tolist())),
                neighbour_s=tuple(map(tuple, np.full((2, 12), 1e-3).tolist())),
                start_s=tuple(map(tuple, start.tolist())),
                end_s=tuple(map(tuple, np.stack([end, end - 1e-6]).tolist())),
            )
            found.append(Placed(0, record))
    return found


def fitted(records: Sequence[Placed[ContextSamples]]) -> InContext:
    (entry,), notes = fit_contexts(records, (), operations())
    assert notes == ()
    return entry


def test_known_latency_and_factor_lie_inside_their_intervals() -> None:
    held = np.zeros(2)
    for seed in range(10):
        entry = fitted(pairs(seed=seed))
        assert entry.added_s == pytest.approx(ADDED_S, rel=0.25)
        assert entry.factor == pytest.approx(FACTOR, rel=0.1)
        sds = np.sqrt(np.diag(entry.covariance))
        held += np.abs([entry.added_s - ADDED_S, entry.factor - FACTOR]) <= 1.645 * sds
    assert np.all(held >= 7)


def test_added_latency_excludes_the_wait_for_the_last_rank() -> None:
    entry = fitted(pairs(noise=0.001))
    assert entry.added_s == pytest.approx(ADDED_S, rel=0.03)
    (_, record), *_ = pairs(noise=0.001)
    assert 10e-6 < np.median(record.lags_s()) < 40e-6
    assert np.median(record.in_context_s(max)) == pytest.approx(ADDED_S + FACTOR * 2 * (50e-6 + 512e-9), rel=0.1)


def test_compute_before_a_call_makes_nothing_faster() -> None:
    entry = fitted(pairs(-40e-6, 0.9))
    assert (entry.added_s, entry.factor) == (0.0, 1.0)


def test_pairs_of_two_ranks_hide_nothing_of_four() -> None:
    """Two ranks with a core each come from compute in no time. Four that share two cores do not."""
    of_four = [Placed(0, msgspec.structs.replace(record, **doubled(record))) for _, record in pairs(noise=0.01)]
    (two, four), notes = fit_contexts([*pairs(-40e-6, 0.9, noise=0.01), *of_four], (), operations())
    assert (two.ranks, two.added_s, two.factor, notes) == ((2, 2), 0.0, 1.0, ())
    assert four.ranks == (4, 4)
    assert four.added_s == pytest.approx(ADDED_S, rel=0.1)
    assert four.factor == pytest.approx(FACTOR, rel=0.1)


def doubled(record: ContextSamples) -> dict[str, object]:
    """The fields of as many calls of four ranks, two of which do what the two others do."""
    names = ("idle_end_s", "neighbour_s", "start_s", "end_s")
    return {"ranks": 4, **{name: getattr(record, name) * 2 for name in names}}


def test_one_size_tells_no_factor() -> None:
    entry = fitted(pairs(sizes=(1 << 14,), noise=0.01))
    assert entry.factor == 1
    assert entry.added_s == pytest.approx(ADDED_S + (FACTOR - 1) * 116e-6, rel=0.1)


def test_without_one_clock_the_shortest_stay_counts() -> None:
    (_, record), *_ = pairs(noise=0.001)
    own_clocks = msgspec.structs.replace(
        record,
        one_clock=False,
        start_s=tuple(tuple(0.0 for _ in row) for row in record.start_s),
        end_s=((5.0,) * 12, (3.0,) * 12),
    )
    assert own_clocks.in_context_s(max) == (3.0,) * 12
    assert own_clocks.lags_s() == ()


def test_records_that_end_before_they_start_are_refused() -> None:
    (_, record), *_ = pairs()
    with pytest.raises(ValueError, match="ends before it starts"):
        msgspec.structs.replace(record, start_s=((1.0,) * 12, (0.0,) * 12), end_s=((0.5,) * 12, (2.0,) * 12))


# Predictions


NETWORK = two_convolutions()


def measured(operation: str, **more: object) -> InContext:
    return in_context("after-compute", operation, **{"added_s": ADDED_S, "bytes_range": (1024, 1 << 20), **more})


def profile_of(*entries: InContext) -> Profile:
    names = ("all_reduce", "all_gather", "broadcast", "send_recv", "reduce_scatter")
    return make_profile(NETWORK, communication=tuple(map(ring_fit, names)), contexts=entries)


def predicted(strategy: str, *entries: InContext, batch: int = 8, evaluator: str = "simulate") -> Prediction:
    costs = CostModel(profile=profile_of(*entries), network=NETWORK)
    asked = Configuration(strategy=parse_strategy(strategy), settings=PlanSettings(batch=batch))
    return Predictor(costs, evaluator_named(evaluator)).predict(asked)


@pytest.mark.parametrize(
    ("strategy", "operations_behind"),
    [
        ("f2", {"all_gather", "all_reduce"}),
        ("c2", {"all_gather", "all_reduce"}),
        ("s2", {"halo", "all_gather"}),
        ("p2", {"send"}),
        ("d2", set()),
        ("d2f2", {"all_gather", "all_reduce"}),
    ],
)
def test_layer_communication_is_behind_compute_but_not_the_exchange(strategy: str, operations_behind: set[str]) -> None:
    parsed = parse_strategy(strategy)
    plan = planner_for(parsed).plan(NETWORK, parsed, plan_settings(batch=8, first_bucket_bytes=64))
    names = set()
    for work, behind in zip(plan.works, works_after_compute(plan), strict=True):
        if behind:
            assert isinstance(work, Collective | HaloExchange | Transfer)
            names.add(getattr(work, "operation", getattr(work, "direction", "halo")))
    assert names == operations_behind
    for role in plan.roles:
        exchanged = role.work[(role.phase == Phase.GE) & (role.stream == Stream.COMMUNICATION)]
        assert not works_after_compute(plan)[exchanged].any()


@pytest.mark.parametrize("blocking", [True, False])
def test_gathers_of_zero_are_waited_for_where_calls_block(blocking: bool) -> None:
    parsed = parse_strategy("z3d2")
    plan = planner_for(parsed).plan(NETWORK, parsed, PlanSettings(batch=8, blocking=blocking))
    gathers = [
        bool(behind)
        for work, behind in zip(plan.works, works_after_compute(plan), strict=True)
        if isinstance(work, Collective) and work.operation == "all_gather"
    ]
    assert any(gathers) == blocking


def test_each_collective_of_a_layer_takes_so_much_longer() -> None:
    parsed = parse_strategy("f2")
    plan = planner_for(parsed).plan(NETWORK, parsed, PlanSettings(batch=8))
    count = sum(isinstance(work, Collective) for work in plan.communication())
    plain, late = predicted("f2"), predicted("f2", measured("all_gather"), measured("all_reduce"))
    assert late.iteration_s - plain.iteration_s == pytest.approx(count * ADDED_S, rel=1e-6)
    assert any("wait for compute: the added time was not measured" in line for line in plain.provenance.extrapolated)
    assert not any("after-compute" in line for line in late.provenance.extrapolated)
    spread = predicted("f2", measured("all_gather", covariance=((1e-10, 0.0), (0.0, 0.0))), measured("all_reduce"))
    assert spread.time.interval_s[1] - spread.iteration_s > late.time.interval_s[1] - late.iteration_s


def test_latency_counts_once_per_halo_exchange_and_per_pipeline_message() -> None:
    plain, late = predicted("s2"), predicted("s2", measured("send_recv"), measured("all_gather", added_s=0.0))
    parsed = parse_strategy("s2")
    plan = planner_for(parsed).plan(NETWORK, parsed, PlanSettings(batch=8))
    halos = sum(isinstance(work, HaloExchange) for work in plan.communication())
    assert late.iteration_s - plain.iteration_s == pytest.approx(halos * ADDED_S, rel=1e-6)
    # Two micro-batches: the first message of forward and the last of backward can't be hidden behind compute.
    assert predicted("p2", measured("send_recv")).iteration_s - predicted("p2").iteration_s >= 2 * ADDED_S - 1e-9


@pytest.mark.parametrize("strategy", ["p2", "s2", "f2", "c2", "d2"])
def test_closed_forms_leave_it_out(strategy: str) -> None:
    measured_all = [measured(operation) for operation in ("send_recv", "all_gather", "all_reduce")]
    late, plain = (predicted(strategy, *entries, evaluator="paradl") for entries in (measured_all, ()))
    assert late.iteration_s == plain.iteration_s


def test_calls_of_as_many_ranks_come_before_those_of_others() -> None:
    entries = (measured("all_reduce"), measured("all_reduce", added_s=3 * ADDED_S, ranks=(4, 4)))
    costs = CommunicationCosts(profile_of(*entries), None, "gloo")
    for degree, added_s in ((2, ADDED_S), (4, 3 * ADDED_S)):
        work = Collective(operation="all_reduce", message_bytes=1 << 18, ranks=degree)
        strategy = parse_strategy(f"f{degree}")
        behind, alone = (costs.cost(work, strategy, Call(after_compute=each)).cost.seconds for each in (True, False))
        assert behind - alone == pytest.approx(added_s)


def test_data_parallelism_stays_as_it_is() -> None:
    assert predicted("d2", measured("all_reduce")).iteration_s == predicted("d2").iteration_s


def test_beyond_the_largest_size_what_was_added_there_stays() -> None:
    costs = CommunicationCosts(profile_of(measured("all_reduce", factor=1.5)), None, "gloo")
    strategy = parse_strategy("f2")
    added = []
    for size in (1 << 20, 1 << 26):
        work = Collective(operation="all_reduce", message_bytes=size, ranks=2)
        behind = costs.cost(work, strategy, Call(after_compute=True)).cost.seconds
        added.append(behind - costs.cost(work, strategy).cost.seconds)
    assert added[0] == pytest.approx(ADDED_S + 0.5 * 2 * (50e-6 + (1 << 19) * 1e-9))
    assert added[1] == pytest.approx(added[0])


def swept_s(size: int) -> float:
    return 2 * (50e-6 + size / 2 * 1e-9)


def paired(ratios: dict[int, float]) -> tuple[ContextPoint, ...]:
    """Pairs whose first halves took so many times what a sweep's calls take."""
    return tuple(
        ContextPoint(ranks=2, message_bytes=size, idle_s=ratio * swept_s(size), in_context_s=1.0, fitted_s=1.0)
        for size, ratio in ratios.items()
    )


def behind_s(size: int, entry: InContext) -> float:
    costs = CommunicationCosts(profile_of(entry), None, "gloo")
    work = Collective(operation="all_reduce", message_bytes=size, ranks=2)
    return costs.cost(work, parse_strategy("f2"), Call(after_compute=True)).cost.seconds


def test_latency_behind_compute_adds_to_paired_not_swept_call_times() -> None:
    points = paired({1024: 0.5, 4096: 2.0, 65536: 2.0, 1 << 20: 8.0})
    entry = measured("all_reduce", factor=1.5, points=points)
    for size, ratio in ((16, 0.5), (1024, 0.5), (4096, 2.0), (16384, 2.0), (1 << 20, 8.0), (1 << 18, 4.0)):
        assert behind_s(size, entry) == pytest.approx(ADDED_S + 1.5 * ratio * swept_s(size))
    # Beyond the largest size what is more at it stays.
    more_s = ADDED_S + (1.5 * 8.0 - 1) * swept_s(1 << 20)
    assert behind_s(1 << 26, entry) == pytest.approx(swept_s(1 << 26) + more_s)


def test_no_call_takes_less_than_a_sweeps() -> None:
    """On cores that ranks share a loop of short calls hinders itself, and calls between others are shorter."""
    short = paired({1024: 0.25, 1 << 20: 0.25})
    assert behind_s(4096, measured("all_reduce", added_s=0.0, points=short)) == pytest.approx(swept_s(4096))
    costs = CommunicationCosts(profile_of(measured("all_reduce", points=short)), None, "gloo")
    work = Collective(operation="all_reduce", message_bytes=4096, ranks=2, scope="node", per_node=2)
    assert costs.cost(work, parse_strategy("d2")).cost.seconds == pytest.approx(swept_s(4096))


def test_one_size_that_its_neighbours_agree_against_does_not_count() -> None:
    entry = measured("all_reduce", added_s=0.0, points=paired({1024: 2.0, 4096: 50.0, 65536: 2.0, 1 << 20: 3.0}))
    assert behind_s(4096, entry) == pytest.approx(2.0 * swept_s(4096))


def test_consecutive_calls_take_the_paired_ratio_without_added_latency() -> None:
    """Segments of buckets: each is one of three operations, one after the other."""
    entry = measured("all_reduce", points=paired({1024: 3.0, 1 << 20: 3.0}))
    costs = CommunicationCosts(profile_of(entry), None, "gloo")
    cases: tuple[tuple[Scope, str, int], ...] = (
        ("group", "all_reduce", 1),
        ("node", "all_reduce", 3),
        ("node", "all_gather", 1),
    )
    for scope, operation, ratio in cases:
        work = Collective(operation=operation, message_bytes=1 << 18, ranks=2, scope=scope, per_node=2)
        alone = Collective(operation=operation, message_bytes=1 << 18, ranks=2)
        plain_s = costs.cost(alone, parse_strategy("d2")).cost.seconds
        assert costs.cost(work, parse_strategy("d2")).cost.seconds == pytest.approx(ratio * plain_s)


def test_an_operation_unmeasured_behind_compute_uses_another_with_notice() -> None:
    costs = CommunicationCosts(profile_of(measured("all_reduce")), None, "gloo")
    work = Collective(operation="all_gather", message_bytes=1024, ranks=2)
    found = costs.cost(work, parse_strategy("f2"), Call(after_compute=True)).cost
    assert [remark.text for remark in found.remarks] == [
        "all_gather at level 'node' after-compute: as all_reduce at level 'node' after-compute"
    ]
