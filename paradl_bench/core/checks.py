"""What records hold their own numbers to, as msgspec's types can't: finite, not negative, as many as belong together.

Each check names the field that is wrong and its value; msgspec adds the place in the file. Plain Python, since a record
has a few numbers and a profile thousands of records: an array made for each would take longer than all of its checks.
A field that is None was not measured, and passes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import cast

import msgspec

# A module's own name is found faster than an attribute of math, and a float is compared with a float fastest.
_INFINITY = math.inf
_ROUNDING = 1e-6
LONGEST_S = 1e9
"""Thirty years: what is longer is no measurement, and its square no number."""


def check_finite(owner: msgspec.Struct, *labels: str) -> None:
    """Hold fields to finite numbers; a field may be one, a list or a table (a covariance) of them.

    Raises:
        ValueError: one is infinite or not a number.
    """
    for label in labels:
        for row in _rows(getattr(owner, label)):
            if not all(map(math.isfinite, row)):
                wrong = next(value for value in row if not math.isfinite(value))
                raise ValueError(f"{label} has to be finite, not {wrong}")


def _rows(value: float | tuple[float, ...] | tuple[tuple[float, ...], ...] | None) -> Iterable[Iterable[float]]:
    if value is None:
        return ()
    if not isinstance(value, tuple):
        return ((value,),)
    if value and isinstance(value[0], tuple):
        return value
    return (cast("tuple[float, ...]", value),)


def check_not_negative(owner: msgspec.Struct, *labels: str, where: str = "") -> None:
    """Hold fields to finite numbers from 0 on: times, counts, relative deviations.

    Args:
        where: what the fields are of, for the message, where the type of the owner does not say it.

    Raises:
        ValueError: one is negative, infinite or not a number.
    """
    for label in labels:
        value = getattr(owner, label)
        if value is not None and not 0.0 <= value < _INFINITY:
            raise ValueError(f"{_of(where)}{label} has to be finite and not negative, not {value}")


def check_positive(owner: msgspec.Struct, *labels: str, where: str = "") -> None:
    """Hold fields to finite numbers above 0: ratios, sizes, work.

    Args:
        where: as for :func:`check_not_negative`.

    Raises:
        ValueError: one is 0 or less, infinite or not a number.
    """
    for label in labels:
        value = getattr(owner, label)
        if value is not None and not 0.0 < value < _INFINITY:
            raise ValueError(f"{_of(where)}{label} has to be finite and positive, not {value}")


def check_slowdowns(owner: msgspec.Struct, *labels: str, where: str = "") -> None:
    """Hold fields to finite factors from 1 on: what something takes beside another thing, over what it takes alone.

    Args:
        where: as for :func:`check_not_negative`.

    Raises:
        ValueError: one is below 1, infinite or not a number.
    """
    for label in labels:
        value = getattr(owner, label)
        if value is not None and not 1.0 <= value < _INFINITY:
            raise ValueError(f"{_of(where)}{label} has to be finite and at least 1, not {value}")


def check_counts(owner: msgspec.Struct, *labels: str, least: int = 1, where: str = "") -> None:
    """Hold fields to whole numbers (by their type) from ``least`` on.

    Args:
        where: as for :func:`check_not_negative`.

    Raises:
        ValueError: one is smaller.
    """
    for label in labels:
        value = getattr(owner, label)
        if value is not None and value < least:
            raise ValueError(f"{_of(where)}{label} has to be at least {least}, not {value}")


def _of(where: str) -> str:
    return f"{where}: " if where else ""


def check_samples(samples_s: Sequence[float], where: str) -> None:
    """Hold raw times in seconds to at least one, each finite and not negative.

    Args:
        where: what was timed, for the message.

    Raises:
        ValueError: there are none, or one is no time.
    """
    if not samples_s:
        raise ValueError(f"{where} holds no samples")
    for value in samples_s:
        if not 0.0 <= value <= LONGEST_S:
            raise ValueError(
                f"{where} holds {value}, which is no time: seconds are not negative, and below {LONGEST_S:g}"
            )


def check_rises(owner: msgspec.Struct, *labels: str) -> None:
    """Hold pairs to (lower end, upper end), in that order; a pair that is None was not measured.

    Raises:
        ValueError: one is reversed.
    """
    for label in labels:
        pair = getattr(owner, label)
        if pair is not None and pair[0] > pair[1]:
            raise ValueError(f"{label} has to rise, not go from {pair[0]} to {pair[1]}")


def check_covariance(owner: msgspec.Struct, *labels: str) -> None:
    """Hold 2 x 2 matrices to symmetric ones without a negative variance in any direction.

    Raises:
        ValueError: one is no covariance.
    """
    for label in labels:
        (first, upper), (lower, second) = getattr(owner, label)
        scale = math.sqrt(abs(first)) * math.sqrt(abs(second))
        slack = _ROUNDING * scale
        if min(first, second) < 0 or abs(upper - lower) > slack or abs(upper) > scale + slack:
            raise ValueError(
                f"{label} is no covariance: it has to be symmetric, with variances from 0 on"
                f" and |covariance| at most the root of their product"
            )


def check_distinct(where: str, keys: Iterable[object]) -> None:
    """Hold entries of one list to different things.

    Args:
        where: the list's name, for the message.

    Raises:
        ValueError: two are about the same.
    """
    first: dict[object, int] = {}
    for index, key in enumerate(keys):
        other = first.setdefault(key, index)
        if other != index:
            raise ValueError(f"{where}[{index}] is about the same as {where}[{other}]: keep one of them")


def check_aligned(owner: msgspec.Struct, *labels: str) -> None:
    """Hold lists of one index (one iteration, one A-B group) to one length; a list that is not measured is empty.

    Raises:
        ValueError: they differ in length.
    """
    lengths = {label: len(getattr(owner, label)) for label in labels if getattr(owner, label)}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"lists of one index differ in length: {lengths}")
