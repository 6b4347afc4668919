"""Known alpha and beta come back from noisy sweeps; what is chosen is chosen on points that the fit had not seen."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_measurements import SIZES, CollectivesSpec, collective_samples

from calibrate.fitting.collectives.communication_curve import Point, build_curve
from calibrate.fitting.collectives.communication_fit import fit_communication
from calibrate.fitting.collectives.communication_fit import fit_points as fit_points_and_choice
from calibrate.fitting.collectives.communication_segments import Segments
from calibrate.profile.collectives.communication import CommunicationFit
from calibrate.profile.collectives.communication_time import communication_seconds
from calibrate.statistics.regression import fit_relative, relative_covariance, told_apart
from paradl_bench.core.errors import UserError
from paradl_bench.core.statistics import Z90
from paradl_bench.plan.collectives.catalog import operations
from paradl_bench.plan.cost_terms.terms import Algorithm, CollectiveOperation, CostTerms

KEY = ("gloo", "all_reduce", "node")
ALL_REDUCE = operations()["all_reduce"]
LINE = Algorithm(name="line", source="test", terms=lambda p, m: CostTerms(1 + 0 * p, m, 0 * m))
LINES = CollectiveOperation(name="line", message_bytes_is="all", bus_factor=lambda ranks: 1.0, algorithms=(LINE,))


def one_fit(spec: CollectivesSpec) -> CommunicationFit:
    fits, _, notes = fit_communication(collective_samples(spec), operations())
    assert notes == ()
    (fit,) = fits
    return fit


def fit_points(
    key: tuple[str, str, str], points: list[Point], operation: CollectiveOperation
) -> list[CommunicationFit]:
    return fit_points_and_choice(key, points, operation)[0]


def points_of(seconds: dict[tuple[int, int], float], *, noise: float = 0.0, seed: int = 0) -> list[Point]:
    generator = np.random.default_rng(seed)
    return [
        Point(ranks, size, tuple(value * np.exp(noise * generator.standard_normal((5, 8)))))
        for (ranks, size), value in seconds.items()
    ]


@pytest.mark.parametrize("name", sorted(operations()))
def test_exact_times_give_alpha_and_beta_back(name: str) -> None:
    fit = one_fit(CollectivesSpec(operations=(name,), noise=0.0, ranks=(4,)))
    assert fit.alpha_s == pytest.approx(2e-5, rel=1e-6)
    assert fit.beta_s_per_byte == pytest.approx(1e-9, rel=1e-6)
    assert fit.gamma_s_per_byte == 0
    assert fit.regime == "all"
    assert fit.residual_relative_median < 1e-9
    assert fit.held_out_relative_error < 1e-6
    assert fit.bytes_range == (SIZES[0], SIZES[-1])
    assert fit.ranks_range == (4, 4)
    assert fit.points == len(SIZES) == len(fit.measured)


@pytest.mark.parametrize("drift", [0.0, 0.03])
def test_intervals_hold_the_truth_about_as_often_as_they_say(drift: float) -> None:
    # 90% intervals from standard deviations that 8 blocks estimate: Student's t with 7 degrees of freedom holds 86%.
    held = []
    for seed in range(40):
        spec = CollectivesSpec(operations=("all_reduce",), sizes=SIZES[::2], blocks=8, calls=4, drift=drift, seed=seed)
        fit, *more = fit_communication(collective_samples(spec), operations())[0]
        if not more:
            for value, truth, variance in (
                (fit.alpha_s, 2e-5, fit.covariance[0][0]),
                (fit.beta_s_per_byte, 1e-9, fit.covariance[1][1]),
            ):
                held.append(abs(value - truth) <= Z90 * np.sqrt(variance))
    assert len(held) >= 60
    assert 0.75 <= np.mean(held) <= 0.98


def test_a_slow_spell_at_one_size_moves_the_fit_little() -> None:
    fit = one_fit(CollectivesSpec(operations=("all_reduce",), slow={SIZES[6]: 3.0}))
    assert fit.alpha_s == pytest.approx(2e-5, rel=0.05)
    assert fit.beta_s_per_byte == pytest.approx(1e-9, rel=0.05)


def test_small_messages_count_as_much_as_large_ones() -> None:
    sizes = np.array([1024.0 * 4**k for k in range(9)])
    design = np.stack([np.ones_like(sizes), sizes], axis=1)
    truth = np.array([2e-5, 1e-9])
    errors = {"relative": [], "absolute": []}
    for seed in range(20):
        seconds = design @ truth * np.exp(0.03 * np.random.default_rng(seed).standard_normal(len(sizes)))
        absolute, *_ = np.linalg.lstsq(design, seconds, rcond=None)
        errors["relative"].append(abs(fit_relative(design, seconds)[0] / truth[0] - 1))
        errors["absolute"].append(abs(absolute[0] / truth[0] - 1))
    assert np.median(errors["relative"]) < 0.03
    assert np.median(errors["absolute"]) > 1


def test_held_out_error_grows_when_the_model_is_wrong() -> None:
    sizes = [1024 * 2**k for k in range(8)]
    right = fit_points(KEY, points_of({(2, m): 1e-5 + 1e-9 * m for m in sizes}, noise=0.01), LINES)
    wrong = fit_points(KEY, points_of({(2, m): 1e-7 * m**0.6 for m in sizes}, noise=0.01), LINES)
    assert max(fit.held_out_relative_error for fit in right) < 0.02
    assert max(fit.held_out_relative_error for fit in wrong) > 0.03
    assert wrong[0].covariance[0][0] / wrong[0].alpha_s ** 2 > right[0].covariance[0][0] / right[0].alpha_s ** 2


def two_regimes(m: int) -> float:
    return 1e-5 + 1e-9 * m if m <= 65536 else 4e-5 + 3e-9 * m


def test_two_regimes_are_found_where_they_meet() -> None:
    fits = fit_points(KEY, points_of({(2, m): two_regimes(m) for m in SIZES}, noise=0.01), LINES)
    assert [fit.regime for fit in fits] == ["<=65536", ">=131072"]
    assert fits[0].beta_s_per_byte == pytest.approx(1e-9, rel=0.05)
    assert fits[1].beta_s_per_byte == pytest.approx(3e-9, rel=0.05)
    assert fits[0].bytes_range[1] < fits[1].bytes_range[0]
    assert sum(fit.points for fit in fits) == len(SIZES)


def test_one_regime_is_not_split_by_noise() -> None:
    regimes = [one_fit_count(CollectivesSpec(operations=("all_reduce",), sizes=SIZES, seed=seed)) for seed in range(20)]
    assert np.mean([count == 1 for count in regimes]) >= 0.8


def one_fit_count(spec: CollectivesSpec) -> int:
    return len(fit_communication(collective_samples(spec), operations())[0])


@given(st.integers(1, 2**24), st.integers(1, 2**24))
def test_time_grows_with_bytes_across_regimes_and_has_no_jump(one: int, other: int) -> None:
    fits = TWO_REGIMES
    low, high = sorted((one, other))
    slow, slower = communication_seconds(LINES, fits, 2, [low, high])
    assert slow <= slower
    steepest = max(fits[1].beta_s_per_byte, 3 * (two_regimes(131072) - two_regimes(65536)) / 65536)
    assert slower - slow <= steepest * (high - low) * (1 + 1e-6)


TWO_REGIMES = fit_points(KEY, points_of({(2, m): two_regimes(m) for m in SIZES}), LINES)


def test_a_split_after_which_time_would_fall_is_no_candidate() -> None:
    falling = {(2, m): (1e-4 + 1e-9 * m if m <= 32768 else 2e-5 + 1e-9 * m) for m in SIZES}
    fits = fit_points(KEY, points_of(falling), LINES)
    seconds = communication_seconds(LINES, fits, 2, np.geomspace(SIZES[0], SIZES[-1], 200))
    assert np.all(np.diff(seconds) >= 0)


@pytest.mark.parametrize("name", ["ring", "tree"])
def test_several_rank_counts_tell_the_algorithm(name: str) -> None:
    truth = ALL_REDUCE.algorithms[name]
    times = {
        (ranks, size): float(truth.seconds(ranks, size, alpha_s=2e-5, beta_s_per_byte=1e-9, gamma_s_per_byte=0))
        for ranks in (2, 4, 8, 16)
        for size in SIZES[::2]
    }
    fits = fit_points(KEY, points_of(times, noise=0.01), ALL_REDUCE)
    assert {fit.algorithm for fit in fits} == {name}
    assert fits[0].ranks_range == (2, 16)
    assert fits[0].held_out_ranks_relative_error is not None
    assert fits[0].held_out_ranks_relative_error < 0.02


def test_one_rank_count_takes_the_algorithm_that_the_library_runs() -> None:
    broadcast = operations()["broadcast"]
    for library in ("gloo", "nccl"):
        spec = CollectivesSpec(operations=("broadcast",), library=library, ranks=(4,))
        fits, _, _ = fit_communication(collective_samples(spec), operations())
        assert {fit.algorithm for fit in fits} == {broadcast.algorithm_of(library)}
        assert {fit.held_out_ranks_relative_error for fit in fits} == {None}


def test_reduction_is_fitted_apart_only_if_rank_counts_identify_it() -> None:
    apart = Algorithm(name="apart", source="test", terms=lambda p, m: CostTerms(p, m, (p - 1) * m))
    operation = CollectiveOperation(
        name="apart", message_bytes_is="all", bus_factor=lambda ranks: 1.0, algorithms=(apart,)
    )
    truth = {"alpha_s": 1e-5, "beta_s_per_byte": 1e-9, "gamma_s_per_byte": 5e-10}

    def times(counts: tuple[int, ...]) -> list[Point]:
        return points_of({(p, m): float(apart.seconds(p, m, **truth)) for p in counts for m in SIZES[::2]})

    (several,) = fit_points(KEY, times((2, 4, 8, 16)), operation)
    assert several.gamma_s_per_byte == pytest.approx(5e-10, rel=0.05)
    assert several.beta_s_per_byte == pytest.approx(1e-9, rel=0.1)
    (single,) = fit_points(KEY, times((4,)), operation)
    assert single.gamma_s_per_byte == 0
    assert single.beta_s_per_byte == pytest.approx(1e-9 + 3 * 5e-10, rel=0.02)


def test_a_ring_cannot_tell_reduction_from_beta() -> None:
    curve = build_curve(points_of({(p, m): 1e-5 + 1e-9 * m for p in (2, 4, 8) for m in SIZES}))
    ring = ALL_REDUCE.algorithms["ring"]
    design = Segments(curve, ()).design(ring)
    assert not told_apart(design[:, :3], curve.seconds)


def test_a_point_to_point_call_lasts_as_its_receiver() -> None:
    fit = one_fit(CollectivesSpec(operations=("send_recv",), noise=0.0, calls=3))
    assert fit.beta_s_per_byte == pytest.approx(1e-9, rel=1e-6)


def test_too_few_sizes_are_left_out_and_said() -> None:
    fits, _, notes = fit_communication(collective_samples(CollectivesSpec(sizes=SIZES[:2])), operations())
    assert fits == ()
    assert notes == (
        "gloo all_reduce node: measured at 2 sizes; a fit needs 3: left out",
        "gloo broadcast node: measured at 2 sizes; a fit needs 3: left out",
    )


def test_three_sizes_are_enough() -> None:
    fit = one_fit(CollectivesSpec(operations=("all_reduce",), sizes=SIZES[::5], noise=0.01))
    assert fit.points == 3
    assert fit.alpha_s == pytest.approx(2e-5, rel=0.05)
    assert 0 < fit.held_out_relative_error < 0.2


def test_tools_do_not_mix() -> None:
    slow = collective_samples(CollectivesSpec(operations=("all_reduce",), tool="osu", alpha_s=1e-3, noise=0.0))
    torch = collective_samples(CollectivesSpec(operations=("all_reduce",), noise=0.0))
    (fit,), _, notes = fit_communication([*slow, *torch], operations())
    assert fit.alpha_s == pytest.approx(2e-5, rel=1e-6)
    assert notes == ("gloo all_reduce node: fitted on torch fp32; what osu fp32 measured is left out",)


def test_an_unknown_operation_names_the_choices() -> None:
    record = msgspec.structs.replace(collective_samples(CollectivesSpec())[0], operation="all_redcue")
    with pytest.raises(UserError, match="unknown collective 'all_redcue': did you mean all_reduce"):
        fit_communication([record], operations())


def test_a_single_block_still_gives_a_spread() -> None:
    fit = one_fit(CollectivesSpec(operations=("all_reduce",), blocks=1, calls=16))
    assert fit.covariance[0][0] > 0
    assert fit.block_relative_sd > 0


def test_drift_between_blocks_is_kept() -> None:
    calm = one_fit(CollectivesSpec(operations=("all_reduce",), blocks=10))
    drifting = one_fit(CollectivesSpec(operations=("all_reduce",), blocks=10, drift=0.1))
    assert calm.block_relative_sd < 0.03
    assert 0.05 < drifting.block_relative_sd < 0.2


@given(
    st.lists(st.floats(1e-6, 1e-2), min_size=4, max_size=8),
    st.floats(1e-7, 1e-3),
    st.floats(1e-12, 1e-7),
)
def test_regression_is_exact_on_exact_points_and_never_negative(
    noise: list[float], alpha_s: float, beta_s_per_byte: float
) -> None:
    sizes = 1024.0 * 8.0 ** np.arange(len(noise))
    design = np.stack([np.ones_like(sizes), sizes], axis=1)
    exact = design @ np.array([alpha_s, beta_s_per_byte])
    np.testing.assert_allclose(design @ fit_relative(design, exact), exact, rtol=1e-6)
    assert np.all(fit_relative(design, np.array(noise)) >= 0)


def test_covariance_of_a_regression_is_that_of_least_squares() -> None:
    design = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 4.0]])
    seconds = np.array([1.0, 1.0, 1.0])
    expected = 0.01 * np.linalg.inv(design.T @ design)
    found = relative_covariance(design, seconds, 0.01, np.array([True, True]))
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    held = relative_covariance(design, seconds, 0.01, np.array([False, True]))
    assert held[0, 0] == held[0, 1] == 0
    assert held[1, 1] == pytest.approx(0.01 / 21)


def test_bimodal_sizes_do_not_decide_the_fitted_line() -> None:
    """As gloo's small messages on pinned cores do: 0.4 ms or 3.7 ms, while large ones lie on a line."""
    generator = np.random.default_rng(0)

    def blocks(size: int) -> tuple[np.ndarray, ...]:
        line = 2e-3 + size * 8e-10
        if size < 1 << 20:
            return tuple(generator.choice([4e-4, 3.7e-3], 9) for _ in range(5))
        return tuple(line * generator.normal(1, 0.02, 9) for _ in range(5))

    sizes = [128 * 4**power for power in range(11)]
    fits = fit_points(KEY, [Point(2, size, blocks(size)) for size in sizes], ALL_REDUCE)
    for size in sizes[-4:]:
        assert float(communication_seconds(ALL_REDUCE, fits, 2, size)) == pytest.approx(2e-3 + size * 8e-10, rel=0.08)
    # A size's own jumps are no drift of all.
    assert fits[-1].block_relative_sd < 0.1


def test_drift_that_all_sizes_share_is_found() -> None:
    drift = (0.8, 0.9, 1.0, 1.1, 1.2)
    points = [
        Point(2, size, tuple((1e-4 + size * 1e-9) * factor * np.ones(5) for factor in drift))
        for size in (1024, 16384, 262144, 4194304)
    ]
    (fit,) = fit_points(KEY, points, ALL_REDUCE)
    assert fit.block_relative_sd == pytest.approx(np.std(drift, ddof=1) / 0.94, rel=0.02)
