"""Gradient accumulation: a rank goes through its samples in equal micro-batches, one after the other.

Each runs forward and backward; gradients are added up, and what is exchanged for them is exchanged once, during the
last backward, as torch's DistributedDataParallel does under ``no_sync`` until then. It broadcasts buffers before the
first forward alone. The loss of a micro-batch counts as its part of the samples, so that gradients are those of the
mean over all of them; batch norm takes its statistics of each micro-batch by itself.

ZeRO stages 2 and 3 gather and reduce for every micro-batch (:mod:`~paradl_bench.strategies.data.zero.plan`): what they
would else keep are whole gradients, which they are there not to hold.
"""

from __future__ import annotations

from collections.abc import Iterator

from paradl_bench.core.bounds import MOST_ACCUMULATED
from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import DTYPE_BYTES, ModelGraph
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.axis_planner import ShardedLayers
from paradl_bench.plan.compute import NetworkCompute, gradient_order
from paradl_bench.plan.mesh import degree_of
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.plan.tasks import BucketCopy, Phase, RoleBuilder, Stream
from paradl_bench.strategies.frameworks.framework_memory import ADDED_IN_KERNEL
from paradl_bench.strategies.frameworks.presets import framework_of
from paradl_bench.strategies.passes.recomputation import segments_of

MICRO_BATCHES_APART = 2
"""Nothing is before the first one; the second one does what all after it do."""


def check_accumulation(strategy: Strategy, settings: PlanSettings) -> None:
    """Refuse micro-batches that cannot be.

    Raises:
        UserError: a pipeline, which has micro-batches of its own, or samples that do not split evenly.
    """
    count = settings.accumulate
    if count == 1:
        return
    if degree_of(strategy, Trait.STAGES) > 1:
        raise UserError(
            f"strategy {strategy}: a pipeline adds up the gradients of its own micro-batches; give --micro-batches, not"
            " --accumulate"
        )
    local = settings.batch // degree_of(strategy, Trait.DIVIDES_BATCH)
    if local % count:
        even = (n for n in range(1, min(local, MOST_ACCUMULATED) + 1) if not local % n)
        raise UserError(
            f"strategy {strategy}: {local} samples a rank do not split evenly into {count} micro-batches;"
            f" give --accumulate one of {', '.join(map(str, even))}"
        )


class MicroSteps:
    """Adds forward and backward of a rank's micro-batches to a role; ``sharded`` is what it runs of one of them."""

    def __init__(
        self, builder: RoleBuilder, sharded: ShardedLayers, settings: PlanSettings, operations: dict[int, str]
    ) -> None:
        self._builder, self._count = builder, settings.accumulate
        again = [segment.layers for segment in segments_of(sharded.network, settings)]
        self._compute = NetworkCompute(
            builder, sharded.network, sharded.shards, operations=operations, recomputed=again
        )
        self._added = added_with(sharded.network, self.backward_layers, settings)
        self._adds_first = adds_first(settings)

    @property
    def backward_layers(self) -> tuple[int, ...]:
        """Layers that backward runs, in its order."""
        return self._compute.backward_layers

    def add_but_last(self, after: tuple[int, ...] = ()) -> None:
        """Append all micro-batches but the last, whose gradients stay where they are; forward waits for ``after``."""
        start = 0
        for step in range(min(self._count - 1, MICRO_BATCHES_APART)):
            start = self._builder.tasks
            self._compute.add_forward(after)
            for layer, task in self._compute.add_backward():
                if step or self._adds_first:
                    self._add_up(layer, task)
        self._builder.repeat(start, self._count - 1 - MICRO_BATCHES_APART, start)

    def add_last(self, after: tuple[int, ...] = ()) -> Iterator[tuple[int, int]]:
        """Append the last one; yields (layer index, task) once a layer's gradients are those of all micro-batches."""
        self._compute.add_forward(after)
        for layer, task in self._compute.add_backward():
            yield layer, self._add_up(layer, task) if self._count > 1 or self._adds_first else task

    def _add_up(self, layer: int, task: int) -> int:
        added = self._added.get(layer)
        return task if added is None else self._builder.add(added, Phase.BW, Stream.COMPUTE, (task,))


def adds_first(settings: PlanSettings) -> bool:
    """Whether gradients of the first micro-batch are added too: to a buffer that a framework holds."""
    return bool(framework_of(settings).gradient_dtype)


def added_with(network: ModelGraph, backward_layers: tuple[int, ...], settings: PlanSettings) -> dict[int, BucketCopy]:
    """Per layer, the gradients that are added to earlier ones once its backward has run.

    One of a parameter that several layers read is complete with the layer that backward reaches last. Those that a
    framework's kernel adds are none of them.
    """
    framework = framework_of(settings)
    in_kernel, otherwise = set[str](), set[str]()
    for reader in network.layers:
        adds = framework.placeholders and reader.kind in ADDED_IN_KERNEL
        (in_kernel if adds else otherwise).update(reader.parameters)
    trained = {parameter.name: parameter for parameter in network.parameters}
    alone = {name for name in in_kernel & trained.keys() - otherwise if len(trained[name].shape) > 1}
    updated = set(gradient_order(network)) & trained.keys() - alone
    last = {name: layer for layer in backward_layers for name in network.layers[layer].parameters if name in updated}
    sizes: dict[int, list[int]] = {}
    for name, layer in last.items():
        dtype = framework.gradient_dtype or trained[name].dtype
        sizes.setdefault(layer, []).append(trained[name].elements * DTYPE_BYTES[dtype])
    return {
        layer: BucketCopy(direction="add", bytes=sum(layer_sizes), tensors=len(layer_sizes))
        for layer, layer_sizes in sizes.items()
    }
