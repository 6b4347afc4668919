"""A search of the same candidates on other links or another device, led by what a whole search of them has found.

A whole search estimates every candidate, and learns from its predictions by how much estimates are off. A *following*
search estimates few of them on the other hardware: the fastest candidate of each of the first :data:`FAMILIES`
families, and then all of the families that are the fastest there. A family has one mesh, one number of micro-batches
and one schedule; its candidates differ in the order of axes, in buckets, and in what is computed again. It predicts the
rows of the whole search anew, and then what may be among the rows here. What it learns, the next one knows.

It proves nothing of the candidates that it does not look at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from predict.costs.cost_model import CostModel
from predict.costs.sourced import Ints
from predict.prediction.prediction import Predictor
from predict.search.candidates.mesh import alike
from predict.search.pricing.corrections import Corrections
from predict.search.pricing.estimate import Estimates
from predict.search.pricing.memory_bound import bounds_of
from predict.search.ranking import Exact, Ranker

FAMILIES = 200
"""Families of which the fastest candidate is estimated anew."""
_CLOSE = 12
"""Families of which all candidates are then estimated anew."""
_CHALLENGERS = 3
"""Predictions at most beside those of the rows of the whole search."""


class Followed(NamedTuple):
    """A whole search, and its fastest families.

    Attributes:
        corrections: what that search has learned, and those that follow it.
        rows: candidates that it predicted and that are rows: the fastest of a strategy, or leaner than what is faster.
        fastest: by its estimates, the fastest candidate of each family, the fastest family first.
        every: all candidates of these families that may fit. family: of each, the index in ``fastest``.
    """

    whole: Ranker
    corrections: Corrections
    rows: Ints
    fastest: Ints
    every: Ints
    family: Ints

    @classmethod
    def by(cls, whole: Ranker) -> Followed:
        """What follows a search that is done."""
        possible, seconds, corrections = whole.corrected()
        columns = whole.space.mesh_of[whole.space.strategy], whole.space.micro_batches, whole.space.schedule
        of_family = alike(*(column[possible] for column in columns))[1]
        order = np.argsort(seconds, kind="stable")
        first = np.sort(np.unique(of_family[order], return_index=True)[1])[:FAMILIES]
        place = np.full(int(of_family.max(initial=0)) + 1, -1)
        place[of_family[order[first]]] = np.arange(len(first))
        near = np.flatnonzero(place[of_family] >= 0)
        return cls(whole, corrections, whole.rows(), possible[order[first]], possible[near], place[of_family[near]])

    def rank(
        self, costs: CostModel, predictor: Predictor, rows: int, advance: Callable[[], None] = lambda: None
    ) -> list[Exact]:
        """Predictions of the fastest on other hardware, the fastest first.

        Args:
            costs: by which candidates are estimated there. rows: of the whole search, how many to predict anew.
            advance: called after each prediction.
        """
        return _Following(self, costs, rows).rank(predictor, advance)


class _Following(Ranker):
    """Ranks on other hardware: what is there to choose from, and what of it fits, is as in the whole search."""

    def __init__(self, followed: Followed, costs: CostModel, rows: int) -> None:
        vars(self).update(vars(followed.whole))
        self._costs, self._space, self._known = costs, self._space.counted_anew(), followed.rows[:rows]
        self._corrections, self._done, self._memory = followed.corrections, [], {}
        estimates = Estimates(costs, self._space, bounds_of(costs, self._space).shared)
        seconds = estimates.seconds(self._marked(followed.fastest))
        by_seconds = np.argsort(self._corrections.of(seconds, followed.fastest), kind="stable")
        close = followed.every[np.isin(followed.family, by_seconds[:_CLOSE])]
        self._chosen = np.union1d(close, self._known)
        self._estimates = estimates.seconds(self._marked(self._chosen))
        self._chosen = self._chosen[np.isfinite(self._estimates[self._chosen])]
        self._waiting = self._marked(self._chosen)

    def rank(self, predictor: Predictor, advance: Callable[[], None] = lambda: None) -> list[Exact]:
        for candidate in self._known.tolist():
            self._predict(predictor, candidate)
            advance()
        most = len(self._known) + _CHALLENGERS
        while len(self._done) < most and self._next(predictor, self._may_be_a_row()):
            advance()
        return sorted(self._done, key=lambda exact: exact.timed.iteration_s)

    def _marked(self, chosen: Ints) -> NDArray[np.bool_]:
        marked = np.zeros(len(self._space), bool)
        marked[chosen] = True
        return marked

    def _may_be_a_row(self) -> Ints:
        """Candidates that wait and, by corrected estimates, are faster than the last row so far."""
        waiting = self._chosen[self._waiting[self._chosen]]
        fastest_s: dict[int, float] = {}
        for exact in sorted(self._done, key=lambda exact: -exact.timed.iteration_s):
            fastest_s[int(self._space.strategy[exact.candidate])] = exact.timed.iteration_s
        last_s = sorted([*fastest_s.values(), np.inf])[: len(self._known)][-1]
        return waiting[self._corrections.of(self._estimates, waiting) < last_s]
