"""Numbers of ranks as products: divisors, factorings, and candidates that are alike."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import numpy as np

from predict.costs.sourced import Ints


def alike(*columns: Ints) -> tuple[Ints, Ints]:
    """Which entries of columns of whole numbers from 0 on are equal in all of them.

    Returns:
        The first of each kind, ordered by the columns, and the kind of each entry.
    """
    key = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        several = int(column.max(initial=0)) + 1
        if int(key.max(initial=0)) >= np.iinfo(np.int64).max // several - 1:
            key = np.unique(key, return_inverse=True)[1]
        key = key * several + column
    _, first, kind = np.unique(key, return_index=True, return_inverse=True)
    return first, kind


def placements(stages: int, replicas: int, shared: int) -> int:
    """Orders of the axes of more than one rank."""
    return math.factorial((stages > 1) + (replicas > 1) + shared)


@functools.lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    """All of them, the least first."""
    small = [part for part in range(1, math.isqrt(number) + 1) if not number % part]
    return tuple(sorted({*small, *(number // part for part in small)}))


def factorings(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Ordered products of so many factors."""
    if parts == 1:
        yield (number,)
        return
    for first in divisors(number):
        for rest in factorings(number // first, parts - 1) if parts > 1 else ():
            yield (first, *rest)
