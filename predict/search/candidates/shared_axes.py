"""Axes that share layers, of each degree that divides the ranks: one, or two of those that do so in turn."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from paradl_bench.core.errors import UserError
from paradl_bench.network.equal_blocks import without_equal_blocks
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.axes.kind import IN_TURN, AxisKind, Trait
from paradl_bench.plan.axes.options import AxisOptions
from paradl_bench.plan.axes.registry import kinds_with
from paradl_bench.plan.axis_planner import DimsPlanner, axis_planner
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Axis, Strategy
from paradl_bench.strategies.nesting.catalog import planner_for
from predict.search.candidates.mesh import Sharing, choices_of, divisors, factorings, of_one_sample, placements
from predict.search.candidates.mirrored import is_first_written
from predict.search.candidates.ruled_out import RuledOut


class SharedAxes:
    """Those within the limits of their kinds; strategies that have others are counted as impossible.

    Args:
        like: per spatial dim, the first that is like it, of blocks that are predicted alike; none where all differ.
    """

    def __init__(
        self, network: ModelGraph, settings: PlanSettings, ranks: int, impossible: RuledOut, like: tuple[int, ...]
    ) -> None:
        self._network, self._settings, self._ranks = network, settings, ranks
        self._impossible, self._like = impossible, like
        self._mirrored: list[Axis] = []
        self._all_in_turn = False
        # Of equal blocks one says as much as all, unless somebody names blocks.
        names = settings.recompute or any(options.of_shards for options in settings.axes)
        self._few = network if names else without_equal_blocks(network).network

    def __iter__(self) -> Iterator[Sharing]:
        """Axes that share layers, of each degree that divides the ranks, with each choice of what is tried of them."""
        found: list[tuple[Axis, tuple[AxisOptions, ...]]] = []
        for kind in kinds_with(Trait.SHARDS_LAYERS):
            for chosen in choices_of(kind, self._settings):
                found += [(axis, chosen) for axis in self._axes_within(kind, self._settings.having(*chosen))]
        yield from (((axis,), chosen) for axis, chosen in found)
        turns = [[(axis, chosen) for axis, chosen in found if axis.has(trait)] for trait in IN_TURN]
        self._all_in_turn = all(turns)
        # Orders of so many axes are too many to search: each pair is tried, and all together are said to be left out.
        for one, other in itertools.combinations(turns, 2):
            for together in itertools.product(one, other):
                axes = tuple(axis for axis, _ in together)
                choices = tuple(choice for _, chosen in together for choice in chosen)
                if not self._ranks % math.prod(axis.degree for axis in axes) and self._go_together(axes, choices):
                    yield axes, choices

    def _go_together(self, axes: tuple[Axis, ...], chosen: tuple[AxisOptions, ...]) -> bool:
        """Whether one axis shares what another leaves of layers; else the strategies that have both are counted."""
        strategy, settings = Strategy(axes=axes), of_one_sample(self._settings.having(*chosen), axes)
        try:
            planner_for(strategy).check(self._few, strategy, settings)
        except UserError as error:
            text = str(error).replace(f"strategy {strategy}", " with ".join(axis.kind for axis in axes))
            self._impossible.add(text, self._strategies_with(*(axis.degree for axis in axes)))
            return False
        return True

    def _axes_within(self, kind: AxisKind, settings: PlanSettings) -> Iterator[Axis]:
        """Axes of a kind within its limit."""
        planner = axis_planner(kind)
        limit = planner.limit(self._network, settings)
        for degree in divisors(self._ranks)[1:]:
            beyond = degree > limit.ranks
            for axis in () if beyond and limit.ranks == 1 else self._axes(kind, degree):
                try:
                    if beyond:
                        raise UserError(str(limit))
                    if kind.dims == 1:
                        planner.check(self._network, Strategy(axes=(axis,)), 0, settings)
                    yield axis
                except UserError as error:
                    # Degrees that are refused alike are one reason.
                    text = f"{kind.name}: {limit}" if beyond else str(error).replace(f"strategy {axis}", kind.name)
                    self._impossible.add(text, self._strategies_with(degree))
            if beyond and limit.ranks == 1:
                self._impossible.add(f"{kind.name}: {limit}", self._strategies_with(degree))

    def _strategies_with(self, *degrees: int) -> int:
        """Strategies that have an axis of each degree, which shares layers."""
        rest = self._ranks // math.prod(degrees)
        return sum(placements(stages, rest // stages, len(degrees)) for stages in divisors(rest))

    def _axes(self, kind: AxisKind, degree: int) -> Iterator[Axis]:
        """An axis of the degree; of several dims, one for each way to part these, none of which ends in a 1."""
        planner = axis_planner(kind)
        if not isinstance(planner, DimsPlanner):
            yield Axis(kind=kind.name, extents=(degree,))
            return
        most = planner.most_parts(self._network, self._settings)
        extents = most[0] if most else ()
        for parts in factorings(degree, min(len(extents), kind.dims)):
            kept = parts[: max(i for i, part in enumerate(parts, start=1) if part > 1)]
            if not is_first_written(parts, self._like):
                self._mirrored.append(Axis(kind=kind.name, extents=kept))
                continue
            if all(part <= extent for part, extent in zip(kept, extents, strict=False)):
                yield Axis(kind=kind.name, extents=kept)
            else:
                text = f"{kind.name}: at most {'x'.join(map(str, extents))} parts, layer {most[1] if most else ''}"
                self._impossible.add(text, self._strategies_with(degree))

    def left_out(self) -> Iterator[str]:
        """What has no candidates: more than two axes that share layers, blocks that are others' with dims in turn."""
        if self._all_in_turn:
            kinds = [kinds_with(trait)[0].name for trait in IN_TURN]
            yield f"more than two of the axes that share layers in turn ({', '.join(kinds)})"
        if self._mirrored:
            few = list(map(str, dict.fromkeys(self._mirrored)))
            yield f"blocks that are another's with like dims in turn ({', '.join(few[:3])})"
