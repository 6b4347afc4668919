"""Plan of ZeRO's stage 1 where ranks update equal parts of all parameters together, as frameworks do.

Gradients were scattered (:mod:`~paradl_bench.strategies.exchange.gradients`), so that each rank has the sums of its own
part. One all-gather sends what it updated. Torch's own stage 1 shares out whole parameters instead.

Source: Megatron-LM, ``core/optimizer/distrib_optimizer.py``.
"""

from __future__ import annotations

import math

import msgspec

from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.compute import gradient_order
from paradl_bench.plan.mesh import ranks_along, sharing_axes
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.plan.tasks import Before, Collective, Phase, RoleBuilder, Stream
from paradl_bench.strategies.exchange.buckets import total_bytes
from paradl_bench.strategies.passes.weight_update import add_weight_update, weight_update


def add_even_update(
    builder: RoleBuilder, network: ModelGraph, strategy: Strategy, settings: PlanSettings, after: tuple[int, ...]
) -> Before:
    """The weight update of a rank's part and the gather of all; returns those of the first two iterations."""
    axes = sharing_axes(strategy)
    ranks = ranks_along(strategy, axes)
    whole, updated = weight_update(network, settings), set(gradient_order(network))
    part = msgspec.structs.replace(whole, elements=math.ceil(whole.elements / ranks))
    done = add_weight_update(builder, part, settings, after)
    sent_bytes = total_bytes(parameter for parameter in network.parameters if parameter.name in updated)
    size = math.ceil(sent_bytes / ranks)
    gathered = Collective(operation="all_gather", message_bytes=size, ranks=ranks, axes=axes)
    builder.add(gathered, Phase.WU, Stream.COMMUNICATION, (done,))
    return tuple((when, gathered) for when in ("first", "rebuild"))
