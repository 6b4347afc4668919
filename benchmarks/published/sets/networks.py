"""Networks as publishers trained them, where they are not those of ``paradl-bench models``."""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_utils import AttentionInterface

from paradl_bench.network.models.language_models import build_language_model

PRODUCTS = "products_and_softmax"


def _attention(module: Any, query: Any, key: Any, value: Any, _mask: Any, dropout: float = 0.0, **_: Any) -> Any:
    """As transformers computed it before torch's own kernel: products, a mask, softmax and dropout by themselves."""
    scores = torch.matmul(query, key.transpose(-1, -2)) / query.size(-1) ** 0.5
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    shares = torch.nn.functional.softmax(torch.where(seen, scores, torch.finfo(scores.dtype).min), dim=-1)
    shares = torch.nn.functional.dropout(shares, dropout, module.training)
    return torch.matmul(shares, value).transpose(1, 2), None


AttentionInterface.register(PRODUCTS, _attention)


def gpt2_large() -> torch.nn.Module:
    """GPT-2 large with attention in single operations, as NeuSight's authors traced it."""
    return build_language_model("gpt2", n_embd=1280, n_layer=36, n_head=20, attn_implementation=PRODUCTS)
