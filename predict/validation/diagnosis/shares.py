"""What each limitation takes of a predicted iteration, read off its ledger.

Each exposed second of a ledger belongs to at most one limitation. Seconds are means over all ranks, so that a stage
that idles counts as much as the ranks that it is of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.mesh import degree_of
from paradl_bench.plan.strategy import Strategy, parse_strategy
from paradl_bench.plan.tasks import HaloExchange
from paradl_bench.strategies.passes.input_tasks import INPUT_PHASES
from predict.costs.sourced import CONTENTION, HOST_DISPATCH
from predict.ledger.ledger import (
    BESIDE_COMMUNICATION,
    SLOW_RANK,
    SLOWEST_RANK,
    WAIT_FOR_INPUT,
    WAIT_FOR_STAGES,
    Ledger,
    LedgerEntry,
    RoleLedger,
)
from predict.validation.diagnosis import limitations as of

_HALF_WIDTH = 1.645
"""Standard deviations from the middle to either end of a 90% interval."""
_ROUNDING = 1e-9
"""Of an iteration: entries that have no more are rounding."""
_WITHOUT_SECONDS = (of.INPUT, of.REDUNDANT_COMPUTE)
"""What may be there and take nothing: input that hides behind compute, sharing that costs no compute."""
_INPUT = tuple(phase.name for phase in INPUT_PHASES)
_FROM_EFFECT = {
    CONTENTION: of.CONTENTION,
    HOST_DISPATCH: of.HOST_DISPATCH,
    SLOWEST_RANK: of.IMBALANCE,
    SLOW_RANK: of.IMBALANCE,
    BESIDE_COMMUNICATION: "",
}
"""Limitations whose seconds are what an effect adds to entries of any kind; empty for what is hidden there."""

_OF_WAITING = {WAIT_FOR_INPUT: of.INPUT, WAIT_FOR_STAGES: of.BUBBLES}


class Seconds(NamedTuple):
    """Seconds of an iteration with their 90% interval."""

    seconds: float
    low_s: float
    high_s: float

    @classmethod
    def around(cls, seconds: float, sd_s: float) -> Seconds:
        """So many seconds, with a standard deviation; none below 0."""
        return cls(seconds, max(seconds - _HALF_WIDTH * sd_s, 0.0), seconds + _HALF_WIDTH * sd_s)


class _Sum(NamedTuple):
    seconds: float = 0.0
    sd_s: float = 0.0

    def plus(self, seconds: float, sd_s: float = 0.0) -> _Sum:
        # Entries of one limitation are mostly of one fit, whose errors go together.
        return _Sum(self.seconds + seconds, self.sd_s + sd_s)


def seconds_of_limitations(
    ledger: Ledger, serial: Ledger, free: Ledger | None, *, crowding: float = 1.0
) -> dict[str, Seconds]:
    """Seconds of an iteration that each limitation takes; those that it cannot have are left out.

    Args:
        serial: of one rank that trains alone on what a replica does; tells what sharing makes computed again.
        crowding: what the serial rank would take longer if as many ranks computed on its host, which is no computation.
        free: of a pipeline, the same with links that take no time; tells what stages wait for messages.
    """
    strategy = parse_strategy(ledger.strategy)
    sums: dict[str, _Sum] = {}
    for role in ledger.roles:
        weight = role.ranks / ledger.ranks
        for name, seconds, sd_s in _parts(role, strategy):
            sums[name] = sums.get(name, _Sum()).plus(weight * seconds, weight * sd_s)
    stages = degree_of(strategy, Trait.STAGES)
    if free is not None:
        _part_waiting(sums, ledger, free)
    shards = stages * degree_of(strategy, Trait.SHARDS_LAYERS)
    if shards > 1:
        alone = crowding / shards
        again_s = computed_s(ledger) - alone * computed_s(serial)
        # Parts of layers and whole ones are measured one after the other, each with the host as it was then.
        sums[of.REDUNDANT_COMPUTE] = _Sum(
            max(again_s, 0.0), math.hypot(_layers_sd_s(ledger), alone * _layers_sd_s(serial))
        )
    least_s = _ROUNDING * ledger.iteration_s
    there = {name: total for name, total in sums.items() if total.seconds > least_s or name in _WITHOUT_SECONDS}
    return {name: Seconds.around(total.seconds, total.sd_s) for name, total in there.items()}


def contended_s(ledger: Ledger) -> dict[str, float]:
    """What groups that communicate at once add, by the limitation that the calls are of; the mean over ranks."""
    seconds_of: dict[str, float] = {}
    for role in ledger.roles:
        for entry in role.entries:
            added_s = sum(change.added_s for change in entry.adjustments if change.effect == CONTENTION)
            if added_s > 0:
                name, exposed = _limitation_of(entry), entry.exposed_s / entry.total_s
                seconds_of[name] = seconds_of.get(name, 0.0) + role.ranks / ledger.ranks * added_s * exposed
    return seconds_of


def computed_s(ledger: Ledger) -> float:
    """Forward and backward of layers, without what effects on the whole rank add; the mean over ranks."""
    return _mean_of_layers(ledger, _computed_s)


def taken_by_layers(ledger: Ledger) -> Seconds:
    """Forward and backward of layers as a rank spends them, all effects in; the mean over ranks."""
    return Seconds.around(_mean_of_layers(ledger, lambda entry: entry.total_s), _layers_sd_s(ledger))


def _mean_of_layers(ledger: Ledger, seconds: Callable[[LedgerEntry], float]) -> float:
    return sum(role.ranks * sum(map(seconds, _of_layers(role))) for role in ledger.roles) / ledger.ranks


def _of_layers(role: RoleLedger) -> Iterable[LedgerEntry]:
    return (entry for entry in role.entries if entry.phase in ("FW", "BW") and not _group(entry))


def _computed_s(entry: LedgerEntry) -> float:
    others = sum(change.added_s for change in entry.adjustments if change.effect in _FROM_EFFECT)
    return entry.total_s - others


def _layers_sd_s(ledger: Ledger) -> float:
    """Of forward and backward of layers, in the mean over ranks.

    Layers are measured each by itself. What else their errors have in them moves all layers at once.
    """
    shared_s = _mean_of_layers(ledger, lambda entry: math.sqrt(max(entry.sd_s**2 - entry.own_sd_s**2, 0.0)))
    own = (role.ranks / ledger.ranks * sum(entry.own_sd_s**2 for entry in _of_layers(role)) for role in ledger.roles)
    return math.hypot(shared_s, math.sqrt(sum(own)))


def _group(entry: LedgerEntry) -> str:
    return str(entry.details.get("group", ""))


def _parts(role: RoleLedger, strategy: Strategy) -> Iterable[tuple[str, float, float]]:
    """Limitation, seconds and standard deviation of the parts of all entries."""
    for entry in role.entries:
        exposed = entry.exposed_s / entry.total_s if entry.total_s else 0.0
        rest_s = entry.exposed_s
        for change in entry.adjustments:
            if change.effect in _FROM_EFFECT and change.added_s > 0:
                rest_s -= change.added_s * exposed
                # What an effect adds is as uncertain, relatively, as the entry that it adds to.
                name = _FROM_EFFECT[change.effect] or _hidden(strategy)
                yield name, change.added_s * exposed, entry.sd_s * change.added_s / entry.total_s
        name = _limitation_of(entry)
        if name:
            yield name, max(rest_s, 0.0), entry.sd_s * exposed


def _limitation_of(entry: LedgerEntry) -> str:
    """The limitation that an entry's own seconds are of; empty for layers."""
    if not entry.phase:
        return _OF_WAITING.get(entry.name, of.IMBALANCE)
    if entry.phase in _INPUT:
        return of.INPUT
    group = _group(entry)
    if not group:
        return {"WU": of.WEIGHT_UPDATE, "GE": of.GRADIENT_EXCHANGE}.get(entry.phase, "")
    if entry.phase not in ("FW", "BW"):
        return of.GRADIENT_EXCHANGE
    if any(axis.declared.has(Trait.STAGES) for axis in parse_strategy(group).axes):
        return of.PIPELINE_MESSAGES
    return of.HALO if entry.name == HaloExchange.kind else of.LAYER_WISE


def _hidden(strategy: Strategy) -> str:
    """The communication that compute hides: of gradients where there is any, else of stages, else of layers."""
    if degree_of(strategy, Trait.REPLICATES) > 1:
        return of.GRADIENT_EXCHANGE
    return of.PIPELINE_MESSAGES if degree_of(strategy, Trait.STAGES) > 1 else of.LAYER_WISE


def _part_waiting(sums: dict[str, _Sum], ledger: Ledger, free: Ledger) -> None:
    """Part what stages wait: for messages, for a stage that computes more than the mean, and the rest as bubbles."""
    waiting = sums.pop(of.BUBBLES, _Sum())
    messages_s = min(max(waiting.seconds - _waiting_s(free), 0.0), waiting.seconds)
    by_role = [sum(entry.exposed_s for entry in _of_layers(role)) for role in ledger.roles]
    mean_s = sum(role.ranks * of_role_s for role, of_role_s in zip(ledger.roles, by_role, strict=True)) / ledger.ranks
    uneven_s = min(max(by_role) - mean_s, waiting.seconds - messages_s)
    sums[of.PIPELINE_MESSAGES] = sums.get(of.PIPELINE_MESSAGES, _Sum()).plus(messages_s)
    sums[of.IMBALANCE] = sums.get(of.IMBALANCE, _Sum()).plus(uneven_s)
    sums[of.BUBBLES] = _Sum(waiting.seconds - messages_s - uneven_s)


def _waiting_s(ledger: Ledger) -> float:
    """What ranks wait for other stages, in the mean."""
    return (
        sum(
            role.ranks * entry.exposed_s
            for role in ledger.roles
            for entry in role.entries
            if entry.name == WAIT_FOR_STAGES
        )
        / ledger.ranks
    )
