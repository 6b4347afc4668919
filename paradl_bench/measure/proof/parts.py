"""Which part of the serial model's tensors a rank holds, and over which parts batch norms take their statistics."""

from __future__ import annotations

import itertools
from typing import Any, Literal, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.axis_planner import PartsHeld, ShardingPlanner, axis_planner, steps_of
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.strategies.spatial.region import region_of

Part = tuple[slice | list[int], ...]
AtOnce = Literal["own", "replicas", "all"]
"""What one forward of the serial model reads: a micro-batch of this rank's replica, those of all replicas together, as
norms that replicas synchronise need it, or the global mini-batch."""

NormCuts = tuple[tuple[int, int], ...]
"""Dims of a batch norm's input, and in how many parts each is cut."""


class Place(NamedTuple):
    """Where a rank's samples are in the global mini-batch.

    Attributes:
        steps: micro-batches that each replica computes one after the other.
    """

    replica: int
    replicas: int
    steps: int
    samples: int

    @property
    def own(self) -> slice:
        """This rank's samples."""
        local = self.steps * self.samples
        return slice(self.replica * local, (self.replica + 1) * local)

    def micro_batch(self, replica: int, step: int) -> slice:
        """Samples of one micro-batch of a replica."""
        begin = (replica * self.steps + step) * self.samples
        return slice(begin, begin + self.samples)


def place_of(strategy: Strategy, settings: PlanSettings, rank: int) -> Place:
    """The place of a rank's samples; its mini-batch is the settings'."""
    replicas, replica = 1, 0
    for axis, position in zip(strategy.axes, strategy.coordinates(rank), strict=True):
        if axis.has(Trait.DIVIDES_BATCH):
            replicas, replica = replicas * axis.degree, replica * axis.degree + position
    steps = steps_of(strategy, settings)
    return Place(replica, replicas, steps, settings.batch // (replicas * steps))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that ranks hold rows of, on every rank; a collective where there are such."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_parts(network: ModelGraph, strategy: Strategy, rank: int, settings: PlanSettings) -> PartsHeld:
    """Per parameter that is split, the slices or positions of it that this rank holds."""
    parts: PartsHeld = {}
    for axis, position in zip(strategy.axes, strategy.coordinates(rank), strict=True):
        planner = axis_planner(axis.declared)
        if isinstance(planner, ShardingPlanner):
            of_axis = planner.parts_held(network, axis, position, settings)
            parts |= {name: _of_both(parts.get(name, ()), part) for name, part in of_axis.items()}
    return parts


def _of_both(one: Part, other: Part) -> Part:
    """What two axes leave of a parameter, which cut other dims of it."""
    dims = itertools.zip_longest(one, other, fillvalue=slice(None))
    return tuple(other if own == slice(None) else own for own, other in dims)


def norm_cuts(
    network: ModelGraph, strategy: Strategy, settings: PlanSettings, place: Place, at_once: AtOnce
) -> dict[int, NormCuts]:
    """Per index of a batch norm that takes its statistics of parts of what forward reads, those parts."""
    local = settings.batch_norm == "local"
    counts = {"own": 1, "replicas": place.replicas if local else 1}
    # Micro-batches of one replica are one behind the other.
    count = counts.get(at_once, place.steps * (place.replicas if local else 1))
    of_samples: NormCuts = ((0, count),) if count > 1 else ()
    axes = strategy.axes if local else ()
    spatial = next((axis for axis in axes if axis.has(Trait.CUTS_POSITIONS) and axis.degree > 1), None)
    blocks = set(region_of(network, spatial, settings).layers) if spatial else set()
    of_blocks: NormCuts = tuple((2 + dim, parts) for dim, parts in enumerate(spatial.extents)) if spatial else ()
    cuts = {index: of_samples + (of_blocks if index in blocks else ()) for index in trained_batch_norms(network)}
    return {index: parts for index, parts in cuts.items() if parts}


def trained_batch_norms(network: ModelGraph) -> list[int]:
    """Indices of the batch norms that take statistics."""
    layers = enumerate(network.layers)
    return [index for index, layer in layers if layer.kind == "batch_norm" and layer.attributes["training"]]


def normalise_apart(function: Any, arguments: dict[str, Any], cuts: NormCuts) -> torch.Tensor:
    """Batch norm of each part by that part's own statistics; running statistics are left as they are.

    Args:
        arguments: of ``torch.nn.functional.batch_norm``, by name.
    """
    if not cuts:
        result: torch.Tensor = function(**arguments | {"running_mean": None, "running_var": None})
        return result
    (dim, parts), *rest = cuts
    pieces = arguments["input"].tensor_split(parts, dim)
    done = [normalise_apart(function, arguments | {"input": piece}, tuple(rest)) for piece in pieces]
    return torch.cat(done, dim)
