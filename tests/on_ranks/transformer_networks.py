"""Transformers whose tensor parallel training is held against the serial one; of transformers' own, tiny ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from paradl_bench.network.models.token_tasks import MaskedTokens, NextToken
from paradl_bench.network.models.torchvision_import import import_torchvision_models

WIDTH, TOKENS = 12, 6


class Own(nn.Module):
    """One fused projection for queries, keys and values, heads counted out, a mask with heads, a gated perceptron."""

    input_shape = (TOKENS, WIDTH)
    heads = 4

    def __init__(self) -> None:
        super().__init__()
        self.norm0, self.norm1, self.norm2 = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 10), nn.Linear(WIDTH, 10)
        self.down = nn.Linear(10, WIDTH, bias=False)
        self.add_attention()
        # A model's last linear layer tells its classes.
        self.head1, self.head2 = nn.Linear(WIDTH, 8), nn.Linear(8, 5)

    def add_attention(self) -> None:
        self.distances = nn.Embedding(TOKENS, self.heads)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        at = torch.arange(tokens, device=x.device)
        slopes = torch.arange(1, self.heads + 1, device=x.device).view(1, -1, 1, 1)
        distance = (at[:, None] - at[None, :]).abs()
        scores = q @ k.transpose(-2, -1) / q.size(-1) ** 0.5 + self.distances(distance).permute(2, 0, 1)
        weights = F.softmax(scores - distance * slopes, dim=3)
        return self.out((weights @ v).transpose(1, 2).contiguous().view(batch, tokens, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm0(x)
        x = x + self.attend(self.norm1(x))
        y = self.norm2(x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return self.head2(F.relu_(self.head1(x.mean(1))))


class Split(Own):
    """Projections that are split and chunked, attention in one call, a causal one, fewer keys than queries."""

    def add_attention(self) -> None:
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out2 = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm3 = nn.LayerNorm(WIDTH)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.view(*part.shape[:-1], self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(WIDTH, dim=2)
        )
        once = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = self.norm3(self.out(once.transpose(1, 2).flatten(2)))
        return x + self.grouped(x)

    def grouped(self, x: torch.Tensor) -> torch.Tensor:
        width, pairs = WIDTH // self.heads, self.heads // 2
        k, v = (part.unflatten(-1, (pairs, width)).transpose(1, 2) for part in self.kv(x).chunk(2, dim=-1))
        q = self.q(x).view(len(x), TOKENS, self.heads, width).transpose(1, 2)
        k, v = (
            part[:, :, None].expand(len(x), pairs, 2, TOKENS, width).reshape(len(x), self.heads, TOKENS, width)
            for part in (k, v)
        )
        return self.out2(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(len(x), TOKENS, -1))


class _Sized(nn.Module):
    """One of transformers' models that reads embedded tokens, with a head on what it makes of the last one."""

    input_shape = (TOKENS, WIDTH)

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.head = nn.Linear(WIDTH, 5)

    def inner(self, x: torch.Tensor) -> Any:
        return self.model(inputs_embeds=x).last_hidden_state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x)[:, -1])


def bert() -> nn.Module:
    # transformers imports torchvision where there is one.
    import_torchvision_models()
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertModel

    config = BertConfig(
        hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, intermediate_size=22, vocab_size=30,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return _Sized(BertModel(config, add_pooling_layer=False))


def dropping() -> nn.Module:
    """GPT-2 with dropout, in and behind attention."""
    return gpt2(0.3)


def gpt2(dropout: float = 0.0) -> nn.Module:
    import_torchvision_models()
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Model

    from paradl_bench.network.models.transformer_families import WITHOUT_MASKS

    config = GPT2Config(
        n_embd=WIDTH, n_layer=2, n_head=4, vocab_size=30, n_positions=8, bos_token_id=0, eos_token_id=0,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, use_cache=False,
        attn_implementation=WITHOUT_MASKS,
    )  # fmt: skip
    return _Sized(GPT2Model(config))


class _EncoderDecoder(_Sized):
    def inner(self, x: torch.Tensor) -> Any:
        return self.model(inputs_embeds=x, decoder_inputs_embeds=x[:, :3]).last_hidden_state


def t5() -> nn.Module:
    import_torchvision_models()
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Model

    config = T5Config(
        d_model=WIDTH, d_kv=3, d_ff=18, num_layers=2, num_heads=4, vocab_size=30, dropout_rate=0.0,
        feed_forward_proj="gated-gelu", use_cache=False,
    )  # fmt: skip
    return _EncoderDecoder(T5Model(config))


class Fused(Own):
    """One projection for queries, keys and values, of which keys and values have half as many heads."""

    def add_attention(self) -> None:
        self.qkv = nn.Linear(WIDTH, 2 * WIDTH)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        head = WIDTH // self.heads
        parts = self.qkv(x).split([WIDTH, WIDTH // 2, WIDTH // 2], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, head)).transpose(1, 2) for part in parts)
        k, v = (part[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for part in (k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Scaled(Own):
    """Norms of each head's queries and keys, of which one is shared, and scales that all heads have in common."""

    def add_attention(self) -> None:
        head = WIDTH // self.heads
        self.of_both, self.of_keys = nn.LayerNorm(head), nn.RMSNorm(head)
        self.gain, self.temperature = nn.Parameter(torch.rand(head)), nn.Parameter(torch.zeros(()))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        q, k = (self.of_both(q) * (1 + self.gain)).to(q.device), self.of_keys(self.of_both(k)) * self.temperature.exp()
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Tied(nn.Module):
    """Token ids to logits: the embedding is the output layer too, and the first block's projection the last one's."""

    def __init__(self) -> None:
        super().__init__()
        self.token_task = NextToken(vocabulary=17, sequence=TOKENS)
        self.embedding = nn.Embedding(17, WIDTH)
        self.places = nn.Parameter(torch.randn(TOKENS, WIDTH))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.ups = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(3))
        self.downs = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(3))
        self.ups[2].weight = self.ups[0].weight
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + self.places
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + down(F.gelu(up(norm(x))))
        return self.logits(self.norm(x))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.embedding.weight)


class Untied(Tied):
    """Logits of a weight of their own, with a bias; a token that pads, whose embedding is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, WIDTH, padding_idx=11)
        self.head = nn.Linear(WIDTH, 17)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * torch.tanh(self.head(x) / 2)


READ = 8


class Reading(nn.Module):
    """Token ids to logits: positions that are parameters, a mask of its own, rows of all samples, parts of one tensor.

    Args:
        masked: whether some targets are left out, not as many on each part of a sequence.
    """

    heads = 3

    def __init__(self, *, masked: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.token_task = (
            MaskedTokens(vocabulary=17, sequence=READ, mask_token=3)
            if masked
            else NextToken(vocabulary=17, sequence=READ)
        )
        self.dropout = dropout
        self.embedding = nn.Embedding(17, WIDTH)
        self.places = nn.Parameter(torch.randn(READ, WIDTH))
        self.weight = nn.Parameter(torch.randn(WIDTH, 3 * WIDTH) / WIDTH)
        self.out, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 17, bias=False)

    def mask(self, distance: torch.Tensor) -> torch.Tensor:
        return distance < 5

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + self.places
        samples, tokens, width = x.shape
        q, k, v = (x @ self.weight).view(samples, tokens, 3, self.heads, -1).unbind(2)
        at = torch.arange(tokens, device=x.device)
        near = self.mask((at[:, None] - at[None, :]).abs())
        dropout = self.dropout if self.training else 0.0
        a = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)), near, dropout)
        x = F.dropout(x + self.out(a.transpose(1, 2).reshape(samples, -1, width)), dropout)
        rows = self.norm(x).reshape(samples * tokens, width)
        rows = rows * F.softmax(self.gate(rows), -1)
        return self.head(rows.unflatten(0, (samples, tokens)) + x.mean(-1, keepdim=True) * (at[:, None] + 1))


class Biased(Reading):
    """What is added to scores is learned, a number a head."""

    heads = 4

    def __init__(self) -> None:
        super().__init__()
        self.slopes = nn.Parameter(torch.randn(self.heads))

    def mask(self, distance: torch.Tensor) -> torch.Tensor:
        return self.slopes[:, None, None] * distance


def masked() -> nn.Module:
    return Reading(masked=True)


def drawing() -> nn.Module:
    return Reading(dropout=0.4)


def _language_model(family: str, **changes: Any) -> nn.Module:
    from paradl_bench.network.models.language_models import build_language_model

    return build_language_model(family, vocab_size=19, **changes)


def gpt2_tokens() -> nn.Module:
    return _language_model(
        "gpt2", n_embd=WIDTH, n_layer=2, n_head=4, n_positions=READ, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )


def llama_tokens(key_heads: int = 2) -> nn.Module:
    return _language_model(
        "llama", hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=key_heads, max_position_embeddings=READ,
    )  # fmt: skip


def one_key_head() -> nn.Module:
    return llama_tokens(1)


def frozen_attention() -> nn.Module:
    model = llama_tokens()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("attn" not in name)
    return model


def bert_tokens() -> nn.Module:
    return _language_model(
        "bert", hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, intermediate_size=22,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=READ,
    )  # fmt: skip


_TO_EXPERTS = {
    "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": READ, "num_experts_per_tok": 2,
}  # fmt: skip


def mixtral_tokens() -> nn.Module:
    return _language_model("mixtral", num_local_experts=4, **_TO_EXPERTS)


def qwen_tokens() -> nn.Module:
    """An expert that all tokens go to beside those that they are sent to."""
    return _language_model(
        "qwen2_moe", **_TO_EXPERTS, moe_intermediate_size=6, shared_expert_intermediate_size=10, num_experts=8
    )


class Sorted(nn.Module):
    """Token ids to logits: rows sorted by expert by hand, two products of the same rows, one expert a token."""

    experts = 4

    def __init__(self) -> None:
        super().__init__()
        self.token_task = NextToken(vocabulary=17, sequence=READ)
        self.embedding = nn.Embedding(17, WIDTH)
        self.router = nn.Linear(WIDTH, self.experts)
        self.gate, self.up = (nn.Parameter(torch.randn(self.experts, WIDTH, 8) / 4) for _ in range(2))
        self.down = nn.Parameter(torch.randn(self.experts, 8, WIDTH) / 4)
        self.head = nn.Linear(WIDTH, 17)

    def product(self, rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        # torch's own takes no double precision.
        if rows.dtype == torch.float64:
            import transformers.integrations.moe  # noqa: F401

            return torch.ops.transformers.grouped_mm_fallback(rows, matrices, ends)
        return F.grouped_mm(rows, matrices, offs=ends)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        rows = x.flatten(0, 1)
        weight, chosen = self.choose(rows)
        order, ends = self.order(chosen), self.ends(chosen)
        sent = rows[order]
        inner = F.silu(self.product(sent, self.gate, ends)) * self.product(sent, self.up, ends)
        made = self.put_back(self.product(inner, self.down, ends), order) * weight.unsqueeze(-1)
        return self.head(x + made.view_as(x))

    def choose(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weight, chosen = F.softmax(self.router(rows), -1).max(-1)
        return weight, chosen

    def order(self, chosen: torch.Tensor) -> torch.Tensor:
        return chosen.argsort()

    def ends(self, chosen: torch.Tensor) -> torch.Tensor:
        return F.one_hot(chosen, self.experts).sum(0).cumsum(0).to(torch.int32)

    def put_back(self, made: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        return made[order.argsort()]


class Added(Sorted):
    """Rows are added to zeros where they were: what takes them back reads another tensor first."""

    def put_back(self, made: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        return made.new_zeros(made.shape).index_add(0, order, made)


class Skewed(Sorted):
    """All tokens go to one expert: some ranks get no rows."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.router.bias[1] = 100.0


class Latent(Sorted):
    """Two experts a token, chosen among groups; keys and values of few numbers, joined in place; complex angles."""

    experts, groups, heads, each = 8, 4, 4, 2

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.latent = nn.Linear(WIDTH, 6 * self.heads), nn.Linear(WIDTH, 7)
        self.expand, self.out = nn.Linear(5, 7 * self.heads), nn.Linear(3 * self.heads, WIDTH)

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        at = torch.arange(x.size(-2), device=x.device, dtype=x.dtype)[:, None] / 2
        turns = torch.polar(torch.ones_like(at), at)
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
        return torch.view_as_real(pairs * turns.unsqueeze(0)).flatten(3).type_as(x)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        samples, tokens, _ = x.shape
        whole, turning = self.queries(x).view(samples, tokens, -1, 6).transpose(1, 2).split([4, 2], -1)
        few, shared = self.latent(x).split([5, 2], -1)
        keys, values = self.expand(few).view(samples, tokens, -1, 7).transpose(1, 2).split([4, 3], -1)
        shared = self.turned(shared.view(samples, 1, tokens, 2)).expand(-1, self.heads, -1, -1)
        joined = keys.new_empty(*keys.shape[:-1], 6)
        joined[..., :4].copy_(keys)
        joined[..., 4:].copy_(shared)
        q = torch.cat([whole, self.turned(turning)], -1)
        found = F.scaled_dot_product_attention(q, joined, values, is_causal=True)
        return x + self.out(found.transpose(1, 2).reshape(samples, tokens, -1))

    def choose(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.router(rows).sigmoid()
        by_group = scores.view(-1, self.groups, self.experts // self.groups)
        best = by_group.topk(2, dim=-1)[0].sum(-1).topk(2, dim=-1, sorted=False)[1]
        taken = torch.zeros_like(by_group[..., 0]).scatter_(1, best, 1).unsqueeze(-1).expand_as(by_group)
        allowed = scores.masked_fill(~taken.reshape(-1, self.experts).bool(), float("-inf"))
        chosen = allowed.topk(self.each, dim=-1, sorted=False)[1]
        weight = scores.gather(1, chosen)
        weight /= weight.sum(-1, keepdim=True) + 1e-20
        return weight, chosen

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.attend(self.embedding(ids))
        weight, chosen = self.choose(x.flatten(0, 1))
        order, ends = self.order(chosen.flatten()), self.ends(chosen.flatten())
        sent = x.flatten(0, 1)[order // self.each]
        inner = F.silu(self.product(sent, self.gate, ends)) * self.product(sent, self.up, ends)
        made = self.product(inner, self.down, ends) * weight.flatten()[order].unsqueeze(-1)
        return self.head(x + self.put_back(made, order).view(*chosen.shape, -1).sum(-2).view_as(x))
