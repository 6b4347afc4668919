"""Runs attention of a rank's queries while keys and values go round (:mod:`~paradl_bench.strategies.context.ring`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from paradl_bench.strategies.context import ring_kernels
from paradl_bench.strategies.context.ring_kernels import Scoring
from paradl_bench.strategies.running.autocast import as_product_reads_it
from paradl_bench.strategies.running.group_functions import Group, Messages
from paradl_bench.strategies.running.own_randomness import OwnRandomness
from paradl_bench.strategies.running.sharded_module import Call, beside, instead
from paradl_bench.strategies.tensor.cuts import Cut
from paradl_bench.strategies.tensor.sequence.on_tokens import OwnTokens

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class MirroredTokens(OwnTokens):
    """A chunk from the front and its mirror from the back: no rank has more of a causal attention than another."""

    def part_of(self, rank: int, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Two chunks, one behind the other, of each of the samples that lie along the dim."""
        at, chunks = dim % whole.dim(), 2 * self.group.size
        parts = whole.reshape(*whole.shape[:at], -1, chunks, self.length // chunks, *whole.shape[at + 1 :])
        front, back = (parts.select(at + 1, number) for number in (rank, chunks - 1 - rank))
        return torch.cat([front, back], at + 1).flatten(at, at + 1)

    def in_order(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """A copy in which ranks' parts lie one behind the other."""
        return torch.cat([self.part_of(rank, whole, dim) for rank in range(self.group.size)], dim)


class AttentionByRing:
    """This rank's queries with the keys and values of all ranks, a block of them at a time."""

    def __init__(self, own_tokens: OwnTokens, random: OwnRandomness) -> None:
        self._own, self._random = own_tokens, random

    def __call__(self, function: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As torch's ``scaled_dot_product_attention``."""
        given = dict(zip(_NAMES, args, strict=False)) | kwargs
        query, key, value = (as_product_reads_it(given[name]) for name in _NAMES[:3])
        mask = given.get("attn_mask")
        if mask is not None and mask.dim() > 1 and mask.shape[-2] == self._own.length:
            mask = self._own.part(mask, -2)
        one_head = query.dim() == len("NLE")
        if one_head:
            query, key, value = (tensor.unsqueeze(-3) for tensor in (query, key, value))
            mask = mask.unsqueeze(-3) if mask is not None and mask.dim() == len("NLS") else mask
        scoring = Scoring(bool(given.get("is_causal")), given.get("scale"), given.get("dropout_p") or 0.0)
        with self._random.used(query) if scoring.dropout else contextlib.nullcontext():
            attended = _RingAttention.apply(query, key, value, mask, _Ring(self._own, scoring, function))  # type: ignore[no-untyped-call]
        return self._own.mark(attended.squeeze(-3) if one_head else attended, Cut(-2))


def _nothing() -> None:
    pass


class _Ring(NamedTuple):
    """How blocks go round, and what of each a rank's queries see.

    Where attention is causal, the tokens of ranks are mirrored.

    Attributes:
        called: what the model calls for all of it.
    """

    own: OwnTokens
    scoring: Scoring
    called: Call

    @property
    def group(self) -> Group:
        return self.own.group

    def seen(self, turn: int) -> tuple[slice, slice]:
        """Of a rank's queries and of the block at hand, what meets: a causal mask leaves out half, or is the kernel's.

        An earlier rank's front chunk comes before all of a rank's queries, and its back chunk behind them. A later
        rank's two chunks lie between those of the queries.
        """
        every, half = slice(None), self.own.length // (2 * self.group.size)
        if not self.scoring.causal or turn == 0:
            return every, every
        return (every, slice(half)) if turn <= self.group.rank else (slice(half, None), every)

    def scoring_of(self, turn: int) -> Scoring:
        """The mask of later tokens is the kernel's for a rank's own block; of others it leaves out whole chunks."""
        return self.scoring._replace(causal=self.scoring.causal and turn == 0)

    def columns(self, turn: int, mask: torch.Tensor | None, rows: slice, keys: slice) -> torch.Tensor | None:
        """A mask's part for the block at hand."""
        if mask is None or mask.shape[-1] != self.own.length:
            return mask
        of_block = self.own.part_of((self.group.rank - turn) % self.group.size, mask, -1)[..., keys]
        return of_block if of_block.dim() < len("LS") or of_block.shape[-2] == 1 else of_block[..., rows, :]

    def pass_on(self, *tensors: torch.Tensor) -> tuple[list[torch.Tensor], Callable[[], None]]:
        """Begin to send to the next rank; returns what comes from the one before, and what waits for it."""
        if not tensors:
            return [], _nothing
        rank, size = self.group.rank, self.group.size
        landing = [torch.empty_like(tensor) for tensor in tensors]
        sent: Messages = [((rank + 1) % size, tensor) for tensor in tensors]
        return landing, self.group.begin_exchange(sent, [((rank - 1) % size, tensor) for tensor in landing])


class _RingAttention(torch.autograd.Function):
    """Attention of one rank; gradients of blocks go round behind them, and then home."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, ring: _Ring
    ) -> torch.Tensor:
        block, size = _packed((key, value), key.dtype), ring.group.size
        draws: list[ring_kernels.Drawn] = []
        for turn in range(size):
            landing, wait = ring.pass_on(*[block] * (turn < size - 1))
            rows, keys = ring.seen(turn)
            operands = query[..., rows, :], *(part[..., keys, :] for part in _parts(block, key, value))
            seen = ring.columns(turn, mask, rows, keys)
            attend = instead(ring.called, ring_kernels.attend, rounds=size)
            *made, drawn = attend(operands, seen, ring.scoring_of(turn))
            draws.append(drawn)
            if turn == 0:
                out, lse = (tensor.to(_wide(query)) for tensor in made)
            else:
                beside(ring.called, ring_kernels.join)(out[..., rows, :], lse[..., rows], *made)
            del made, operands
            wait()
            block = landing[0] if landing else block
        attended: torch.Tensor = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, mask, attended, lse)
        ctx.ring, ctx.draws = ring, draws
        return attended

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        query, key, value, mask, out, lse = ctx.saved_tensors
        ring: _Ring = ctx.ring
        block, size, wide = _packed((key, value), key.dtype), ring.group.size, _wide(query)
        of_query = torch.zeros_like(query, dtype=wide)
        # Of this rank's own block, and of the one that was at hand last.
        sums: list[torch.Tensor] = []
        for turn in range(size):
            landing, wait = ring.pass_on(*[block] * (turn < size - 1), *sums[1:])
            rows, keys = ring.seen(turn)
            operands = query[..., rows, :], *(part[..., keys, :] for part in _parts(block, key, value))
            made = instead(ring.called, ring_kernels.differentiate, rounds=size, backward=True)(
                (gradient[..., rows, :], *operands, out[..., rows, :], lse[..., rows]),
                ring.columns(turn, mask, rows, keys),
                ctx.draws[turn],
                ring.scoring_of(turn),
            )
            of_query[..., rows, :].add_(made[0])
            del operands
            wait()
            if any(ctx.needs_input_grad[1:3]):
                total = landing.pop() if sums[1:] else block.new_zeros(block.shape, dtype=wide)
                for of_all, part in zip(_parts(total, key, value), made[1:], strict=True):
                    of_all[..., keys, :].add_(part)
                sums[1:] = [total]
            del made
            block = landing[0] if landing else block
        del block
        return of_query.to(query.dtype), *_brought_home(ring, sums, key, value), None, None


def _brought_home(
    ring: _Ring, sums: list[torch.Tensor], key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of keys and values, once those that other ranks made have come; none where none is wanted."""
    if not sums:
        return None, None
    landing, wait = ring.pass_on(sums.pop())
    wait()
    sums[0].add_(landing.pop())
    of_key, of_value = (part.to(key.dtype) for part in _parts(sums.pop(), key, value))
    return of_key, of_value


def _wide(tensor: torch.Tensor) -> torch.dtype:
    """What parts are added up in: fp32 at least."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _packed(tensors: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Keys and values in one message."""
    block = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=dtype, device=tensors[0].device)
    for part, tensor in zip(_parts(block, *tensors), tensors, strict=True):
        part.copy_(tensor)
    return block


def _parts(block: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What :func:`_packed` put together, as it was shaped."""
    return block[: key.numel()].view(key.shape), block[key.numel() :].view(value.shape)
