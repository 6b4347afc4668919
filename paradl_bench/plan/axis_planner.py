"""What one axis of a strategy does to the layers of a network: the torch-free half of each strategy folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import Layer, ModelGraph
from paradl_bench.plan.compute import LayerShard
from paradl_bench.plan.mesh import REPLICATING
from paradl_bench.plan.settings import Limit, PlanSettings
from paradl_bench.plan.strategy import Axis, AxisKind, Strategy
from paradl_bench.plan.tasks import Communication

T = TypeVar("T")


class ShardedLayers(NamedTuple):
    """The layers of a network as the ranks of one axis share them, seen from one of them.

    Attributes:
        shards: by index of the layer; layers that are missing run whole on every rank.
        network: with the shapes that its parameters have on this rank.
        notes: what a report has to say, as which layers could not be split.
        gathers: by name of a layer whose output each rank holds a part of and others read whole, what gathers it. It
            stands in ``shards`` where the output is first read so; a stage of a pipeline that receives it gathers anew.
    """

    shards: dict[int, LayerShard]
    network: ModelGraph
    notes: tuple[str, ...] = ()
    gathers: Mapping[str, Communication] = {}


class Shares(NamedTuple):
    """What the ranks of a replica run.

    Attributes:
        distinct: what some ranks run, each once.
        positions: per position along the axes other than data, the index of what stands there. Along a pipeline all
            share alike: each takes its stages of it.
    """

    distinct: tuple[ShardedLayers, ...]
    positions: tuple[int, ...]


def sharded_layers(shares: Shares) -> tuple[tuple[Layer, int], ...]:
    """Layers with the shapes of their shards, each operation once, and bytes of what a rank holds of parameters."""
    found: dict[str, tuple[Layer, int]] = {}
    seen: set[tuple[int, int]] = set()
    for shared in shares.distinct:
        size = {parameter.name: parameter.bytes for parameter in shared.network.parameters}
        for layer in (shard.layer for shard in shared.shards.values() if shard.shard):
            # Ranks often share a layer, and what they hold of it: to spell its key takes longer than all else here.
            if (id(layer), id(shared.network)) in seen:
                continue
            seen.add((id(layer), id(shared.network)))
            found[layer.operation] = (layer, sum(size.get(name, 0) for name in layer.parameters))
    return tuple(found.values())


@runtime_checkable
class AxisPlanner(Protocol):
    """What the ``plan.py`` of each strategy folder declares as ``PLANNER``."""

    @property
    def name(self) -> str:
        """The kind of axis."""

    def check(self, network: ModelGraph, strategy: Strategy, axis: int, settings: PlanSettings) -> None:
        """Refuse what cannot run.

        Args:
            network: may be empty: what no network could make right is refused nevertheless.
            axis: index of the axis in the strategy.

        Raises:
            UserError: a limit is exceeded; the message names the layer that sets it, and what would be right.
        """

    def limit(self, network: ModelGraph, settings: PlanSettings) -> Limit:
        """The largest degree of the axis on this network, and what sets it."""


@runtime_checkable
class SharingPlanner(AxisPlanner, Protocol):
    """An axis whose ranks share layers."""

    def share(
        self,
        network: ModelGraph,
        strategy: Strategy,
        axis: int,
        position: int,
        local_batch: int,
        settings: PlanSettings,
    ) -> ShardedLayers:
        """What the rank at ``position`` along the axis runs of each layer on ``local_batch`` samples."""


SHARD_OPTIONS: dict[AxisKind, tuple[str, ...]] = {
    "filter": ("split", "filter_backward"),
    "channel": ("split",),
    "tensor": ("split",),
    "spatial": ("spatial_until",),
}
"""Settings that decide what the ranks of an axis run of shared layers, by its kind."""


PIPELINE_OPTIONS = ("micro_batches", "schedule")
"""Settings that decide the order of a pipeline's actions."""


def shard_label(axis: Axis, settings: PlanSettings) -> str:
    """What a rank runs of a model, as measurements and plans call it: ``f2``, ``f2[split=fc1,fc2]``."""
    options = [f"{name}={text}" for name, text in settings.options.items() if name in SHARD_OPTIONS.get(axis.kind, ())]
    return f"{axis}[{' '.join(options)}]" if options else str(axis)


def refuse_unused(settings: PlanSettings, strategies: Sequence[Strategy], *given: str) -> None:
    """Refuse an option of axes that none of the strategies has.

    Args:
        given: settings that were given as what they are by default.

    Raises:
        UserError: names the option, and the kinds of axes that it is for.
    """
    present = {axis.kind for strategy in strategies for axis in strategy.axes}
    for name in dict.fromkeys((*settings.options, *given)):
        kinds = [kind for kind, names in SHARD_OPTIONS.items() if name in names]
        kinds += REPLICATING if name == "exchange" else ()
        kinds += ("pipeline",) if name in PIPELINE_OPTIONS else ()
        if kinds and not present.intersection(kinds):
            found = ",".join(map(str, strategies)) or "no strategy"
            raise UserError(f"--{name.replace('_', '-')} is for {', '.join(kinds)} parallelism, not for {found}")


@dataclass(slots=True)
class Latest(Generic[T]):
    """Keeps the last answer about a network: every position along an axis asks for the same one."""

    _known: tuple[ModelGraph, object, T] | None = None

    def get(self, network: ModelGraph, key: object, find: Callable[[], T]) -> T:
        """The answer, found anew where the network is another object or the key unequal."""
        if self._known is None or self._known[0] is not network or self._known[1] != key:
            self._known = network, key, find()
        return self._known[2]
