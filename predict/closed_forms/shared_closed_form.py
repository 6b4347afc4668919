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
corners are not. Data+spatial exchanges gradients by one all-reduce over all ranks, as the run does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from paradl_bench.network.graph import DTYPE_BYTES, Layer, ModelGraph
from paradl_bench.network.kinds.kind import layer_kinds
from paradl_bench.plan.compute import weight_update
from paradl_bench.plan.mesh import degree_of, group_axes
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.plan.tasks import Collective, Compute, HaloExchange, WeightUpdate, Work
from paradl_bench.strategies.splitting.channel_shards import splittable

SHARING = ("filter", "channel", "spatial")


class Term(NamedTuple):
    """A work and how often its seconds count; ``symbol``: the term of the equation that it is of."""

    work: Work
    phase: Literal["FW", "BW", "GE", "WU"]
    times: float
    symbol: str


def sharing_kind(strategy: Strategy) -> str | None:
    """The kind of axis that shares layers in a strategy that the paper has a row for; None for other strategies."""
    kinds = [axis.kind for axis in strategy.axes if axis.degree > 1]
    others = [kind for kind in kinds if kind != "data"]
    known = len(others) == 1 and others[0] in SHARING and len(kinds) - len(others) <= 1
    return others[0] if known and not any(axis.zero_stage for axis in strategy.axes) else None


def split_layers(network: ModelGraph, kind: str, settings: PlanSettings) -> list[Layer]:
    """Layers that communicate: those that are split, but for the last one of filter and channel parallelism."""
    if kind == "spatial":
        return _before_end(network, settings)
    candidates = splittable(network)
    chosen = {layer.name for layer in splittable(network, settings.split)}
    return [layer for layer in candidates[:-1] if layer.name in chosen]


def _before_end(network: ModelGraph, settings: PlanSettings) -> list[Layer]:
    names = [layer.name for layer in network.layers]
    end = names.index(settings.spatial_until) if settings.spatial_until in names else len(names)
    return list(network.layers[:end])


def terms(network: ModelGraph, strategy: Strategy, settings: PlanSettings, *, dtype: str = "fp32") -> list[Term]:
    """The closed form as a sum over works; layers' seconds are of a group's samples, whole.

    Args:
        strategy: for which :func:`sharing_kind` is not None.
    """
    kind = sharing_kind(strategy)
    assert kind is not None
    form = _Form(network, strategy, settings, kind, DTYPE_BYTES[dtype])
    communication = form.spatial() if kind == "spatial" else form.channels()
    return [*form.compute(), *communication, *form.exchange()]


class _Form:
    """The parts of one closed form."""

    def __init__(
        self, network: ModelGraph, strategy: Strategy, settings: PlanSettings, kind: str, element_bytes: int
    ) -> None:
        self._network, self._settings, self._kind = network, settings, kind
        self._element_bytes = element_bytes
        self._groups, self._ranks = degree_of(strategy, "data"), degree_of(strategy, kind)  # type: ignore[arg-type]
        self._samples = settings.batch // self._groups
        self._inside, self._between = group_axes(strategy, kind), group_axes(strategy, "data")  # type: ignore[arg-type]
        self._extents = strategy.axes[self._inside[0]].extents

    def compute(self) -> Iterator[Term]:
        """Layers and weight update."""
        chosen = {layer.name for layer in self._shared()}
        for layer in self._network.layers:
            share = 1 / self._ranks if layer.name in chosen else 1.0
            symbol = "b FB_split / p2" if layer.name in chosen else "b FB_rest"
            yield Term(Compute(layer=layer.name, operation=layer.operation, phase="FW"), "FW", share, symbol)
            yield Term(Compute(layer=layer.name, operation=layer.operation, phase="BW"), "BW", share, symbol)
        update: WeightUpdate = weight_update(self._network, self._settings)
        if self._kind == "spatial":
            yield Term(update, "WU", 1.0, "WU")
        else:
            yield Term(update, "WU", 1 / self._ranks, "WU / p2")

    def _shared(self) -> Sequence[Layer]:
        """Layers whose time is taken as 1/p: all of them unless told."""
        if self._kind == "spatial":
            return _before_end(self._network, self._settings)
        return splittable(self._network, self._settings.split) if self._settings.split else self._network.layers

    def channels(self) -> Iterator[Term]:
        """An all-gather and an all-reduce a layer."""
        gather, reduce = ("FW", "BW") if self._kind == "filter" else ("BW", "FW")
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
        until = next((x for x in self._network.layers if x.name == self._settings.spatial_until), None)
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
        """One all-reduce of what ranks hold alike."""
        weights = self._network.parameter_bytes
        if self._kind == "spatial":
            ranks, size, axes = self._groups * self._ranks, weights, tuple(sorted((*self._between, *self._inside)))
            symbol = "AR(p, W e)"
        else:
            ranks, size, axes = self._groups, math.ceil(weights / self._ranks), self._between
            symbol = "AR(p1, W e / p2)"
        if ranks > 1:
            work = Collective(operation="all_reduce", message_bytes=size, ranks=ranks, axes=axes)
            yield Term(work, "GE", 1.0, symbol)
