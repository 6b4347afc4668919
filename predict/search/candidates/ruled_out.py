"""What a search does not compare, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from paradl_bench.core.errors import uneven
from paradl_bench.plan.collectives.catalog import OF_STRATEGIES
from paradl_bench.plan.strategy import Strategy

_REASONS = 2
_MEASURE = "measure it:"


class Counted(NamedTuple):
    """Numbers of strategies by why they cannot be, the replicas of :class:`RuledOut`, and reasons of settings alone."""

    counts: dict[str, int]
    uneven_replicas: set[int]
    partly: set[str]


@dataclass(slots=True)
class RuledOut:
    """Strategies that cannot be, as a whole or with some settings, counted by why; kinds of axes by what they lack.

    Attributes:
        uneven_replicas: numbers of replicas that would see unequal parts of the mini-batch.
    """

    counts: Counter[str] = field(default_factory=Counter)
    lacking: dict[str, str] = field(default_factory=dict)
    uneven_replicas: set[int] = field(default_factory=set)
    _known: set[tuple[str, Hashable]] = field(default_factory=set)
    _partly: set[str] = field(default_factory=set)

    def copy(self) -> RuledOut:
        """Another that has counted as much."""
        counted = self.counts.copy(), self.lacking.copy(), self.uneven_replicas.copy()
        return RuledOut(*counted, self._known.copy(), self._partly.copy())

    @property
    def counted(self) -> Counted:
        """What it has counted."""
        return Counted(dict(self.counts), self.uneven_replicas, self._partly)

    def add_all(self, of_others: Counted) -> None:
        """What was counted of other strategies."""
        self.counts.update(of_others.counts)
        self.uneven_replicas |= of_others.uneven_replicas
        self._partly |= of_others.partly

    def add(self, reason: str, strategies: int = 1) -> None:
        """So many strategies more."""
        if strategies:
            self.counts[reason] += strategies

    def add_uneven(self, batch: int, replicas: int, strategies: int) -> None:
        """So many strategies more that have a number of replicas which the mini-batch does not split evenly over."""
        self.uneven_replicas.add(replicas)
        self.add(f"{_uneven_batch(batch)}{replicas} replicas", strategies)

    def add_settings(self, reason: str, of: Hashable, strategies: int = 1) -> None:
        """Some settings of so many strategies, whatever they are of (a mesh); those are counted once a reason."""
        self._partly.add(reason)
        if (reason, of) not in self._known:
            self._known.add((reason, of))
            self.counts[reason] += strategies

    def lacks(self, strategy: Strategy, operation: str) -> None:
        """The profile holds no fit of a collective that the strategy issues."""
        for kind in kinds_of(strategy):
            self.lacking.setdefault(kind, operation)

    def uncompared(self, strategies: Iterable[Strategy]) -> dict[str, str]:
        """Kinds of axes that none of these strategies has, each with the collective that was not measured."""
        compared = {kind for strategy in strategies for kind in kinds_of(strategy)}
        return {kind: operation for kind, operation in self.lacking.items() if kind not in compared}

    def why_none(self, batch: int, ranks: int) -> str:
        """Why no strategy is left: the batch first, then what rules out most strategies whole, then what is lacking."""
        parted = _uneven_batch(batch)
        reasons = [str(uneven(f"batch {batch}", batch, ranks, f"{ranks} replicas"))] if batch % ranks else []
        whole = [
            reason
            for reason, _ in self.counts.most_common()
            if reason not in self._partly and not reason.startswith(parted) and _MEASURE not in reason
        ]
        lacking = [reason for reason in self.counts if _MEASURE in reason]
        return "; ".join([*reasons, *whole[:_REASONS], *lacking[:1]]) or "; ".join([*self.counts][:_REASONS])


def _uneven_batch(batch: int) -> str:
    return f"batch {batch} does not split evenly over "


def kinds_of(strategy: Strategy) -> tuple[str, ...]:
    """The kinds of a strategy's axes as a person calls them: ``pipeline``, ``ZeRO 2``."""
    return tuple(f"ZeRO {axis.prefix}" if axis.prefix else axis.kind for axis in strategy.axes)


def sweep_command(measured: Iterable[str], backend: str) -> str:
    """The command that measures what strategies issue and the profile lacks."""
    lacking = ",".join(sorted(set(OF_STRATEGIES) - set(measured)))
    return f"paradl-bench collectives --ranks 2 --backend {backend} --ops {lacking} -o DIR"
