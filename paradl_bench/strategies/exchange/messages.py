"""Gradients in messages of given bytes, in the place of DDP's buckets: which parameters each holds.

A message holds the gradients of whole layers, which follow each other in backward. Its bytes alone say which: those of
the messages before it say where it begins. Bytes that end inside of a layer's gradients are of another model.
"""

from __future__ import annotations

from collections.abc import Sequence

from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import ModelGraph, Tensor
from paradl_bench.plan.compute import backward_layers, gradient_layers, layers_with_gradient
from paradl_bench.plan.mesh import divides_batch_alone, zero_stage
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.strategies.exchange.options import ExchangeOptions


def check_messages(strategy: Strategy, settings: PlanSettings, flag: str = "--fusion") -> None:
    """Refuse what exchanges gradients otherwise than in messages.

    Args:
        flag: that asks for them.

    Raises:
        UserError: another strategy than data parallelism, nodes in the exchange, or limits of DDP's buckets.
    """
    options = settings.of(ExchangeOptions)
    if not strategy.axes or not divides_batch_alone(strategy) or zero_stage(strategy):
        raise UserError(f"{flag} is for data parallelism alone (d2), not for {strategy}: leave it out")
    if options.exchange != "flat":
        raise UserError(f"{flag} exchanges flat: leave out --exchange {options.exchange}")
    if not options.has_default_limits:
        raise UserError(f"--bucket-cap-mb is for DDP's buckets, and {flag} has none: leave one of them out")


def messages_of(network: ModelGraph, sizes: Sequence[int]) -> list[list[Tensor]]:
    """Parameters of each message, in the order in which their gradients arrive.

    Args:
        sizes: bytes of each message, in the order in which they are sent.

    Raises:
        UserError: sizes that are not those of whole layers of this network, or a message of several dtypes.
    """
    left = _gradients_by_layer(network)
    messages: list[list[Tensor]] = []
    for number, size in enumerate(sizes, start=1):
        message: list[Tensor] = []
        while left and sum(parameter.bytes for parameter in message) < size:
            message += left.pop(0)
        held = sum(parameter.bytes for parameter in message)
        if held != size or not message:
            raise UserError(
                f"--fusion: message {number} has {size} bytes, and gradients of whole layers of {network.name} have"
                f" {held}: these messages are of another model"
            )
        dtypes = sorted({parameter.dtype for parameter in message})
        if len(dtypes) > 1:
            raise UserError(f"--fusion: message {number} would mix {' and '.join(dtypes)}; give it one dtype")
        messages.append(message)
    if left:
        missing = sum(parameter.bytes for layer in left for parameter in layer)
        raise UserError(f"--fusion: {missing} bytes of the gradients of {network.name} are in no message")
    return messages


def _gradients_by_layer(network: ModelGraph) -> list[list[Tensor]]:
    """Per layer of backward that completes gradients, their parameters; without those that hold nothing."""
    order = backward_layers(network, layers_with_gradient(network))
    parameters = {parameter.name: parameter for parameter in network.parameters}
    tensors_by_layer: dict[int, list[Tensor]] = {}
    for name, layer in gradient_layers(network, order).items():
        if parameters[name].bytes:
            tensors_by_layer.setdefault(layer, []).append(parameters[name])
    return [tensors_by_layer[layer] for layer in order if layer in tensors_by_layer]
