"""Steps of language models, which the family of decoders alone draws: attention with its norm, positions, norms."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from random_modules.operation import SEQUENCE, Parts, Sight, operation

NEVER = 0.0
"""The weight of what no other family draws."""


def draw_norm(rng: Random, sight: Sight) -> dict[str, Any]:
    return {"features": sight.features, "root_mean_square": rng.random() < 0.5}


def build_norm(features: int, root_mean_square: bool) -> Parts:
    return {"": nn.RMSNorm(features) if root_mean_square else nn.LayerNorm(features)}


@operation(SEQUENCE, draw=draw_norm, build=build_norm, weight=NEVER)
def token_norm(own: Parts, x: torch.Tensor, **_: Any) -> torch.Tensor:
    return own[""](x)


def draw_grouped(rng: Random, sight: Sight) -> dict[str, Any] | None:
    if sight.features % 4:
        return None
    heads = rng.choice([2, 4, 4])
    return {
        "features": sight.features,
        "heads": heads,
        "shared": rng.choice([1, 1, 2]) if heads == 4 else 1,
        "way": rng.choice(["expand", "repeat", "kernel"]),
        "fused": rng.random() < 0.3,
        "turned": rng.random() < 0.4 and sight.features // heads % 2 == 0,
        "causal": rng.random() < 0.7,
        "bias": rng.random() < 0.5,
        "norm": rng.choice(["before", "before", "behind", "none"]),
    }


def build_grouped(features: int, heads: int, shared: int, fused: bool, bias: bool, norm: str, **_: Any) -> Parts:
    few = features // shared
    parts: Parts = {"out": nn.Linear(features, features, bias=bias)}
    if fused:
        parts["qkv"] = nn.Linear(features, features + 2 * few, bias=bias)
    else:
        parts |= {
            name: nn.Linear(features, size, bias=bias) for name, size in (("q", features), ("k", few), ("v", few))
        }
    return parts if norm == "none" else parts | {"norm": nn.LayerNorm(features)}


def turned(x: torch.Tensor) -> torch.Tensor:
    """By an angle that grows with the position: rotary embedding of (batch, heads, tokens, features of a head)."""
    half = x.size(-1) // 2
    rates = 10.0 ** -torch.arange(half, dtype=x.dtype, device=x.device)
    angles = torch.arange(x.size(2), dtype=x.dtype, device=x.device)[:, None] * rates
    cos, sin = (torch.cat([part, part], -1) for part in (angles.cos(), angles.sin()))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def _for_all_heads(x: torch.Tensor, shared: int, way: str) -> torch.Tensor:
    if shared == 1 or way == "kernel":
        return x
    if way == "repeat":
        return x.repeat_interleave(shared, dim=1)
    return x[:, :, None].expand(-1, -1, shared, -1, -1).flatten(1, 2)


@operation(SEQUENCE, draw=draw_grouped, build=build_grouped, weight=NEVER)
def grouped_attention(
    own: Parts, x: torch.Tensor, features: int, heads: int, shared: int, fused: bool, norm: str, **how: Any
) -> torch.Tensor:
    """Fewer keys and values than queries, from separate products or one, with rotary positions or none."""
    given, size = own["norm"](x) if norm == "before" else x, features // heads
    if fused:
        few = features // shared
        parts = own["qkv"](given).split([features, few, few], dim=-1)
    else:
        parts = tuple(own[name](given) for name in ("q", "k", "v"))
    q, k, v = (part.unflatten(-1, (-1, size)).transpose(1, 2) for part in parts)
    if how["turned"]:
        q, k = turned(q), turned(k)
    k, v = (_for_all_heads(part, shared, how["way"]) for part in (k, v))
    by_kernel = shared > 1 and how["way"] == "kernel"
    found = F.scaled_dot_product_attention(q, k, v, is_causal=how["causal"], enable_gqa=by_kernel)
    x = x + own["out"](found.transpose(1, 2).flatten(2))
    return own["norm"](x) if norm == "behind" else x


def draw_perceptron(rng: Random, sight: Sight) -> dict[str, Any]:
    return {
        "features": sight.features,
        "hidden": rng.choice([8, 12, 16]),
        "kind": rng.choice(["plain", "gated", "fused"]),
        "bias": rng.random() < 0.5,
        "in_place": rng.random() < 0.3,
    }


def build_perceptron(features: int, hidden: int, kind: str, bias: bool, in_place: bool) -> Parts:
    parts: Parts = {"norm": nn.RMSNorm(features), "down": nn.Linear(hidden, features, bias=bias)}
    if kind == "fused":
        return parts | {"up": nn.Linear(features, 2 * hidden, bias=bias)}
    parts["up"] = nn.Linear(features, hidden, bias=bias)
    return parts | {"gate": nn.Linear(features, hidden, bias=bias)} if kind == "gated" else parts


@operation(SEQUENCE, draw=draw_perceptron, build=build_perceptron, weight=NEVER)
def perceptron(own: Parts, x: torch.Tensor, kind: str, in_place: bool, **_: Any) -> torch.Tensor:
    given = own["norm"](x)
    inner = own["up"](given)
    if kind == "fused":
        gate, inner = inner.chunk(2, dim=-1)
        inner = F.silu(gate) * inner
    elif kind == "gated":
        inner = F.silu(own["gate"](given), inplace=in_place) * inner
    else:
        inner = F.relu(inner, inplace=in_place)
    made = own["down"](inner)
    if in_place:
        made += x
        return made
    return x + made


def draw_cap(rng: Random, sight: Sight) -> dict[str, Any]:
    return {"at": rng.choice([5.0, 30.0])}


@operation(SEQUENCE, draw=draw_cap, weight=NEVER)
def cap(own: Parts, x: torch.Tensor, at: float) -> torch.Tensor:
    return at * torch.tanh(x / at)
