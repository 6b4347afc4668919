"""Exchange of gradients over nodes as a communication hook of DistributedDataParallel.

One bucket's collectives wait for each other, and buckets for each other, so that every rank issues those of a group in
one order. On a CPU a thread issues them, while backward goes on in its own; on a GPU they follow each other on a stream
of their own. The bucket is divided by the number of ranks first, as DDP does without a hook.

Source: torch/nn/parallel/distributed.py (register_comm_hook), torch/csrc/distributed/c10d/reducer.cpp: what the hook's
future holds takes the bucket's place.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from paradl_bench.strategies.exchange.node_groups import NodeGroups, Step
from paradl_bench.strategies.running.group_functions import all_gather_into, reduce_scatter_into


class NodeExchange:
    """Sends buckets through the groups of a node and between nodes.

    Args:
        members: ranks of this one's node that exchange gradients with it, by their place.
        node, between: process groups; ``between`` is None on a rank that leads no part.
    """

    def __init__(
        self,
        groups: NodeGroups,
        members: Sequence[int],
        node: dist.ProcessGroup,
        between: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._steps = groups.steps
        self._ranks, self._per_node, self._padded = groups.nodes * groups.per_node, groups.per_node, not groups.leaders
        self._chain = _Chain(members, node, between, device)
        self._local = members.index(dist.get_rank())
        self._device = device
        self._thread = ThreadPoolExecutor(1, "exchange")
        # The thread has to be gone before the interpreter is, and holds the groups while it works.
        weakref.finalize(self, self._thread.shutdown)

    def register(self, module: DistributedDataParallel) -> None:
        """Have a module send its buckets so; before its first backward."""
        # Its signature is looked at: it must bear no annotation but torch's own.
        module.register_comm_hook(self, lambda state, bucket: state.exchange(bucket.buffer()))

    def exchange(self, bucket: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """The mean over all ranks of a flat tensor, once it is there."""
        count = bucket.numel()
        sent = bucket
        if self._padded and count % self._per_node:
            sent = bucket.new_zeros(-(-count // self._per_node) * self._per_node)
        torch.mul(bucket, 1.0 / self._ranks, out=sent[:count])
        steps = self._steps(count, self._local)
        done: torch.futures.Future[torch.Tensor]
        if self._device.type == "cuda":
            done = torch.futures.Future(devices=[self._device])
            self._chain.follow(sent)
            self._chain.run(steps, sent, count, done, [])
        else:
            done = torch.futures.Future()
            watching = [mode for mode in _get_current_dispatch_mode_stack() if getattr(mode, "across_threads", False)]
            self._thread.submit(self._chain.run, steps, sent, count, done, watching)
        # What a callback raises reaches backward as an error; what a future holds would not.
        return done.then(lambda finished: finished.value())


class _Chain:
    """Issues the collectives of one bucket after the other; all that the thread holds."""

    def __init__(
        self,
        members: Sequence[int],
        node: dist.ProcessGroup,
        between: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._members, self._groups = members, {"node": node, "between nodes": between}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def follow(self, sent: torch.Tensor) -> None:
        """Have the stream wait for what has been issued for a bucket so far."""
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream(sent.device))
        sent.record_stream(self._stream)

    def run(
        self,
        steps: Sequence[Step],
        sent: torch.Tensor,
        count: int,
        done: torch.futures.Future[torch.Tensor],
        watching: Sequence[Any],
    ) -> None:
        """Exchange a bucket, padded where segments need it; its first ``count`` elements become the future's value."""
        try:
            with _watched(watching), torch.cuda.stream(self._stream) if self._stream else nullcontext():
                self._exchange(steps, sent)
                done.set_result(sent[:count])
        except Exception as error:  # it is raised where the future is waited for
            done.set_exception(error)  # type: ignore[arg-type]

    def _exchange(self, steps: Sequence[Step], sent: torch.Tensor) -> None:
        segment = sent
        for step in steps:
            part, group = sent[step.start : step.start + step.elements], self._groups[step.scope]
            if step.operation == "reduce":
                dist.reduce(part, dst=self._members[step.leader], group=group)
            elif step.operation == "broadcast":
                dist.broadcast(part, src=self._members[step.leader], group=group)
            elif step.operation == "reduce_scatter":
                segment = sent.new_empty(step.elements)
                reduce_scatter_into(segment, sent, group=group)
            elif step.operation == "all_gather":
                all_gather_into(sent, segment, group=group)
            else:
                dist.all_reduce(part if segment is sent else segment, group=group)


@contextmanager
def _watched(modes: Sequence[Any]) -> Iterator[None]:
    """Let modes see what this thread dispatches, which are a thread's own."""
    for mode in modes:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in modes:
            _pop_mode()
