"""What predictions turned out to be over their estimates, for those that are still to be predicted."""

from __future__ import annotations

import copy

import numpy as np
from numpy.typing import NDArray

from paradl_bench.core.cache_keys import numbered
from predict.costs.sourced import Floats, Ints
from predict.search.candidates.space import Space

_ALL = slice(None)


class Corrections:
    """Corrects estimates by predictions of others, so that the next to be predicted is likely the fastest.

    What estimates leave out differs by mesh and, in a pipeline, by schedule. So each schedule of a mesh has a factor
    of its own, the least that was found. One that none was predicted of takes the least that its schedule has on other
    meshes, or, before it was tried on a few, the least of all. Without a pipeline it takes the least of its kind:
    meshes with the same axes, options of these and ZeRO stage, whatever their degrees. One mesh does not speak for its
    kind: before a few were predicted, it takes a factor between that and what kinds with other options have. So do
    these, between theirs and what other ZeRO stages of the axes have, and these between theirs and 1. The search tries
    every kind, but not all stages and options of axes whose estimates are far too low.
    """

    _FEW = 3

    def __init__(self, space: Space) -> None:
        mesh_of = space.mesh_of[space.strategy]
        piped = space.columns.stages[mesh_of] > 1
        # Schedule 0 stands for meshes without a pipeline, whose factor says nothing of other meshes.
        self._schedule = space.found.once("corrected schedules", lambda: np.where(piped, space.schedule + 1, 0))
        self._mesh = mesh_of
        axes = [
            (tuple(axis.kind for axis in mesh.shared), mesh.zero, mesh.copies > 1, mesh.stages > 1)
            for mesh in space.meshes
        ]
        options = [(*of_mesh, mesh.chosen) for of_mesh, mesh in zip(axes, space.meshes, strict=True)]
        # From what many meshes have to what few have.
        of_axes = [of_mesh[0] for of_mesh in axes]
        self._kinds = [np.array(numbered(kinds)[1], np.int64) for kinds in (of_axes, axes, options)]
        self._tries = True
        self._factor = np.full((len(space.meshes), len(space.schedules) + 1), np.inf)

    def learn(self, candidate: int, estimate_s: float, predicted_s: float) -> None:
        """Take in what a candidate was estimated, and predicted, to take."""
        place = int(self._mesh[candidate]), int(self._schedule[candidate])
        self._factor[place] = min(self._factor[place], predicted_s / estimate_s)

    def when_tried(self) -> Corrections:
        """The same, to learn on, where no kind has to be tried any more: of what was not, the median of all holds."""
        other = copy.copy(self)
        other._factor, other._tries = self._factor.copy(), False
        return other

    def of(self, estimates: Floats, chosen: Ints | slice = _ALL) -> Floats:
        """Seconds of the chosen of all candidates, corrected."""
        known = np.isfinite(self._factor)
        usual = (np.min if self._tries else np.median)(self._factor[known]) if known.any() else 1.0
        elsewhere = np.where(known.sum(axis=0) >= self._FEW, self._factor.min(axis=0), usual)
        factor = np.where(known, self._factor, elsewhere)
        alike = np.full(len(factor), 1.0 if self._tries else usual)
        for kind in self._kinds:
            alike = self._of_kinds(kind, known[:, 0], alike)
        factor[:, 0] = np.where(known[:, 0], self._factor[:, 0], alike)
        return np.asarray(estimates[chosen] * factor[self._mesh[chosen], self._schedule[chosen]])

    def _of_kinds(self, kind: Ints, known: NDArray[np.bool_], others: Floats) -> Floats:
        """By mesh, the least factor of its kind; before a few are known, so much nearer to what ``others`` have."""
        least = np.full(int(kind.max()) + 1, np.inf)
        np.minimum.at(least, kind, self._factor[:, 0])
        certain = np.minimum(np.bincount(kind, known) / self._FEW, 1.0)[kind]
        of_kind = np.where(np.isfinite(least[kind]), least[kind], others)
        return np.asarray(others + (of_kind - others) * certain)


def next_to(space: Space, candidate: int) -> Ints:
    """Candidates of the same strategy whose settings are one step from this one's: another schedule, half or twice the
    micro-batches, the next bucket size or torch's default, another choice of what is computed again."""
    same_strategy = space.of_strategy(int(space.strategy[candidate]))
    ratio = space.micro_batches[same_strategy] / space.micro_batches[candidate]
    caps = np.array([-np.inf if cap is None else cap for cap in space.caps_mb]).argsort().argsort()
    # The default comes first in that order, and is next to all.
    step = np.where(caps[space.cap[same_strategy]] == 0, 1, caps[space.cap[same_strategy]] - caps[space.cap[candidate]])
    same_cap = space.cap[same_strategy] == space.cap[candidate]
    steps = (
        (space.schedule[same_strategy] != space.schedule[candidate]).astype(int)
        + (ratio != 1)
        + ~same_cap
        + (space.again[same_strategy] != space.again[candidate])
    )
    return np.asarray(same_strategy[(steps == 1) & (ratio >= 0.5) & (ratio <= 2) & (same_cap | (np.abs(step) == 1))])
