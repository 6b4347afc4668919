"""Layer-wise communication that autograd passes through: one collective forward, its transpose backward.

What is reduced forward is passed on as it is backward, and the other way round; what is gathered is sliced
(Megatron-LM's conjugate functions f and g, for any of them). Every function times its own communication where it is
asked to (:class:`~paradl_bench.strategies.running.spans.Spans`), and what it cuts and puts together, without waiting
for anything that it would not wait for anyway.

A gradient that autograd does not make, as of a head that no loss reads, is not made here either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from paradl_bench.network.partition import Box, Halo
from paradl_bench.strategies.running.spans import Spans

Slices = tuple[slice, ...]
Messages = Sequence[tuple[int, torch.Tensor]]
"""Tensors, each with the rank of the group that it goes to or comes from."""
Reduce = Callable[[], None]
"""Reduces the gradients of all micro-batches, and lets go of what was gathered."""

# torch 2.13 gave them new names, and warns of the old ones.
all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


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

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """Sum over the group, or what ``op`` makes of it, in place."""
        with self.spans.span("all_reduce"):
            dist.all_reduce(tensor, op=op, group=self.process_group)

    def all_gather(self, gathered: torch.Tensor, sent: torch.Tensor) -> None:
        """Every rank's ``sent``, one after the other; both flat."""
        with self.spans.span("all_gather"):
            all_gather_into(gathered, sent, group=self.process_group)

    def reduce_scatter(self, received: torch.Tensor, sent: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """This rank's part of the sum of ``sent``, or of what ``op`` makes of it; both flat."""
        with self.spans.span("reduce_scatter"):
            reduce_scatter_into(received, sent, op=op, group=self.process_group)

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, sizes: tuple[Sequence[int], Sequence[int]] | None = None
    ) -> None:
        """A part of ``sent`` to each rank, and one of each, in the order of ranks, along the first dim.

        ``sizes`` are those of parts received, and of parts sent; None where all are equal."""
        out, given = ([], []) if sizes is None else map(list, sizes)
        with self.spans.span("all_to_all"):
            dist.all_to_all_single(received, sent, out, given, group=self.process_group)

    def send_and_receive(self, sent: Messages, received: Messages) -> None:
        """As :meth:`exchange`, of a layer's halo."""
        with self.spans.span("halo"):
            self.exchange(sent, received)

    def begin_exchange(self, sent: Messages, received: Messages) -> Callable[[], None]:
        """As :meth:`send_and_receive`, beside what is done next; the function that is returned waits for the end."""
        if self.spans.listener is not None:
            self.spans.listener.settle()
        works = self._post(sent, received)

        def wait() -> None:
            with self.spans.span("halo"):
                # What has come holds no tensors any longer.
                while works:
                    works.pop(0).wait()

        return wait

    def exchange(self, sent: Messages, received: Messages) -> None:
        """Messages to and from ranks of the group, all at once; tensors are contiguous."""
        for work in self._post(sent, received):
            work.wait()

    def _post(self, sent: Messages, received: Messages) -> list[Any]:
        calls = [(dist.isend, *message) for message in sent] + [(dist.irecv, *message) for message in received]
        operations = [
            dist.P2POp(call, tensor, dist.get_global_rank(self.process_group, peer), self.process_group)
            for call, peer, tensor in calls
        ]
        return list(dist.batch_isend_irecv(operations)) if operations else []


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
    own_part = parts[group.rank]
    received = whole.new_empty(longest)
    group.reduce_scatter(received, sent.view(-1))
    return received[: own_part.numel()].view(own_part.shape)


class _Conjugate(torch.autograd.Function):
    """One function forward, another for the gradient backward."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        run: Callable[[torch.Tensor], torch.Tensor],
        back: Callable[[torch.Tensor], torch.Tensor],
        spans: Spans,
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.back, ctx.spans = back, spans
        with spans.copies():
            result = run(tensor)
        if result is tensor:
            ctx.mark_dirty(tensor)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if gradients[0] is None:
            return None, None, None, None
        with ctx.spans.copies():
            return ctx.back(gradients[0]), None, None, None


def _conjugate(
    tensor: torch.Tensor,
    run: Callable[[torch.Tensor], torch.Tensor],
    back: Callable[[torch.Tensor], torch.Tensor],
    group: Group,
) -> torch.Tensor:
    """Neither function may hold a tensor, which would live as long as the graph."""
    result: torch.Tensor = _Conjugate.apply(tensor, run, back, group.spans)  # type: ignore[no-untyped-call]
    return result


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view_as(tensor)


def reduce_gradient(whole: torch.Tensor, group: Group) -> torch.Tensor:
    """``whole`` as it is; its gradient is summed over the group, whose ranks each used all of it for a part."""

    def back(gradient: torch.Tensor) -> torch.Tensor:
        # A copy: other branches may hold the same gradient.
        total = gradient.clone(memory_format=torch.contiguous_format)
        group.all_reduce(total)
        return total

    return _conjugate(whole, _unchanged, back, group)


def reduce_scatter_gradient(whole: torch.Tensor, slices: Sequence[Slices], group: Group) -> torch.Tensor:
    """``whole`` as it is; of its gradient's sum over the group only this rank's part is made, the rest is 0."""

    def back(gradient: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(gradient)
        total[slices[group.rank]] = reduce_scatter_slices(gradient, slices, group)
        return total

    return _conjugate(whole, _unchanged, back, group)


def move_rows(
    rows: torch.Tensor,
    run: Callable[[torch.Tensor], torch.Tensor],
    back: Callable[[torch.Tensor], torch.Tensor],
    group: Group,
) -> torch.Tensor:
    """Rows at other places, which ``run`` brings them to, and ``back`` their gradients from. Neither holds a tensor."""
    return _conjugate(rows, run, back, group)


def reduce(partial: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum over the group, in place; the gradient is that of every rank."""

    def run(tensor: torch.Tensor) -> torch.Tensor:
        group.all_reduce(tensor)
        return tensor

    return _conjugate(partial, run, lambda gradient: gradient, group)


def reduce_scatter(partial: torch.Tensor, slices: Sequence[Slices], group: Group, shape: Sequence[int]) -> torch.Tensor:
    """This rank's part of the sum over the group, in a shape; gradients of the parts, of one size, are gathered."""
    whole, part = partial.shape, partial[slices[group.rank]].shape

    def run(tensor: torch.Tensor) -> torch.Tensor:
        # No view: changed in place, it would lose the hooks that ``fully_shard`` has on it.
        made = tensor.new_empty(shape)
        group.reduce_scatter(made.view(-1), torch.stack([tensor[own] for own in slices]).view(-1))
        return made

    def back(gradient: torch.Tensor) -> torch.Tensor:
        return all_gather_slices(gradient.reshape(part), slices, whole, group)

    return _conjugate(partial, run, back, group)


class _SummedGradients(torch.autograd.Function):
    """Parameters as they are; their gradients are summed over the group in one message."""

    @staticmethod
    def forward(ctx: Any, group: Group, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        total = torch.cat([gradient.reshape(-1) for gradient in gradients])
        ctx.group.all_reduce(total)
        parts = torch.split(total, [gradient.numel() for gradient in gradients])
        return None, *(part.view(gradient.shape) for part, gradient in zip(parts, gradients, strict=True))


def sum_gradients(parameters: Sequence[torch.Tensor], group: Group) -> tuple[torch.Tensor, ...]:
    """The parameters of a layer that ranks each ran on a part: their gradients are summed over the group."""
    summed: tuple[torch.Tensor, ...] = _SummedGradients.apply(group, *parameters)  # type: ignore[no-untyped-call]
    return summed


def gather(
    part: torch.Tensor, slices: Sequence[Slices], shape: Sequence[int], group: Group, *, scale: float = 1.0
) -> torch.Tensor:
    """The whole from every rank's part; the gradient of this rank's part is taken times ``scale``."""

    def back(gradient: torch.Tensor) -> torch.Tensor:
        own_part = gradient[slices[group.rank]]
        return own_part.contiguous() if scale == 1 else own_part * scale

    return _conjugate(part, lambda tensor: all_gather_slices(tensor, slices, shape, group), back, group)


def gather_for_all(part: torch.Tensor, slices: Sequence[Slices], shape: Sequence[int], group: Group) -> torch.Tensor:
    """The whole from every rank's part, which ranks each go on with; of its gradient's sum, this rank's part."""
    return _conjugate(
        part,
        lambda tensor: all_gather_slices(tensor, slices, shape, group),
        lambda gradient: reduce_scatter_slices(gradient, slices, group),
        group,
    )


def take(whole: torch.Tensor, slices: Sequence[Slices], group: Group, *, scale: float = 1.0) -> torch.Tensor:
    """This rank's part; gradients of the parts are gathered, times ``scale``."""
    shape = whole.shape

    def back(gradient: torch.Tensor) -> torch.Tensor:
        gathered = all_gather_slices(gradient, slices, shape, group)
        return gathered if scale == 1 else gathered * scale

    return _conjugate(whole, lambda tensor: tensor[slices[group.rank]].contiguous(), back, group)


def with_halo(owned: torch.Tensor, halo: Halo, fill: float, group: Group) -> torch.Tensor:
    """The box that this rank reads, from the boxes that ranks own; ``fill`` where it lies outside the tensor.

    Backward returns the halo's gradients, and adds them where they belong.
    """
    if halo.read == halo.owned and not halo.sends:
        return owned
    leading, shape = owned.dim() - len(halo.owned), owned.shape

    def inside(box: Box) -> Slices:
        return slices_of(box, leading=leading, origin=halo.owned)

    def outside(box: Box) -> Slices:
        return slices_of(box, leading=leading, origin=halo.read)

    def run(tensor: torch.Tensor) -> torch.Tensor:
        extents = [interval.extent for interval in halo.read]
        read = tensor.new_full((*shape[:leading], *extents), fill)
        if halo.kept is not None:
            read[outside(halo.kept)] = tensor[inside(halo.kept)]
        sent = [(transfer.peer, tensor[inside(transfer.box)]) for transfer in halo.sends]
        received = [(transfer.peer, read[outside(transfer.box)]) for transfer in halo.receives]
        for target, message in _swap(sent, received, group):
            target.copy_(message)
        return read

    def back(gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.new_zeros(shape)
        if halo.kept is not None:
            total[inside(halo.kept)] = gradient[outside(halo.kept)]
        sent = [(transfer.peer, gradient[outside(transfer.box)]) for transfer in halo.receives]
        received = [(transfer.peer, total[inside(transfer.box)]) for transfer in halo.sends]
        for target, message in _swap(sent, received, group):
            target.add_(message)
        return total

    return _conjugate(owned, run, back, group)


def _swap(
    sent: Sequence[tuple[int, torch.Tensor]], received: Sequence[tuple[int, torch.Tensor]], group: Group
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Send and receive all messages at once; returns what came, behind the part of a tensor that it is for."""
    targets = [target for _, target in received]
    messages = [torch.empty(target.shape, dtype=target.dtype, device=target.device) for target in targets]
    group.send_and_receive(
        [(peer, part.contiguous()) for peer, part in sent],
        [(peer, message) for (peer, _), message in zip(received, messages, strict=True)],
    )
    return zip(targets, messages, strict=True)


def axis_slices(intervals: Sequence[tuple[int, int]], dim: int) -> tuple[Slices, ...]:
    """Slices of every rank along one dim, counted from the front."""
    return tuple((slice(None),) * dim + (slice(start, stop),) for start, stop in intervals)
