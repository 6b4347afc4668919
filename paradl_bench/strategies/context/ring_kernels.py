"""Attention with a block of keys, its log-sum-exp, and its gradients given those of all blocks.

Fused kernels of torch where they take the operands; where they do not, as with a mask, the two products by themselves.
A kernel's backward, given the output and the log-sum-exp over all blocks, gives this block's part of the gradients.

Source: Liu et al. 2023, "Ring Attention with Blockwise Transformers"; Dao 2023, "FlashAttention-2", section 3.1.
"""

from __future__ import annotations

import math
from typing import Any

import torch

_HEADS = -3
_FUSED_WIDTHS = 8
"""Widths of heads are multiples of it where a GPU's fused kernels run."""
Made = tuple[torch.Tensor, ...]


def attend(
    tensors: Made, mask: torch.Tensor | None, *, causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (samples, heads, queries, width) and log-sum-exp of scores (samples, heads, queries).

    Args:
        tensors: query, key, value. mask: as torch's attention takes it. scale: of scores; None for torch's.
    """
    query, *of_keys = tensors
    key, value = (_for_heads(tensor, query) for tensor in of_keys)
    kernel, aten = _fused(query, key, value, mask), torch.ops.aten
    if kernel == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
        return out, lse
    if kernel == "flash":
        out, lse, *_ = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)
        return out, lse
    if kernel == "efficient":
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, causal, scale=scale
        )
        # Its rows are padded.
        return out, lse[..., : query.shape[-2]]
    scores = _scores(query, key, mask, causal=causal, scale=scale)
    lse = scores.logsumexp(-1)
    return _weights(scores, lse) @ value.to(scores.dtype), lse


def join(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Make of an output and its log-sum-exp those with a further block, in place."""
    total = torch.logaddexp(lse, part_lse.to(lse.dtype))
    # Rows that see nothing so far weigh nothing.
    before, now = ((each - total).exp_().nan_to_num_(0.0).unsqueeze(-1) for each in (lse, part_lse))
    out.mul_(before).addcmul_(part.to(out.dtype), now.to(out.dtype))
    lse.copy_(total)


def differentiate(
    tensors: Made, mask: torch.Tensor | None, *, causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value through one block.

    Args:
        tensors: gradient of the output, query, key, value; output and log-sum-exp over all blocks.
    """
    gradient, query, key, value, out, lse = tensors
    heads = key.shape[_HEADS]
    key, value = (_for_heads(tensor, query) for tensor in (key, value))
    kernel = _fused(query, key, value, mask)
    if kernel:
        made = _differentiate_fused(kernel, (gradient, query, key, value, out, lse), causal=causal, scale=scale)
    else:
        scores = _scores(query, key, mask, causal=causal, scale=scale)
        weights, wide = _weights(scores, lse), gradient.to(scores.dtype)
        of_weights = wide @ value.to(scores.dtype).mT - (wide * out).sum(-1, keepdim=True)
        of_scores = weights * of_weights * _scale(query, scale)
        of_query, of_key = of_scores @ key.to(scores.dtype), of_scores.mT @ query.to(scores.dtype)
        made = of_query, of_key, weights.mT @ wide
    return made[0], _of_groups(made[1], heads), _of_groups(made[2], heads)


def _differentiate_fused(kernel: str, tensors: Made, *, causal: bool, scale: float | None) -> Made:
    gradient, query, key, value, out, lse = tensors
    aten, given = torch.ops.aten, (gradient if gradient.stride(-1) == 1 else gradient.contiguous(), query, key, value)
    if kernel == "cpu":
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return tuple(backward(*given, out, lse, 0.0, causal, scale=scale))
    # Of dropout, which there is none of.
    seed, offset = (torch.zeros((), dtype=torch.int64, device=query.device) for _ in range(2))
    if kernel == "flash":
        lengths: Any = None, None, query.shape[-2], key.shape[-2]
        flash = aten._scaled_dot_product_flash_attention_backward
        return tuple(flash(*given, out, lse.contiguous(), *lengths, 0.0, causal, seed, offset, scale=scale))
    rows = -(-query.shape[-2] // 32) * 32
    padded = torch.nn.functional.pad(lse, (0, rows - lse.shape[-1]))
    efficient = aten._scaled_dot_product_efficient_attention_backward
    wanted = [True, True, True, False]
    return tuple(efficient(*given, None, out, padded, seed, offset, 0.0, wanted, causal, scale=scale)[:3])


def _fused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> str:
    """Which of torch's fused kernels takes the operands; empty for none."""
    alike = query.shape[-1] == key.shape[-1] == value.shape[-1]
    if mask is not None or not alike or query.dim() != len("NHLE"):
        return ""
    if query.device.type == "cpu":
        return "cpu"
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
