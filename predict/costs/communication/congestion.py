"""What congestion adds to an iteration of many collectives (docs/model.md, "Congestion").

A predicted iteration is the median over iterations. With one exchange in it, that is the usual time of an exchange,
however long the few congested ones take; with hundreds, some are congested in every iteration, and the median holds
nearly all of the mean. In between it is the median of a sum of independent draws, and is drawn here.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import numpy as np

from predict.costs.sourced import Floats, Ints, Remark
from predict.costs.spread.assembly import Priced

DRAWS = 400
"""Iterations. Their median is taken relative to their mean, which chance moves alike: what is left of it is a
twenty-fifth of a sum's standard deviation, and the same each time."""


def with_congestion(parts: Sequence[Priced]) -> tuple[list[Priced], tuple[Remark, ...]]:
    """Parts whose collectives take what congestion adds to the median iteration, each by its own share; a remark on it.

    Of all of an iteration's collectives together, as if none were hidden: what is added to the sum is spread over
    collectives by what each has in the mean. One that waits for another's congestion, and what compute hides, are the
    evaluator's. Collectives are taken as congested independently of each other.
    """
    chosen = [index for index, part in enumerate(parts) if part.congestion and part.cost.seconds * part.occurrences]
    if not chosen:
        return list(parts), ()
    usual = np.array([parts[index].cost.seconds for index in chosen])
    counts = np.array([round(parts[index].occurrences) for index in chosen])
    mean = np.array([each.mean_excess for index in chosen if (each := parts[index].congestion)])
    added = _added(parts, chosen, usual, counts)
    middle = median(added.tolist())
    if not middle:
        return list(parts), ()
    share = middle / float(added.mean())
    found = list(parts)
    for index, excess in zip(chosen, (share * mean).tolist(), strict=True):
        found[index] = _stretched(parts[index], excess)
    communication_s = sum(part.cost.seconds * part.occurrences for part in parts if part.is_communication)
    part_of_all = share * float(usual * counts @ mean) / communication_s
    text = (
        f"congestion adds {part_of_all:.1%} to collectives, {share:.0%} of what it does in the mean over iterations: of"
        f" {int(counts.sum())} some are seldom spared"
    )
    return found, (Remark(text, False),)


def _added(parts: Sequence[Priced], chosen: Sequence[int], usual: Floats, counts: Ints) -> Floats:
    """(DRAWS,) seconds that congestion adds to an iteration."""
    generator = np.random.default_rng(0)
    added = np.zeros(DRAWS)
    for index, seconds, count in zip(chosen, usual.tolist(), counts.tolist(), strict=True):
        congestion = parts[index].congestion
        assert congestion is not None
        excess = np.array(congestion.ratios) - 1
        chances = np.full(len(excess) + 1, congestion.probability / len(excess))
        chances[0] = 1 - congestion.probability
        added += seconds * (generator.multinomial(count, chances, size=DRAWS)[:, 1:] @ excess)
    return added


def _stretched(part: Priced, excess: float) -> Priced:
    """A part that takes longer by so much; what it is off by grows with it."""
    assert part.congestion is not None
    cost, longer = part.cost, 1 + excess
    return part._replace(
        cost=cost.adjusted("congestion", cost.seconds * longer)._replace(
            independent_sd_s=cost.independent_sd_s * longer,
            batch_sd_s=cost.batch_sd_s * longer,
            method_sd_s=cost.method_sd_s * longer,
        ),
        modes=(
            *((name, shift * longer) for name, shift in part.modes),
            ("congestion", cost.seconds * excess * part.congestion.relative_sd),
        ),
    )
