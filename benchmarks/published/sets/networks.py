"""Networks as publishers trained them, where they are not those of ``paradl-bench models``."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from transformers.modeling_utils import AttentionInterface

from paradl_bench.network.models.language_models import build_language_model
from paradl_bench.network.models.token_tasks import NextToken

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


def bert_large() -> torch.nn.Module:
    """BERT-large, as NeuSight's authors traced it, as are the three that follow."""
    sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    return build_language_model("bert", **sizes, attn_implementation=PRODUCTS)


def _gpt3(width: int, blocks: int, heads: int) -> torch.nn.Module:
    sizes = {"n_embd": width, "n_layer": blocks, "n_head": heads, "n_positions": 2048}
    return build_language_model("gpt2", **sizes, attn_implementation=PRODUCTS)


gpt3_xl, gpt3_27 = partial(_gpt3, 3072, 24, 24), partial(_gpt3, 2560, 32, 32)


def opt_13() -> torch.nn.Module:
    """OPT 1.3B, as a GPT-2 of its sizes with its activation: queries, keys and values are of one product."""
    sizes = {"n_embd": 2048, "n_layer": 24, "n_head": 32, "n_positions": 2048, "vocab_size": 50_272}
    how = {"activation_function": "relu", "attn_pdrop": 0.0, "attn_implementation": PRODUCTS}
    return build_language_model("gpt2", **sizes, **how)


class _MptBlock(torch.nn.Module):
    """A block of MPT, without biases."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.projection = (torch.nn.Linear(width, parts * width, bias=False) for parts in (3, 1))
        self.up, self.down = (
            torch.nn.Linear(width, 4 * width, bias=False),
            torch.nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the next block reads."""
        parts = self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        seen = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(seen.transpose(1, 2).flatten(-2))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm_2(x))))


class _Tied(torch.nn.Module):
    """A causal language model: positions are learnt, the head is the embedding."""

    equal_blocks = ("blocks",)

    def __init__(self, vocabulary: int, tokens: int, width: int, blocks: Iterable[torch.nn.Module]) -> None:
        super().__init__()
        self.token_task = NextToken(vocabulary=vocabulary, sequence=tokens)
        self.embedding, self.positions = torch.nn.Embedding(vocabulary, width), torch.nn.Embedding(tokens, width)
        self.blocks = torch.nn.ModuleList(blocks)
        self.norm, self.head = torch.nn.LayerNorm(width), torch.nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of token ids (batch, tokens)."""
        x = self.embedding(ids) + self.positions(torch.arange(ids.size(1), device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Mpt(_Tied):
    """As llm-foundry's authors trained."""

    def __init__(self, width: int, heads: int, blocks: int) -> None:
        super().__init__(50_368, 2048, width, (_MptBlock(width, heads) for _ in range(blocks)))


mpt_760m = partial(Mpt, 1536, 12, 24)
mpt_1b = partial(Mpt, 2048, 16, 24)
mpt_3b = partial(Mpt, 2560, 20, 32)
mpt_13b = partial(Mpt, 5120, 40, 40)
mpt_30b = partial(Mpt, 7168, 56, 48)
mpt_70b = partial(Mpt, 8192, 64, 80)


class _GptBlock(torch.nn.Module):
    """A block of GPT, with attention in single operations; its softmax masks what lies ahead."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.norm_1, self.norm_2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.projection = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
        self.drop_scores = torch.nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the next block reads."""
        parts = self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        shares = torch.nn.functional.softmax(torch.matmul(query, key.transpose(-1, -2)), dim=-1)
        seen = torch.matmul(self.drop_scores(shares), value)
        x = x + self.projection(seen.transpose(1, 2).flatten(-2))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm_2(x))))


class Gpt(_Tied):
    """As Megatron-LM trains it in fp16, parameters of two bytes."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__(51_200, 1024, width, (_GptBlock(width, 16) for _ in range(blocks)))
        self.to(torch.bfloat16)


gpt_1024_12, gpt_1024_16, gpt_1024_20, gpt_1024_24 = (partial(Gpt, 1024, blocks) for blocks in (12, 16, 20, 24))
gpt_2048_12, gpt_2048_16, gpt_2048_20, gpt_2048_24 = (partial(Gpt, 2048, blocks) for blocks in (12, 16, 20, 24))
