"""A plan of data parallelism without buckets: backward sends bytes as the gradients of layers become ready.

What S-SGD's DAG and OSF assume of an iteration: each layer with parameters has an all-reduce of its own, or
several of them share one, which starts when the last of them is ready.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.compute import NetworkCompute, gradient_layers
from paradl_bench.plan.mesh import degree_of
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.plan.tasks import Collective, Phase, Plan, RoleBuilder, Stream
from paradl_bench.strategies.passes.weight_update import weight_update

Sends = Mapping[int, tuple[int, ...]]
"""Per layer, by index, the bytes of each all-reduce that its backward makes ready."""


def layerwise_plan(network: ModelGraph, strategy: Strategy, settings: PlanSettings, sends: Sends | None = None) -> Plan:
    """Forward, backward with all-reduces as gradients are ready, weight update.

    Args:
        sends: what backward of which layer sends; None for each layer's own gradients.
    """
    builder = RoleBuilder()
    compute = NetworkCompute(builder, network)
    compute.add_forward()
    if sends is None:
        sends = {layer: (size,) for layer, size in gradient_bytes(network, compute.backward_layers).items()}
    ranks = strategy.ranks
    all_reduces = []
    for layer, task in compute.add_backward():
        for size in sends.get(layer, ()) if ranks > 1 else ():
            if size:
                work = Collective(operation="all_reduce", message_bytes=size, ranks=ranks)
                all_reduces.append(builder.add(work, Phase.GE, Stream.COMMUNICATION, (task,)))
    return updated(builder, compute, network, strategy, settings, all_reduces)


def updated(
    builder: RoleBuilder,
    compute: NetworkCompute,
    network: ModelGraph,
    strategy: Strategy,
    settings: PlanSettings,
    all_reduces: Sequence[int],
) -> Plan:
    """The plan of equal ranks that update behind backward and the last all-reduce."""
    after = tuple(all_reduces[-1:]) + ((compute.backward_task,) if compute.backward_layers else ())
    builder.add(weight_update(network, settings), Phase.WU, Stream.COMPUTE, after)
    return Plan(
        strategy=strategy,
        network=network.name,
        local_batch=settings.batch // degree_of(strategy, Trait.DIVIDES_BATCH),
        works=tuple(builder.works),
        roles=(builder.build("rank", strategy.ranks),),
        exchange_axes=(0,),
    )


def gradient_bytes(network: ModelGraph, backward: Sequence[int]) -> dict[int, int]:
    """Bytes of the gradients that are complete with backward of each layer."""
    sizes = {parameter.name: parameter.bytes for parameter in network.parameters}
    bytes_by_layer: dict[int, int] = {}
    for name, layer in gradient_layers(network, backward).items():
        bytes_by_layer[layer] = bytes_by_layer.get(layer, 0) + sizes[name]
    return bytes_by_layer
