"""The messages that a rule of fusion sends, for ``paradl-bench train --fusion`` to exchange by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paradl_bench.core.errors import UserError
from paradl_bench.strategies.data.fusion.fused_plan import check_fusion
from paradl_bench.strategies.data.fusion.fusion_file import FusionFile
from paradl_bench.strategies.exchange.messages import check_messages
from predict.prediction.request import read_request


def fusion_file(options: Mapping[str, Any]) -> FusionFile:
    """The messages of one strategy and batch, under the costs as they are.

    Args:
        options: by the names of the command's parameters.

    Raises:
        UserError: no rule of fusion, DDP's buckets, several points, or a strategy without such an exchange.
    """
    request = read_request(options)
    fusion = request.costs.fusion
    if fusion is None or fusion.rule == "ddp":
        raise UserError("--fusion-out needs --fusion none, buffer, ada or mg-wfbp, whose messages it writes")
    if len(request.points) != 1:
        raise UserError(
            f"--fusion-out takes one strategy and batch, not {len(request.points)}: give --strategy with its"
            " degree (d4) and one --batch"
        )
    (point,) = request.points
    check_messages(point.strategy, point.settings)
    check_fusion(fusion, point.strategy, point.settings)
    sent = request.costs.buffers(fusion, point.strategy, point.settings).bytes
    if not sent:
        raise UserError(f"model {request.costs.network.name} has no gradients: --fusion-out has nothing to write")
    return FusionFile(
        model=request.costs.network.name,
        strategy=str(point.strategy),
        batch=point.settings.batch,
        rule=fusion.rule,
        messages_bytes=sent,
    )
