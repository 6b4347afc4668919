"""Memory of a pipeline's ranks: each holds its own stages, and the activations of the micro-batches under way in them.

Held throughout: parameters, optimizer state, exchange buckets and buffers of the rank's stages, and what torch's stages
receive into: a buffer for every micro-batch and every value that crosses a cut, forward and backward. The first rank
holds the input. Activations of a micro-batch are held from its forward to its backward, as many at a time as the
schedule has under way (GPipe: all of them; 1F1B: as many as stages follow). Gradients are complete after the first
backward and are added to by the others.

Where an axis shares layers, each rank holds its parts of its stages, and what crosses cuts as it holds it.

Approximated as without a pipeline (:mod:`predict.memory`); what a send keeps until it is done is an activation already.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from paradl_bench.schedules.catalog import schedule_of
from paradl_bench.schedules.schedule import Action
from paradl_bench.spec.errors import unknown_choice
from paradl_bench.spec.network import DTYPE_BYTES, Network
from paradl_bench.spec.plan import PlanSettings
from paradl_bench.spec.strategy import Strategy
from paradl_bench.strategies.catalog import planner_for
from paradl_bench.strategies.mesh import REPLICATING, degree_of
from paradl_bench.strategies.pipeline.plan import micro_batches, samples_at_once
from paradl_bench.strategies.pipeline.stage_shares import StageShare, share_stage
from paradl_bench.strategies.pipeline.stages import cut_into_stages
from predict.memory import STATE_COPIES, MemoryUse, hold


def pipelined_memory(network: Network, strategy: Strategy, settings: PlanSettings, *, dtype: str = "fp32") -> MemoryUse:
    """The peak of the rank that needs most.

    Raises:
        UserError: a limit is exceeded, or an optimizer whose state is not known.
    """
    if settings.optimizer not in STATE_COPIES:
        raise unknown_choice("optimizer", settings.optimizer, STATE_COPIES)
    ranks = degree_of(strategy, "pipeline")
    shares = planner_for(strategy).shares(network, strategy, settings)
    stages = cut_into_stages(network, ranks, settings)
    uses = []
    for rank, shared in itertools.product(range(ranks), shares.distinct):
        own = [share_stage(network, stage, shared) for stage in stages if stage.index % ranks == rank]
        parts = _parts(own, rank, network, strategy, settings, dtype)
        uses.append(MemoryUse(sum(parts.values()), parts))
    return max(uses, key=lambda use: use.peak_bytes)


def _parts(
    own: Sequence[StageShare],
    rank: int,
    network: Network,
    strategy: Strategy,
    settings: PlanSettings,
    dtype: str,
) -> dict[str, int]:
    """What the ranks at one place of the pipeline hold that share its stages alike."""
    ranks, micro_batch = degree_of(strategy, "pipeline"), samples_at_once(strategy, settings)
    count = micro_batches(settings, ranks)
    parameters = sum(share.network.parameter_bytes for share in own)
    received = [
        share.message_bytes(cut, micro_batch) for share in own for cut in (share.stage.receives, share.stage.sends)
    ]
    order = schedule_of(settings.schedule).order(rank, ranks, count)
    return {
        "parameters": parameters,
        "optimizer": STATE_COPIES[settings.optimizer] * parameters,
        "buckets": parameters if degree_of(strategy, *REPLICATING) > 1 else 0,
        "buffers": sum(buffer.bytes for share in own for buffer in share.network.buffers),
        "input": 0 if rank else network.input_bytes(count * micro_batch, dtype),
        "communication": count * sum(map(sum, received)),
        "gradients": parameters,
        "activations": _activations(own, order, micro_batch * DTYPE_BYTES[dtype]),
    }


def _activations(own: Sequence[StageShare], actions: Sequence[Action], scale: int) -> int:
    """Bytes at the moment when most are held.

    Args:
        scale: bytes of an element of each sample of a micro-batch.
    """
    held = {
        share.stage.index: [hold(layer, share.shards.get(i)) for i, layer in enumerate(share.network.layers)]
        for share in own
    }
    kept = {index: scale * sum(layer.kept for layer in layers) for index, layers in held.items()}
    in_flight = {index: scale * max(layer.in_flight for layer in layers) for index, layers in held.items()}
    under_way = now = most = 0
    for action in actions:
        if action.direction == "FW":
            under_way += kept[action.stage]
            now = under_way
        else:
            now = under_way + in_flight[action.stage]
            under_way -= kept[action.stage]
        most = max(most, now)
    return most
