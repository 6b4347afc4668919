"""Actions of a short order that stand for those of a long one.

A schedule repeats the same turns for every further micro-batch. So a few micro-batches show what tasks of a rank do to
each other. Each action of the long order has a representative in the short one: both do the same, and the same actions
are around both.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paradl_bench.plan.schedules.ordered import Order

_REACH = 2
"""How many actions on each side are looked at, in each of two rounds: what lies next to them is alike as well."""
_FAR = _REACH + 1
"""A forward that is as far in front of its action, or further, is not next to it."""
_NONE = -1


def representatives(order: Order, shorter: Order) -> NDArray[np.intp] | None:
    """Per action of an order, the index of its representative in a shorter order; None if an action has none.

    The same actions are around both, around their neighbours, and around their forwards.
    """
    orders = order, shorter
    apart = [np.minimum(np.arange(len(of.kinds)) - of.forwards, _FAR) for of in orders]
    own = _numbered([[of.kinds, of.marks, far] for of, far in zip(orders, apart, strict=True)])
    near = _numbered([_around(numbers) for numbers in own])
    ones, others = _numbered(
        [[*_around(numbers), numbers[of.forwards]] for of, numbers in zip(orders, near, strict=True)]
    )
    first = np.full(int(max(ones.max(), others.max())) + 1, _NONE)
    first[others[::-1]] = np.arange(len(others))[::-1]
    found = first[ones]
    return None if np.any(found == _NONE) else found


def _around(numbers: NDArray[np.intp]) -> list[NDArray[np.intp]]:
    """Per action, its number and those of its neighbours on both sides."""
    padded = np.pad(numbers, _REACH, constant_values=_NONE)
    return [padded[shift : shift + len(numbers)] for shift in range(2 * _REACH + 1)]


def _numbered(orders: list[list[NDArray[np.intp]]]) -> list[NDArray[np.intp]]:
    """Per action of each order a number, which is the same for actions with the same columns."""
    lengths = [len(columns[0]) for columns in orders]
    number = np.zeros(sum(lengths), np.intp)
    for columns in zip(*orders, strict=True):
        column = np.concatenate(columns) - _NONE
        # Numbers are made few again after each column, so that the next one has room.
        number = np.unique(number * (int(column.max(initial=0)) + 1) + column, return_inverse=True)[1]
    return np.split(number, np.cumsum(lengths)[:-1])
