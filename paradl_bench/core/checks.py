"""What records hold several of their numbers to: a type (:mod:`paradl_bench.core.bounds`) sees one at a time.

Plain Python, since a record has a few numbers and a profile thousands of records: an array made for each would take
longer than all of its checks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from paradl_bench.core.errors import UserError

_ROUNDING = 1e-6


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
    """Hold entries of one list, which ``where`` names in the message, to different things.

    Raises:
        ValueError: two are about the same.
    """
    first: dict[object, int] = {}
    for index, key in enumerate(keys):
        other = first.setdefault(key, index)
        if other != index:
            raise ValueError(f"{where}[{index}] is almost the same as {where}[{other}]: keep one of them")


def check_aligned(owner: msgspec.Struct, *labels: str) -> None:
    """Hold lists of one index (one iteration, one A-B group) to one length; a list that is not measured is empty.

    Raises:
        ValueError: they differ in length.
    """
    lengths = {label: len(getattr(owner, label)) for label in labels if getattr(owner, label)}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"lists of one index differ in length: {lengths}")


_FP8 = ("fp8", "float8", "f8", "e4m3", "e5m2")


def refuse_fp8(dtype: str | None) -> None:
    """Refuse to train or to predict in any form of fp8, by the name that was given.

    Raises:
        UserError: it is one.
    """
    if dtype is not None and any(word in dtype.lower() for word in _FP8):
        raise UserError(f"--dtype {dtype[:40]}: fp8 is not supported; give bf16 or fp32")
