"""A plan of data parallelism that exchanges gradients as Horovod does: fused by a rule, and not in DDP's buckets.

Which gradients share an all-reduce is decided of the costs as they are, and is given. When one is
sent follows from the simulated iteration (docs/model/closed-forms.md, "osf"; the wait stands before the maximum):

    start = max(channel free, ready of its last gradient + wait)

A buffer that has no room for the next gradient learns so when that one comes, late ranks and slower kernels included;
one that the timeout ends waits for just that. adaFusion's, MG-WFBP's and single gradients wait for nothing. Several
tensors are copied into one buffer and out of it on the stream of the exchange, a single one is sent from where it lies.
The weight update waits for the last exchange. What ``paradl-bench train --fusion`` runs is planned by
:mod:`paradl_bench.strategies.exchange`: the same messages, copied as DDP copies, and sent without a wait.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import ModelGraph
from paradl_bench.plan.compute import NetworkCompute, gradient_layers
from paradl_bench.plan.mesh import divides_batch_alone, zero_stage
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.plan.tasks import BucketCopy, Collective, Phase, Plan, RoleBuilder, Stream, Wait
from paradl_bench.strategies.data.fusion.buffers import Buffers
from paradl_bench.strategies.data.fusion.layerwise_plan import updated
from paradl_bench.strategies.data.fusion.rules import Fusion
from paradl_bench.strategies.exchange.options import ExchangeOptions


def check_fusion(fusion: Fusion, strategy: Strategy, settings: PlanSettings) -> None:
    """Refuse what no such exchange is planned of.

    Raises:
        UserError: another strategy than serial and data; an exchange over nodes, synchronised batch norm, accumulation,
            activations that are computed again.
    """
    name = f"--fusion {fusion.rule}"
    if not divides_batch_alone(strategy) or zero_stage(strategy):
        raise UserError(f"{name} is of data parallelism alone, not of {strategy}: leave it out")
    if settings.of(ExchangeOptions).exchange != "flat":
        raise UserError(f"{name} exchanges flat: leave out --exchange {settings.of(ExchangeOptions).exchange}")
    if settings.batch_norm == "sync":
        raise UserError(f"{name} knows no synchronised batch norm: leave out --batch-norm sync")
    for option, text in settings.simulated_alone.items():
        raise UserError(f"{name} knows no --{option} {text}: leave it out")


class _Sent(NamedTuple):
    """A buffer: the layer that completes it, its bytes and tensors, and what it waits for beyond that.

    Attributes:
        next_layer: whose gradient tells that the buffer is full; None where it waits for none.
        timeout_s: that it waits; 0 for none.
    """

    layer: int
    bytes: int
    tensors: int
    next_layer: int | None
    timeout_s: float


def fused_plan(
    network: ModelGraph, strategy: Strategy, settings: PlanSettings, fusion: Fusion, buffers: Buffers
) -> Plan:
    """Forward, backward with what the rule sends, weight update."""
    builder, ranks = RoleBuilder(), strategy.ranks
    compute = NetworkCompute(builder, network)
    compute.add_forward()
    sent = list(_sent(network, fusion, buffers, compute.backward_layers)) if ranks > 1 else []
    task_of: dict[int, int] = {}
    for layer, task in compute.add_backward():
        task_of[layer] = task
        # In order: what waits for a gradient is sent before what that gradient completes.
        while sent and {sent[0].layer, sent[0].next_layer} - {None} <= task_of.keys():
            _send(builder, sent.pop(0), task_of, ranks)
    sent_tasks = [task for task in range(builder.tasks) if builder.stream[task] == Stream.COMMUNICATION]
    return updated(builder, compute, network, strategy, settings, sent_tasks)


def _sent(network: ModelGraph, fusion: Fusion, buffers: Buffers, backward: tuple[int, ...]) -> Iterator[_Sent]:
    tensors: dict[int, int] = {}
    for layer in gradient_layers(network, backward).values():
        tensors[layer] = tensors.get(layer, 0) + 1
    starts = (0, *(index + 1 for index in buffers.last))
    for (low, high), size, is_full in zip(itertools.pairwise(starts), buffers.bytes, buffers.full, strict=True):
        is_last = high == len(buffers.layers)
        timed = fusion.rule == "buffer" and not is_full and not is_last
        yield _Sent(
            layer=buffers.layers[high - 1],
            bytes=size,
            tensors=sum(tensors[layer] for layer in buffers.layers[low:high]),
            next_layer=buffers.layers[high] if is_full else None,
            timeout_s=fusion.timeout_s if timed else 0.0,
        )


def _send(builder: RoleBuilder, sent: _Sent, task_of: dict[int, int], ranks: int) -> None:
    after: tuple[int, ...] = tuple(task_of[layer] for layer in (sent.layer, sent.next_layer) if layer is not None)
    if sent.timeout_s:
        # The copy stream has nothing else to do here, and a buffer waits only when the one before has been sent.
        after = (builder.add(Wait(seconds=sent.timeout_s), Phase.GE, Stream.COPY, after),)
    if sent.tensors > 1:
        copy = BucketCopy(direction="into", bytes=sent.bytes, tensors=sent.tensors)
        after = (builder.add(copy, Phase.GE, Stream.COMMUNICATION, after),)
    work = Collective(operation="all_reduce", message_bytes=sent.bytes, ranks=ranks)
    task = builder.add(work, Phase.GE, Stream.COMMUNICATION, after)
    if sent.tensors > 1:
        copy = BucketCopy(direction="out", bytes=sent.bytes, tensors=sent.tensors)
        builder.add(copy, Phase.GE, Stream.COMMUNICATION, (task,))
