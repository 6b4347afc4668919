"""Plan of the exchange as torch's DistributedDataParallel (DDP) runs it, in its steady state and before.

Steady state, from the third iteration on. Before forward the buffers (batch norm's statistics) are broadcast from rank
0, coalesced by dtype. In backward each gradient, as it arrives, is divided by the number of ranks into its bucket; a
full bucket is all-reduced while backward goes on, buckets strictly in order. After backward each bucket is waited for
and copied back into its gradients; then weights are updated.

Buckets: one with everything in the first iteration; at the start of the second they are rebuilt in the order in which
gradients arrived in the first, with the limits (first_bucket_bytes, bucket_cap_bytes, bucket_cap_bytes, ...). Where
some parameter gets no gradient, DDP has to run with ``find_unused_parameters``: buckets are then those of registration
order, reversed and never rebuilt, gradients that do not arrive are sent as zeros, and a map of the used parameters is
all-reduced as well.

Phases are those in which a real run spends the time: the broadcast of buffers belongs to FW.

Where the exchange knows nodes (:mod:`~paradl_bench.strategies.exchange.node_groups`), a communication hook sends the
buckets: it divides a bucket in a pass of its own, and the all-reduce becomes a chain of collectives. A rank that leads
nothing does not issue those between nodes, and its plan does not show that it waits for them.

Where the settings give messages (:mod:`~paradl_bench.strategies.exchange.messages`), these are exchanged in the place
of buckets, from the first iteration on; parameters without gradient are passed over. Where the settings say so they
are sent behind backward, one after the other, as frameworks do that do not overlap the two.

A framework may hold all gradients in one buffer (:mod:`~paradl_bench.strategies.frameworks.framework_memory`): a bucket
that is full is checked, divided and sent where it lies, and where ranks update equal parts it is scattered.

Not modelled: sparse gradients, other communication hooks, ``gradient_as_bucket_view``. ``no_sync`` is what
:mod:`~paradl_bench.strategies.passes.accumulation` has.

Source: torch/csrc/distributed/c10d/reducer.cpp, comm.cpp; torch/nn/parallel/distributed.py (torch 2.13).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from functools import cached_property

from paradl_bench.network.graph import DTYPE_BYTES, ModelGraph, Tensor
from paradl_bench.plan.compute import gradient_layers, gradient_order
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.tasks import BucketCopy, Collective, GradientPass, Phase, RoleBuilder, Setup, Stream
from paradl_bench.strategies.exchange.buckets import assign_buckets, broadcast_buckets, total_bytes
from paradl_bench.strategies.exchange.messages import messages_of
from paradl_bench.strategies.exchange.node_groups import NodeGroups
from paradl_bench.strategies.exchange.options import ExchangeOptions
from paradl_bench.strategies.frameworks.presets import framework_of

_INT64_BYTES = 8
_INT32_BYTES = 4
# torch has at most two coalesced broadcasts under way (comm.cpp, broadcast_coalesced).
_BROADCASTS_IN_FLIGHT = 2


class GradientBuckets:
    """The buckets of a network's gradients.

    Args:
        apart: parameters that fewer ranks hold alike than the others, whose gradients are exchanged by themselves.
        of_apart: whether these are the buckets of those, or of the others.

    Attributes:
        registered: the parameters. held: with those that are not trained. buffers: that are sent with them.
        arrival: parameters in the order in which their gradients arrive.
        unused: parameters that get no gradient, for which DDP sends something; none where messages are given.
        fused: whether the settings give messages, which are then the buckets, from the first iteration on.
        after_backward: whether these are sent when backward is over.
        buffer_dtype: of a framework's buffer that holds all gradients and is sent as it is; empty where buckets are
            tensors of their own.
        checks: whether the framework reads what is in that buffer before it is sent.

    Raises:
        UserError: messages that are not of this network.
    """

    def __init__(
        self,
        network: ModelGraph,
        settings: PlanSettings,
        apart: frozenset[str] = frozenset(),
        *,
        of_apart: bool = False,
    ) -> None:
        self.registered = tuple(tensor for tensor in network.parameters if (tensor.name in apart) == of_apart)
        self.held = [tensor for tensor in network.held_parameters if (tensor.name in apart) == of_apart]
        self.buffers = () if of_apart else network.buffers
        parameters = {parameter.name: parameter for parameter in self.registered}
        self.arrival = [parameters[name] for name in gradient_order(network) if name in parameters]
        arriving = {parameter.name for parameter in self.arrival}
        options = settings.of(ExchangeOptions)
        self.fused = bool(options.fused_bytes)
        self.after_backward = options.after_backward
        self.buffer_dtype = framework_of(settings).gradient_dtype
        self.checks = framework_of(settings).checks_gradients
        self._messages = messages_of(network, options.fused_bytes) if self.fused else []
        without = [parameter for parameter in self.registered if parameter.name not in arriving]
        self.unused = [] if self.fused else without
        self._limits = [options.first_bucket_bytes, options.bucket_cap_bytes]

    @cached_property
    def first(self) -> list[list[Tensor]]:
        """Buckets of the first iteration."""
        if self.fused:
            return self._messages
        limits = self._limits if self.unused else [total_bytes(self.registered) + 1]
        initial = assign_buckets(self.registered, limits, in_order_of_arrival=False)
        return [[self.registered[i] for i in bucket] for bucket in reversed(initial)]

    @cached_property
    def rebuilt(self) -> list[list[Tensor]]:
        """Buckets of every later iteration."""
        if self.unused or self.fused:
            return self.first
        rebuilt = assign_buckets(self.arrival, self._limits, in_order_of_arrival=True)
        return [[self.arrival[i] for i in bucket] for bucket in rebuilt]

    def bytes_of(self, gradients: Sequence[Tensor]) -> int:
        """Of so many gradients as they are sent."""
        if not self.buffer_dtype:
            return total_bytes(gradients)
        return sum(gradient.elements for gradient in gradients) * DTYPE_BYTES[self.buffer_dtype]

    @property
    def used_map_bytes(self) -> int:
        """Size of the map of used parameters that is all-reduced too; 0 where all are used."""
        return _INT32_BYTES * (len(self.arrival) + len(self.unused)) if self.unused else 0

    @property
    def notes(self) -> tuple[str, ...]:
        """What a report has to say of them."""
        if not self.unused:
            return ()
        return (
            f"{len(self.unused)} parameters get no gradient ({self.unused[0].name}, ...): DDP runs with "
            "find_unused_parameters, which keeps the initial buckets and sends zeros for them",
        )


def add_buffer_broadcasts(
    builder: RoleBuilder, network: ModelGraph, ranks: int, axes: tuple[int, ...]
) -> tuple[int, ...]:
    """Tasks that send the first rank's buffers to all of a group; returns those that forward waits for."""
    finished: list[int] = []
    in_flight: deque[tuple[int, BucketCopy]] = deque()

    def finish() -> None:
        broadcast, copy = in_flight.popleft()
        finished.append(builder.add(copy, Phase.FW, Stream.COMPUTE, (broadcast,)))

    for size, count in broadcast_buckets(network.buffers):
        if len(in_flight) == _BROADCASTS_IN_FLIGHT:
            finish()
        copied = builder.add(BucketCopy(direction="into", bytes=size, tensors=count), Phase.FW, Stream.COMPUTE)
        work = Collective(operation="broadcast", message_bytes=size, ranks=ranks, axes=axes)
        broadcast = builder.add(work, Phase.FW, Stream.COMMUNICATION, (copied,))
        in_flight.append((broadcast, BucketCopy(direction="out", bytes=size, tensors=count)))
    while in_flight:
        finish()
    return tuple(finished)


class GradientExchange:
    """Adds the exchange of gradients to backward, as layers become ready.

    Args:
        nodes: how ranks lie on nodes, and the place of this one on its own, where the exchange knows nodes.
        scatters: whether each rank needs the sums of an equal part alone.
        behind: whether nothing is sent before backward is over.
    """

    def __init__(
        self,
        builder: RoleBuilder,
        network: ModelGraph,
        buckets: GradientBuckets,
        backward_layers: Sequence[int],
        ranks: int,
        axes: tuple[int, ...],
        nodes: tuple[NodeGroups, int] | None = None,
        *,
        scatters: bool = False,
        behind: bool = False,
    ) -> None:
        self._builder, self._scatters = builder, scatters
        self._ranks, self._axes, self._nodes = ranks, axes, nodes
        self._buckets, self._behind = buckets, behind or buckets.after_backward
        self._bucket_of = {parameter.name: i for i, bucket in enumerate(buckets.rebuilt) for parameter in bucket}
        self._missing = [len(bucket) for bucket in buckets.rebuilt]
        self._copies: list[list[int]] = [[] for _ in buckets.rebuilt]
        self._all_reduces: list[int] = []
        self._ready_with = _ready_with(network, buckets, backward_layers)

    def add_ready(self, layer: int, task: int) -> None:
        """Copy the gradients that are ready with backward of ``layer`` into their buckets, and send what is full."""
        ready = self._ready_with.get(layer)
        if not ready:
            return
        by_bucket: dict[int, list[Tensor]] = {}
        for parameter in ready:
            by_bucket.setdefault(self._bucket_of[parameter.name], []).append(parameter)
        for bucket, tensors in by_bucket.items():
            copied = task if self._buckets.buffer_dtype else self._copy_into(tensors, task)
            self._copies[bucket].append(copied)
            self._missing[bucket] -= len(tensors)
            if not self._behind:
                self._send_full(copied)

    def _copy_into(self, gradients: Sequence[Tensor], task: int, tensors: int = 0) -> int:
        """Divide gradients by the number of ranks on their way into a bucket, in a call for each unless given."""
        size = self._buckets.bytes_of(gradients)
        work = BucketCopy(direction="into", bytes=size, tensors=tensors or len(gradients))
        return self._builder.add(work, Phase.GE, Stream.COMPUTE, (task,))

    def _in_place(self, bucket: Sequence[Tensor], task: int) -> int:
        """Check and divide a bucket that is a part of a framework's buffer."""
        if self._buckets.checks:
            work = GradientPass(part="check", elements=sum(gradient.elements for gradient in bucket), tensors=1)
            task = self._builder.add(work, Phase.GE, Stream.COMPUTE, (task,))
        return self._copy_into(bucket, task, tensors=1)

    def _send_full(self, trigger: int) -> None:
        # A bucket that is full before an earlier one waits for it, so that all ranks send in the same order.
        while len(self._all_reduces) < len(self._missing) and not self._missing[len(self._all_reduces)]:
            bucket = len(self._all_reduces)
            gradients = self._buckets.rebuilt[bucket]
            if self._buckets.buffer_dtype:
                waits: tuple[int, ...] = (self._in_place(gradients, trigger),)
            else:
                waits = tuple(dict.fromkeys((*self._copies[bucket], trigger)))
            self._all_reduces.append(self._send(gradients, waits))

    def _send(self, bucket: Sequence[Tensor], waits: tuple[int, ...]) -> int:
        if self._nodes is None:
            return self._reduce(self._buckets.bytes_of(bucket), waits)
        groups, local = self._nodes
        divided = BucketCopy(direction="into", bytes=total_bytes(bucket), tensors=1)
        task = self._builder.add(divided, Phase.GE, Stream.COMPUTE, waits)
        for work in groups.collectives(bucket, local):
            task = self._builder.add(work, Phase.GE, Stream.COMMUNICATION, (task,))
        return task

    def _reduce(self, message_bytes: int, waits: tuple[int, ...]) -> int:
        if not self._scatters:
            return self._all_reduce(message_bytes, waits)
        part = math.ceil(message_bytes / self._ranks)
        work = Collective(operation="reduce_scatter", message_bytes=part, ranks=self._ranks, axes=self._axes)
        return self._builder.add(work, Phase.GE, Stream.COMMUNICATION, waits)

    def _all_reduce(self, message_bytes: int, waits: tuple[int, ...]) -> int:
        work = Collective(operation="all_reduce", message_bytes=message_bytes, ranks=self._ranks, axes=self._axes)
        return self._builder.add(work, Phase.GE, Stream.COMMUNICATION, waits)

    def add_finish(self, last: int) -> tuple[int, ...]:
        """After the last backward task, wait for each bucket in turn and copy it out; returns what WU awaits."""
        # All that were not sent before.
        self._send_full(last)
        used_map = self._buckets.used_map_bytes
        before: tuple[int, ...] = (self._all_reduce(used_map, (last,)),) if used_map else ()
        done = list(before)
        if self._buckets.buffer_dtype:
            # The weight update reads the buffer.
            return (*done, last, *self._all_reduces)
        for bucket, all_reduce in zip(self._buckets.rebuilt, self._all_reduces, strict=True):
            work = BucketCopy(direction="out", bytes=total_bytes(bucket), tensors=len(bucket))
            done.append(self._builder.add(work, Phase.GE, Stream.COMPUTE, (last, all_reduce)))
        return tuple(done)


def _ready_with(
    network: ModelGraph, buckets: GradientBuckets, backward_layers: Sequence[int]
) -> dict[int, list[Tensor]]:
    """Per layer, the parameters that are ready with its backward, in the order in which they arrive.

    One without gradient is marked ready when the first gradient arrives.
    """
    ready: dict[int, list[Tensor]] = {}
    layers = gradient_layers(network, backward_layers)
    for parameter in buckets.arrival if layers else ():
        ready.setdefault(layers[parameter.name], []).append(parameter)
    if ready and buckets.unused:
        first = next(layer for layer in backward_layers if layer in ready)
        ready[first] = buckets.unused + ready[first]
    return ready


def issued_before_steady_state(buckets: GradientBuckets, *, buffers_in_second: bool = True, flat: bool = True) -> Setup:
    """Every collective of DDP's construction and of the first two iterations: (when, operation, bytes, count).

    Construction checks that all ranks have the same parameters (their number, then their sizes and strides) and
    broadcasts parameters and buffers. The second iteration broadcasts the rebuilt buckets' indices and sizes. Where
    messages are given nothing is checked or rebuilt.

    Args:
        buffers_in_second: whether the second iteration broadcasts buffers as well.
        flat: whether buckets are all-reduced among all ranks; else :func:`exchanged_over_nodes` says how they are sent.
    """
    counts: Counter[tuple[str, str, int]] = Counter()
    dims = sum(len(parameter.shape) for parameter in buckets.registered)
    if not buckets.fused:
        counts["setup", "all_gather", _INT64_BYTES] += 1
        counts["setup", "broadcast", 2 * dims * _INT64_BYTES] += 1
    for size, _ in broadcast_buckets([*buckets.held, *buckets.buffers]):
        counts["setup", "broadcast", size] += 1
    of_buffers = broadcast_buckets(buckets.buffers)
    for when, sent in (("first", buckets.first), ("rebuild", buckets.rebuilt)):
        for size, _ in of_buffers if when == "first" or buffers_in_second else ():
            counts[when, "broadcast", size] += 1
        for bucket in sent if flat else ():
            counts[when, "all_reduce", total_bytes(bucket)] += 1
        if buckets.used_map_bytes:
            counts[when, "all_reduce", buckets.used_map_bytes] += 1
    if not (buckets.unused or buckets.fused):
        counts["rebuild", "broadcast", _INT32_BYTES * (len(buckets.arrival) + 1)] += 1
        counts["rebuild", "broadcast", _INT32_BYTES * len(buckets.rebuilt)] += 1
    return tuple((*key, count) for key, count in counts.items())


def exchanged_along(setup: Setup, ranks: int, axes: tuple[int, ...]) -> tuple[tuple[str, Collective], ...]:
    """What is issued before the steady state along other axes than all that exchange, as (when, collective)."""
    return tuple(
        (when, Collective(operation=operation, message_bytes=size, ranks=ranks, axes=axes))
        for when, operation, size, count in setup
        for _ in range(count)
    )


def exchanged_over_nodes(
    buckets: GradientBuckets, groups: NodeGroups, local: int
) -> tuple[tuple[str, Collective], ...]:
    """What the first two iterations issue for buckets within and between nodes, as (when, collective)."""
    return tuple(
        (when, work)
        for when, sent in (("first", buckets.first), ("rebuild", buckets.rebuilt))
        for bucket in sent
        for work in groups.collectives(bucket, local)
    )
