"""Networks as Megatron-LM trains them, with the operations of its and TransformerEngine's modules.

Megatron-LM rotates positions by one kernel, which reads and writes what it turns: a product with a number stands for
it. DeepSeek's blocks are those of ``run_pretrain_deepseekv2.sh``: latent attention, one dense block, then experts, with
as many rows for each. One kernel adds up a token's rows. The softmax over a token's experts is left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
import torch.nn.functional as F

from paradl_bench.network.models.token_tasks import NextToken

_NOPE, _ROTATED, _VALUE = 128, 64, 128
"""Features of a head: of queries and keys without and with positions, and of values."""
_QUERY_RANK, _KEY_RANK = 1536, 512
TOKENS = 4096


def _linear(inputs: int, outputs: int) -> torch.nn.Linear:
    return torch.nn.Linear(inputs, outputs, bias=False)


class _LlamaBlock(torch.nn.Module):
    """A block of Llama; see :class:`Llama`."""

    def __init__(self, width: int, heads: int, groups: int, inner: int, *, rotates: bool) -> None:
        super().__init__()
        self.head_width, self.rotates = width // heads, rotates
        self.norm_1, self.norm_2 = torch.nn.RMSNorm(width), torch.nn.RMSNorm(width)
        self.query, self.projection = _linear(width, width), _linear(width, width)
        self.key, self.value = (_linear(width, groups * self.head_width) for _ in range(2))
        self.up, self.down = _linear(width, 2 * inner), _linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the next block reads."""
        read = self.norm_1(x)
        query, key, value = (
            part(read).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        if self.rotates:
            query, key = query * 1.0, key * 1.0
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.projection(seen.transpose(1, 2).flatten(-2))
        gate, up = self.up(self.norm_2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class _Decoder(torch.nn.Module):
    """A causal language model of these blocks."""

    def __init__(self, blocks: Iterable[torch.nn.Module], width: int, vocabulary: int, tokens: int) -> None:
        super().__init__()
        self.token_task = NextToken(vocabulary=vocabulary, sequence=tokens)
        self.embedding = torch.nn.Embedding(vocabulary, width)
        self.blocks = torch.nn.ModuleList(blocks)
        self.norm, self.head = torch.nn.RMSNorm(width), _linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of token ids (batch, tokens)."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Llama(_Decoder):
    """A causal language model as Megatron-LM trains it.

    Args:
        rotates: whether positions are rotated, for which a product with a number stands.
    """

    equal_blocks = ("blocks",)

    def __init__(
        self,
        blocks: int,
        width: int,
        heads: int,
        groups: int,
        inner: int,
        vocabulary: int = 128_256,
        *,
        tokens: int = 4096,
        rotates: bool = False,
    ) -> None:
        made = (_LlamaBlock(width, heads, groups, inner, rotates=rotates) for _ in range(blocks))
        super().__init__(made, width, vocabulary, tokens)


class _Latent(torch.nn.Module):
    """DeepSeek's attention: queries, and keys with values, pass through few features."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_down, self.query_norm = _linear(width, _QUERY_RANK), torch.nn.RMSNorm(_QUERY_RANK)
        self.query_up = _linear(_QUERY_RANK, heads * (_NOPE + _ROTATED))
        self.key_down, self.key_norm = _linear(width, _KEY_RANK + _ROTATED), torch.nn.RMSNorm(_KEY_RANK)
        self.key_up = _linear(_KEY_RANK, heads * (_NOPE + _VALUE))
        self.projection = _linear(heads * _VALUE, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of what a norm made of the block's input."""
        query = self._by_head(self.query_up(self.query_norm(self.query_down(x))))
        few, turned = self.key_down(x).split([_KEY_RANK, _ROTATED], dim=-1)
        key, value = self._by_head(self.key_up(self.key_norm(few))).split([_NOPE, _VALUE], dim=-1)
        # One kernel turns the positions and writes keys and values.
        key = torch.cat([key, turned.unsqueeze(1).expand(-1, self.heads, -1, -1)], dim=-1)
        seen = F.scaled_dot_product_attention(query, key, value.contiguous(), is_causal=True)
        made: torch.Tensor = self.projection(seen.transpose(1, 2).flatten(-2))
        return made

    def _by_head(self, features: torch.Tensor) -> torch.Tensor:
        return features.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class _Gated(torch.nn.Module):
    """Up, gate and down."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = _linear(width, 2 * inner), _linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of what a norm made."""
        gate, up = self.up(x).chunk(2, dim=-1)
        made: torch.Tensor = self.down(F.silu(gate) * up)
        return made


class _Experts(torch.nn.Module):
    """A router, experts as two grouped products, and one that all tokens go to."""

    def __init__(self, width: int, inner: int, shared: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.experts, self.chosen = experts, chosen
        self.router, self.shared = _linear(width, experts), _Gated(width, shared)
        self.up = torch.nn.Parameter(torch.empty(experts, width, 2 * inner))
        self.down = torch.nn.Parameter(torch.empty(experts, inner, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of what a norm made."""
        tokens = x.flatten(0, 1)
        weight, chosen = self.router(tokens).topk(self.chosen, -1)
        order = chosen.flatten().argsort()
        ends = F.one_hot(chosen.flatten(), self.experts).sum(0).cumsum(0).to(torch.int32)
        whose = order // self.chosen
        gate, up = F.grouped_mm(tokens.index_select(0, whose), self.up, offs=ends).chunk(2, dim=-1)
        made = F.grouped_mm(F.silu(gate) * up, self.down, offs=ends)
        together = torch.zeros_like(tokens).index_add(0, whose, made)
        return (together * weight[:, :1]).view_as(x) + self.shared(x)


class _Block(torch.nn.Module):
    """Attention, then a dense part or experts."""

    def __init__(self, width: int, heads: int, inner: torch.nn.Module) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = torch.nn.RMSNorm(width), torch.nn.RMSNorm(width)
        self.attention, self.inner = _Latent(width, heads), inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the next block reads."""
        x = x + self.attention(self.norm_1(x))
        made: torch.Tensor = x + self.inner(self.norm_2(x))
        return made


class DeepSeek(_Decoder):
    """One dense block, and the others with experts."""

    def __init__(
        self, width: int, dense: int, inner: int, shared: int, experts: int, chosen: int, vocabulary: int
    ) -> None:
        parts = [_Gated(width, dense), *(_Experts(width, inner, shared, experts, chosen) for _ in range(3))]
        super().__init__((_Block(width, 128, part) for part in parts), width, vocabulary, TOKENS)


llama2_7b = partial(Llama, 32, 4096, 32, 32, 11008, 32_000)
llama3_70b = partial(Llama, 12, 8192, 64, 8, 28672, rotates=True)
llama3_405b = partial(Llama, 4, 16384, 128, 16, 53248, rotates=True)
llama3_70b_32k, llama3_70b_128k = (partial(llama3_70b, tokens=tokens) for tokens in (32768, 131072))
llama3_405b_32k, llama3_405b_128k = (partial(llama3_405b, tokens=tokens) for tokens in (32768, 131072))
deepseek_v2 = partial(DeepSeek, 5120, 12288, 1536, 3072, 160, 6, 102_400)
deepseek_v3 = partial(DeepSeek, 7168, 18432, 2048, 2048, 256, 8, 129_280)
