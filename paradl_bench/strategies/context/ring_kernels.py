"""Attention with a block of keys, its log-sum-exp, and its gradients given those of all blocks.

Fused kernels of torch run where they take the operands. Else the two products run by themselves: with a mask, or on a
CPU with dropout. A kernel's backward, given the output and the log-sum-exp over all blocks, gives this block's part of
the gradients.

Source: Liu et al. 2023, "Ring Attention with Blockwise Transformers"; Dao 2023, "FlashAttention-2", section 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

_HEADS = -3
_FUSED_WIDTHS = 8
"""Widths of heads are multiples of it where a GPU's fused kernels run."""
Made = tuple[torch.Tensor, ...]
Drawn = Sequence[torch.Tensor]
"""What dropout is drawn again from."""


class Scoring(NamedTuple):
    """What is done to scores besides a mask.

    Attributes:
        causal: whether queries see no later keys. scale: None for torch's. dropout: share of weights that is dropped.
    """

    causal: bool
    scale: float | None
    dropout: float


def attend(tensors: Made, mask: torch.Tensor | None, scoring: Scoring) -> tuple[torch.Tensor, torch.Tensor, Drawn]:
    """Output (samples, heads, queries, width), log-sum-exp of scores (samples, heads, queries), and what was drawn.

    Args:
        tensors: query, key, value. mask: as torch's attention takes it.
    """
    causal, scale, dropout = scoring
    query, *of_keys = tensors
    key, value = (_for_heads(tensor, query) for tensor in of_keys)
    kernel, aten = _fused(query, key, value, mask, dropout), torch.ops.aten
    drawn: Drawn
    if kernel == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
        return out, lse, ()
    if kernel == "flash":
        out, lse, *_, seed, offset, _ = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout, causal, scale=scale
        )
        return out, lse, (seed, offset)
    if kernel == "efficient":
        out, lse, *drawn = aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, dropout, causal, scale=scale
        )
        # Its rows are padded.
        return out, lse[..., : query.shape[-2]], drawn
    scores = _scores(query, key, mask, causal=causal, scale=scale)
    lse = scores.logsumexp(-1)
    weights = _weights(scores, lse)
    drawn = (torch.randint(2**62, (), device=query.device),) if dropout else ()
    return (weights * _kept(weights, drawn, dropout) if dropout else weights) @ value.to(scores.dtype), lse, drawn


def join(
    out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make of an output and its log-sum-exp those with a further block, in place; returns both."""
    total = torch.logaddexp(lse, part_lse.to(lse.dtype))
    # Rows that see nothing so far weigh nothing.
    before, now = ((log_sum - total).exp_().nan_to_num_(0.0).unsqueeze(-1) for log_sum in (lse, part_lse))
    out.mul_(before).addcmul_(part.to(out.dtype), now.to(out.dtype))
    lse.copy_(total)
    return out, lse


def differentiate(
    tensors: Made, mask: torch.Tensor | None, drawn: Drawn, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value through one block.

    Args:
        tensors: gradient of the output, query, key, value; output and log-sum-exp over all blocks.
        drawn: with this block.
    """
    gradient, query, key, value, out, lse = tensors
    heads = key.shape[_HEADS]
    key, value = (_for_heads(tensor, query) for tensor in (key, value))
    kernel = _fused(query, key, value, mask, scoring.dropout)
    given = gradient, query, key, value, out, lse
    made = _differentiate_fused(kernel, given, drawn, scoring) if kernel else _products(given, mask, drawn, scoring)
    return made[0], _of_groups(made[1], heads), _of_groups(made[2], heads)


def _products(tensors: Made, mask: torch.Tensor | None, drawn: Drawn, scoring: Scoring) -> Made:
    gradient, query, key, value, out, lse = tensors
    scores = _scores(query, key, mask, causal=scoring.causal, scale=scoring.scale)
    weights, wide = _weights(scores, lse), gradient.to(scores.dtype)
    kept = _kept(weights, drawn, scoring.dropout) if scoring.dropout else None
    of_value = (weights if kept is None else weights * kept).mT @ wide
    of_weights = wide @ value.to(scores.dtype).mT
    if kept is not None:
        of_weights *= kept
    of_scores = weights * (of_weights - (wide * out).sum(-1, keepdim=True)) * _scale(query, scoring.scale)
    return of_scores @ key.to(scores.dtype), of_scores.mT @ query.to(scores.dtype), of_value


def _kept(weights: torch.Tensor, drawn: Drawn, dropout: float) -> torch.Tensor:
    """What weights are taken times: 0 where they are dropped; alike whenever the same was drawn."""
    generator = torch.Generator(weights.device).manual_seed(int(drawn[0]))
    return torch.empty_like(weights).bernoulli_(1 - dropout, generator=generator).div_(1 - dropout)


def _differentiate_fused(kernel: str, tensors: Made, drawn: Drawn, scoring: Scoring) -> Made:
    gradient, query, key, value, out, lse = tensors
    causal, scale, dropout = scoring
    aten, given = torch.ops.aten, (gradient if gradient.stride(-1) == 1 else gradient.contiguous(), query, key, value)
    if kernel == "cpu":
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return tuple(backward(*given, out, lse, 0.0, causal, scale=scale))
    if kernel == "flash":
        lengths: Any = None, None, query.shape[-2], key.shape[-2]
        flash = aten._scaled_dot_product_flash_attention_backward
        return tuple(flash(*given, out, lse.contiguous(), *lengths, dropout, causal, *drawn, scale=scale))
    rows = -(-query.shape[-2] // 32) * 32
    padded = torch.nn.functional.pad(lse, (0, rows - lse.shape[-1]))
    efficient = aten._scaled_dot_product_efficient_attention_backward
    wanted = [True, True, True, False]
    return tuple(efficient(*given, None, out, padded, *drawn, dropout, wanted, causal, scale=scale)[:3])


def _fused(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, dropout: float
) -> str:
    """Which of torch's fused kernels takes the operands; empty for none."""
    alike = query.shape[-1] == key.shape[-1] == value.shape[-1]
    if mask is not None or not alike or query.dim() != len("NHLE"):
        return ""
    if query.device.type == "cpu":
        return "" if dropout else "cpu"
    if query.device.type != "cuda" or query.dtype == torch.float64 or query.shape[-1] % _FUSED_WIDTHS:
        return ""
    return "efficient" if query.dtype == torch.float32 else "flash"


def _scale(query: torch.Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def _scores(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, *, causal: bool, scale: float | None
) -> torch.Tensor:
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide) @ key.to(wide).mT * _scale(query, scale)
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask


def _weights(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Probabilities, given the log-sum-exp; 0 in rows that see nothing."""
    return (scores - lse.masked_fill(lse.isinf(), 0.0).unsqueeze(-1)).exp()


def _for_heads(tensor: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Keys or values, each as often as heads of queries share it."""
    shared = query.shape[_HEADS] // tensor.shape[_HEADS]
    return tensor if shared == 1 else tensor.repeat_interleave(shared, _HEADS)


def _of_groups(gradient: torch.Tensor, heads: int) -> torch.Tensor:
    """The sum over heads of queries that share a head of keys."""
    samples, *_, length, width = gradient.shape
    return gradient if gradient.shape[_HEADS] == heads else gradient.view(samples, heads, -1, length, width).sum(2)
