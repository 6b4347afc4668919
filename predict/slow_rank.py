"""One rank that computes slower than the others: what if a device throttles, or a host is shared.

Every other rank waits for it where they meet, so the iteration is as long as it needs, and what others would have been
late by chance counts only as far as they may be later still (:meth:`predict.stragglers.RankSpread.wait`). In a pipeline
it slows its own stage, which sets the pace or not.
"""

from __future__ import annotations

import math

import msgspec

from paradl_bench.spec.errors import UserError
from paradl_bench.spec.plan import Plan
from predict.costs import Remark


class SlowRank(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rank whose compute takes ``factor`` times as long as measured, kernels and copies alike, on any stream."""

    factor: float
    rank: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.factor < math.inf:
            raise ValueError(f"factor has to be finite and at least 1, not {self.factor}")
        if self.rank < 0:
            raise ValueError(f"rank has to be 0 or more, not {self.rank}")

    def role_in(self, plan: Plan) -> int:
        """Index of the role that it plays.

        Raises:
            UserError: the plan has fewer ranks.
        """
        ranks = plan.strategy.ranks
        if self.rank >= ranks:
            held = "rank 0 alone" if ranks == 1 else f"ranks 0 to {ranks - 1}"
            raise UserError(f"--slow-rank {self.factor:g}@{self.rank}: {plan.strategy} has {held}")
        return plan.role_of(self.rank)

    @property
    def remark(self) -> Remark:
        """That it was asked for."""
        return Remark(f"rank {self.rank} computes {self.factor:g} times as long as measured (--slow-rank)", False)


def slow_rank_option(evaluator_name: str, text: str | None) -> SlowRank | None:
    """What ``--slow-rank FACTOR[@RANK]`` says; None where it is not given.

    Raises:
        UserError: it does not parse, or is for another evaluator.
    """
    if text is None:
        return None
    if evaluator_name != "simulate":
        raise UserError(f"--slow-rank is for --evaluator simulate; {evaluator_name} takes all ranks as equally fast")
    factor, at, rank = text.partition("@")
    try:
        return SlowRank(factor=float(factor), rank=int(rank) if at else 0)
    except ValueError:
        raise UserError(
            f"--slow-rank: {text!r} is no FACTOR[@RANK], as 1.5 or 1.5@3: a factor of at least 1, a rank from 0 on"
        ) from None
