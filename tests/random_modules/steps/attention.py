"""Steps on sequences: attention, recurrent layers, positions, and what is pooled from tokens."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from random_modules.operation import SEQUENCE, VECTOR, Parts, Sight, operation


def draw_heads(rng: Random, sight: Sight) -> dict[str, Any] | None:
    heads = [count for count in (1, 2, 4) if sight.features % count == 0]
    return {"features": sight.features, "heads": rng.choice(heads)} if sight.shape[1] > 1 else None


def draw_multi_head(rng: Random, sight: Sight) -> dict[str, Any] | None:
    found = draw_heads(rng, sight)
    return found and {
        **found,
        "batch_first": rng.random() < 0.7,
        "need_weights": rng.random() < 0.3,
        "causal": rng.random() < 0.2,
        "residual": rng.random() < 0.6,
    }


def build_multi_head(features: int, heads: int, batch_first: bool, **_: Any) -> Parts:
    return {"": nn.MultiheadAttention(features, heads, batch_first=batch_first)}


@operation(SEQUENCE, draw=draw_multi_head, build=build_multi_head, weight=3)
def multi_head(
    own: Parts, x: torch.Tensor, batch_first: bool, need_weights: bool, causal: bool, residual: bool, **_: Any
) -> torch.Tensor:
    given = x if batch_first else x.transpose(0, 1)
    mask = torch.ones(x.size(1), x.size(1), dtype=torch.bool, device=x.device).triu(1) if causal else None
    found, _ = own[""](given, given, given, need_weights=need_weights, attn_mask=mask)
    found = found if batch_first else found.transpose(0, 1)
    return x + found if residual else found


def draw_fused(rng: Random, sight: Sight) -> dict[str, Any] | None:
    found = draw_heads(rng, sight)
    ways = ("chunk", "unbind", "index", "split", "view")
    kernels = ("sdpa", "causal", "softmax", "einsum")
    return found and {**found, "way": rng.choice(ways), "kernel": rng.choice(kernels)}


def build_fused(features: int, **_: Any) -> Parts:
    return {"qkv": nn.Linear(features, 3 * features), "out": nn.Linear(features, features)}


def _apart(qkv: torch.Tensor, heads: int, way: str) -> tuple[torch.Tensor, ...]:
    """Query, key and value, each (batch, heads, tokens, features of a head)."""
    batch, tokens, features = qkv.size(0), qkv.size(1), qkv.size(2) // 3
    if way in ("chunk", "split"):
        parts = qkv.chunk(3, dim=-1) if way == "chunk" else qkv.split(features, dim=2)
        return tuple(part.view(batch, tokens, heads, -1).transpose(1, 2) for part in parts)
    if way == "view":
        return qkv.view(batch, tokens, heads, -1).transpose(1, 2).chunk(3, -1)
    stacked = qkv.reshape(batch, tokens, 3, heads, features // heads).permute(2, 0, 3, 1, 4)
    return stacked.unbind(0) if way == "unbind" else (stacked[0], stacked[1], stacked[2])


@operation(SEQUENCE, draw=draw_fused, build=build_fused, weight=4)
def fused_attention(own: Parts, x: torch.Tensor, heads: int, way: str, kernel: str, **_: Any) -> torch.Tensor:
    q, k, v = _apart(own["qkv"](x), heads, way)
    if kernel in ("sdpa", "causal"):
        found = F.scaled_dot_product_attention(q, k, v, is_causal=kernel == "causal")
    else:
        scale = q.size(-1) ** -0.5
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) if kernel == "einsum" else q @ k.transpose(-2, -1)
        found = (scores * scale).softmax(-1) @ v
    return x + own["out"](found.transpose(1, 2).reshape(x.shape))


def build_separate(features: int, heads: int) -> Parts:
    return {name: nn.Linear(features, features) for name in ("q", "k", "v", "out")}


@operation(SEQUENCE, draw=draw_heads, build=build_separate, weight=2)
def separate_attention(own: Parts, x: torch.Tensor, heads: int, features: int) -> torch.Tensor:
    q, k, v = (own[name](x).unflatten(-1, (heads, -1)).transpose(1, 2) for name in ("q", "k", "v"))
    found = F.scaled_dot_product_attention(q, k, v)
    return x + own["out"](found.transpose(1, 2).flatten(2))


def build_encoder_layer(features: int, heads: int, norm_first: bool) -> Parts:
    layer = nn.TransformerEncoderLayer(
        features, heads, 2 * features, dropout=0.0, batch_first=True, norm_first=norm_first
    )
    return {"": layer}


def draw_encoder_layer(rng: Random, sight: Sight) -> dict[str, Any] | None:
    found = draw_heads(rng, sight)
    return found and {**found, "norm_first": rng.random() < 0.5}


@operation(SEQUENCE, draw=draw_encoder_layer, build=build_encoder_layer, weight=1.5)
def encoder_layer(own: Parts, x: torch.Tensor, **_: Any) -> torch.Tensor:
    return own[""](x)


def draw_recurrent(rng: Random, sight: Sight) -> dict[str, Any]:
    return {
        "kind": rng.choice(["gru", "lstm", "rnn"]),
        "features": sight.features,
        "hidden": rng.choice([sight.features, 4, 6]),
        "layers": rng.choice([1, 1, 2]),
        "both_ways": rng.random() < 0.2,
    }


def build_recurrent(kind: str, features: int, hidden: int, layers: int, both_ways: bool) -> Parts:
    made = {"gru": nn.GRU, "lstm": nn.LSTM, "rnn": nn.RNN}[kind]
    return {"": made(features, hidden, layers, batch_first=True, bidirectional=both_ways)}


@operation(SEQUENCE, draw=draw_recurrent, build=build_recurrent, weight=2)
def recurrent(own: Parts, x: torch.Tensor, **_: Any) -> torch.Tensor:
    found, _ = own[""](x)
    return found


@operation(SEQUENCE, draw=draw_recurrent, build=build_recurrent, to=VECTOR)
def last_state(own: Parts, x: torch.Tensor, kind: str, **_: Any) -> torch.Tensor:
    _, state = own[""](x)
    return (state[0] if kind == "lstm" else state)[-1]


def draw_cell(rng: Random, sight: Sight) -> dict[str, Any]:
    return {"features": sight.features, "hidden": rng.choice([4, 6])}


def build_cell(features: int, hidden: int) -> Parts:
    return {"": nn.GRUCell(features, hidden)}


@operation(SEQUENCE, draw=draw_cell, build=build_cell, to=VECTOR, weight=0.7)
def cell_loop(own: Parts, x: torch.Tensor, hidden: int, **_: Any) -> torch.Tensor:
    """Token by token, from a state of zeros that forward makes."""
    state = x.new_zeros(x.size(0), hidden)
    for token in x[:, :4].unbind(1):
        state = own[""](token, state)
    return state


def draw_positions(rng: Random, sight: Sight) -> dict[str, Any]:
    return {
        "tokens": sight.shape[1] + rng.choice([0, 3]),
        "features": sight.features,
        "held": rng.choice(["parameter", "embedding", "buffer"]),
    }


def build_positions(tokens: int, features: int, held: str) -> Parts:
    if held == "embedding":
        return {"": nn.Embedding(tokens, features)}
    values = torch.linspace(-1, 1, tokens * features).view(1, tokens, features)
    return {"": nn.Parameter(values) if held == "parameter" else values}


@operation(SEQUENCE, draw=draw_positions, build=build_positions, weight=2)
def positions(own: Parts, x: torch.Tensor, held: str, **_: Any) -> torch.Tensor:
    tokens = x.size(1)
    if held == "embedding":
        return x + own[""](torch.arange(tokens, device=x.device))
    return x + own[""][:, :tokens]


def build_token(features: int) -> Parts:
    return {"": nn.Parameter(torch.linspace(-1, 1, features).view(1, 1, features))}


def draw_token(rng: Random, sight: Sight) -> dict[str, Any]:
    return {"features": sight.features}


@operation(SEQUENCE, draw=draw_token, build=build_token)
def class_token(own: Parts, x: torch.Tensor, **_: Any) -> torch.Tensor:
    return torch.cat([own[""].expand(x.shape[0], -1, -1), x], dim=1)


def build_query(features: int, heads: int) -> Parts:
    query = nn.Parameter(torch.linspace(-1, 1, features).view(1, 1, features))
    return {"query": query, "attention": nn.MultiheadAttention(features, heads, batch_first=True)}


@operation(SEQUENCE, draw=draw_heads, build=build_query, to=VECTOR)
def query_pool(own: Parts, x: torch.Tensor, **_: Any) -> torch.Tensor:
    """Attention whose query is a parameter."""
    query = own["query"].expand(x.size(0), -1, -1)
    return own["attention"](query, x, x, need_weights=False)[0].squeeze(1)


@operation(SEQUENCE, to=VECTOR, draw=lambda rng, sight: {"way": rng.choice(["mean", "last", "first", "max"])}, weight=2)
def pool_tokens(own: Parts, x: torch.Tensor, way: str) -> torch.Tensor:
    if way in ("last", "first"):
        return x[:, -1 if way == "last" else 0]
    return x.mean(1) if way == "mean" else x.amax(dim=1)


@operation(SEQUENCE, draw=lambda rng, sight: {"reverse": rng.random() < 0.5})
def reorder_tokens(own: Parts, x: torch.Tensor, reverse: bool) -> torch.Tensor:
    order = torch.arange(x.size(1), device=x.device)
    return x.index_select(1, order.flip(0) if reverse else order.roll(1))
