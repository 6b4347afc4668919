"""Medians and their spread."""

from __future__ import annotations

import math
import statistics

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paradl_bench.core.statistics import Z90, Summary, bootstrap_interval, summarise

seconds = st.just(0.0) | st.floats(1e-9, 1e6)
samples = st.lists(seconds, min_size=1, max_size=40)


@given(samples)
def test_a_summary_is_what_the_standard_library_finds(values: list[float]) -> None:
    summary = summarise(values)
    assert summary.median_s == pytest.approx(statistics.median(values))
    assert summary.minimum_s == min(values)
    assert summary.samples == len(values)
    if len(values) > 1:
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        assert summary.iqr_s == pytest.approx(high - low, abs=1e-9 * max(values))


@given(samples, st.floats(0.1, 10))
def test_times_twice_as_long_have_twice_the_spread(values: list[float], factor: float) -> None:
    one, scaled = summarise(values), summarise([value * factor for value in values])
    assert scaled.median_s == pytest.approx(one.median_s * factor)
    assert scaled.iqr_s == pytest.approx(one.iqr_s * factor, abs=1e-9 * max(values))


@pytest.mark.parametrize(
    "values",
    [[], [1.0, math.nan], [math.inf], [-1.0]],
)
def test_what_are_no_times_is_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match=r"no samples|to be finite and not negative"):
        summarise(values)


@pytest.mark.parametrize(
    ("change", "where"),
    [({"iqr_s": -1.0}, "iqr_s"), ({"minimum_s": 1e300}, "minimum_s"), ({"samples": 0}, "samples")],
)
def test_a_summary_out_of_bounds_is_refused_on_reading(change: dict[str, float], where: str) -> None:
    summary = {"median_s": 1.0, "typical_s": 1.0, "iqr_s": 0.1, "minimum_s": 0.9, "samples": 3}
    with pytest.raises(msgspec.ValidationError, match=rf"Expected .* - at `\$\.{where}`"):
        msgspec.convert(summary | change, Summary)


@given(samples)
def test_a_bootstrap_interval_lies_within_the_samples_and_is_reproducible(values: list[float]) -> None:
    low, high = bootstrap_interval([np.array(values)], resamples=100)
    assert min(values) <= low <= high <= max(values)
    assert (low, high) == bootstrap_interval([np.array(values)], resamples=100)


def test_one_sample_gives_a_point_and_none_an_error() -> None:
    assert bootstrap_interval([np.array([2.0])]) == (2.0, 2.0)
    with pytest.raises(ValueError, match="no samples"):
        bootstrap_interval([])


def test_a_bootstrap_interval_covers_the_median_as_stated() -> None:
    # 90% nominal over 400 seeded draws; the percentile bootstrap of a median is known to cover a little differently,
    # and 400 draws scatter by 1.5%.
    random = np.random.default_rng(7)
    true_median = math.exp(0.0)
    hits = 0
    for _ in range(400):
        low, high = bootstrap_interval([random.lognormal(0.0, 0.5, 40)], resamples=300)
        hits += low <= true_median <= high
    assert 0.83 <= hits / 400 <= 0.97


def test_a_higher_level_gives_a_wider_interval() -> None:
    values = np.random.default_rng(3).lognormal(0.0, 0.5, 60)
    narrow, wide = bootstrap_interval([np.array(values)], level=0.5), bootstrap_interval([np.array(values)], level=0.99)
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


def test_the_normal_quantile_of_a_two_sided_90_percent_interval() -> None:
    assert statistics.NormalDist().inv_cdf(0.95) == pytest.approx(Z90, rel=1e-14)
