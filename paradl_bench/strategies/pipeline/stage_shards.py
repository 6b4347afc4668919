"""What one rank runs of a stage where an axis inside of the pipeline shards layers. Torch-free.

The axis shards the layers of the whole network, as it does without a pipeline, and a stage is a range of what comes of
that. A cut is crossed by what each position holds: whole activations under filter and channel parallelism, blocks
inside a spatial region, each from a rank to the one at its own position in the next stage. What a stage receives as a
block and reads whole it gathers once, whether an earlier stage has gathered it or not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from paradl_bench.core.cache_keys import Same
from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import DTYPE_BYTES, NEXT_FORWARD, Layer, ModelGraph, Value
from paradl_bench.network.kinds.autocast import Width, dtype_made, widths_of
from paradl_bench.plan.axis_planner import ShardedLayers, StageParts, updating_planners
from paradl_bench.plan.compute import INPUT, LayerShard, held_layer, operations_of_forward
from paradl_bench.plan.mesh import zero_stage
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.plan.tasks import BucketCopy, Communication, Phase, RoleBuilder, Stream, Transfer
from paradl_bench.strategies.frameworks.presets import framework_of
from paradl_bench.strategies.passes.recomputation import parts_within
from paradl_bench.strategies.pipeline.crossings import Crossing, data_flow
from paradl_bench.strategies.pipeline.stages import Stage, reads_of_received

_DIRECTIONS: tuple[Literal["send"], Literal["receive"]] = ("send", "receive")
_VOTE_BYTES = 4
_NOBODYS = frozenset({"", INPUT, NEXT_FORWARD})
"""What stands in the place of names of layers."""


class CrossingShape(NamedTuple):
    """A tensor that crosses.

    Attributes:
        held, whole: its shape per sample, as a rank holds it and whole. batchless: whether it holds no batch.
        dtype: that it was computed in.
    """

    held: tuple[int, ...]
    whole: tuple[int, ...]
    batchless: bool
    dtype: str = "fp32"

    @property
    def is_whole(self) -> bool:
        """Whether each rank holds all of it."""
        return self.held == self.whole


CrossingShapes = Mapping[Crossing, CrossingShape]


class StageShard(NamedTuple):
    """A stage as one rank runs it.

    Attributes:
        network: the stage's, with the shapes that its parameters have on this rank.
        shards: by index in the stage's network, as their leaders; layers that are missing run whole.
        widths: per layer, how wide the elements are that it works on.
        receives, sends: per tensor that crosses each cut, what it is on this rank.
        recomputed: ranges of its layers, by index in the stage's network, that run forward again in backward.
        reads: by such an index, the tensors that a layer reads where some are received: those have one name, and are
            told apart by their place among ``receives``.
    """

    stage: Stage
    network: ModelGraph
    shards: dict[int, LayerShard]
    widths: tuple[Width, ...]
    receives: CrossingShapes
    sends: CrossingShapes
    recomputed: tuple[range, ...] = ()
    reads: Mapping[int, tuple[Value, ...]] = {}


def message_bytes(crossing: CrossingShapes, micro_batch: int) -> tuple[int, ...]:
    """Bytes of each tensor that crosses a cut, for one micro-batch; its gradient has as many."""
    return tuple(
        math.prod(shape.held) * (1 if shape.batchless else micro_batch) * DTYPE_BYTES[shape.dtype]
        for shape in crossing.values()
    )


def shard_stage(network: ModelGraph, stage: Stage, sharded: ShardedLayers, settings: PlanSettings) -> StageShard:
    """The part of a stage that a rank runs.

    Raises:
        UserError: the stage begins where a rank has as many rows as come to it, and no stage can know how many.
    """
    return _shard_stage(Same(network), Same(stage), Same(sharded), settings)


# A plan and its memory ask for the same.
@functools.lru_cache(maxsize=64)
def _shard_stage(
    of: Same[ModelGraph], one: Same[Stage], ranks_part: Same[ShardedLayers], settings: PlanSettings
) -> StageShard:
    network, stage, sharded = of.thing, one.thing, ranks_part.thing
    parted = next((span for span in sharded.together if stage.layers.start in span[1:]), None)
    if parted is not None:
        raise UserError(
            f"{network.name} cannot be cut at {network.layers[stage.layers.start].name}: between"
            f" {network.layers[parted.start].name} and {network.layers[parted.stop - 1].name} a rank has as many rows"
            " as come to it, which the next stage can't know; give other --stages"
        )
    start, flow = stage.layers.start, data_flow(network)
    widths = widths_of(network, settings.dtype, settings.device)

    def dtype_of(value: Crossing) -> str:
        return dtype_made(network.layers[value.layer], widths[value.layer], settings.dtype)

    shards = {index - start: shard for index, shard in _led_inside(stage, sharded).items()}
    end = operations_of_forward(network)
    if end - start in shards:
        shards[end - start] = _for_loss_alone(network, end, sharded)
    for index, gathers in _gathered_again(network, stage, sharded).items():
        shard = shards.get(index - start) or LayerShard(network.layers[index])
        shards[index - start] = shard._replace(before_fw=(*gathers, *shard.before_fw))
    receives, sends = (
        {
            value: _shape(network, value, flow.made_by(value, cut), sharded)._replace(dtype=dtype_of(value))
            for value in values
        }
        for values, cut in ((stage.receives, start), (stage.sends, stage.layers.stop))
    )
    again = tuple(
        range(part.start - start, part.stop - start) for part in parts_within(network, settings, stage.layers)
    )
    held = hold_parameters(stage.network, (stage,), sharded)
    fused = framework_of(settings).fuses
    inside = widths_of(network, settings.dtype, settings.device, fused) if fused else widths
    inside_widths, reads = widths_inside(network, stage, inside), reads_of_received(network, stage)
    return StageShard(stage, held, shards, inside_widths, receives, sends, again, reads)


def widths_inside(network: ModelGraph, stage: Stage, widths: Sequence[Width]) -> tuple[Width, ...]:
    """Those of a stage's layers, which read all that the stage receives under one name."""
    inside = {network.layers[index].name for index in stage.layers}

    def of(index: int) -> Width:
        inputs, reads = network.layers[index].inputs, dict[str, int]()
        if inside.issuperset(inputs) and len(set(inputs)) == len(inputs):
            return widths[index]
        for name, width in zip(inputs, widths[index].reads, strict=True):
            reads.setdefault(name if name in inside else INPUT, width)
        return widths[index]._replace(reads=tuple(reads.values()))

    return tuple(map(of, stage.layers))


def _shape(network: ModelGraph, value: Crossing, made_by: int, sharded: ShardedLayers) -> CrossingShape:
    layer = network.layers[value.layer]
    changed_as = sharded.shards.get(made_by)
    if made_by != value.layer and not (changed_as and changed_as.shard):
        # Who changes a part of it that no block is has gathered it, and changed that.
        shape = layer.output_shapes[value.output]
        return CrossingShape(shape, shape, layer.batchless)
    held, whole = held_layer(layer, sharded.shards.get(value.layer)).output_shape, layer.output_shape
    shape = layer.output_shapes[value.output]
    if value.output == 0:
        return CrossingShape(held, whole, layer.batchless)
    if len(shape) != len(whole):
        return CrossingShape(shape, shape, layer.batchless)
    # All tensors that a layer returns are cut alike.
    cut = tuple(extent * part // full for extent, part, full in zip(shape, held, whole, strict=True))
    return CrossingShape(cut, shape, layer.batchless)


def _for_loss_alone(network: ModelGraph, end: int, sharded: ShardedLayers) -> LayerShard:
    """The first layer of the loss, without gathers of outputs that the loss does not read: no stage returns those."""
    read = {name for layer in network.layers[end:] for name in layer.inputs}
    unread = [sharded.gathers[name] for name in network.outputs if name in sharded.gathers and name not in read]
    shard = sharded.shards[end]
    left = tuple(gather for gather in shard.before_fw if not any(gather is other for other in unread))
    return shard._replace(before_fw=left)


def _led_inside(stage: Stage, sharded: ShardedLayers) -> dict[int, LayerShard]:
    """Shards of the stage's layers by index in the network, with leaders by index in the stage.

    A leader may lie in an earlier stage. Then the first of its followers here communicates in its place.
    """
    shards: dict[int, LayerShard] = {}
    leader_here: dict[int, int] = {}
    for index in stage.layers:
        shard = sharded.shards.get(index)
        if shard is None:
            continue
        leader = index if shard.leader is None else shard.leader
        here = leader_here.setdefault(leader, index)
        if here == index and leader != index:
            before, after = sharded.shards[leader].before_fw, sharded.shards[leader].after_bw
            shard = shard._replace(before_fw=before, after_bw=after, leader=None)
        elif leader != index:
            shard = shard._replace(leader=here - stage.layers.start)
        shards[index] = shard
    return shards


def hold_parameters(network: ModelGraph, stages: Sequence[Stage], sharded: ShardedLayers) -> ModelGraph:
    """The network with the parameters that a rank holds of these stages, in its shapes."""
    held = {parameter.name for stage in stages for parameter in stage.network.parameters}
    parameters = tuple(parameter for parameter in sharded.network.parameters if parameter.name in held)
    order = _arriving(stages, [name for name in sharded.network.gradient_order if name in held])
    if (parameters, order) == (network.parameters, network.gradient_order):
        # Making a network checks all of its layers.
        return network
    return msgspec.structs.replace(network, parameters=parameters, gradient_order=order)


def add_sums_of_shared(
    builder: RoleBuilder, held: ModelGraph, partners: Mapping[int, tuple[str, ...]], rank: int, axis: int
) -> tuple[int, ...]:
    """Append the exchange of gradients of parameters that other ranks' stages use too; returns its last task.

    Args:
        held: what the rank holds. partners: as of :func:`~paradl_bench.strategies.pipeline.stages.sent_to_places`.
    """
    sizes = {parameter.name: parameter.bytes for parameter in held.parameters}
    for place, names in partners.items():
        works = {
            direction: Transfer(
                direction=direction,
                phase="BW",
                cut=rank if direction == "send" else place,
                to=place if direction == "send" else rank,
                message_bytes=tuple(sizes[name] for name in names),
                axes=(axis,),
            )
            for direction in _DIRECTIONS
        }
        builder.add(works["send"], Phase.BW, Stream.COMMUNICATION)
        # Nothing else is computed meanwhile.
        builder.add(works["receive"], Phase.BW, Stream.COMPUTE)
    added: tuple[int, ...] = ()
    for names in partners.values():
        work = BucketCopy(direction="add", bytes=sum(sizes[name] for name in names), tensors=len(names))
        added = (builder.add(work, Phase.BW, Stream.COMPUTE, added or tuple(range(builder.tasks))),)
    return added


def handshake(stages: Collection[int], last_stage: int, axis: int) -> tuple[Transfer, ...]:
    """The votes of a rank's stages over every cut of theirs that another rank is behind."""
    cuts = [
        cut
        for stage in stages
        for cut in (stage - 1, stage)
        if 0 <= cut < last_stage and not (cut in stages and cut + 1 in stages)
    ]
    return tuple(
        Transfer(direction=direction, phase="FW", cut=cut, message_bytes=(_VOTE_BYTES,), axes=(axis,))
        for cut in cuts
        for direction in _DIRECTIONS
    )


def network_of_rank(network: ModelGraph, stages: Sequence[Stage], sharded: ShardedLayers) -> ModelGraph:
    """A rank's stages, one behind the other, with the parameters that it holds of them, in its shapes."""
    layers = tuple(layer for stage in stages for layer in stage.network.layers)
    stacked = msgspec.structs.replace(stages[0].network, layers=layers, outputs=(), parameters=(), gradient_order=())
    held = hold_parameters(network, stages, sharded)
    return msgspec.structs.replace(stacked, parameters=held.parameters, gradient_order=held.gradient_order)


def exchanged_by_stages(shards: Iterable[StageShard]) -> dict[int, ModelGraph]:
    """Networks of a rank's stages by number, each with the parameters whose gradients it exchanges with replicas.

    Of stages that use the same one, the first exchanges it: its last backward is behind those of the others.
    """
    networks: dict[int, ModelGraph] = {}
    known: set[str] = set()
    for shard in shards:
        network = shard.network
        own = tuple(parameter for parameter in network.parameters if parameter.name not in known)
        if len(own) < len(network.parameters):
            order = tuple(name for name in network.gradient_order if name not in known)
            network = msgspec.structs.replace(network, parameters=own, gradient_order=order)
        networks[shard.stage.index] = network
        known.update(parameter.name for parameter in own)
    return networks


def parts_of_rank(
    network: ModelGraph, stages: Sequence[Stage], sharded: ShardedLayers, strategy: Strategy, settings: PlanSettings
) -> StageParts | None:
    """How replicas hold parts of a rank's own stages; None where each holds all of them."""
    if zero_stage(strategy) < 2:
        return None
    held = network_of_rank(network, stages, sharded)
    parts = (planner.stage_parts(held, strategy, settings, sharded.apart) for planner in updating_planners(strategy))
    return next((part for part in parts if part is not None), None)


def _arriving(stages: Sequence[Stage], of_network: Sequence[str]) -> tuple[str, ...]:
    """Parameters in the order in which their gradients arrive on a rank; what other stages use too, as in the stage."""
    shared = frozenset(name for stage in stages for name in stage.shared)
    arriving = [name for name in of_network if name not in shared]
    for stage in stages:
        order = stage.network.gradient_order
        for at, name in enumerate(order):
            if name in shared and name not in arriving:
                behind = next((other for other in order[at:] if other not in shared), None)
                arriving.insert(len(arriving) if behind is None else arriving.index(behind), name)
    return tuple(arriving)


def _gathered_again(network: ModelGraph, stage: Stage, sharded: ShardedLayers) -> dict[int, tuple[Communication, ...]]:
    """Per index of a layer of the stage, gathers of what an earlier stage has gathered for itself."""
    if not sharded.gathers:
        return {}

    def reads_whole(index: int) -> list[str]:
        shard = sharded.shards.get(index)
        on_parts = shard is not None and bool(shard.shard)
        return [] if on_parts else [name for name in network.layers[index].inputs if name in sharded.gathers]

    missing = {name for index in range(stage.layers.start) for name in reads_whole(index)}
    gathers: dict[int, tuple[Communication, ...]] = {}
    for index in stage.layers:
        again = missing.intersection(reads_whole(index))
        if again:
            gathers[index] = tuple(sharded.gathers[name] for name in network.layers[index].inputs if name in again)
            missing -= again
    return gathers


def layers_by_name(shard: StageShard, other: StageShard) -> dict[str, str]:
    """Names of the layers of another stage that is alike, by those of the layers in their place."""
    pairs = zip(shard.network.layers, other.network.layers, strict=True)
    run = ((shard.shards[index].layer, other.shards[index].layer) for index in shard.shards)
    return {layer.name: like.name for layer, like in (*pairs, *run)}


_NAME, _HELD_UNTIL, _ALONG, _DTYPE, _INPUTS, _PARAMETERS, _STATE, _READS, _WRITES = map(
    Layer.__struct_fields__.index,
    ("name", "held_until", "along", "other_dtype", "inputs", "parameters", "state", "reads", "writes"),
)


def likeness(shard: StageShard) -> bytes:
    """All of a stage's part but names, which do no more than tell things apart, and are numbered as they come."""
    return _likeness(Same(shard))


# A plan and its memory ask for the same.
@functools.lru_cache(maxsize=64)
def _likeness(same: Same[StageShard]) -> bytes:
    shard, network, stage = same.thing, same.thing.network, same.thing.stage
    numbers: dict[str, int] = {}

    def number(name: str) -> int | str:
        return name if name in _NOBODYS else numbers.setdefault(name, len(numbers))

    def numbered(names: Sequence[str]) -> list[int | str]:
        return list(map(number, names))

    def of_layer(layer: Layer | None) -> list[object] | None:
        if layer is None:
            return None
        told: list[object] = list(msgspec.structs.astuple(layer))
        told[_NAME], told[_HELD_UNTIL], told[_DTYPE] = number(layer.name), number(layer.held_until), layer.dtype
        told[_ALONG] = None if layer.along is msgspec.UNSET else layer.along
        told[_INPUTS], told[_PARAMETERS] = numbered(layer.inputs), numbered(layer.parameters)
        told[_STATE] = numbered(layer.state)
        # Shards have those of the whole network.
        told[_READS] = [(number(name), output) for name, output in layer.reads]
        told[_WRITES] = layer.writes and [(number(name), output) for name, output in layer.writes]
        return told

    def of_shard(layer_shard: LayerShard) -> dict[str, object]:
        return layer_shard._asdict() | {"layer": of_layer(layer_shard.layer), "held": of_layer(layer_shard.held)}

    return msgspec.msgpack.encode(
        (
            [of_layer(layer) for layer in network.layers],
            [(number(tensor.name), tensor.shape, tensor.dtype) for tensor in network.parameters],
            [(number(tensor.name), tensor.shape, tensor.dtype) for tensor in network.buffers],
            [numbered(names) for names in (network.gradient_order, network.outputs, network.registered)],
            (network.input_shape, network.input_dtype, network.frozen, operations_of_forward(network)),
            [(index, of_shard(layer_shard)) for index, layer_shard in sorted(shard.shards.items())],
            [(index, [(number(name), place) for name, place in read]) for index, read in sorted(shard.reads.items())],
            (shard.widths, stage.outputs, bool(stage.receives), bool(stage.sends)),
            [(part.start, part.stop) for part in shard.recomputed],
        )
    )
