"""Forward and backward of a whole network on one role: what serial and data parallel iterations share."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from paradl_bench.core.cache_keys import Same
from paradl_bench.network.graph import Layer, ModelGraph
from paradl_bench.plan.tasks import (
    Communication,
    Compute,
    ComputePhase,
    FrameworkOverhead,
    Phase,
    RoleBuilder,
    Stream,
)

INPUT = "input"
"""What a network reads, among the inputs of its layers."""

_BETWEEN_FORWARD, _BETWEEN_BACKWARD = FrameworkOverhead(phase="FW"), FrameworkOverhead(phase="BW")
BeforeLayer = Callable[[int], tuple[int, ...]]
Rounds = tuple[Communication | None, ...]


class LayerShard(NamedTuple):
    """What one rank runs of a layer, and what it communicates for it; all of that is waited for where it stands.

    Attributes:
        layer: with this rank's shapes and FLOPs. shard: which part of the layer it is; empty for all of it.
        before_bw: what backward waits for. sums: of its parameters' gradients, before these are handed on; of what is
            added behind ``after_fw``, and so ahead of ``before_bw``, where there is that.
        held: with the shape of the output that the rank then holds, where ``after_fw`` leaves a part of it.
        rounds_fw, rounds_bw: per time that the layer runs, one after the other, what is under way beside it; the next
            time waits for both.
        leader: index of the layer whose ``before_fw`` and ``after_bw`` do for this one too, where that is another one;
            in the network, or in the stage of a pipeline.
    """

    layer: Layer
    shard: str = ""
    before_fw: tuple[Communication, ...] = ()
    after_fw: tuple[Communication, ...] = ()
    after_bw: tuple[Communication, ...] = ()
    leader: int | None = None
    before_bw: tuple[Communication, ...] = ()
    sums: tuple[Communication, ...] = ()
    held: Layer | None = None
    rounds_fw: Rounds = (None,)
    rounds_bw: Rounds = (None,)


def shard_within(outer: LayerShard, own: LayerShard) -> LayerShard:
    """What a rank runs of a layer of which one axis leaves it ``outer``, and another one ``own`` of that."""
    return own._replace(
        shard=outer.shard + own.shard,
        before_fw=(*outer.before_fw, *own.before_fw),
        after_fw=(*own.after_fw, *outer.after_fw),
        before_bw=(*outer.before_bw, *own.before_bw),
        after_bw=(*own.after_bw, *outer.after_bw),
        # Gradients of parameters, of which every rank along the other axis has all that it has.
        sums=(*own.sums, *outer.sums),
        leader=outer.leader if own.leader is None else own.leader,
        held=outer.held if own.held is None else own.held,
        rounds_fw=own.rounds_fw if len(own.rounds_fw) > 1 else outer.rounds_fw,
        rounds_bw=own.rounds_bw if len(own.rounds_bw) > 1 else outer.rounds_bw,
    )


def held_layer(layer: Layer, shard: LayerShard | None) -> Layer:
    """The layer whose output the rank then holds: the whole one where ranks put that together behind forward."""
    if shard is None or shard.after_fw:
        return layer if shard is None or shard.held is None else shard.held
    return shard.layer


def layers_with_gradient(network: ModelGraph, *, input_has_gradient: bool = False) -> list[bool]:
    """Per layer, whether a gradient of its output is made: it reads a trained parameter, or what such a layer wrote.

    None is made of what was seen to have none, as behind ``detach``, under ``no_grad`` and of indices.

    Args:
        input_has_gradient: whether what the network reads needs a gradient too.
    """
    return list(_with_gradient(Same(network), input_has_gradient))


def names_with_gradient(network: ModelGraph) -> frozenset[str]:
    """Names of the layers of :func:`layers_with_gradient`."""
    return frozenset(layer.name for layer in itertools.compress(network.layers, layers_with_gradient(network)))


# Every plan of a network asks, for every degree of every axis.
@functools.lru_cache(maxsize=64)
def _with_gradient(same: Same[ModelGraph], input_has_gradient: bool) -> tuple[bool, ...]:
    network = same.thing
    trained = {parameter.name for parameter in network.parameters}
    has_gradient: dict[str, bool] = {INPUT: input_has_gradient}
    layers = {layer.name: layer for layer in network.layers}
    for layer in network.layers:
        reads = not trained.isdisjoint(layer.parameters) or _reads_gradient(layer, layers, has_gradient)
        has_gradient[layer.name] = reads and len(layer.without_gradient) < len(layer.output_shapes)
    return tuple(has_gradient[layer.name] for layer in network.layers)


def _reads_gradient(layer: Layer, layers: Mapping[str, Layer], made: Mapping[str, bool]) -> bool:
    """Whether a layer reads a tensor whose gradient is made, given for the layers before it."""
    values = layer.values_read
    for name, output in values:
        if made.get(name, False) and (name not in layers or output not in layers[name].without_gradient):
            return True
    # Operations that changed a part of what is read are among the inputs as well.
    return any(made.get(name, False) for name in {*layer.inputs} - {name for name, _ in values})


def input_needs_gradient(network: ModelGraph) -> list[bool]:
    """Per layer that has a gradient, whether backward makes one of what it reads."""
    return list(_needing_gradient(Same(network)))


@functools.lru_cache(maxsize=64)
def _needing_gradient(same: Same[ModelGraph]) -> tuple[bool, ...]:
    network, made = same.thing, _with_gradient(same, False)
    has_gradient = dict(zip((layer.name for layer in network.layers), made, strict=True))
    layers = {layer.name: layer for layer in network.layers}
    return tuple(
        with_gradient and _reads_gradient(layer, layers, has_gradient)
        for layer, with_gradient in zip(network.layers, made, strict=True)
    )


def operations_of_forward(network: ModelGraph) -> int:
    """How many layers are the model's; the loss follows them."""
    count = len(network.layers)
    while count and network.layers[count - 1].name.startswith("loss."):
        count -= 1
    return count


def backward_layers(
    network: ModelGraph, needs_gradient: Sequence[bool], outputs: Sequence[int] = ()
) -> tuple[int, ...]:
    """Layers that backward runs, in its order: those that a gradient of the outputs reaches.

    Args:
        outputs: indices of the layers whose gradients are given; empty for the last layer, which is the loss.
    """
    index = {layer.name: i for i, layer in enumerate(network.layers)}
    last = (len(network.layers) - 1,) if network.layers else ()
    reached = set(outputs or last)
    order = []
    for i in reversed(range(len(network.layers))):
        if i in reached and needs_gradient[i]:
            order.append(i)
            reached |= {index[name] for name in network.layers[i].inputs if name in index}
    return tuple(order)


def layers_behind_input(network: ModelGraph) -> list[bool]:
    """Per layer, whether it reads what the network reads, or what such a layer wrote: backward of the input runs it."""
    index = {layer.name: i for i, layer in enumerate(network.layers)}
    behind_input: list[bool] = []
    for layer in network.layers:
        behind_input.append(
            "input" in layer.inputs or any(behind_input[index[name]] for name in layer.inputs if name in index)
        )
    return behind_input


class BackwardPart(NamedTuple):
    """What one of backward's two parts runs: indices of layers in its order, and which part of each."""

    layers: tuple[int, ...]
    phases: tuple[ComputePhase, ...]


def parts_of_backward(
    network: ModelGraph, order: Sequence[int], *, input_has_gradient: bool
) -> tuple[BackwardPart, BackwardPart]:
    """Backward parted into that of what the network reads and that of its parameters, as torch's pipelines part it.

    The first runs what lies between the outputs and the input; the second the parameters of those layers, and all of
    the layers that lead to parameters alone. Where what is read has no gradient, the second runs everything.
    """
    trained = {parameter.name for parameter in network.parameters}
    behind = layers_behind_input(network) if input_has_gradient else [False] * len(network.layers)
    splits = [on and not trained.isdisjoint(layer.parameters) for on, layer in zip(behind, network.layers, strict=True)]
    of_input = tuple(i for i in order if behind[i])
    of_weight = tuple(i for i in order if splits[i] or not behind[i])

    def phases(layers: tuple[int, ...], of_split: ComputePhase) -> tuple[ComputePhase, ...]:
        return tuple(of_split if splits[i] else "BW" for i in layers)

    return (
        BackwardPart(of_input, phases(of_input, "BW_input")),
        BackwardPart(of_weight, phases(of_weight, "BW_weight")),
    )


class NetworkCompute:
    """Adds a network's compute tasks to a role: per layer its operation and its share of the time between operations.

    Backward runs the layers in reverse: autograd takes, of the nodes that are ready, the one that forward made last.
    It passes over what no gradient reaches (operations on the input alone, heads that the loss does not read).

    Args:
        shards: what the rank runs of layers, by index, and communicates for them; layers that are missing run whole.
        outputs: indices of the layers whose gradients are given; empty for the last layer, which is the loss.
        input_has_gradient: whether what the network reads needs a gradient, as what a pipeline's stage receives does.
        operations: keys of operations by the identity of their layers, which live as long as it does; it is added to.
        recomputed: ranges of layers whose forward runs again when backward comes to the first of them.
    """

    def __init__(
        self,
        builder: RoleBuilder,
        network: ModelGraph,
        shards: Mapping[int, LayerShard] | None = None,
        *,
        outputs: Sequence[int] = (),
        input_has_gradient: bool = False,
        operations: dict[int, str] | None = None,
        recomputed: Sequence[range] = (),
    ) -> None:
        self._builder = builder
        self._layers = network.layers
        of_layers = shards or {}
        self._shards = [of_layers.get(i) or LayerShard(layer) for i, layer in enumerate(network.layers)]
        known = {} if operations is None else operations
        for layer in (shard.layer for shard in self._shards):
            if id(layer) not in known:
                known[id(layer)] = layer.operation
        self._operations = [known[id(shard.layer)] for shard in self._shards]
        index = {layer.name: i for i, layer in enumerate(network.layers)}
        self._inputs = [tuple(index[name] for name in layer.inputs if name in index) for layer in network.layers]
        needs_gradient = layers_with_gradient(network, input_has_gradient=input_has_gradient)
        self.backward_layers = backward_layers(network, needs_gradient, outputs)
        self._network, self._input_has_gradient = network, input_has_gradient
        self._outputs = frozenset(outputs)
        self._again: dict[int, range] = {}
        for layers in recomputed:
            first = next((layer for layer in self.backward_layers if layer in layers), None)
            if first is not None:
                self._again[first] = layers
        self._works: dict[tuple[int, ComputePhase], Compute] = {}
        self._forward: list[int] = []
        self.backward_task = -1
        """The task that ends what backward has done so far, communication included."""

    def onto(self, builder: RoleBuilder) -> NetworkCompute:
        """The same network, for another builder: what is known of its layers is not worked out again.

        Forward that was added here counts as added there: that builder begins with a copy of this one, or adds it anew.
        """
        other = copy.copy(self)
        other._builder, other.backward_task = builder, -1
        return other

    def add_forward(self, after: tuple[int, ...] = (), before_layer: BeforeLayer | None = None) -> None:
        """Append forward of all layers; those that read the network's input wait for ``after``.

        Args:
            before_layer: appends what comes right before a layer, and returns what that layer waits for.
        """
        self._forward = []
        for index, inputs in enumerate(self._inputs):
            before = before_layer(index) if before_layer else ()
            waits = (tuple(self._forward[source] for source in inputs) or after) + before
            self._forward.append(self._run(index, Phase.FW, waits, self._shards[index].before_fw))

    def _run(self, index: int, phase: Phase, waits: tuple[int, ...], before: tuple[Communication, ...]) -> int:
        """Append forward of a layer, in the phase FW or again in BW; returns the task that its readers wait for."""
        shard = self._shards[index]
        waits = self._communicate(before, phase, waits)
        task = self._compute(self._work(index, "FW"), shard.rounds_fw, phase, waits)
        made = self._communicate(shard.after_fw, phase, (task,))[-1]
        self._builder.add(_BETWEEN_FORWARD, phase, Stream.COMPUTE, (made,))
        return made

    def _work(self, index: int, phase: ComputePhase) -> Compute:
        """What a layer computes, made once: a builder finds the same work sooner than an equal one."""
        key, shard, operation = (index, phase), self._shards[index], self._operations[index]
        if key not in self._works:
            self._works[key] = Compute(layer=shard.layer.name, operation=operation, phase=phase, shard=shard.shard)
        return self._works[key]

    def _compute(self, work: Compute, rounds: Rounds, phase: Phase, after: tuple[int, ...]) -> int:
        """Append a layer as often as it runs, each time beside what is under way; returns the last time's task."""
        for beside in rounds:
            under_way = () if beside is None else (self._builder.add(beside, phase, Stream.COMMUNICATION, after),)
            task = self._builder.add(work, phase, Stream.COMPUTE, after)
            after = (task, *under_way)
        return task

    def _run_again(self, layers: range, after: tuple[int, ...]) -> tuple[int, ...]:
        """Append forward of a segment in backward; returns what its backward waits for."""
        made, led = dict[int, int](), set[int]()
        for index in layers:
            waits = tuple(made[source] for source in self._inputs[index] if source in made) or after
            of_layer = self._shards[index]
            leader = index if of_layer.leader is None else of_layer.leader
            # Where a leader does not run again, the first of its followers communicates.
            before = of_layer.before_fw if leader in led else self._shards[leader].before_fw
            led.add(leader)
            made[index] = self._run(index, Phase.BW, waits, before)
        return tuple(made.values())[-1:]

    def _communicate(self, works: tuple[Communication, ...], phase: Phase, after: tuple[int, ...]) -> tuple[int, ...]:
        """Append communication one after the other; returns what waits for the last waits for."""
        for work in works:
            after = (self._builder.add(work, phase, Stream.COMMUNICATION, after),)
        return after

    @property
    def forward_tasks(self) -> tuple[int, ...]:
        """Per layer, the task that its readers wait for."""
        return tuple(self._forward)

    def part_of_backward(self, phase: ComputePhase) -> BackwardPart:
        """All of backward (``BW``), or what one of its two parts runs."""
        order = self.backward_layers
        if phase == "BW":
            return BackwardPart(order, tuple(phase for _ in order))
        of_input, of_weight = parts_of_backward(self._network, order, input_has_gradient=self._input_has_gradient)
        return of_input if phase == "BW_input" else of_weight

    def add_backward(
        self,
        after: tuple[int, ...] = (),
        before_layer: BeforeLayer | None = None,
        part: BackwardPart | None = None,
    ) -> Iterator[tuple[int, int]]:
        """Append backward layer by layer; yields (layer index, task) after each, for what follows on its gradients.

        Layers whose gradients are given wait for ``after``; ``before_layer`` as in :meth:`add_forward`.

        Args:
            part: of :meth:`part_of_backward`; None for all of it.
        """
        part = part or self.part_of_backward("BW")
        # A layer waits for backward of all that read its output; the loss, which nothing reads, for its own forward.
        waits = {layer: [self._forward[layer], *(after if layer in self._outputs else ())] for layer in part.layers}
        for index, phase in zip(*part, strict=True):
            shard = self._shards[index]
            before = before_layer(index) if before_layer else ()
            if index in self._again:
                before += self._run_again(self._again[index], (*waits[index], *before))
            sums = () if phase == "BW_input" else shard.sums
            ready = self._communicate(sums if shard.before_bw else (), Phase.BW, (*waits[index], *before))
            # What the input's part has waited for is there.
            ready = self._communicate(() if phase == "BW_weight" else shard.before_bw, Phase.BW, ready)
            computed = self._compute(self._work(index, phase), shard.rounds_bw, Phase.BW, ready)
            # Autograd finishes the parameters' gradients before it goes on with the input's.
            computed = self._communicate(() if shard.before_bw else sums, Phase.BW, (computed,))[-1]
            yield index, computed
            communicated = () if phase == "BW_weight" else shard.after_bw
            # Autograd hands the gradients on first, so these calls wait for whatever copies or adds up gradients then.
            behind = max(computed, self._builder.last_of(Stream.COMPUTE)) if communicated else computed
            task = self.backward_task = self._communicate(communicated, Phase.BW, (behind,))[-1]
            for source in self._inputs[index]:
                if source in waits:
                    waits[source].append(task)
            self._builder.add(_BETWEEN_BACKWARD, Phase.BW, Stream.COMPUTE, (task,))


def gradient_order(network: ModelGraph) -> tuple[str, ...]:
    """Parameters in the order in which their gradients arrive; where none was seen, reverse registration order."""
    return network.gradient_order or tuple(parameter.name for parameter in reversed(network.parameters))


def gradient_layers(network: ModelGraph, backward: Sequence[int]) -> dict[str, int]:
    """The layer with whose backward each parameter's gradient is complete, in the order in which gradients arrive.

    That is the last layer of backward that reads it; of a parameter that no layer lists, the last of all.

    Args:
        backward: layers in the order of backward, by index; empty where there is none, and so no gradient.
    """
    if not backward:
        return {}
    last = {name: layer for layer in backward for name in network.layers[layer].parameters}
    return {name: last.get(name, backward[-1]) for name in gradient_order(network)}
