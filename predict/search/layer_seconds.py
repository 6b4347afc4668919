"""Seconds of whole layers, what computing some of them again adds, and the least that the last of ranks is late."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from paradl_bench.spec.network import Network
from paradl_bench.spec.plan import PlanSettings
from paradl_bench.strategies.compute import backward_layers, layers_with_gradient
from paradl_bench.strategies.recomputation import segments_of
from predict.cost_model import CostModel, Place
from predict.costs import Floats, Ints
from predict.search.space import Mesh
from predict.stragglers import RankSpread


class LayerSeconds(NamedTuple):
    """Seconds of forward and of backward of every layer of a network, and of its weight update."""

    forward: Floats
    backward: Floats
    update: float


def layer_seconds(model: CostModel, place: Place) -> LayerSeconds:
    """As they are on a rank that runs layers whole; time between operations is shared out evenly over a phase's.

    Raises:
        UserError: the profile has nothing for an operation, or no update by the optimizer.
    """
    of_operations, _ = model.compute_seconds(place)
    *_, between_fw, between_bw, update = model.sums(place).costs.seconds.tolist()
    layers = model.network.layers
    forward = np.array([of_operations[layer.operation, "FW"] for layer in layers]) + between_fw / len(layers)
    backward = np.zeros(len(layers))
    run = list(backward_layers(model.network, layers_with_gradient(model.network)))
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
        found = backward.copy()
        found[..., self.first] += before[..., self.stop] - before[..., self.start]
        return found


def computed_again(network: Network, settings: PlanSettings) -> ComputedAgain:
    """The segments of ``settings.recompute`` that backward reaches.

    Raises:
        UserError: the network has no such segments.
    """
    order = backward_layers(network, layers_with_gradient(network))
    found = []
    for segment in segments_of(network, settings):
        first = next((layer for layer in order if layer in segment.layers), None)
        if first is not None:
            found.append((first, segment.layers.start, segment.layers.stop))
    return ComputedAgain(*np.array(found, np.int64).reshape(-1, 3).T)


def least_of(one: LayerSeconds, other: LayerSeconds) -> LayerSeconds:
    """Whichever of each is less."""
    forward, backward = np.minimum(one.forward, other.forward), np.minimum(one.backward, other.backward)
    return LayerSeconds(forward, backward, min(one.update, other.update))


def least_lag(spread: RankSpread, ranks: int, mesh: Mesh) -> float:
    """How much longer the last of the ranks computes at least, however often they meet: by what is tied alone.

    Of a pipeline's stages, each of the last of the ranks that share its layers, the slowest of all replicas is late in
    the measure of how far replicas come apart: least where every stage has an equal part in that (as in
    :mod:`predict.pipeline_lateness`, whose draws may fall below it).
    """
    tied = math.sqrt(spread.tied_share)
    if mesh.stages == 1:
        return 1.0 + tied * spread.wait(ranks)
    sharing = mesh.shared.degree if mesh.shared else 1
    return 1.0 + tied * (spread.wait(sharing) + spread.wait(mesh.replicas) / math.sqrt(mesh.stages))
