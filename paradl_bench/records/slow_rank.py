"""One rank that computes slower than the others: asked of a prediction, or made so in an emulated run."""

from __future__ import annotations

import contextlib

import msgspec

from paradl_bench.core.bounds import RankIndex, Slowdown
from paradl_bench.core.errors import UserError
from paradl_bench.core.units import LARGEST_FACTOR
from paradl_bench.plan.tasks import Plan


class SlowRank(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rank whose compute takes ``factor`` times as long as measured."""

    factor: Slowdown
    rank: RankIndex = 0

    def __str__(self) -> str:
        return f"{self.factor:g}@{self.rank}"

    def of_rank(self, rank: int) -> float:
        """How many times as long a rank computes."""
        return self.factor if rank == self.rank else 1.0

    def role_in(self, plan: Plan) -> int:
        """Index of the role that it plays.

        Raises:
            UserError: the plan has fewer ranks.
        """
        self.check(str(plan.strategy), plan.strategy.ranks)
        return plan.role_of(self.rank)

    def check(self, strategy: str, ranks: int) -> None:
        """Refuse a rank that a strategy of so many ranks does not have.

        Raises:
            UserError: it names those that there are.
        """
        if self.rank >= ranks:
            held = "rank 0 alone" if ranks == 1 else f"ranks 0 to {ranks - 1}"
            raise UserError(f"--slow-rank {self}: {strategy} has {held}")


def parse_slow_rank(text: str) -> SlowRank:
    """What ``--slow-rank FACTOR[@RANK]`` says.

    Raises:
        UserError: it does not parse.
    """
    factor, at, rank = text.partition("@")
    with contextlib.suppress(ValueError):
        slow = SlowRank(factor=float(factor), rank=int(rank) if at else 0)
        if 1 <= slow.factor <= LARGEST_FACTOR and slow.rank >= 0:
            return slow
    raise UserError(
        f"--slow-rank: {text!r} is no FACTOR[@RANK], as 1.5 or 1.5@3:"
        f" a factor from 1 to {LARGEST_FACTOR:g}, a rank from 0 on"
    )
