"""Caches: answers that are found once, and keys over things that take longer to compare than to work with."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class Answers:
    """Answers by key, each found when it is first asked for.

    Args:
        most: that are kept, those that were found last; None for all.
    """

    __slots__ = ("_by_key", "_most")

    def __init__(self, most: int | None = None) -> None:
        self._by_key: dict[Hashable, object] = {}
        self._most = most

    def once(self, key: Hashable, find: Callable[[], T]) -> T:
        """The answer; ``key`` says all that it depends on, beside what the answers belong to."""
        if key not in self._by_key:
            # What will go makes room first: an answer may take gigabytes.
            self._keep((self._most or 1) - 1)
            self._by_key[key] = find()
            self._keep(self._most or 1)
        answer: T = self._by_key[key]  # type: ignore[assignment]
        return answer

    def _keep(self, most: int) -> None:
        while self._most is not None and len(self._by_key) > most:
            del self._by_key[next(iter(self._by_key))]


class Same(Generic[T]):
    """A thing that is equal to itself alone: hashing and comparing look at none of what it holds."""

    __slots__ = ("thing",)

    def __init__(self, thing: T) -> None:
        self.thing = thing

    def __hash__(self) -> int:
        return id(self.thing)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.thing is self.thing


def numbered(keys: Iterable[Hashable]) -> tuple[list[int], list[int]]:
    """The index of the first of each kind of equal keys, and of each key the number of its kind."""
    first: list[int] = []
    numbers: dict[Hashable, int] = {}
    kinds = []
    for index, key in enumerate(keys):
        kinds.append(numbers.setdefault(key, len(numbers)))
        if len(numbers) > len(first):
            first.append(index)
    return first, kinds
