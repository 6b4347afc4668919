"""From the options of the command line to points: strategies by degree or by kind, rank counts, batches, scaling."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal

from paradl_bench.core.errors import UserError
from paradl_bench.core.units import parse_counts, parse_ranks
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Axis, Strategy, parse_strategy, parse_strategy_kinds
from paradl_bench.strategies.nesting.catalog import planner_for
from predict.workload import Configuration

Scaling = Literal["weak", "strong"]


def left_out_lines(refused: Sequence[tuple[Strategy, UserError]]) -> tuple[str, ...]:
    """Each reason once, before the strategies that it holds for, unless it names all of them."""
    strategies: dict[str, dict[str, None]] = {}
    for strategy, error in refused:
        strategies.setdefault(str(error), {})[str(strategy)] = None
    return tuple(
        reason if set(names) <= set(re.findall(r"\w+", reason)) else f"{reason} (so not {', '.join(names)})"
        for reason, names in strategies.items()
    )


def fewest_ranks(strategies: str, ranks: str | None) -> int:
    """The least of a sweep's rank counts; of fixed strategies the most ranks that one has.

    Raises:
        UserError: a part does not parse.
    """
    if ranks is not None:
        return min(parse_ranks(ranks))
    fixed = [text for text in strategies.split(",") if not parse_strategy_kinds(text.strip())]
    return max((parse_strategy(text.strip()).ranks for text in fixed), default=1)


def expand_points(
    network: ModelGraph,
    strategies: str,
    batches: str,
    ranks: str | None,
    scaling: Scaling,
    settings_of: Callable[[int], PlanSettings],
) -> tuple[tuple[Configuration, ...], tuple[str, ...]]:
    """Every strategy with every batch; kinds at every rank count; and why others of a sweep are left out.

    Args:
        strategies: fixed (``d4``) or kinds (``data``), parted by commas.
        batches: global mini-batches. In weak scaling a kind's batch is that of the smallest rank count and grows with
            the ranks; serial and fixed strategies take it as it is.
        network: sets the limits beyond which a point is left out.

    Raises:
        UserError: a part does not parse, kinds have no ranks or ranks no kinds, or no point of all is possible.
    """
    counts = parse_ranks(ranks) if ranks is not None else ()
    texts = [text.strip() for text in strategies.split(",")]
    if counts and not any(parse_strategy_kinds(text) for text in texts):
        for text in texts:
            parse_strategy(text)
        raise UserError(
            f"the degrees of {strategies} are fixed: leave --ranks out, or name a kind whose degree --ranks sets,"
            " such as data"
        )
    points: list[Configuration] = []
    refused: list[tuple[Strategy, UserError]] = []
    for batch in parse_counts(batches, "--batch"):
        for text in texts:
            for strategy, global_batch in _configurations(text, batch, counts, scaling):
                try:
                    point = Configuration(strategy=strategy, settings=settings_of(global_batch))
                    planner_for(strategy).check(network, strategy, point.settings)
                    points.append(point)
                except UserError as error:
                    refused.append((strategy, error))
    if not points:
        raise refused[0][1]
    return tuple(dict.fromkeys(points)), left_out_lines(refused)


def _configurations(text: str, batch: int, counts: Sequence[int], scaling: Scaling) -> list[tuple[Strategy, int]]:
    kinds = parse_strategy_kinds(text)
    if kinds is None:
        strategy = parse_strategy(text)
        planner_for(strategy)
        return [(strategy, batch)]
    if not kinds:
        return [(Strategy(), batch)]
    if not counts:
        raise UserError(
            f"strategy {text!r} has no degree: give numbers of ranks, as --ranks 2:16:x2, or write the degree, as d4"
        )
    return [(_grown(kinds, count), batch * count // counts[0] if scaling == "weak" else batch) for count in counts]


def _grown(kinds: tuple[str, ...], ranks: int) -> Strategy:
    strategy = Strategy(axes=tuple(Axis(kind=kind, extents=(ranks if i == 0 else 1,)) for i, kind in enumerate(kinds)))
    planner_for(strategy)
    if len(kinds) > 1:
        raise UserError(
            f"strategy {'+'.join(kinds)}: --ranks sets the degree of one axis only; write the degrees of both, as"
            f" {strategy}"
        )
    return strategy
