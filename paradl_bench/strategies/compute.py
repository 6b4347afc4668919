"""Forward and backward of a whole network on one role: what serial and data parallel iterations share."""

from __future__ import annotations

from collections.abc import Iterator

from paradl_bench.spec.network import Network
from paradl_bench.spec.plan import Between, Compute, Phase, PlanSettings, RoleBuilder, Stream, WeightUpdate


class NetworkCompute:
    """Adds a network's compute tasks to a role: per layer its operation and its share of the time between operations.

    Backward runs the layers in reverse: autograd takes, of the nodes that are ready, the one that forward made last.
    It passes over what no gradient reaches (operations on the input alone, heads that the loss does not read).
    """

    def __init__(self, builder: RoleBuilder, network: Network) -> None:
        self._builder = builder
        self._layers = network.layers
        self._operations = [layer.operation for layer in network.layers]
        index = {layer.name: i for i, layer in enumerate(network.layers)}
        self._inputs = [tuple(index[name] for name in layer.inputs if name in index) for layer in network.layers]
        self.backward_layers = self._find_backward_layers({parameter.name for parameter in network.parameters})
        self._forward: list[int] = []

    def _find_backward_layers(self, trainable: set[str]) -> tuple[int, ...]:
        needs_gradient: list[bool] = []
        for layer, inputs in zip(self._layers, self._inputs, strict=True):
            own = any(name in trainable for name in layer.parameters)
            needs_gradient.append(own or any(needs_gradient[source] for source in inputs))
        reached = [False] * len(self._layers)
        if reached:
            reached[-1] = True
        order = []
        for layer_index in reversed(range(len(self._layers))):
            if not (reached[layer_index] and needs_gradient[layer_index]):
                continue
            order.append(layer_index)
            for source in self._inputs[layer_index]:
                reached[source] = True
        return tuple(order)

    def add_forward(self, after: tuple[int, ...] = ()) -> None:
        """Append forward of all layers; those that read the network's input wait for ``after``."""
        between = Between(phase="FW")
        for layer, operation, inputs in zip(self._layers, self._operations, self._inputs, strict=True):
            work = Compute(layer=layer.name, operation=operation, phase="FW")
            waits = tuple(self._forward[source] for source in inputs) or after
            self._forward.append(self._builder.add(work, Phase.FW, Stream.COMPUTE, waits))
            self._builder.add(between, Phase.FW, Stream.COMPUTE, (self._forward[-1],))

    def add_backward(self) -> Iterator[tuple[int, int]]:
        """Append backward layer by layer; yields (layer index, task) after each, for what follows on its gradients."""
        between = Between(phase="BW")
        # A layer waits for backward of all that read its output; the loss, which nothing reads, for its own forward.
        waits: dict[int, list[int]] = {layer: [self._forward[layer]] for layer in self.backward_layers}
        for index in self.backward_layers:
            work = Compute(layer=self._layers[index].name, operation=self._operations[index], phase="BW")
            task = self._builder.add(work, Phase.BW, Stream.COMPUTE, tuple(waits[index]))
            for source in self._inputs[index]:
                if source in waits:
                    waits[source].append(task)
            yield index, task
            self._builder.add(between, Phase.BW, Stream.COMPUTE, (task,))


def weight_update(network: Network, settings: PlanSettings) -> WeightUpdate:
    """The optimizer step over every parameter that gets a gradient; optimizers pass over the others."""
    updated = set(gradient_order(network))
    parameters = [parameter for parameter in network.parameters if parameter.name in updated]
    elements = sum(parameter.elements for parameter in parameters)
    return WeightUpdate(optimizer=settings.optimizer, elements=elements, tensors=len(parameters))


def gradient_order(network: Network) -> tuple[str, ...]:
    """Parameters in the order in which their gradients arrive; where none was seen, reverse registration order."""
    return network.gradient_order or tuple(parameter.name for parameter in reversed(network.parameters))
