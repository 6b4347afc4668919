"""What records hold their numbers to: which values pass, which do not, and that the message names field and value."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import msgspec
import pytest

from paradl_bench.core.checks import (
    check_aligned,
    check_counts,
    check_finite,
    check_not_negative,
    check_positive,
    check_samples,
    check_slowdowns,
)

Check = Callable[..., None]
NOT_NUMBERS = (math.inf, -math.inf, math.nan)


class Record(msgspec.Struct, frozen=True, kw_only=True):
    value: object = None
    other: object = None


@pytest.mark.parametrize(
    ("check", "passing", "failing", "words"),
    [
        (check_not_negative, (0, 0.0, 1e-300, 7), (-1e-300, *NOT_NUMBERS), "finite and not negative"),
        (check_positive, (1e-300, 7), (0, 0.0, -1.0, *NOT_NUMBERS), "finite and positive"),
        (check_slowdowns, (1, 1.0, 3.5), (0.999, 0, *NOT_NUMBERS), "finite and at least 1"),
        (check_counts, (1, 10**400), (0, -3), "at least 1"),
    ],
)
def test_numbers_within_limits_pass_and_others_are_named(
    check: Check, passing: tuple[float, ...], failing: tuple[float, ...], words: str
) -> None:
    for value in (*passing, None):
        check(Record(value=value, other=passing[0]), "value", "other")
    for value in failing:
        message = re.escape(f"value has to be {words}, not {value}")
        with pytest.raises(ValueError, match=f"^{message}$"):
            check(Record(value=value), "other", "value")
        with pytest.raises(ValueError, match=f"^level 'node': {message}$"):
            check(Record(value=value), "value", where="level 'node'")


def test_counts_begin_where_they_are_said_to() -> None:
    check_counts(Record(value=0), "value", least=0)
    with pytest.raises(ValueError, match="value has to be at least 2, not 1"):
        check_counts(Record(value=1), "value", least=2)


@pytest.mark.parametrize("wrong", NOT_NUMBERS)
@pytest.mark.parametrize("around", [lambda v: v, lambda v: (1.0, v), lambda v: ((1.0, -2.0), (v, 3.0))])
def test_finite_looks_into_lists_and_tables(around: Callable[[float], object], wrong: float) -> None:
    check_finite(Record(value=around(-1.5), other=()), "value", "other")
    with pytest.raises(ValueError, match=f"value has to be finite, not {wrong}"):
        check_finite(Record(value=around(wrong)), "other", "value")


def test_samples_are_times() -> None:
    check_samples((0.0, 0.25), "FW of conv1")
    with pytest.raises(ValueError, match="FW of conv1 holds no samples"):
        check_samples((), "FW of conv1")
    for value in (-0.25, 1e308, *NOT_NUMBERS):
        with pytest.raises(ValueError, match=rf"FW of conv1 holds {re.escape(str(value))}, which is no time"):
            check_samples((0.25, value), "FW of conv1")


def test_lists_of_one_index_are_of_one_length_or_not_measured() -> None:
    check_aligned(Record(value=(0.5, 0.25), other=()), "value", "other")
    with pytest.raises(ValueError, match=r"differ in length: \{'value': 2, 'other': 1\}"):
        check_aligned(Record(value=(0.5, 0.25), other=(0.5,)), "value", "other")
