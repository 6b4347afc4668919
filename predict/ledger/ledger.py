"""What every second of a predicted iteration is made of.

A ledger has the tasks of each role, by layer or message. Each moment of a role's iteration belongs to one entry: to
what the role computes, else to the call that compute waits for, else to other communication, else to copies and timers,
else to waiting. An entry is *exposed* for as long as moments belong to it, and *hidden* for the rest of its seconds. So
the exposed seconds of a role's entries add up to the iteration.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from paradl_bench.plan.strategy import Strategy
from paradl_bench.plan.tasks import Communication, Ints, Phase, Work
from predict.costs.priced import PricedPlan
from predict.costs.sourced import Adjustment, Costs, Floats
from predict.costs.spread.assembly import Priced

IDLE_RANKS = "other ranks of the host idle"
"""What a pipeline's stages gain while other ranks of their host wait."""
SLOWEST_RANK, SLOW_RANK, BESIDE_COMMUNICATION = "slowest rank", "slow rank", "beside communication"
BESIDE_ALL_REDUCE = "beside an all-reduce"
"""Effects on a task beyond its work's price: ranks that vary, one that is asked to be slow, communication beside it."""
WAIT_FOR_STAGES, WAIT_FOR_RANKS, WAIT_FOR_INPUT = (
    "wait for other stages",
    "wait for other ranks",
    "wait for a mini-batch",
)
_NOTHING = 1e-12
"""Of an entry's seconds: effects that add less are rounding."""


class LedgerAdjustment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds that one effect adds to an entry; negative where it takes some away."""

    effect: str
    added_s: float


class LedgerEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A task of a role, or several alike; seconds of all ``count`` occurrences in an iteration.

    Attributes:
        name: of the layer, the message, or what is waited for. details: its bytes, ranks and group.
        term: of a closed form, the term of its equation, in the paper's letters; else empty.
        source: where ``base_s`` comes from (:class:`~predict.costs.sourced.Source`, in lower case); ``simulated`` of
            waiting.
        total_s: ``base_s`` and the adjustments, added up in order.
        exposed_s, hidden_s: seconds that the iteration has for the entry, and those behind something else.
        sd_s: standard deviation of ``total_s`` by what is known of costs, interference and lateness left out.
        own_sd_s: the part of ``sd_s`` that is the entry's own; the rest goes together with other entries.
    """

    name: str
    phase: str
    term: str = ""
    source: str
    details: dict[str, str | int] = {}
    count: float
    base_s: float
    adjustments: tuple[LedgerAdjustment, ...] = ()
    total_s: float
    exposed_s: float
    hidden_s: float
    sd_s: float = 0.0
    own_sd_s: float = 0.0


class RoleLedger(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What each of the ``ranks`` ranks of a role spends the iteration with."""

    role: str
    ranks: int
    entries: tuple[LedgerEntry, ...]

    @property
    def waiting_s(self) -> float:
        """Seconds in which it waits for other ranks, stages or input."""
        return sum(entry.exposed_s for entry in self.entries if not entry.phase)


class Ledger(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a predicted iteration is made of, role by role; exposed seconds of a role add up to ``iteration_s``.

    Attributes:
        waterfall_s: of the role that waits least, by step (:mod:`predict.ledger.waterfall`); adds up to the iteration.
    """

    model: str
    strategy: str
    ranks: int
    batch: int
    evaluator: str
    iteration_s: float
    interval_s: tuple[float, float]
    waterfall_s: dict[str, float] = {}
    roles: tuple[RoleLedger, ...]


def exposed_effect_s(role: RoleLedger, effect: str) -> float:
    """Seconds of a role's iteration that an effect adds to its entries."""
    return sum(
        change.added_s * entry.exposed_s / entry.total_s
        for entry in role.entries
        for change in entry.adjustments
        if change.effect == effect and entry.total_s
    )


def shown_role(roles: Iterable[RoleLedger]) -> RoleLedger:
    """The role that waits least: the others wait for it."""
    return min(roles, key=lambda role: role.waiting_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedWorks:
    """Works with what their seconds are made of, all in one order; costs may have changed since parts were priced."""

    strategy: Strategy
    works: Sequence[Work]
    parts: Sequence[Priced]
    costs: Costs
    sd_s: Floats = field(init=False)

    def __post_init__(self) -> None:
        # Each entry asks for one of all works.
        object.__setattr__(self, "sd_s", self.costs.sd_s)

    @classmethod
    def of_plan(cls, priced: PricedPlan) -> PricedWorks:
        """All works of a priced plan."""
        return cls(strategy=priced.plan.strategy, works=priced.plan.works, parts=priced.parts, costs=priced.costs)

    def entry(
        self,
        work: int,
        phase: str,
        count: float,
        *,
        exposed_s: float | None = None,
        changes: Iterable[Adjustment] = (),
        term: str = "",
    ) -> LedgerEntry:
        """The entry of a work; ``exposed_s`` is None for all of it.

        Changes are what effects add to all occurrences together, beyond the work's price.
        """
        about, cost = self.works[work], self.parts[work].cost
        idle_s = float(self.costs.seconds[work]) - cost.seconds
        added = [Adjustment(effect, count * seconds) for effect, seconds in cost.adjustments]
        added += [Adjustment(IDLE_RANKS, count * idle_s), *changes]
        base_s = count * cost.base_s
        kept = _merged(added, _NOTHING * abs(count * cost.seconds))
        total_s = base_s
        for adjustment in kept:
            total_s += adjustment.added_s
        exposed = total_s if exposed_s is None else exposed_s
        return LedgerEntry(
            name=about.label,
            phase=phase,
            term=term,
            source=cost.origin.name.lower(),
            details=details_of(about, self.strategy),
            count=count,
            base_s=base_s,
            adjustments=kept,
            total_s=total_s,
            exposed_s=exposed,
            hidden_s=max(total_s - exposed, 0.0),
            sd_s=count * float(self.sd_s[work]),
            own_sd_s=count * float(self.costs.independent_sd_s[work]),
        )

    def entries_of_tasks(
        self,
        work: Ints,
        phase: Ints,
        exposed_s: Floats,
        added_s: Mapping[str, Floats] | None = None,
        terms: Mapping[Phase, str] | None = None,
    ) -> list[LedgerEntry]:
        """An entry for each work and phase of tasks; arrays of one length.

        Args:
            added_s: by effect, what it adds to each task beyond its work's price. terms: of a closed form, by phase.
        """
        keys, place = np.unique(work.astype(np.int64) * len(Phase) + phase, return_inverse=True)

        def add_up(values: Floats) -> list[float]:
            return list(np.bincount(place, weights=values, minlength=len(keys)).tolist())

        changes = {effect: add_up(values) for effect, values in (added_s or {}).items()}
        rows = zip(keys.tolist(), np.bincount(place, minlength=len(keys)).tolist(), add_up(exposed_s), strict=True)
        return [
            self.entry(
                key // len(Phase),
                Phase(key % len(Phase)).name,
                count,
                exposed_s=exposed,
                changes=[Adjustment(effect, values[index]) for effect, values in changes.items()],
                term=(terms or {}).get(Phase(key % len(Phase)), ""),
            )
            for index, (key, count, exposed) in enumerate(rows)
        ]


def details_of(work: Work, strategy: Strategy) -> dict[str, str | int]:
    """What a person asks of a work: its shapes, bytes and group."""
    if not isinstance(work, Communication):
        return work.details
    return work.details | {"group": "".join(str(strategy.axes[axis]) for axis in work.axes)}


def waiting_entry(
    name: str, seconds: float, spans: int, *, exposed_s: float | None = None, phase: str = "", term: str = ""
) -> LedgerEntry:
    """The entry of what a role waits for, in so many spans; ``exposed_s`` is None where all of it is exposed."""
    exposed = seconds if exposed_s is None else exposed_s
    return LedgerEntry(
        name=name,
        phase=phase,
        term=term,
        source="simulated",
        count=spans,
        base_s=seconds,
        total_s=seconds,
        exposed_s=exposed,
        hidden_s=max(seconds - exposed, 0.0),
    )


def most_exposed_first(entries: Iterable[LedgerEntry]) -> tuple[LedgerEntry, ...]:
    """In the order of a ledger; without those that take no time."""
    taking_time = (entry for entry in entries if entry.total_s or entry.exposed_s)
    return tuple(sorted(taking_time, key=lambda entry: -entry.exposed_s))


def _merged(added: Iterable[Adjustment], least_s: float) -> tuple[LedgerAdjustment, ...]:
    """Each effect once, in order; without those that add nothing."""
    by_effect: dict[str, float] = {}
    for effect, seconds in added:
        by_effect[effect] = by_effect.get(effect, 0.0) + seconds
    return tuple(
        LedgerAdjustment(effect=effect, added_s=seconds)
        for effect, seconds in by_effect.items()
        if abs(seconds) > least_s
    )
