"""The messages that a run exchanges gradients in, found in its network."""

from __future__ import annotations

import msgspec

from paradl_bench.core.errors import UserError
from paradl_bench.measure.training.request import TrainingRequest
from paradl_bench.network.graph import ModelGraph
from paradl_bench.strategies.data.fusion.fusion_file import AskedFusion
from paradl_bench.strategies.exchange.options import ExchangeOptions


def with_messages(request: TrainingRequest, network: ModelGraph) -> TrainingRequest:
    """The request with the messages of the fusion that it asks for, or its preset; as it is where it asks for none.

    A preset that exchanges layer by layer has each layer's own, unless a fusion says otherwise.

    Raises:
        UserError: a file of another network, or a model without anything to exchange.
    """
    by_preset = request.exchanges_by_preset
    fusion = request.fusion or (AskedFusion(rule="none") if by_preset else None)
    if fusion is None:
        return request
    messages = fusion.messages(network)
    if not messages:
        raise UserError(f"model {request.model} has no parameter that gets a gradient: --fusion has nothing to send")
    after = by_preset and not request.overlap.wait_free
    options = request.settings.changed(
        ExchangeOptions,
        fused_bytes=messages,
        fused_by=fusion.words(len(messages)) + " after backward" * after,
        after_backward=after,
    )
    return msgspec.structs.replace(request, axes=options.axes, fusion=None)
