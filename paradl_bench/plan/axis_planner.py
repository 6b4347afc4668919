"""What one axis of a strategy does to the layers of a network: the torch-free half of each strategy folder."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import msgspec

from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import DTYPE_BYTES, Layer, ModelGraph
from paradl_bench.plan.axes.kind import AxisKind, Trait
from paradl_bench.plan.axes.registry import option_types
from paradl_bench.plan.compute import LayerShard
from paradl_bench.plan.mesh import degree_of
from paradl_bench.plan.settings import Limit, PlanSettings
from paradl_bench.plan.strategy import Axis, Strategy
from paradl_bench.plan.tasks import Before, Collective, Communication, Plan, RoleBuilder

T = TypeVar("T")


class ShardedLayers(NamedTuple):
    """The layers of a network as the ranks of one axis shard them, seen from one of them.

    Attributes:
        shards: by index of the layer; layers that are missing run whole on every rank.
        network: with the shapes that its parameters have on this rank.
        notes: what a report has to say, as which layers could not be split.
        gathers: by name of a layer whose output each rank holds a part of and others read whole, what gathers it. It
            stands in ``shards`` where the output is first read so; a stage of a pipeline that receives it gathers anew.
        apart: parameters that ranks along the axis hold parts of, where they hold all others alike and exchange their
            gradients.
        together: spans of layers that no cut into stages may part: between them a rank has as many rows as come to it.
    """

    shards: dict[int, LayerShard]
    network: ModelGraph
    notes: tuple[str, ...] = ()
    gathers: Mapping[str, Communication] = {}
    apart: frozenset[str] = frozenset()
    together: tuple[range, ...] = ()


class ReplicaShards(NamedTuple):
    """What the ranks of a replica run.

    Attributes:
        distinct: what some ranks run, each once.
        positions: per position along the axes other than data, the index of what stands there. Along a pipeline all
            run alike: each takes its stages of it.
    """

    distinct: tuple[ShardedLayers, ...]
    positions: tuple[int, ...]


def sharded_layers(shards: ReplicaShards) -> tuple[tuple[Layer, int], ...]:
    """Layers with the shapes of their shards, each operation once, and bytes of what a rank holds of parameters."""
    layer_by_operation: dict[str, tuple[Layer, int]] = {}
    seen: set[tuple[int, int]] = set()
    for sharded in shards.distinct:
        size = {parameter.name: parameter.bytes for parameter in sharded.network.parameters}
        for layer in (shard.layer for shard in sharded.shards.values() if shard.shard):
            # Ranks often run the same shard: to spell its key takes longer than all else here.
            if (id(layer), id(sharded.network)) in seen:
                continue
            seen.add((id(layer), id(sharded.network)))
            layer_by_operation[layer.operation] = (layer, sum(size.get(name, 0) for name in layer.parameters))
    return tuple(layer_by_operation.values())


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


class AxisPlace(NamedTuple):
    """A rank's place along one axis of a strategy.

    Attributes:
        axis_index: of the axis in the strategy.
        position: of the rank along the axis.
        local_batch: samples that it computes at a time.
        element_bytes: of the layer that communicates.
    """

    axis: Axis
    axis_index: int
    position: int
    local_batch: int
    element_bytes: int = DTYPE_BYTES["fp32"]

    def collective(
        self, operation: str, elements: int, *, batchless: bool, element_bytes: int | None = None
    ) -> Collective:
        """One along the axis, of so many elements a sample, or in all of a tensor that holds no batch."""
        size = elements * (1 if batchless else self.local_batch) * (element_bytes or self.element_bytes)
        return Collective(operation=operation, message_bytes=size, ranks=self.axis.degree, axes=(self.axis_index,))


def part_of_layer(layer: Layer, part: float, whole: int = 1, **changes: Any) -> Layer:
    """The layer with ``part`` of ``whole`` of its FLOPs, and other values of some fields."""
    return msgspec.structs.replace(
        layer,
        fw_flops=round(layer.fw_flops * part / whole),
        bw_input_flops=round(layer.bw_input_flops * part / whole),
        bw_weight_flops=round(layer.bw_weight_flops * part / whole),
        **changes,
    )


PartsHeld = dict[str, tuple[slice | list[int], ...]]
"""Per parameter that is not whole on a rank, what the rank holds of it along its first dims."""


@runtime_checkable
class DimsPlanner(AxisPlanner, Protocol):
    """An axis that may cut several dims."""

    def most_parts(self, network: ModelGraph, settings: PlanSettings) -> tuple[tuple[int, ...], str] | None:
        """The most parts along each dim, and the layer that sets them; None where nothing can be cut."""


@runtime_checkable
class ShardingPlanner(AxisPlanner, Protocol):
    """An axis whose ranks shard layers."""

    def shard(self, network: ModelGraph, place: AxisPlace, settings: PlanSettings) -> ShardedLayers:
        """What the rank at a place along the axis runs of each layer."""

    def parts_held(self, network: ModelGraph, axis: Axis, position: int, settings: PlanSettings) -> PartsHeld:
        """What the rank at ``position`` along the axis holds of parameters that are not whole on it."""


@runtime_checkable
class FurtherPlanner(ShardingPlanner, Protocol):
    """An axis whose ranks shard what those of another axis run of the same layers."""

    def shard_further(
        self, sharded: ShardedLayers, network: ModelGraph, place: AxisPlace, settings: PlanSettings
    ) -> ShardedLayers:
        """What the rank at a place along the axis runs of each layer, where another axis leaves it ``sharded``.

        Raises:
            UserError: what is left of a layer does not part over the ranks; the message names it.
        """


def shard_label(axis: Axis, settings: PlanSettings) -> str:
    """What a rank runs of a model, as measurements and plans call it: ``f2``, ``f2[split=fc1,fc2]``."""
    shards = (settings.of(kind) for kind in axis.declared.options if kind.of_shards)
    options = [f"{name}={text}" for given in shards for name, text in given.words.items()]
    return f"{axis}[{' '.join(options)}]" if options else str(axis)


def refuse_unused(settings: PlanSettings, strategies: Sequence[Strategy], *given: str) -> None:
    """Refuse an option of axes that none of the strategies has.

    Args:
        given: settings that were given as what they are by default.

    Raises:
        UserError: names the option, and the kinds of axes that it is for.
    """
    present = {axis.kind for strategy in strategies for axis in strategy.axes}
    for options, kinds in option_types().items():
        of_kinds = [kind.name for kind in kinds]
        words = settings.of(options).words
        used = [shown for shown in options.shown if shown.name in words or shown.name in given]
        if used and not present.intersection(of_kinds):
            strategy_names = ",".join(map(str, strategies)) or "no strategy"
            raise UserError(f"{used[0].flag} is for {', '.join(of_kinds)} parallelism, not for {strategy_names}")


@runtime_checkable
class StagingPlanner(AxisPlanner, Protocol):
    """An axis that parts layers into stages."""

    def micro_batches(self, settings: PlanSettings, ranks: int) -> int:
        """Into how many micro-batches the samples of a rank are split, of so many along the axis."""

    def plan_stages(
        self, network: ModelGraph, strategy: Strategy, settings: PlanSettings, shards: ReplicaShards
    ) -> Plan:
        """The tasks of one iteration on every rank; ``shards`` are those of a micro-batch."""


@runtime_checkable
class UpdatingPlanner(AxisPlanner, Protocol):
    """An axis that may have ranks hold or update parts of what replicas else hold alike."""

    def add_role(
        self,
        builder: RoleBuilder,
        sharded: ShardedLayers,
        strategy: Strategy,
        settings: PlanSettings,
        operations: dict[int, str],
    ) -> Before | None:
        """Add all that a rank does, where the axis has it gather what it computes with; else None.

        Args:
            sharded: what the rank runs of the layers.
            operations: as of :class:`~paradl_bench.plan.compute.NetworkCompute`.
        """

    def add_update(
        self,
        builder: RoleBuilder,
        network: ModelGraph,
        strategy: Strategy,
        settings: PlanSettings,
        done: tuple[int, ...],
        apart: frozenset[str],
    ) -> Before | None:
        """Add the weight update behind the tasks ``done``, where it is not all of it on each rank; else None.

        Args:
            network: with the parameters that the rank holds. apart: as of :class:`ShardedLayers`.
        """

    def stage_parts(
        self, network: ModelGraph, strategy: Strategy, settings: PlanSettings, apart: frozenset[str]
    ) -> StageParts | None:
        """How replicas of stages hold parts of what these compute with; None where each holds all of it.

        Args:
            network: the stages of a rank, one behind the other, with the parameters that it holds.
            apart: as of :class:`ShardedLayers`.
        """


def updating_planners(strategy: Strategy) -> tuple[UpdatingPlanner, ...]:
    """Those of a strategy's axes that may have ranks hold or update parts of what replicas else hold alike."""
    planners = (axis_planner(axis.declared) for axis in strategy.axes)
    return tuple(planner for planner in planners if isinstance(planner, UpdatingPlanner))


class StageParts(Protocol):
    """Parts that replicas of a rank's stages hold, gathered once in an iteration and kept through its micro-batches."""

    def led(self, layers: Sequence[Layer], shards: Mapping[int, LayerShard]) -> dict[int, LayerShard]:
        """Shards of a stage's layers, by index, with what each communicates of tensors that several layers read."""

    def gathering(self, builder: RoleBuilder, after: tuple[int, ...]) -> Gathering:
        """What the first forward has to gather, behind the tasks ``after``."""

    def add_update(self, builder: RoleBuilder) -> Before:
        """Reduce the gradients of all micro-batches, limit them and update the parts; returns what that issues before
        the steady state."""


class Gathering(Protocol):
    """Gathers of one forward."""

    def before_forward(self, layer: int) -> tuple[int, ...]:
        """Gather what a layer reads and is not there; returns what the layer waits for."""

    def gather_rest(self) -> None:
        """Gather what no layer has asked for: forward of a stage passes through the others of its rank."""


def staging_axis(strategy: Strategy) -> int | None:
    """Index of the axis that parts layers into stages, if it has several."""
    return next((i for i, axis in enumerate(strategy.axes) if axis.has(Trait.STAGES) and axis.degree > 1), None)


def staging_planner(kind: AxisKind) -> StagingPlanner:
    """The planner of a kind of axis that parts layers into stages."""
    planner = axis_planner(kind)
    assert isinstance(planner, StagingPlanner)
    return planner


def steps_of(strategy: Strategy, settings: PlanSettings) -> int:
    """Micro-batches that a replica computes one after the other."""
    index = staging_axis(strategy)
    if index is None:
        return settings.accumulate
    axis = strategy.axes[index]
    return staging_planner(axis.declared).micro_batches(settings, axis.degree)


def samples_at_once(strategy: Strategy, settings: PlanSettings) -> int:
    """Samples that a rank computes at a time: its part of the mini-batch, or a micro-batch of that."""
    return settings.batch // degree_of(strategy, Trait.DIVIDES_BATCH) // steps_of(strategy, settings)


def axis_planner(kind: AxisKind) -> AxisPlanner:
    """The planner of a kind of axis: ``PLANNER`` of the ``plan.py`` in its folder.

    Raises:
        TypeError: there is none, or it lacks what the kind's traits ask for.
    """
    wanted = ShardingPlanner if kind.has(Trait.SHARDS_LAYERS) else AxisPlanner
    planner = kind.beside("plan", "PLANNER", wanted)  # type: ignore[type-abstract]
    if planner is None:
        raise TypeError(f"{kind.package}.plan declares no PLANNER")
    return planner


def shard_in_turn(
    network: ModelGraph,
    places: Sequence[AxisPlace],
    settings: PlanSettings,
    known: dict[AxisPlace, ShardedLayers] | None = None,
) -> ShardedLayers:
    """What a rank runs of each layer, where each axis shards what comes of the one before.

    Args:
        places: of the rank along each axis, in the order of :func:`~paradl_bench.plan.mesh.axes_that_shard`.
        known: what ranks run that stand at a place along the first axis, where others shard that further.

    Raises:
        UserError: what one axis leaves of a layer does not part over the ranks of the next.
    """
    sharded = ShardedLayers({}, network)
    for place in places:
        if sharded.shards:
            sharded = _further_planner(place.axis).shard_further(sharded, network, place, settings)
            continue
        first = known.get(place) if known else None
        sharded = _sharding_planner(place.axis).shard(network, place, settings) if first is None else first
        if known is not None and len(places) > 1:
            known.setdefault(place, sharded)
    return sharded


# Every position along an axis asks, and to look at a planner takes longer than to find what it has found.
@functools.lru_cache(maxsize=256)
def _sharding_planner(axis: Axis) -> ShardingPlanner:
    planner = axis_planner(axis.declared)
    assert isinstance(planner, ShardingPlanner)
    return planner


@functools.lru_cache(maxsize=256)
def _further_planner(axis: Axis) -> FurtherPlanner:
    planner = axis_planner(axis.declared)
    assert isinstance(planner, FurtherPlanner)
    return planner


_MOST_ANSWERS = 8


@dataclass(slots=True)
class Latest(Generic[T]):
    """Keeps the last few answers about networks: positions along an axis ask for the same ones, and so do strategies of
    a search.
    """

    _known: list[tuple[ModelGraph | ShardedLayers, object, T]] = field(default_factory=list)

    def get(self, network: ModelGraph | ShardedLayers, key: object, find: Callable[[], T]) -> T:
        """The answer, found anew where the network, or what is left of one, is another object or the key unequal."""
        for of, known, answer in self._known:
            if of is network and known == key:
                return answer
        new_answer = find()
        self._known = [(network, key, new_answer), *self._known[: _MOST_ANSWERS - 1]]
        return new_answer
