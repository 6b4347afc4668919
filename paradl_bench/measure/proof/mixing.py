"""Models that mix samples: what they give for one depends on the others in the batch.

Ranks and micro-batches that compute parts of a mini-batch train such a model otherwise than one process trains it on
the whole, whatever the strategy; plain data parallelism does so too. It shows in one process, which splits a batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from paradl_bench.measure.proof.comparison import Tolerance, difference, largest
from paradl_bench.measure.proof.copies import tolerance_of
from paradl_bench.measure.proof.parts import trained_batch_norms
from paradl_bench.measure.proof.watching import WatchedForward, tensors_of
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.models.catalog import LoadedModel


class Mixing(NamedTuple):
    """What forward of some samples at once, and of their halves, shows.

    Attributes:
        layer: the first whose result for a sample depends on others; empty for none. Batch norms are known to be such,
            and do not count here.
        varies: whether it draws numbers that are not held still, so that nothing can be said.
    """

    layer: str
    dtypes: set[torch.dtype]
    varies: bool = False


def dtypes_of(model: LoadedModel, inputs: torch.Tensor) -> set[torch.dtype]:
    """Floating dtypes that a copy's layers give."""
    watched = WatchedForward(model.module)
    try:
        _run(model, inputs)
        return watched.dtypes
    finally:
        watched.remove()


def _varies(model: LoadedModel, watched: WatchedForward, inputs: torch.Tensor, tolerance: Tolerance) -> bool:
    watched.forget()
    watched.noting = False
    for seed in (1, 2):
        torch.manual_seed(seed)
        _run(model, inputs)
    pairs = zip(*map(tensors_of, watched.outputs), strict=True)
    return any(difference(one, other, tolerance, largest(other))[0] for one, other in pairs)


def _run(model: LoadedModel, inputs: torch.Tensor) -> None:
    with torch.no_grad():
        # A copy, since the model may change its input in place.
        model.module(inputs.clone())


class _Halves(NamedTuple):
    """What a batch gave, and what its halves did; layer: index of that which gave it."""

    layer: int
    whole: torch.Tensor
    one: torch.Tensor
    other: torch.Tensor


def find_mixing(model: LoadedModel, network: ModelGraph, inputs: torch.Tensor) -> Mixing:
    """The first layer of a model that mixes samples.

    Args:
        model: a copy to be spoilt: its running statistics change.
        inputs: an even number of samples.
    """
    watched = WatchedForward(model.module)
    try:
        outputs = _run_halved(model, network, watched, inputs, note=False)
        tolerance = tolerance_of(watched.dtypes)
        if all(_apart(halves, tolerance) for halves in outputs):
            return Mixing("", watched.dtypes)
        if _varies(model, watched, inputs, tolerance):
            return Mixing("", watched.dtypes, varies=True)
        layers = _run_halved(model, network, watched, inputs, note=True)
        first = next((halves for halves in layers if not _apart(halves, tolerance)), None)
        return Mixing("its output" if first is None else network.layers[first.layer].name, watched.dtypes)
    finally:
        watched.remove()


def _run_halved(
    model: LoadedModel, network: ModelGraph, watched: WatchedForward, inputs: torch.Tensor, *, note: bool
) -> list[_Halves]:
    """What forward gives, or with ``note`` what each of its layers gives: of the batch, and of its halves."""
    norms = trained_batch_norms(network)
    watched.forget()
    watched.noting = note
    for part in (inputs, *inputs.chunk(2)):
        watched.cuts = {index: ((0, 2),) for index in norms} if part is inputs else {}
        _run(model, part)
    if not note:
        return [_Halves(0, *tensors) for tensors in zip(*map(tensors_of, watched.outputs), strict=False)]
    whole, one, other = (passage.outputs for passage in watched.passages)
    return [
        _Halves(key[0], whole[key], one[key], other[key])
        for key in whole
        # Positions of samples are whole numbers, and no sign that anything is mixed.
        if key in one and key in other and key[0] < len(network.layers) and whole[key].is_floating_point()
    ]


def _apart(of: _Halves, tolerance: Tolerance) -> bool:
    """Whether the batch gave what its halves gave, in whatever order."""
    scale = largest(of.whole)

    def same(parallel: torch.Tensor, exact: torch.Tensor) -> bool:
        return not difference(parallel, exact, tolerance, scale)[0]

    if same(of.whole, of.one) and same(of.whole, of.other):
        # It does not depend on samples.
        return True
    halves = torch.cat([of.one.flatten(), of.other.flatten()])
    return same(of.whole.flatten(), halves) or same(of.whole.flatten().sort()[0], halves.sort()[0])
