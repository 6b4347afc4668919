"""ParaDL's closed forms where ranks share layers (Table 3 of the paper), from the equations.

With b = B / p1 samples a group, p2 ranks in each of p1 groups, and p = p1 p2 (p1 = 1 without data parallelism):

    filter     b (FB_split / p2 + FB_rest) + WU / p2 + sum over l of [AG(p2, b y_l e / p2) + AR(p2, b y_l e)]
    channel    the same, with AR in forward and AG in backward
    spatial    b (FB_split / p2 + FB_rest) + WU + AR(p, W e)
               + 2 sum over l of [2 alpha + b e beta (halo(x_l) + halo(dy_l))]
    data+      filter and channel: AR(p1, W e / p2) as well

The sums run over the layers that are split, but for the network's last: convolutions and fully connected layers for
filter and channel, layers with windows larger than 1 for spatial. FB_split is all of FB, as in the table, unless
``split`` or ``spatial_until`` say which layers are split; with ``spatial_until`` what that layer reads is gathered.

halo(x_l) is C_l floor(K / 2) times the extents of the other dims, for each dim that is cut; halo(dy_l) likewise with
the output's filters and extents. As in the paper two neighbours are counted for every rank, and stride, dilation and
corners are not. Data+spatial exchanges gradients by one all-reduce over all ranks, as the run does. By leaders of nodes
or in segments (sections 4.5.1 and 5.3.1) the steps that a leader takes stand in the place of AR.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from paradl_bench.network.graph import DTYPE_BYTES, Layer, ModelGraph
from paradl_bench.network.kinds.kind import layer_kinds
from paradl_bench.plan.axes.kind import AxisKind, Trait
from paradl_bench.plan.mesh import degree_of, group_axes, zero_stage
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.plan.tasks import Collective, Compute, HaloExchange, WeightUpdate, Work
from paradl_bench.strategies.exchange.node_groups import node_groups
from paradl_bench.strategies.passes.weight_update import weight_update
from paradl_bench.strategies.spatial.axis import SpatialOptions
from paradl_bench.strategies.splitting.channel_shards import splittable
from paradl_bench.strategies.splitting.options import SplitOptions

SHARING = (Trait.SPLITS_OUTPUTS, Trait.SPLITS_INPUTS, Trait.CUTS_POSITIONS)
"""Of axes that share layers, the traits that the paper has a row for."""


class Term(NamedTuple):
    """A work and how often its seconds count; ``symbol``: the term of the equation that it is of."""

    work: Work
    phase: Literal["FW", "BW", "GE", "WU"]
    times: float
    symbol: str


def sharing_axis(strategy: Strategy) -> int | None:
    """Index of the axis that shares layers in a strategy that the paper has a row for; None for other strategies."""
    others = [
        index for index, axis in enumerate(strategy.axes) if axis.degree > 1 and not axis.has(Trait.DIVIDES_BATCH)
    ]
    known = len(others) == 1 and any(map(strategy.axes[others[0]].has, SHARING))
    return others[0] if known and not zero_stage(strategy) else None


def split_layers(network: ModelGraph, kind: AxisKind, settings: PlanSettings) -> list[Layer]:
    """Layers that communicate: those that are split, but for the last one where outputs or inputs are."""
    if kind.has(Trait.CUTS_POSITIONS):
        return _before_end(network, settings)
    candidates = splittable(network)
    chosen = {layer.name for layer in splittable(network, settings.of(SplitOptions).split)}
    return [layer for layer in candidates[:-1] if layer.name in chosen]


def _before_end(network: ModelGraph, settings: PlanSettings) -> list[Layer]:
    names = [layer.name for layer in network.layers]
    until = settings.of(SpatialOptions).spatial_until
    end = names.index(until) if until in names else len(names)
    return list(network.layers[:end])


def terms(network: ModelGraph, strategy: Strategy, settings: PlanSettings, *, dtype: str = "fp32") -> list[Term]:
    """The closed form, where :func:`sharing_axis` finds one, as a sum over works; layers are of a group's samples."""
    axis = sharing_axis(strategy)
    assert axis is not None
    form = _Form(network, strategy, settings, axis, DTYPE_BYTES[dtype])
    communication = form.spatial() if form.cuts_positions else form.channels()
    return [*form.compute(), *communication, *form.exchange()]


class _Form:
    """The parts of one closed form."""

    def __init__(
        self, network: ModelGraph, strategy: Strategy, settings: PlanSettings, axis: int, element_bytes: int
    ) -> None:
        self._network, self._strategy, self._settings = network, strategy, settings
        self._kind = strategy.axes[axis].declared
        self.cuts_positions = self._kind.has(Trait.CUTS_POSITIONS)
        self._element_bytes = element_bytes
        self._groups, self._ranks = degree_of(strategy, Trait.DIVIDES_BATCH), strategy.axes[axis].degree
        self._samples = settings.batch // self._groups
        self._inside, self._between = (axis,), group_axes(strategy, Trait.DIVIDES_BATCH)
        self._extents = strategy.axes[axis].extents

    def compute(self) -> Iterator[Term]:
        """Layers and weight update."""
        chosen = {layer.name for layer in self._shared()}
        for layer in self._network.layers:
            share = 1 / self._ranks if layer.name in chosen else 1.0
            symbol = "b FB_split / p2" if layer.name in chosen else "b FB_rest"
            yield Term(Compute(layer=layer.name, operation=layer.operation, phase="FW"), "FW", share, symbol)
            yield Term(Compute(layer=layer.name, operation=layer.operation, phase="BW"), "BW", share, symbol)
        update: WeightUpdate = weight_update(self._network, self._settings)
        if self.cuts_positions:
            yield Term(update, "WU", 1.0, "WU")
        else:
            yield Term(update, "WU", 1 / self._ranks, "WU / p2")

    def _shared(self) -> Sequence[Layer]:
        """Layers whose time is taken as 1/p: all of them unless told."""
        if self.cuts_positions:
            return _before_end(self._network, self._settings)
        patterns = self._settings.of(SplitOptions).split
        return splittable(self._network, patterns) if patterns else self._network.layers

    def channels(self) -> Iterator[Term]:
        """An all-gather and an all-reduce a layer."""
        gather, reduce = ("FW", "BW") if self._kind.has(Trait.SPLITS_OUTPUTS) else ("BW", "FW")
        for layer in split_layers(self._network, self._kind, self._settings):
            whole = layer.output_elements_of(self._samples) * self._element_bytes
            gathered, reduced = (
                self._collective("all_gather", whole / self._ranks),
                self._collective("all_reduce", whole),
            )
            yield Term(gathered, gather, 1.0, "AG(p2, b y_l e / p2)")  # type: ignore[arg-type]
            yield Term(reduced, reduce, 1.0, "AR(p2, b y_l e)")  # type: ignore[arg-type]

    def _collective(self, operation: str, message_bytes: float) -> Collective:
        return Collective(operation=operation, message_bytes=round(message_bytes), ranks=self._ranks, axes=self._inside)

    def spatial(self) -> Iterator[Term]:
        """Halos of inputs forward and of outputs' gradients backward, and the gather where the region was ended."""
        for layer in split_layers(self._network, self._kind, self._settings):
            for size_x, size_dy in self._halos(layer):
                yield Term(self._halo(size_x), "FW", 1.0, "halo(x_l)")
                yield Term(self._halo(size_dy), "BW", 1.0, "halo(dy_l)")
        last = self._settings.of(SpatialOptions).spatial_until
        until = next((layer for layer in self._network.layers if layer.name == last), None)
        if until is not None:
            whole = until.input_elements_of(self._samples) * self._element_bytes
            yield Term(self._collective("all_gather", whole / self._ranks), "FW", 1.0, "AG(p2, b x e / p2)")

    def _halos(self, layer: Layer) -> Iterator[tuple[int, int]]:
        """Bytes of the halo of a layer's input and of its output's gradient, from one neighbour along each dim cut."""
        kind = layer_kinds().get(layer.kind)
        if kind is None or kind.windows is None:
            return
        windows = kind.windows(layer.attributes)
        for dim, (parts, window) in enumerate(zip(self._extents, windows, strict=False)):
            depth = window.kernel // 2
            if parts > 1 and depth:
                sizes = (self._slab(shape, dim, depth) for shape in (layer.input_shapes[0], layer.output_shape))
                yield next(sizes), next(sizes)

    def _slab(self, shape: tuple[int, ...], dim: int, depth: int) -> int:
        others = 1.0
        for i, extent in enumerate(shape[1:]):
            parts = self._extents[i] if i < len(self._extents) else 1
            others *= 1 if i == dim else extent / parts
        return round(shape[0] * depth * others * self._samples * self._element_bytes)

    def _halo(self, size: int) -> HaloExchange:
        return HaloExchange(sends_bytes=(size, size), receives_bytes=(size, size), axes=self._inside)

    def exchange(self) -> Iterator[Term]:
        """One all-reduce of what ranks hold alike, or the steps that a leader of a node takes in its place."""
        weights = self._network.parameter_bytes
        if self.cuts_positions:
            ranks, size, axes = self._groups * self._ranks, weights, tuple(sorted((*self._between, *self._inside)))
            symbol = "AR(p, W e)"
        else:
            ranks, size, axes = self._groups, math.ceil(weights / self._ranks), self._between
            symbol = "AR(p1, W e / p2)"
        if ranks == 1:
            return
        groups = node_groups(self._strategy, self._settings)
        if groups is None:
            works = [Collective(operation="all_reduce", message_bytes=size, ranks=ranks, axes=axes)]
        else:
            element_bytes = DTYPE_BYTES["fp32"]
            works = groups.collectives_of(-(-size // element_bytes), element_bytes, local=0)
        for work in works:
            yield Term(work, "GE", 1.0, symbol)
