"""One rank that computes slower than the others: what if a device throttles, or a host is shared.

Every other rank waits for it where they meet, and what others would have been late by chance counts only as far as they
may be later still (:meth:`predict.costs.spread.stragglers.RankSpread.wait`).
"""

from __future__ import annotations

from paradl_bench.core.errors import UserError
from paradl_bench.records.slow_rank import SlowRank, parse_slow_rank
from predict.costs.sourced import Remark


def remark_on(slow: SlowRank) -> Remark:
    """That it was asked for."""
    return Remark(f"rank {slow.rank} computes {slow.factor:g} times as long as measured (--slow-rank)", False)


def slow_rank_option(evaluator_name: str, text: str | None) -> SlowRank | None:
    """What ``--slow-rank FACTOR[@RANK]`` says, if given; a UserError of another evaluator than ``simulate``."""
    if text is None:
        return None
    if evaluator_name != "simulate":
        raise UserError(f"--slow-rank is for --evaluator simulate; {evaluator_name} takes all ranks as equally fast")
    return parse_slow_rank(text)
