"""An iteration in a few steps, from its ledger: what a rank computes alone, and what comes on top of that."""

from __future__ import annotations

from collections.abc import Mapping

from paradl_bench.strategies.passes.input_tasks import INPUT_PHASES
from predict.ledger.ledger import (
    BESIDE_ALL_REDUCE,
    BESIDE_COMMUNICATION,
    IDLE_RANKS,
    SLOW_RANK,
    SLOWEST_RANK,
    WAIT_FOR_INPUT,
    LedgerEntry,
    RoleLedger,
)

ALONE, SHARED_HOST, OVERLAP, WAITING, EXPOSED, INPUT = STEPS = (
    *("compute alone", "shared host", "overlap", "waiting", "exposed communication", "input"),
)
MEANINGS = {
    ALONE: "layers, weight update and copies, on a rank alone on its host",
    SHARED_HOST: "time that the other ranks of the host add to compute",
    OVERLAP: "time that communication beside compute adds to it",
    WAITING: "waiting for late ranks and for other stages of a pipeline",
    EXPOSED: "communication that is not hidden by compute",
    INPUT: "reading or copying a mini-batch while nothing computes",
}
_ROUNDING = 1e-9
"""Of an iteration: steps that take less are rounding."""
_INPUT = {phase.name for phase in INPUT_PHASES}
_OF_EFFECT = {
    IDLE_RANKS: SHARED_HOST,
    BESIDE_COMMUNICATION: OVERLAP,
    BESIDE_ALL_REDUCE: OVERLAP,
    SLOWEST_RANK: WAITING,
    SLOW_RANK: WAITING,
}


def waterfall(role: RoleLedger, crowding: Mapping[str, float]) -> dict[str, float]:
    """Seconds of a role's iteration by step, in order; they add up to it. Steps without seconds are left out.

    Args:
        crowding: by phase, compute on a shared host over compute alone (:func:`predict.ledger.crowding.crowding`).
            Phases that it lacks count as computed alone.
    """
    seconds_of = dict.fromkeys(STEPS, 0.0)
    for entry in role.entries:
        if entry.phase in _INPUT or entry.name == WAIT_FOR_INPUT:
            seconds_of[INPUT] += entry.exposed_s
        elif entry.source == "simulated":
            seconds_of[WAITING] += entry.exposed_s
        elif "group" in entry.details:
            seconds_of[EXPOSED] += entry.exposed_s
        else:
            _add_computed(seconds_of, entry, crowding.get(entry.phase, 1.0))
    least_s = _ROUNDING * sum(seconds_of.values())
    return {step: seconds for step, seconds in seconds_of.items() if abs(seconds) > least_s}


def _add_computed(seconds_of: dict[str, float], entry: LedgerEntry, crowded: float) -> None:
    """What effects add goes to their steps; the rest is parted by what it would take alone."""
    exposed = entry.exposed_s / entry.total_s if entry.total_s else 0.0
    rest_s = entry.exposed_s
    for change in entry.adjustments:
        step = _OF_EFFECT.get(change.effect)
        if step:
            seconds_of[step] += change.added_s * exposed
            rest_s -= change.added_s * exposed
    seconds_of[ALONE] += rest_s / crowded
    seconds_of[SHARED_HOST] += rest_s - rest_s / crowded
