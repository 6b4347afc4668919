"""The messages that a run exchanges gradients in, found in its network."""

from __future__ import annotations

import msgspec

from paradl_bench.core.errors import UserError
from paradl_bench.measure.training.request import TrainingRequest
from paradl_bench.network.graph import ModelGraph
from paradl_bench.strategies.exchange.options import ExchangeOptions


def with_messages(request: TrainingRequest, network: ModelGraph) -> TrainingRequest:
    """The request with the messages of the fusion that it asks for; as it is where it asks for none.

    Raises:
        UserError: a file of another network, or a model without anything to exchange.
    """
    if request.fusion is None:
        return request
    messages = request.fusion.messages(network)
    if not messages:
        raise UserError(f"model {request.model} has no parameter that gets a gradient: --fusion has nothing to send")
    options = request.settings.changed(
        ExchangeOptions, fused_bytes=messages, fused_by=request.fusion.words(len(messages))
    )
    return msgspec.structs.replace(request, axes=options.axes, fusion=None)
