"""Memory of a pipeline's ranks: each holds its own stages, and the activations of the micro-batches under way in them.

Held throughout: parameters, optimizer state, exchange buckets and buffers of the rank's stages, and what torch's stages
receive into: a buffer for every micro-batch and every value that crosses a cut, forward and backward. The first rank
holds the input. Activations of a micro-batch are held from its forward to its backward, as many at a time as the
schedule has under way (GPipe: all of them; 1F1B: as many as stages follow). Gradients are complete after the first
backward and are added to by the others.

Approximated as without a pipeline (:mod:`predict.memory`); what a send keeps until it is done is an activation already.
"""

from __future__ import annotations

from collections.abc import Sequence

from paradl_bench.schedules.catalog import schedule_of
from paradl_bench.schedules.schedule import Action
from paradl_bench.spec.errors import unknown_choice
from paradl_bench.spec.network import DTYPE_BYTES, Network
from paradl_bench.spec.plan import PlanSettings
from paradl_bench.spec.strategy import Strategy
from paradl_bench.strategies.mesh import degree_of
from paradl_bench.strategies.pipeline.plan import micro_batches
from paradl_bench.strategies.pipeline.stages import Stage, cut_into_stages, message_bytes
from predict.memory import STATE_COPIES, MemoryUse, hold


def pipelined_memory(network: Network, strategy: Strategy, settings: PlanSettings, *, dtype: str = "fp32") -> MemoryUse:
    """The peak of the rank that needs most.

    Raises:
        UserError: a limit is exceeded, or an optimizer whose state is not known.
    """
    if settings.optimizer not in STATE_COPIES:
        raise unknown_choice("optimizer", settings.optimizer, STATE_COPIES)
    ranks, replicas = degree_of(strategy, "pipeline"), degree_of(strategy, "data")
    schedule, count = schedule_of(settings.schedule), micro_batches(settings, ranks)
    micro_batch = settings.batch // replicas // count
    stages = cut_into_stages(network, ranks, settings)
    uses = []
    for rank in range(ranks):
        own = [stage for stage in stages if stage.index % ranks == rank]
        parameters = sum(stage.network.parameter_bytes for stage in own)
        received = [message_bytes(network, cut, micro_batch) for stage in own for cut in (stage.receives, stage.sends)]
        parts = {
            "parameters": parameters,
            "optimizer": STATE_COPIES[settings.optimizer] * parameters,
            "buckets": parameters if replicas > 1 else 0,
            "buffers": sum(buffer.bytes for stage in own for buffer in stage.network.buffers),
            "input": 0 if rank else network.input_bytes(settings.batch // replicas, dtype),
            "communication": count * sum(map(sum, received)),
            "gradients": parameters,
            "activations": _activations(own, schedule.order(rank, ranks, count), micro_batch * DTYPE_BYTES[dtype]),
        }
        uses.append(MemoryUse(sum(parts.values()), parts))
    return max(uses, key=lambda use: use.peak_bytes)


def _activations(stages: Sequence[Stage], actions: Sequence[Action], scale: int) -> int:
    """Bytes at the moment when most are held.

    Args:
        scale: bytes of an element of each sample of a micro-batch.
    """
    held = {stage.index: [hold(layer) for layer in stage.network.layers] for stage in stages}
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
