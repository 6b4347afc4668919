"""Congested calls: what a fit says of them, and what they add to iterations, against draws made here."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from profile_factory import make_network, make_profile, ring_fit, with_compute

from calibrate.fit.collectives.communication_curve import Floats, Point
from calibrate.fit.collectives.communication_fit import fit_communication, fit_points
from calibrate.fit.collectives.communication_spread import Asked, nearest_congestion
from calibrate.fit.collectives.congestion import congestion_of
from calibrate.profile.collectives.communication import CommunicationFit, Congestion
from paradl_bench.core.statistics import Z90
from paradl_bench.plan.collectives.catalog import operations
from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.records.samples import CollectiveSamples
from predict.costs.communication.congestion import with_congestion
from predict.costs.cost_model import CostModel
from predict.costs.sourced import Cost, Source
from predict.costs.spread.assembly import Priced
from predict.prediction.prediction import Prediction, Predictor
from predict.workload import Configuration, evaluator_named

KEY = ("gloo", "all_reduce", "node")
ALL_REDUCE = operations()["all_reduce"]
SIZES = tuple(1 << power for power in range(14, 26))
CHAIN = make_network()


def usual_s(size: int) -> float:
    return 1e-4 + size * 1e-9


def heavy_tailed(generator: np.random.Generator, count: int, probability: float) -> Floats:
    """Ratios to the usual time: mostly near 1, else 2 and up with a tail that falls as the cube."""
    calm = np.exp(0.01 * generator.standard_normal(count))
    return np.where(generator.random(count) < probability, 2 * (1 + generator.pareto(3.0, count)), calm)


def pooled(points: list[Point]) -> Congestion | None:
    """Of sizes that are all alike."""
    same = [point._replace(message_bytes=1024) for point in points]
    found = congestion_of(same, np.array([usual_s(point.message_bytes) for point in points]))
    return found[0] if found else None


def sweep(probability: float, *, calls: int = 20, blocks: int = 6, seed: int = 0) -> list[Point]:
    generator = np.random.default_rng(seed)
    return [
        Point(2, size, tuple(usual_s(size) * heavy_tailed(generator, calls, probability) for _ in range(blocks)))
        for size in SIZES
    ]


def usual_of(points: list[Point]) -> Floats:
    return np.array([usual_s(point.message_bytes) for point in points])


def test_probability_and_excess_are_those_that_calls_were_drawn_with() -> None:
    inside = 0
    for seed in range(20):
        points = sweep(0.08, seed=seed)
        found = pooled(points)
        assert found is not None
        assert found.calls == 6 * 20 * len(SIZES)
        assert found.probability == pytest.approx(0.08, abs=0.03)
        # 2 (1 + X) with X of mean 1/2: three times as long in the mean.
        inside += abs(found.mean_excess - 0.08 * 2) <= Z90 * found.relative_sd * found.mean_excess
    assert inside >= 15


def test_ratios_keep_the_mean_of_all_congested_calls() -> None:
    relative = np.ones(40)
    relative[:7] = (2.0, 3.0, 5.0, 8.0, 13.0, 21.0, 2.5)
    (found,) = congestion_of([Point(2, 1024, (relative,))], np.ones(1))
    assert found.probability == pytest.approx(7 / 40)
    assert found.mean_excess == pytest.approx(float(relative.mean()) - 1)
    many = np.concatenate([np.ones(200), np.linspace(2, 9, 37)])
    (kept,) = congestion_of([Point(2, 1024, (many,))], np.ones(1))
    assert len(kept.ratios) == 10
    assert kept.mean_excess == pytest.approx(float(many.mean()) - 1)


def test_a_spell_is_no_congestion_of_a_typical_block() -> None:
    generator = np.random.default_rng(0)
    points = [
        Point(2, size, tuple(usual_s(size) * heavy_tailed(generator, 8, 0.5 * (block == 3)) for block in range(5)))
        for size in SIZES
    ]
    assert any(len(np.flatnonzero(point.blocks[3] > 1.5 * usual_s(point.message_bytes))) for point in points)
    assert congestion_of(points, usual_of(points)) == ()


def test_single_calls_are_held_against_the_fit_and_means_tell_nothing() -> None:
    sizes = [1024 * number for number in range(1, 41)]
    slow = {5: 4.0, 21: 6.0, 33: 3.0}
    points = [
        Point(2, size, (np.array([usual_s(size) * slow.get(index, 1.0 + 0.001 * (index % 3))]),), numbers=(0,))
        for index, size in enumerate(sizes)
    ]
    found = pooled(points)
    assert found is not None
    assert found.probability == pytest.approx(3 / 40)
    assert found.ratios == pytest.approx((3.0, 4.0, 6.0))
    assert congestion_of([point._replace(of_means=True) for point in points], usual_of(points)) == ()


def test_sizes_that_the_fit_misses_are_not_congested() -> None:
    single = [Point(2, size, (np.array([usual_s(size)]),)) for size in SIZES]
    missed = usual_of(single)
    missed[:4] /= 1.5
    assert congestion_of(single, missed) == ()


def samples(tool: str, points: list[Point]) -> list[CollectiveSamples]:
    return [
        CollectiveSamples(
            library="gloo",
            tool=tool,
            operation="all_reduce",
            level="node",
            ranks=2,
            message_bytes=point.message_bytes,
            dtype="fp32",
            block=block,
            samples_s=(tuple(values.tolist()),) * 2,
            verified=True,
        )
        for point in points
        for block, values in enumerate(point.blocks)
    ]


def test_a_fit_knows_its_congestion_and_keeps_alpha_and_beta_of_usual_calls() -> None:
    calm, busy = (fit_communication(samples("torch", sweep(each)), operations()).fits for each in (0.0, 0.08))
    assert all(fit.congestion == () for fit in calm)
    assert all(fit.congestion for fit in busy)
    assert busy[0].alpha_s == pytest.approx(calm[0].alpha_s, rel=0.02)
    assert busy[-1].beta_s_per_byte == pytest.approx(calm[-1].beta_s_per_byte, rel=0.02)
    again = msgspec.json.decode(msgspec.json.encode(busy[0]), type=CommunicationFit)
    assert again == busy[0]
    single = [Point(2, point.message_bytes, (point.blocks[0][:1],)) for point in sweep(0.3)]
    printed = fit_communication(samples("osu", single), operations()).fits
    assert all(fit.congestion == () for fit in printed)


def test_a_congestion_that_cannot_be_is_refused() -> None:
    known = {"ranks": 2, "bytes_range": (1, 9), "probability": 0.1, "ratios": (2.0,), "relative_sd": 0.1, "calls": 10}
    for wrong in ({"probability": -0.1}, {"probability": 1.0}, {"ratios": ()}, {"ratios": (0.5,)}, {"calls": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            msgspec.convert(known | wrong, Congestion)


def parts(count: int, congestion: Congestion) -> list[Priced]:
    """Compute, and exchanges of two sizes."""
    small, large = (Cost(seconds, Source.REGRESSED) for seconds in (1e-3, 3e-3))
    return [
        Priced(Cost(1.0, Source.MEASURED), 1, "compute"),
        Priced(small, count, "small", True, congestion=congestion),
        Priced(large, count, "large", True, congestion=congestion),
    ]


@pytest.mark.parametrize("count", [1, 5, 20, 100])
def test_the_median_iteration_of_heavy_tailed_exchanges_is_met(count: int) -> None:
    probability = 0.06
    points = sweep(probability, calls=50, blocks=8)
    known = pooled(points)
    assert known is not None
    found, _ = with_congestion(parts(count, known))
    predicted = count * sum(part.cost.seconds for part in found[1:])
    generator = np.random.default_rng(7)
    drawn = np.zeros(5_000)
    for seconds in (1e-3, 3e-3):
        ratios = heavy_tailed(generator, 5_000 * count, probability).reshape(5_000, count)
        drawn += seconds * ratios.sum(axis=1)
    usual = 4e-3 * count
    assert found[0].cost.seconds == 1.0
    assert predicted == pytest.approx(float(np.median(drawn)), rel=0.02)
    if count == 1:
        assert predicted == pytest.approx(usual, rel=1e-12)
    if count == 100:
        # Where nothing was added it would be off by four times as much as is allowed here.
        assert predicted > 1.08 * usual


def test_what_is_added_grows_to_the_mean_and_is_shared_out_by_it() -> None:
    often = Congestion(ranks=2, bytes_range=(1, 1 << 30), probability=0.1, ratios=(3.0,), relative_sd=0.2, calls=100)
    (_, small, large), remarks = with_congestion(parts(10_000, often))
    assert small.cost.seconds == pytest.approx(1.2e-3, rel=1e-3)
    assert large.cost.seconds == pytest.approx(3.6e-3, rel=1e-3)
    assert dict(large.modes)["congestion"] == pytest.approx(0.2 * 0.6e-3, rel=1e-2)
    assert "congestion adds 20.0% to collectives" in remarks[0].text
    alone, none = with_congestion(parts(1, often))
    assert [part.cost.seconds for part in alone] == [1.0, 1e-3, 3e-3]
    assert none == ()


def predict(evaluator: str, congestion: Congestion | None, strategy: str = "d2") -> Prediction:
    known = (congestion,) if congestion else ()
    changes = (ring_fit(congestion=known), ring_fit("all_gather", congestion=known))
    profile = make_profile(communication=changes, contexts=(with_compute(1.0, 1.0),))
    settings = plan_settings(batch=8, first_bucket_bytes=1, bucket_cap_bytes=1)
    model = CostModel(profile=profile, network=CHAIN)
    point = Configuration(strategy=parse_strategy(strategy), settings=settings)
    return Predictor(model, evaluator_named(evaluator)).predict(point)


@pytest.mark.parametrize(
    ("evaluator", "strategy", "reads"),
    [
        ("simulate", "d2", True),
        ("simulate", "f2", True),
        ("osf", "d2", True),
        ("dag", "d2", True),
        ("csf", "d2", False),
        ("paradl", "f2", False),
    ],
)
def test_evaluators_whose_exchanges_add_up_read_it(evaluator: str, strategy: str, reads: bool) -> None:
    often = Congestion(
        ranks=2, bytes_range=(1, 1 << 30), probability=0.4, ratios=(2.0, 4.0), relative_sd=0.25, calls=100
    )
    calm, busy = predict(evaluator, None, strategy), predict(evaluator, often, strategy)
    if not reads:
        assert busy == calm
        return
    assert busy.communication_s > 1.1 * calm.communication_s
    assert busy.iteration_s > calm.iteration_s
    assert any(note.startswith("congestion adds") for note in busy.notes)
    assert busy.spread_s["congestion"] > 0
    assert "congestion" not in calm.spread_s


def test_stalls_that_last_alike_at_all_sizes_are_known_by_size() -> None:
    generator = np.random.default_rng(3)
    points = [
        Point(2, size, tuple(usual_s(size) + 4e-3 * (generator.random(30) < 0.1) for _ in range(6))) for size in SIZES
    ]
    (fit, *others), _ = fit_points(KEY, points, ALL_REDUCE)
    for size in (SIZES[0], SIZES[6]):
        found = nearest_congestion(min((fit, *others), key=lambda f: not f.bytes_range[0] <= size <= f.bytes_range[1]),
                                   Asked(2, size))  # fmt: skip
        assert found is not None
        assert found.bytes_range[1] < 16 * found.bytes_range[0]
        low, high = (found.probability * 4e-3 / usual_s(end) for end in reversed(found.bytes_range))
        assert low < found.mean_excess < high
