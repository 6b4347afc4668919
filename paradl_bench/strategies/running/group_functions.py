"""Layer-wise communication that autograd passes through: one collective forward, its transpose backward.

What is reduced forward is passed on as it is backward, and the other way round; what is gathered is sliced
(Megatron-LM's conjugate functions f and g, for any of them). Every function times its own communication where it is
asked to (:class:`Spans`), without waiting for anything that it would not wait for anyway.

A gradient that autograd does not make, as of a head that no loss reads, is not made here either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from paradl_bench.network.partition import Box, Exchange

Slices = tuple[slice, ...]

# torch 2.13 gave them new names, and warns of the old ones.
all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Listener(Protocol):
    """Who is told when layer-wise communication begins and ends."""

    def span_began(self, what: str) -> None:
        """It begins."""

    def span_ended(self, what: str) -> None:
        """It has ended."""

    def work(self) -> None:
        """What the rank does up to its next layer or communication is real: it copies parameters or gradients."""


@dataclass(slots=True)
class Spans:
    """When layer-wise communication began and ended, in the order in which it was issued, while ``stamp`` is set.

    Attributes:
        rows: (what, begin, end) with stamps of the clock that ``stamp`` belongs to.
        listener: told of all of it, whether it is stamped or not; None where nobody is.
    """

    stamp: Callable[[], Any] | None = None
    rows: list[tuple[str, Any, Any]] = field(default_factory=list)
    listener: Listener | None = None

    def work(self) -> None:
        """Tell that what follows is real work on gradients or parameters."""
        if self.listener is not None:
            self.listener.work()

    @contextmanager
    def span(self, what: str) -> Iterator[None]:
        """Stamp what is inside."""
        if self.listener is not None:
            self.listener.span_began(what)
        begin = None if self.stamp is None else self.stamp()
        yield
        if self.listener is not None:
            self.listener.span_ended(what)
        if self.stamp is not None:
            self.rows.append((what, begin, self.stamp()))


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks along one axis of the strategy, as one of them sees them, and how they communicate.

    Attributes:
        rank: of this process in the group.
        spans: what layer-wise communication is timed by.
    """

    process_group: dist.ProcessGroup
    rank: int
    size: int
    spans: Spans

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over the group, in place."""
        with self.spans.span("all_reduce"):
            dist.all_reduce(tensor, group=self.process_group)

    def all_gather(self, gathered: torch.Tensor, sent: torch.Tensor) -> None:
        """Every rank's ``sent``, one after the other; both flat."""
        with self.spans.span("all_gather"):
            all_gather_into(gathered, sent, group=self.process_group)

    def reduce_scatter(self, received: torch.Tensor, sent: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """This rank's part of the sum of ``sent``, or of what ``op`` makes of it; both flat."""
        with self.spans.span("reduce_scatter"):
            reduce_scatter_into(received, sent, op=op, group=self.process_group)

    def send_and_receive(
        self, sent: Sequence[tuple[int, torch.Tensor]], received: Sequence[tuple[int, torch.Tensor]]
    ) -> None:
        """Messages to and from ranks of the group, all at once; tensors are contiguous."""
        calls = [(dist.isend, *message) for message in sent] + [(dist.irecv, *message) for message in received]
        operations = [
            dist.P2POp(call, tensor, dist.get_global_rank(self.process_group, peer), self.process_group)
            for call, peer, tensor in calls
        ]
        with self.spans.span("halo"):
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()


def slices_of(box: Box, *, leading: int, origin: Box | None = None) -> Slices:
    """Slices of a tensor whose dims after the first ``leading`` ones are those of the box.

    ``origin`` is the box that the tensor holds; None where it holds everything.
    """
    starts = [0] * len(box) if origin is None else [interval.start for interval in origin]
    inside = (slice(i.start - start, i.stop - start) for i, start in zip(box, starts, strict=True))
    return (slice(None),) * leading + tuple(inside)


def all_gather_slices(
    local: torch.Tensor, slices: Sequence[Slices], shape: Sequence[int], group: Group
) -> torch.Tensor:
    """A tensor of ``shape`` from every rank's part of it; uneven parts are sent as long as the longest."""
    whole = local.new_empty(tuple(shape))
    counts = [whole[part].numel() for part in slices]
    longest = max(counts)
    sent = local.reshape(-1)
    if sent.numel() < longest:
        sent = torch.cat([sent, sent.new_zeros(longest - sent.numel())])
    gathered = local.new_empty(group.size * longest)
    group.all_gather(gathered, sent.contiguous())
    for rank, (part, count) in enumerate(zip(slices, counts, strict=True)):
        target = whole[part]
        target.copy_(gathered[rank * longest : rank * longest + count].view(target.shape))
    return whole


def reduce_scatter_slices(whole: torch.Tensor, slices: Sequence[Slices], group: Group) -> torch.Tensor:
    """This rank's part of the sum over ranks; uneven parts are sent as long as the longest."""
    parts = [whole[part] for part in slices]
    longest = max(part.numel() for part in parts)
    sent = whole.new_zeros(group.size, longest)
    for row, part in zip(sent, parts, strict=True):
        row[: part.numel()].view(part.shape).copy_(part)
    received = whole.new_empty(longest)
    group.reduce_scatter(received, sent.view(-1))
    own = parts[group.rank]
    return received[: own.numel()].view(own.shape)


class _ReduceGradient(torch.autograd.Function):
    """Identity forward, sum over the group backward: every rank used all of the input for a part of the output."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if gradients[0] is None:
            return (None,) * 2
        # A copy: other branches may hold the same gradient.
        gradient = gradients[0].clone(memory_format=torch.contiguous_format)
        ctx.group.all_reduce(gradient)
        return gradient, None


class _ReduceScatterGradient(torch.autograd.Function):
    """Identity forward; backward leaves this rank's part of the sum and zeros elsewhere, which nothing reads."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, slices: Sequence[Slices], group: Group) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.group, ctx.slices = group, slices
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if gradients[0] is None:
            return (None,) * 3
        gradient = torch.zeros_like(gradients[0])
        gradient[ctx.slices[ctx.group.rank]] = reduce_scatter_slices(gradients[0], ctx.slices, ctx.group)
        return gradient, None, None


class _Reduce(torch.autograd.Function):
    """Sum over the group forward, in place; identity backward."""

    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        group.all_reduce(partial)
        ctx.mark_dirty(partial)
        return partial

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if gradients[0] is None:
            return (None,) * 2
        return gradients[0], None


class _Gather(torch.autograd.Function):
    """Parts become the whole forward; backward takes this rank's part of the gradient, times ``scale``."""

    @staticmethod
    def forward(
        ctx: Any, part: torch.Tensor, slices: Sequence[Slices], shape: Sequence[int], scale: float, group: Group
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.own, ctx.scale = slices[group.rank], scale
        return all_gather_slices(part, slices, shape, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if gradients[0] is None:
            return (None,) * 5
        part = gradients[0][ctx.own]
        return part.contiguous() if ctx.scale == 1 else part * ctx.scale, None, None, None, None


class _Take(torch.autograd.Function):
    """This rank's part forward; backward gathers the parts' gradients, times ``scale``."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, slices: Sequence[Slices], scale: float, group: Group) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.slices, ctx.scale, ctx.shape, ctx.group = slices, scale, whole.shape, group
        return whole[slices[group.rank]].contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if gradients[0] is None:
            return (None,) * 4
        whole = all_gather_slices(gradients[0], ctx.slices, ctx.shape, ctx.group)
        return whole if ctx.scale == 1 else whole * ctx.scale, None, None, None


class _Halo(torch.autograd.Function):
    """From the box that a rank owns to the one that it reads; backward returns the halo's gradients and adds them."""

    @staticmethod
    def forward(ctx: Any, owned: torch.Tensor, exchange: Exchange, fill: float, group: Group) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        leading = owned.dim() - len(exchange.owned)
        ctx.exchange, ctx.group, ctx.leading, ctx.shape = exchange, group, leading, owned.shape
        extents = [interval.extent for interval in exchange.read]
        read = owned.new_full((*owned.shape[:leading], *extents), fill)
        inside, outside = _slicers(exchange, leading)
        if exchange.kept is not None:
            read[outside(exchange.kept)] = owned[inside(exchange.kept)]
        sent = [(transfer.peer, owned[inside(transfer.box)]) for transfer in exchange.sends]
        received = [(transfer.peer, read[outside(transfer.box)]) for transfer in exchange.receives]
        for (_, target), buffer in zip(received, _exchange(sent, received, group), strict=True):
            target.copy_(buffer)
        return read

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if gradients[0] is None:
            return (None,) * 4
        exchange: Exchange = ctx.exchange
        inside, outside = _slicers(exchange, ctx.leading)
        owned = gradients[0].new_zeros(ctx.shape)
        if exchange.kept is not None:
            owned[inside(exchange.kept)] = gradients[0][outside(exchange.kept)]
        sent = [(transfer.peer, gradients[0][outside(transfer.box)]) for transfer in exchange.receives]
        received = [(transfer.peer, owned[inside(transfer.box)]) for transfer in exchange.sends]
        for (_, target), buffer in zip(received, _exchange(sent, received, ctx.group), strict=True):
            target.add_(buffer)
        return owned, None, None, None


def _slicers(exchange: Exchange, leading: int) -> tuple[Callable[[Box], Slices], Callable[[Box], Slices]]:
    """Slices of a box in the tensor that the rank owns, and in the one that it reads."""
    return (
        lambda box: slices_of(box, leading=leading, origin=exchange.owned),
        lambda box: slices_of(box, leading=leading, origin=exchange.read),
    )


def _exchange(
    sent: Sequence[tuple[int, torch.Tensor]], received: Sequence[tuple[int, torch.Tensor]], group: Group
) -> list[torch.Tensor]:
    """Send and receive all messages at once; returns what came, in the order of ``received``."""
    buffers = [torch.empty(target.shape, dtype=target.dtype, device=target.device) for _, target in received]
    group.send_and_receive(
        [(peer, part.contiguous()) for peer, part in sent],
        [(peer, buffer) for (peer, _), buffer in zip(received, buffers, strict=True)],
    )
    return buffers


def reduce_gradient(whole: torch.Tensor, group: Group) -> torch.Tensor:
    """``whole`` as it is; its gradient is summed over the group."""
    result: torch.Tensor = _ReduceGradient.apply(whole, group)  # type: ignore[no-untyped-call]
    return result


def reduce_scatter_gradient(whole: torch.Tensor, slices: Sequence[Slices], group: Group) -> torch.Tensor:
    """``whole`` as it is; of its gradient's sum over the group only this rank's part is made, the rest is 0."""
    result: torch.Tensor = _ReduceScatterGradient.apply(whole, slices, group)  # type: ignore[no-untyped-call]
    return result


def reduce(partial: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum over the group, in place."""
    result: torch.Tensor = _Reduce.apply(partial, group)  # type: ignore[no-untyped-call]
    return result


def gather(
    part: torch.Tensor, slices: Sequence[Slices], shape: Sequence[int], group: Group, *, scale: float = 1.0
) -> torch.Tensor:
    """The whole from every rank's part; the gradient of this rank's part is taken times ``scale``."""
    result: torch.Tensor = _Gather.apply(part, slices, shape, scale, group)  # type: ignore[no-untyped-call]
    return result


def take(whole: torch.Tensor, slices: Sequence[Slices], group: Group, *, scale: float = 1.0) -> torch.Tensor:
    """This rank's part; gradients of the parts are gathered, times ``scale``."""
    result: torch.Tensor = _Take.apply(whole, slices, scale, group)  # type: ignore[no-untyped-call]
    return result


def exchange_halo(owned: torch.Tensor, exchange: Exchange, fill: float, group: Group) -> torch.Tensor:
    """The box that this rank reads, from the boxes that ranks own; ``fill`` where it lies outside the tensor."""
    if exchange.read == exchange.owned and not exchange.sends:
        return owned
    result: torch.Tensor = _Halo.apply(owned, exchange, fill, group)  # type: ignore[no-untyped-call]
    return result


def axis_slices(intervals: Sequence[tuple[int, int]], dim: int) -> tuple[Slices, ...]:
    """Slices of every rank along one dim, counted from the front."""
    return tuple((slice(None),) * dim + (slice(start, stop),) for start, stop in intervals)
