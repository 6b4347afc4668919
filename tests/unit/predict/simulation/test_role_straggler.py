"""How late the last rank is expected to be, against draws of every rank by itself."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from profile_factory import linear_seconds, make_network, make_profile, model_times, ring_fit

from calibrate.profile.profile import LayerTime, Profile
from paradl_bench.core.statistics import IQR_TO_SD, Summary
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import Strategy, parse_strategy
from paradl_bench.plan.tasks import Communication, Compute, Plan, Stream
from paradl_bench.records.measurement import PhaseName
from predict.costs.compute.model_costs import ModelCosts
from predict.costs.cost_model import CostModel
from predict.costs.priced import PricedPlan
from predict.costs.spread.stragglers import RankSpread, part_spread
from predict.simulation.pipelines import pipeline_straggler
from predict.simulation.prepared import price, workload_of
from predict.simulation.role_straggler import ranks_level, straggler_tasks
from predict.workload import Configuration

CHAIN = make_network((64, 128, 256, 32))
EVEN = tuple(0.75 + 0.05 * i for i in range(11))
PHASES: tuple[PhaseName, ...] = ("FW", "BW")
LEVEL_SD = 0.04
"""Of iterations, over their median."""


def normal_quantiles(sd: float, count: int = 401) -> tuple[float, ...]:
    """The ends, which a normal distribution lacks, are those of four deviations."""
    normal = statistics.NormalDist(1.0, sd)
    inside = [normal.inv_cdf(i / (count - 1)) for i in range(1, count - 1)]
    return (1 - 4 * sd, *inside, 1 + 4 * sd)


def profile_with(own_relative_sd: float, quantiles: Sequence[float], network: ModelGraph = CHAIN) -> Profile:
    """Layers that spread by themselves, and iterations that do; the weight update takes next to nothing."""
    times = [
        LayerTime(
            operation=layer.operation,
            phase=phase,
            mode="in_situ",
            batch=batch,
            dtype="fp32",
            ranks_on_host=on_host,
            time=Summary(median_s=at, typical_s=at, iqr_s=at * own_relative_sd / IQR_TO_SD, minimum_s=at, samples=1000),
            block_relative_sd=0.0,
        )
        for layer in {layer.operation: layer for layer in network.layers}.values()
        for phase in PHASES
        for batch in (4, 8)
        for on_host in (1, 2)
        for at in [linear_seconds(layer, phase, batch)]
    ]
    operations = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send_recv")
    return make_profile(
        network,
        layer_times=tuple(times),
        model_times=model_times(network, wu_s=1e-9, quantiles=tuple(quantiles), samples=100_000),
        communication=tuple(ring_fit(operation, alpha_s=1e-5) for operation in operations),
        contexts=(),
    )


def priced_at(
    profile: Profile, text: str, local: int = 4, **settings: object
) -> tuple[CostModel, Configuration, PricedPlan]:
    strategy = parse_strategy(text)
    batch = local * next((axis.degree for axis in strategy.axes if axis.has(Trait.DIVIDES_BATCH)), 1)
    batch *= int(str(settings.get("micro_batches", 1)))
    point = Configuration(strategy=strategy, settings=plan_settings(batch=batch, **settings))  # type: ignore[arg-type]
    costs = CostModel(profile=profile, network=next(iter(profile.network.values())))
    return costs, point, price(costs, point)


def simulated_s(profile: Profile, text: str, **settings: object) -> float:
    model, point, priced = priced_at(profile, text, **settings)  # type: ignore[arg-type]
    return workload_of(model, point, priced).timing().iteration_s


def groups_of(strategy: Strategy, axes: Sequence[int]) -> list[list[int]]:
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(strategy.ranks):
        place = strategy.coordinates(rank)
        found.setdefault(tuple(at for axis, at in enumerate(place) if axis not in axes), []).append(rank)
    return list(found.values())


def drawn_s(priced: PricedPlan, tied: np.ndarray, own_sd: np.ndarray) -> float:
    """The mean iteration over draws when each rank keeps clocks of its own, all of them at 0 to begin with.

    Args:
        tied: (draws, ranks) by how much a rank is slower all the time. own_sd: per work, of each event by itself.
    """
    plan, (role,) = priced.plan, priced.plan.roles
    rng = np.random.default_rng(7)
    draws, ranks = tied.shape
    clock = {stream: np.zeros((draws, ranks)) for stream in Stream}
    ends: list[np.ndarray] = []
    for task in range(role.tasks):
        work, stream = int(role.work[task]), Stream(int(role.stream[task]))
        blocking = role.dependencies[role.dependency_start[task] : role.dependency_start[task + 1]]
        start = np.maximum.reduce([clock[stream], *(ends[other] for other in blocking)])
        seconds = priced.costs.seconds[work]
        described = plan.works[work]
        if isinstance(described, Communication):
            for group in groups_of(plan.strategy, described.axes):
                start[:, group] = start[:, group].max(axis=1, keepdims=True)
            end = start + seconds
        else:
            end = start + seconds * (1 + tied + own_sd[work] * rng.standard_normal((draws, ranks)))
        clock[stream] = end
        ends.append(end)
    return float(np.mean(np.maximum.reduce(list(clock.values())).max(axis=1)))


def own_deviations(plan: Plan, sd: float) -> np.ndarray:
    return np.array([sd if isinstance(work, Compute) else 0.0 for work in plan.works])


# The spread of a rank


@pytest.mark.parametrize("ranks", [1, 2, 4, 100])
def test_the_last_of_uniform_times_is_the_expected_maximum(ranks: int) -> None:
    spread = RankSpread(quantiles=EVEN, samples=1000)
    assert spread.wait(ranks) == pytest.approx(0.5 * (ranks / (ranks + 1) - 0.5))
    assert spread.relative_sd == pytest.approx(0.5 / 12**0.5)


def test_the_last_of_p_agrees_with_draws() -> None:
    rng = np.random.default_rng(0)
    sample = np.sort(rng.lognormal(0.0, 0.1, 20_001))
    quantiles = tuple(np.quantile(sample / np.median(sample), np.linspace(0, 1, 2001)).tolist())
    profile = make_profile(model_times=model_times(CHAIN, quantiles=quantiles, samples=20_001))
    spread = ModelCosts(profile, CHAIN, dtype="fp32", optimizer="sgd").rank_spread(4, 1)
    drawn = (rng.choice(sample, (40_000, 8)).max(axis=1).mean() - sample.mean()) / np.median(sample)
    assert spread.wait(8) == pytest.approx(drawn, rel=0.02)


def test_more_ranks_than_samples_are_clipped_and_flagged() -> None:
    spread = RankSpread(quantiles=(0.9, 1.0, 1.4), samples=20)
    assert spread.wait(1024) == spread.wait(20) > spread.wait(19)
    assert any("beyond 20 ranks" in remark.text and remark.extrapolated for remark in spread.remarks(1024))
    assert not any(remark.extrapolated for remark in spread.remarks(20))


def test_one_delayed_iteration_does_not_dominate_the_expected_wait() -> None:
    quiet = tuple(1 + 0.01 * (i - 10) / 10 for i in range(21))
    held_up = RankSpread(quantiles=(*quiet[:-1], 4.0), samples=20)
    assert held_up.wait(2) < 3 * RankSpread(quantiles=quiet, samples=20).wait(2)


def test_what_is_tied_follows_from_the_spread_of_events() -> None:
    """100 equal events: with all of the variance tied each spreads as the whole does, with none of it ten times so."""
    seconds = np.full(100, 0.01)
    quantiles = normal_quantiles(0.05)
    for share in (0.0, 0.3, 1.0):
        own = 0.05**2 * (share + (1 - share) * 100)
        found = part_spread(quantiles, seconds, seconds * own**0.5, 1.0)
        assert found.common_variance == pytest.approx(share, abs=0.01)
        # All of it adds up to the iteration's.
        assert found.common_variance + found.own_weight * own / 100 == pytest.approx(1.0)
    assert part_spread(quantiles, seconds, seconds, 1.0) == (0.0, pytest.approx(100.0))
    assert part_spread((1.0, 1.0), seconds, seconds, 1.0) == part_spread(quantiles, seconds, 0 * seconds, 1.0) == (1, 0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quantiles": (1.0,)}, "at least two"),
        ({"common_variance": 1.5}, "between 0 and 1"),
    ],
)
def test_a_spread_that_can_not_be_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RankSpread(**changes)  # type: ignore[arg-type]


# Against every rank with clocks of its own


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("d8", {"bucket_cap_bytes": 1 << 40, "first_bucket_bytes": 1 << 40}),
        ("d8", {"bucket_cap_bytes": 1 << 16, "first_bucket_bytes": 1 << 10}),
        ("f4", {}),
        ("c4", {}),
        ("d4f2", {}),
        ("z3d4", {}),
    ],
)
@pytest.mark.parametrize("share", [1.0, 0.6, 0.2, 0.0])
def test_the_expected_last_rank_equals_ranks_drawn_one_by_one(
    text: str, settings: dict[str, object], share: float
) -> None:
    network = CHAIN
    seconds = [linear_seconds(layer, phase, 4) for layer in network.layers for phase in PHASES]
    squares = float(np.sum(np.square(seconds)) / np.sum(seconds) ** 2)
    own_sd = LEVEL_SD * ((1 - share) / squares) ** 0.5
    # What is measured of a single event holds its tied part as well.
    profile = profile_with(float(np.hypot(own_sd, LEVEL_SD * share**0.5)), normal_quantiles(LEVEL_SD))
    _, _, priced = priced_at(profile, text, **settings)  # type: ignore[arg-type]
    assert priced.rank_spread.common_variance == pytest.approx(share, abs=0.02)
    rng = np.random.default_rng(3)
    tied = LEVEL_SD * share**0.5 * rng.standard_normal((4000, priced.plan.strategy.ranks))
    # Shards' events are the whole layers' in size but for a factor, and spread by as much, relative to their time.
    drawn = drawn_s(priced, tied, own_deviations(priced.plan, own_sd))
    still = simulated_s(profile_with(0.0, (1.0, 1.0)), text, **settings)
    found = simulated_s(profile, text, **settings)
    assert found > still
    assert found - still == pytest.approx(drawn - still, rel=0.1)


def pipeline_s(stage_s: np.ndarray, micro_batches: int) -> np.ndarray:
    """GPipe with messages that take no time: (draws, stages) seconds of FW, backward takes twice that."""
    draws, stages = stage_s.shape
    free = np.zeros((draws, stages))
    ready = np.zeros((draws, micro_batches))
    for factor, order in ((1.0, range(stages)), (2.0, range(stages - 1, -1, -1))):
        for stage in order:
            for batch in range(micro_batches):
                free[:, stage] = np.maximum(free[:, stage], ready[:, batch]) + factor * stage_s[:, stage]
                ready[:, batch] = free[:, stage]
    return np.asarray(free.max(axis=1))


@pytest.mark.parametrize(
    ("replicas", "stages", "micro_batches", "most_draws"),
    [(1, 4, 8, 64), (4, 4, 8, 64), (1, 16, 32, 8), (64, 16, 32, 8)],
)
def test_a_pipeline_is_expected_to_take_what_drawn_stages_take(
    replicas: int, stages: int, micro_batches: int, most_draws: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few of them are simulated."""
    monkeypatch.setattr(pipeline_straggler, "_MOST_DRAWS", most_draws)
    network = make_network((64,) * (stages + 1))
    text = f"d{replicas}p{stages}" if replicas > 1 else f"p{stages}"
    settings = {"micro_batches": micro_batches}
    # Exchanges that take time hold up what a stage sends behind them, which a late stage hides.
    quick = tuple(ring_fit(operation, alpha_s=1e-12, beta_s_per_byte=0.0) for operation in ("all_reduce", "send_recv"))
    even, profile = (
        msgspec.structs.replace(profile_with(0.0, quantiles, network), communication=quick)
        for quantiles in ((1.0, 1.0), normal_quantiles(LEVEL_SD))
    )
    _, _, priced = priced_at(even, text, **settings)  # type: ignore[arg-type]
    plan = priced.plan
    stage_s = np.array(
        [
            sum(
                priced.costs.seconds[work]
                for work, phase, stream in zip(role.work, role.phase, role.stream, strict=True)
                if stream == Stream.COMPUTE and phase == 0
            )
            / micro_batches
            for role in plan.roles
        ]
    )
    rng = np.random.default_rng(5)
    draws = max(500, 4000 // replicas)
    factors = 1 + LEVEL_SD * rng.standard_normal((draws * replicas, stages))
    lines = pipeline_s(stage_s * factors, micro_batches).reshape(draws, replicas)
    alone = float(pipeline_s(stage_s[None], micro_batches)[0])
    late = lines.max(axis=1).mean() / alone - 1
    still, found = (simulated_s(of, text, **settings) for of in (even, profile))
    assert (found - still) / alone == pytest.approx(late, rel=0.1)
    # Not all stages are as slow as the slowest.
    assert found / still - 1 < RankSpread(quantiles=normal_quantiles(LEVEL_SD), samples=10**6).wait(stages * replicas)


def test_draws_are_shifted_and_scaled_by_their_correlation() -> None:
    rng = np.random.default_rng(1)
    many, few = rng.normal(5.0, 2.0, 1000), rng.normal(5.0, 2.0, 6)
    same = pipeline_straggler.steadied(3.0 + few, few, many)
    assert same.mean() == pytest.approx(3.0 + many.mean())
    assert same.std(ddof=1) == pytest.approx(many.std())
    half = pipeline_straggler.steadied(3.0 + 0.5 * few, few, many)
    assert half.mean() == pytest.approx(3.0 + 0.5 * many.mean())
    # What falls where the likeness rises tells nothing, and neither does what never moves.
    for drawn, like in ((3.0 - few, few), (few, np.ones(6)), (np.ones(6), few)):
        assert pipeline_straggler.steadied(drawn, like, many) == pytest.approx(drawn)


def test_a_pipeline_whose_ranks_do_not_differ_has_no_lag() -> None:
    _, _, priced = priced_at(profile_with(0.0, (1.0, 1.0)), "p2", micro_batches=2)
    assert priced.straggler == 1.0


# Where ranks meet


def test_meetings_are_of_all_ranks_that_the_axes_inside_span() -> None:
    strategy = parse_strategy("d4p2f3")
    assert [ranks_level(strategy, axes) for axes in ((2,), (0,), (0, 2))] == [3, 12, 12]


def test_a_stretch_is_as_late_as_measured_for_any_tie() -> None:
    quantiles = normal_quantiles(LEVEL_SD)
    wait = RankSpread(quantiles=quantiles, samples=100_000).wait(4)
    for own in (0.0, LEVEL_SD, 1.0):
        _, _, priced = priced_at(profile_with(own, quantiles), "d4")
        (role,) = priced.plan.roles
        computes = role.stream == Stream.COMPUTE
        alone, (late,) = priced.costs.seconds[role.work], straggler_tasks(priced)
        assert late[computes].sum() == pytest.approx((1 + wait) * alone[computes].sum())
        assert np.array_equal(late[~computes], alone[~computes])


def test_more_meetings_of_independently_slow_events_cost_more() -> None:
    quantiles = normal_quantiles(LEVEL_SD)
    tied, own = (simulated_s(profile_with(sd, quantiles), "f4") for sd in (0.0, 1.0))
    assert own > tied
    alike = [simulated_s(profile_with(sd, (1.0, 1.0)), "f4") for sd in (0.0, 1.0)]
    assert alike[0] == alike[1] < tied


def test_a_serial_run_waits_for_nobody() -> None:
    quantiles = normal_quantiles(LEVEL_SD)
    assert simulated_s(profile_with(0.1, quantiles), "serial") == simulated_s(profile_with(0.1, (1.0, 1.0)), "serial")


def test_a_changed_profile_moves_the_lag_of_single_events() -> None:
    """The layer that spreads holds up the meeting behind it more than the others do theirs."""
    quantiles = normal_quantiles(LEVEL_SD)
    even = profile_with(0.2, quantiles)
    largest = next(layer for layer in CHAIN.layers if layer.name == "fc1").operation
    uneven = msgspec.structs.replace(
        even,
        layer_times=tuple(
            time
            if time.operation == largest
            else msgspec.structs.replace(time, time=msgspec.structs.replace(time.time, iqr_s=1e-3 * time.time.iqr_s))
            for time in even.layer_times
        ),
    )
    (before,), (after,) = (straggler_tasks(priced_at(profile, "f4")[2]) for profile in (even, uneven))
    assert after.sum() < before.sum()
