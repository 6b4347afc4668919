"""How far a fit says that it may be off where it has seen nothing; and repetitions far from the rest."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from profile_factory import ring_fit
from scipy.stats import t as student_t

from calibrate.fitting.collectives.communication_curve import Point, build_curve, noise_between_ways, without_outliers
from calibrate.fitting.collectives.communication_fit import fit_communication, fit_points
from calibrate.fitting.collectives.communication_spread import (
    Asked,
    MeasuredPoints,
    algorithms_apart_s,
    error_modes,
    other_level_mode,
    student_90,
    with_comparable_scaling,
)
from calibrate.fitting.collectives.outliers import outlier_words, outliers_of
from calibrate.profile.collectives.communication import CommunicationFit, CommunicationPoint
from calibrate.profile.collectives.communication_time import communication_seconds
from calibrate.statistics.blocks import far_from_the_rest
from calibrate.statistics.regression import fit_relative, fit_relative_many
from paradl_bench.core.statistics import Z90
from paradl_bench.plan.collectives.catalog import operations
from paradl_bench.plan.cost_terms.terms import Algorithm, CollectiveOperation
from paradl_bench.records.samples import CollectiveSamples

KEY = ("nccl", "all_reduce", "node")
ALL_REDUCE = operations()["all_reduce"]
SIZES = tuple(1 << power for power in range(20, 30))
LINKS = {2: 23e9, 4: 85e9, 8: 134e9}
"""Bytes/s that rings have on sets of devices whose links differ, as on a node of eight V100."""


def on_links(ranks: int, size: int) -> float:
    return 2e-5 + 2 * (ranks - 1) / ranks * size / LINKS[ranks]


def on_a_switch(ranks: int, size: int) -> float:
    return 2 * (ranks - 1) * 5e-6 + 2 * (ranks - 1) / ranks * size / 200e9


def points(seconds: object, counts: tuple[int, ...]) -> list[Point]:
    noise = np.random.default_rng(0)
    assert callable(seconds)
    return [
        Point(ranks, size, (seconds(ranks, size) * np.exp(0.01 * noise.standard_normal(1)),))
        for ranks in counts
        for size in SIZES
    ]


def sd_s(modes: tuple[tuple[str, float], ...]) -> float:
    return math.hypot(*(shift for _, shift in modes))


def interval_s(fits: list[CommunicationFit], ranks: int, size: int) -> tuple[float, float]:
    asked = Asked(ranks, size)
    seconds = float(communication_seconds(ALL_REDUCE, fits, ranks, size))
    return seconds, Z90 * sd_s(error_modes(ALL_REDUCE, MeasuredPoints(fits), asked, seconds))


def test_without_scaling_counts_are_fitted_singly_and_others_are_uncertain() -> None:
    fits, choice = fit_points(KEY, points(on_links, (2, 4)), ALL_REDUCE)
    assert all(fit.by_ranks for fit in fits)
    assert "each rank count by itself" in choice.candidates[0].form
    for size in SIZES[3:]:
        seconds, reach = interval_s(fits, 8, size)
        assert abs(seconds - on_links(8, size)) <= reach
        assert reach > 0.3 * seconds
        # At a count that was measured nothing of that counts.
        assert interval_s(fits, 4, size)[1] < 0.1 * interval_s(fits, 4, size)[0]


def test_without_scaling_every_measured_count_is_fitted_well() -> None:
    fits, _ = fit_points(KEY, points(on_links, (2, 4, 8)), ALL_REDUCE)
    for ranks in (2, 4, 8):
        found = communication_seconds(ALL_REDUCE, fits, ranks, SIZES)
        np.testing.assert_allclose(found, [on_links(ranks, size) for size in SIZES], rtol=0.05)
    # Between two of them time lies between theirs, and grows with bytes.
    between = communication_seconds(ALL_REDUCE, fits, 6, SIZES)
    ends = [communication_seconds(ALL_REDUCE, fits, ranks, SIZES) for ranks in (4, 8)]
    assert np.all(between >= np.minimum(*ends) * 0.999)
    assert np.all(between <= np.maximum(*ends) * 1.001)
    assert np.all(np.diff(between) > 0)


def test_with_scaling_more_ranks_are_predicted_within_narrow_intervals() -> None:
    fits, _ = fit_points(KEY, points(on_a_switch, (2, 4)), ALL_REDUCE)
    assert not any(fit.by_ranks for fit in fits)
    for size in SIZES:
        seconds, reach = interval_s(fits, 8, size)
        assert abs(seconds - on_a_switch(8, size)) <= max(reach, 0.03 * seconds)
        assert reach < 0.5 * seconds


@pytest.mark.parametrize("seed", [1, 6, 9])
def test_a_ring_whose_noise_nothing_tells_still_scales(seed: int) -> None:
    # Of these sweeps each count by itself has the least error with sizes and counts left out, by a hair.
    noise = np.random.default_rng(seed)
    own = [
        Point(ranks, size, (np.full(1, on_a_switch(ranks, size) * np.exp(0.03 * noise.standard_normal())),))
        for ranks in (2, 4)
        for size in SIZES
    ]
    fits, choice = fit_points(KEY, own, ALL_REDUCE)
    errors = {
        each.form: each.held_out_relative_error + (each.held_out_ranks_relative_error or 0.0)
        for each in choice.candidates
    }
    assert "each rank count by itself" in min(errors, key=errors.__getitem__)
    assert not any(fit.by_ranks for fit in fits)


def test_the_note_names_rank_counts_that_no_scaling_fits() -> None:
    samples = [
        CollectiveSamples(
            library="nccl",
            tool="nccl-tests",
            operation="all_reduce",
            level="node",
            ranks=point.ranks,
            message_bytes=point.message_bytes,
            dtype="fp32",
            block=0,
            samples_s=((float(point.blocks[0][0]),),) * point.ranks,
            verified=True,
        )
        for point in points(on_links, (2, 4))
    ]
    notes = fit_communication(samples, operations()).notes
    (note,) = [note for note in notes if "algorithm scales" in note]
    assert "no algorithm scales as well as separate fits at 2, 4 ranks" in note


def left_out(ranks: int, size: int, off: float, size_off: float = 0.0) -> CommunicationPoint:
    return CommunicationPoint(
        ranks=ranks,
        message_bytes=size,
        measured_s=1.0,
        fitted_s=1.0,
        held_out_s=1 / (1 + size_off),
        held_out_ranks_s=1 / (1 + off) if ranks > 2 else None,
    )


def scaled(off: float, **changes: object) -> CommunicationFit:
    measured = tuple(left_out(ranks, size, off) for ranks in (2, 4) for size in SIZES)
    return msgspec.structs.replace(ring_fit(), measured=measured, ranks_range=(2, 4), **changes)


def test_error_at_other_ranks_grows_with_distance_from_measured_counts() -> None:
    fit = scaled(0.2)
    (error,) = MeasuredPoints([fit]).near(SIZES[4]).of_counts
    assert error == pytest.approx(0.04)
    modes = [dict(error_modes(ALL_REDUCE, MeasuredPoints([fit]), Asked(ranks, SIZES[0]), 1.0)) for ranks in (4, 8, 16)]
    name = "communication at other ranks"
    assert name not in modes[0]
    assert 0.1 < modes[1][name] < 0.4
    assert modes[2][name] == pytest.approx(2 * modes[1][name], rel=0.3)


def test_other_collectives_of_the_level_tell_of_scaling_as_well() -> None:
    good, bad = scaled(0.0), scaled(0.5, operation="broadcast")
    elsewhere = scaled(0.9, operation="all_gather", level="system")
    found = with_comparable_scaling([good, bad, elsewhere])
    comparable = found[0].comparable_scaling
    assert comparable is not None
    assert comparable.relative_sd == pytest.approx(0.5)
    assert comparable.counts == 1
    assert found[2].comparable_scaling is None
    alone, pooled = (
        dict(error_modes(ALL_REDUCE, MeasuredPoints([fit]), Asked(8, SIZES[0]), 1.0)).get(
            "communication at other ranks", 0.0
        )
        for fit in (good, found[0])
    )
    assert pooled > alone


def test_sizes_left_out_widen_the_interval_near_them_alone() -> None:
    measured = tuple(left_out(2, size, 0.0, 0.3 if size < SIZES[2] else 0.0) for size in SIZES)
    fit = msgspec.structs.replace(ring_fit(), measured=measured)
    near, far = (
        sd_s(error_modes(ALL_REDUCE, MeasuredPoints([fit]), Asked(2, size), 1.0)) for size in (SIZES[0], SIZES[-1])
    )
    assert near > 0.1
    assert far == 0


def test_an_unmeasured_level_may_take_nothing_or_twice_its_time() -> None:
    fit = ring_fit()
    assert other_level_mode(ALL_REDUCE, [fit], fit.level, 1024, 2.0) == ()
    assert other_level_mode(ALL_REDUCE, [fit], "rack", 1024, 2.0) == (("level not measured", 2.0 / Z90),)
    known = float(communication_seconds(ALL_REDUCE, [fit], fit.ranks_range[0], 1024))
    assert other_level_mode(ALL_REDUCE, [fit], "rack", 1024, 0.0) == (("level not measured", known / Z90),)


def test_short_message_algorithms_do_not_widen_long_message_error() -> None:
    def all_reduce(*algorithms: Algorithm) -> CollectiveOperation:
        return CollectiveOperation(
            name="all_reduce", message_bytes_is="all", bus_factor=ALL_REDUCE.bus_factor, algorithms=algorithms
        )

    ring, doubling = (ALL_REDUCE.algorithms[name] for name in ("ring", "recursive_doubling"))
    fit = msgspec.structs.replace(ring_fit(), ranks_range=(2, 2), alpha_s=1e-5, beta_s_per_byte=1e-9)
    # From 2 to 8 ranks a ring's start-up grows sevenfold and its transfer by 7/4; recursive doubling's both threefold.
    for size, apart_s in ((10_000, (4 * 2e-5 - 1.25 * 1e-5) / 2), (1 << 30, 0.0)):
        found = algorithms_apart_s(all_reduce(ring, doubling), [fit], Asked(8, size))
        assert found == pytest.approx(apart_s)
    assert algorithms_apart_s(ALL_REDUCE, [fit], Asked(8, 1 << 30)) > 0


@pytest.mark.parametrize("freedom", [*range(1, 60), 1e9])
def test_students_quantile_is_that_of_scipy(freedom: float) -> None:
    assert student_90(freedom) == pytest.approx(student_t.ppf(0.95, freedom), rel=1e-3)


def congested() -> Point:
    generator = np.random.default_rng(1)
    blocks = [1e-3 * np.exp(0.02 * generator.standard_normal(8)) for _ in range(5)]
    blocks[2][:3] *= 4
    return Point(2, 64 << 20, tuple(blocks))


def test_repetitions_far_from_the_rest_are_counted_and_said() -> None:
    (found,) = outliers_of(congested())
    assert (found.repetitions, found.total, found.blocks) == (3, 40, (2,))
    assert found.ratio == pytest.approx(4, rel=0.1)
    fit = msgspec.structs.replace(ring_fit(), library="gloo", outliers=(found,))
    assert outlier_words([fit]) == (
        "slower than the rest: 3 of 40 repetitions of gloo all_reduce, 64.0 MiB on 2 ranks, took"
        f" {found.ratio:.1f} times the median, all in block 2",
    )


def test_outliers_move_neither_alpha_nor_beta_but_widen_the_spread() -> None:
    def sweep(slow: float) -> list[Point]:
        generator = np.random.default_rng(2)
        found = []
        for size in SIZES:
            blocks = [(1e-4 + size * 1e-9) * np.exp(0.01 * generator.standard_normal(6)) for _ in range(5)]
            blocks[3] *= slow
            found.append(Point(2, size, tuple(blocks)))
        return found

    (calm,), _ = fit_points(KEY, sweep(1.0), ALL_REDUCE)
    (slow,), _ = fit_points(KEY, sweep(5.0), ALL_REDUCE)
    assert slow.alpha_s == pytest.approx(calm.alpha_s, rel=0.03)
    assert slow.beta_s_per_byte == pytest.approx(calm.beta_s_per_byte, rel=0.03)
    assert len(slow.outliers) == len(SIZES)
    assert {found.blocks for found in slow.outliers} == {(3,)}
    assert not calm.outliers
    assert slow.block_relative_sd > 2 * calm.block_relative_sd


def test_two_modes_and_small_differences_are_no_outliers() -> None:
    generator = np.random.default_rng(0)
    two = (generator.choice([4e-4, 3.7e-3], 40),)
    assert not np.concatenate(far_from_the_rest(two)).any()
    even = (np.full(20, 1e-3), np.full(2, 1.1e-3))
    assert not np.concatenate(far_from_the_rest(even)).any()


def test_a_block_of_nothing_but_outliers_keeps_its_place() -> None:
    calm = np.full(8, 1e-3)
    kept = without_outliers((calm, calm * 9, calm, calm))
    assert [len(block) for block in kept] == [8, 24, 8, 8]
    assert np.concatenate(kept).max() == 1e-3


def test_batched_regressions_equal_single_ones_and_scipy() -> None:
    from scipy.optimize import nnls

    generator = np.random.default_rng(0)
    sizes = 4.0 * 2 ** generator.integers(0, 24, (30, 9))
    design = np.stack([np.ones_like(sizes), sizes, np.sqrt(sizes), generator.random(sizes.shape)], axis=-1)
    seconds = (design @ np.array([1e-5, 1e-9, 0.0, 1e-6])) * np.exp(0.1 * generator.standard_normal(sizes.shape))
    precision = np.ones(sizes.shape)
    precision[::2, 6:] = 0
    many = fit_relative_many(design, seconds, noise=1e9, precision=precision)
    for found, rows, times, told in zip(many, design, seconds, precision > 0, strict=True):
        # So noisy that no residual is weighted down: plain least squares.
        unit = rows[told] / times[told, None]
        norms = np.linalg.norm(unit, axis=0)
        expected = nnls(unit / norms, np.ones(told.sum()))[0] / norms
        np.testing.assert_allclose(rows @ found, rows @ expected, rtol=1e-6)
        np.testing.assert_allclose(fit_relative(rows[told], times[told], noise=1e9), found, rtol=1e-6, atol=1e-18)


def test_long_sweeps_are_fitted_on_logarithmically_spaced_sizes() -> None:
    sizes = [1 << 20] + [(1 << 20) * number for number in range(2, 129)]
    own = [Point(2, size, (np.full(1, on_a_switch(2, size)),)) for size in sizes]
    (fit,), _ = fit_points(KEY, own, ALL_REDUCE)
    assert fit.points <= 48
    assert fit.bytes_range == (sizes[0], sizes[-1])
    np.testing.assert_allclose(
        communication_seconds(ALL_REDUCE, [fit], 2, sizes), [on_a_switch(2, size) for size in sizes], rtol=1e-6
    )


@pytest.mark.parametrize("copy_s_per_byte", [0.0, 2e-12])
def test_both_ways_of_buffers_tell_the_noise_of_a_run(copy_s_per_byte: float) -> None:
    noise = np.random.default_rng(3)

    def timed(ranks: int, size: int, sd: float) -> Point:
        own, other = np.exp(sd * noise.standard_normal(2))
        slower_s = on_a_switch(ranks, size) + copy_s_per_byte * size
        return Point(ranks, size, (np.full(1, on_a_switch(ranks, size) * own),), other_way_s=slower_s * other)

    sizes = np.geomspace(1024, 1 << 30, 120).astype(int).tolist()
    for sd in (0.002, 0.03):
        measured = [timed(ranks, size, sd) for ranks in (2, 4, 8) for size in sizes]
        assert noise_between_ways(measured) == pytest.approx(sd, rel=0.25)
        curve = build_curve(measured)
        assert curve.noise == noise_between_ways(measured)
        assert np.all(curve.precision == 1)
        assert curve.drawn.std(axis=0) / curve.seconds == pytest.approx(curve.noise, rel=0.35)
    assert noise_between_ways([timed(2, size, 0.01) for size in sizes[:9]]) is None
    assert noise_between_ways([point._replace(other_way_s=0.0) for point in measured]) is None


def test_one_value_does_not_outweigh_points_whose_spread_is_known() -> None:
    noise = np.random.default_rng(0)
    repeated = [
        Point(2, size, tuple(on_a_switch(2, size) * np.exp(0.02 * noise.standard_normal((6, 1))))) for size in SIZES
    ]
    lone = [Point(4, size, (np.full(1, on_a_switch(4, size)),)) for size in SIZES]
    curve = build_curve([*repeated, *lone])
    assert curve.precision.min() > 0.2
    assert np.all(curve.drawn[:, len(SIZES) :].std(axis=0) > 0)


def test_bootstrap_draws_repetitions_where_there_are_any() -> None:
    raw = Point(2, 1024, tuple(1e-3 * np.exp(0.1 * np.random.default_rng(0).standard_normal((6, 6)))))
    mean = Point(2, 1024, (np.full(1, 1e-3),))
    assert build_curve([raw]).drawn.std() > 0
    assert np.ptp(build_curve([mean]).drawn) == 0


def test_no_bytes_or_one_rank_count_say_nothing_of_scaling() -> None:
    at = {"ranks": 2, "measured_s": 1e-4, "fitted_s": 1e-4, "held_out_s": 1e-4, "held_out_ranks_s": 9e-5}
    fit = ring_fit(measured=tuple(CommunicationPoint(message_bytes=size, **at) for size in (0, 1024)))
    assert MeasuredPoints([fit]).near(0).of_counts == ()
    assert all(seconds >= 0 for _, seconds in error_modes(ALL_REDUCE, MeasuredPoints([fit]), Asked(4, 0), 1e-4))
