"""What a comparison with serial training comes to: it holds, one thing differs first, or nothing can be said."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from paradl_bench.core.errors import WorkError
from paradl_bench.core.units import counted
from paradl_bench.measure.proof.comparison import NO_NUMBER
from paradl_bench.measure.proof.proving import Difference, Findings, StrategyProof
from paradl_bench.measure.proof.reference import Ranks
from paradl_bench.plan.strategy import Strategy
from paradl_bench.ranks.rank_place import NOT_AS_SERIAL
from paradl_bench.records.training.verification import Verification

VARIES = "the serial model itself gives different results each time"


class Outcome(NamedTuple):
    """What all ranks found, the same on each.

    Attributes:
        first: what differs first; None for nothing. most: the largest relative difference on any rank.
        why_not: why nothing can be said; empty where something can.
    """

    first: Difference | None
    most: float
    why_not: str = ""


class Proved(NamedTuple):
    """What a proof says, and what differs first; None for nothing."""

    verification: Verification
    first: Difference | None = None


def settle(proof: StrategyProof, ranks: Ranks, inputs: torch.Tensor, targets: torch.Tensor) -> Outcome:
    """Compare one iteration on a global mini-batch and one weight update, and find what differs first; a collective."""
    trained = _of_all(ranks, proof.iterate(inputs, targets))
    if not trained.finite:
        return Outcome(None, trained.most, "the serial model's own output is not finite")
    if trained.differences:
        # Only now: to note every layer's result takes as much memory again.
        if any(ranks.gather(proof.serial_varies(inputs, targets))):
            return Outcome(None, trained.most, VARIES)
        located = _of_all(ranks, Findings(proof.locate(inputs, targets), 0.0)).differences
        return Outcome((located or trained.differences)[0], trained.most)
    updated = _of_all(ranks, proof.update())
    return Outcome(next(iter(updated.differences), None), max(trained.most, updated.most))


def _of_all(ranks: Ranks, of_this_rank: Findings) -> Findings:
    """What all ranks found, sorted."""
    # All but the first few would be a message of megabytes.
    first: list[list[Any]] = [list(item) for item in sorted(of_this_rank.differences)[:3]]
    every = sorted(Difference(*item) for of_rank in ranks.gather(first) for item in of_rank)
    return Findings(every, max(ranks.gather(of_this_rank.most)), all(ranks.gather(of_this_rank.finite)))


def end_if_differs(proved: Proved, model: str, strategy: Strategy) -> None:
    """Raises:
    WorkError: something differs; the message names what does so first.
    """
    verification, first = proved
    if first is None:
        return
    by = "in shape, or is no number" if first.relative >= NO_NUMBER else f"by {first.relative:.2g} of its largest value"
    remedies = [axis.declared.cut_less for axis in strategy.axes if axis.declared.cut_less and axis.degree > 1]
    raise WorkError(
        f"{NOT_AS_SERIAL}: {model} as {strategy}; first {first.what} differs {by} (rank {first.rank},"
        f" {counted(verification.samples, 'sample')} in {verification.dtype}). Nothing was timed. Take another strategy"
        f"{''.join(f', or {remedy}' for remedy in dict.fromkeys(remedies))}; --no-verify times it anyway"
    )
