"""Seconds of whole layers, what computing some of them again adds, and the least that the last of ranks is late."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.compute import backward_layers, layers_with_gradient
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.strategies.passes.recomputation import segments_of
from predict.costs.cost_model import CostModel
from predict.costs.kinds.kind_costs import PricingContext
from predict.costs.sourced import Floats, Ints
from predict.costs.spread.stragglers import RankSpread
from predict.search.candidates.mesh import Mesh, alike


class LayerSeconds(NamedTuple):
    """Seconds of forward and of backward of every layer of a network, and of its weight update."""

    forward: Floats
    backward: Floats
    update: float


def layer_seconds(costs: CostModel, place: PricingContext) -> LayerSeconds:
    """As they are on a rank that runs layers whole; time between operations is shared out evenly over a phase's."""
    sums, layers = costs.sums(place), costs.network.layers
    *_, between_fw, between_bw, update = sums.seconds.tolist()
    of_operations = sums.seconds_of_operations()
    forward = np.array([of_operations[layer.operation, "FW"] for layer in layers]) + between_fw / len(layers)
    backward = np.zeros(len(layers))
    run = list(backward_layers(costs.network, layers_with_gradient(costs.network)))
    backward[run] = [of_operations[layers[i].operation, "BW"] + between_bw / len(run) for i in run]
    return LayerSeconds(forward, backward, update)


class ComputedAgain(NamedTuple):
    """Segments whose forward runs again in backward.

    Attributes:
        first: index of the layer of each that backward comes to first, before which forward runs.
        start, stop: of each segment's range of layers.
    """

    first: Ints
    start: Ints
    stop: Ints

    def added(self, forward: Floats, backward: Floats) -> Floats:
        """Backward with forward of the segments; all of shape (..., layers)."""
        before = np.concatenate([np.zeros((*forward.shape[:-1], 1)), np.cumsum(forward, axis=-1)], axis=-1)
        with_again = backward.copy()
        with_again[..., self.first] += before[..., self.stop] - before[..., self.start]
        return with_again


def computed_again(network: ModelGraph, settings: PlanSettings, bounds: Sequence[int]) -> ComputedAgain:
    """The segments of ``settings.recompute`` that backward reaches, where stages part them at ``bounds``.

    Args:
        bounds: index of each stage's first layer, and of the end.
    """
    order = backward_layers(network, layers_with_gradient(network))
    turn = {layer: at for at, layer in enumerate(order)}
    pieces = []
    for segment in segments_of(network, settings):
        layers = segment.layers
        inside = bounds[bisect.bisect_right(bounds, layers.start) : bisect.bisect_left(bounds, layers.stop)]
        for start, stop in itertools.pairwise((layers.start, *inside, layers.stop)):
            reached = [layer for layer in range(start, stop) if layer in turn]
            if reached:
                pieces.append((min(reached, key=turn.__getitem__), start, stop))
    return ComputedAgain(*np.array(pieces, np.int64).reshape(-1, 3).T)


def least_of(one: LayerSeconds, other: LayerSeconds) -> LayerSeconds:
    """Whichever of each is less."""
    forward, backward = np.minimum(one.forward, other.forward), np.minimum(one.backward, other.backward)
    return LayerSeconds(forward, backward, min(one.update, other.update))


class WholeLayers:
    """Layers that a rank runs whole, of every number of samples that candidates have; all of so many ranks."""

    def __init__(self, costs: CostModel, ranks: int) -> None:
        self._costs, self._ranks = costs, ranks
        self._on_host = min(ranks, costs.communication.cluster.ranks_per_node)
        self._rows: dict[PricingContext, LayerSeconds] = {}

    def learn(self, samples: Sequence[int], *, alone: bool) -> None:
        """Look up as many samples; ``alone``: also as a stage runs them, while the other ranks of its host may wait."""
        for number in samples:
            for place in (self._place(number), *((PricingContext(number, 1),) if alone else ())):
                if place not in self._rows:
                    find = partial(layer_seconds, self._costs, place)
                    self._rows[place] = self._costs.device.alone.once(("whole layers", place), find)

    def seconds(self, samples: Ints, layers: Ints, *, alone: bool) -> tuple[Floats, Floats, Floats]:
        """Forward and backward of some layers, (numbers of samples, layers), and update.

        Args:
            alone: whether as a host's only rank where that takes less.
        """
        distinct, place = np.unique(samples, return_inverse=True)
        rows = [self._rows[self._place(number)] for number in distinct.tolist()]
        if alone:
            rows = [
                least_of(row, self._rows[PricingContext(number, 1)])
                for row, number in zip(rows, distinct.tolist(), strict=True)
            ]
        forward, backward = np.array([(row.forward[layers], row.backward[layers]) for row in rows]).swapaxes(0, 1)
        return forward[place], backward[place], np.array([row.update for row in rows])[place]

    def stragglers(self, meshes: Sequence[Mesh], mesh: Ints, samples: Ints) -> Floats:
        """:func:`least_lag` of ranks of the meshes with those indices."""
        first, kind = alike(mesh, samples)
        spreads = [self._costs.rank_spread(self._place(number)) for number in samples[first].tolist()]
        row_meshes = (meshes[index] for index in mesh[first].tolist())
        lags = [least_lag(spread, self._ranks, row_mesh) for spread, row_mesh in zip(spreads, row_meshes, strict=True)]
        return np.array(lags)[kind]

    def _place(self, samples: int) -> PricingContext:
        return PricingContext(samples, self._on_host)


def least_lag(spread: RankSpread, ranks: int, mesh: Mesh) -> float:
    """How much longer the last of the ranks computes at least, however often they meet: by what is tied alone.

    Of a pipeline's stages, each of the last of the ranks that share its layers, the slowest of all replicas is late in
    the measure of how far replicas come apart: least where every stage has an equal part in that (as in
    :mod:`predict.simulation.pipelines.pipeline_straggler`, whose draws may fall below it).
    """
    tied = math.sqrt(spread.common_variance)
    if mesh.stages == 1:
        return 1.0 + tied * spread.wait(ranks)
    return 1.0 + tied * (spread.wait(mesh.sharers) + spread.wait(mesh.replicas) / math.sqrt(mesh.stages))
