"""Mixtures of experts, written by hand: a router, rows sorted by expert, grouped products, rows put back."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from random_modules.operation import SEQUENCE, Parts, Sight, operation


def draw_experts(rng: Random, sight: Sight) -> dict[str, Any] | None:
    if sight.features % 4:
        return None
    number = rng.choice([2, 4, 4, 4, 6, 8])
    return {
        "features": sight.features,
        "number": number,
        # Of fp32 torch's kernel wants rows of 16 bytes.
        "hidden": rng.choice([4, 8, 12]),
        "each": rng.choice([1, 2, min(3, number)]),
        "kind": rng.choice(["plain", "gated", "fused"]),
        "held": rng.choice(["as read", "as read", "transposed"]),
        "route": rng.choice(["softmax", "of chosen", "normalised", "sigmoid", "maximum"]),
        "back": rng.choice(["sorted", "index_add", "scatter", "assigned"]),
        "weighted": rng.choice(["behind", "behind", "rows"]),
        "beside": rng.choice(["residual", "residual", "shared", "alone"]),
        "skewed": rng.random() < 0.15,
    }


def _matrices(number: int, read: int, made: int, held: str) -> nn.Parameter:
    shape = (number, made, read) if held == "transposed" else (number, read, made)
    return nn.Parameter(torch.randn(shape) / read**0.5)


def build_experts(features: int, number: int, hidden: int, kind: str, held: str, beside: str, **how: Any) -> Parts:
    router = nn.Linear(features, number)
    if how["skewed"]:
        with torch.no_grad():
            router.bias[number // 2] = 100.0
    parts: Parts = {
        "norm": nn.LayerNorm(features),
        "router": router,
        "up": _matrices(number, features, 2 * hidden if kind == "fused" else hidden, held),
        "down": _matrices(number, hidden, features, held),
    }
    if kind == "gated":
        parts["gate"] = _matrices(number, features, hidden, held)
    return parts | {"shared": nn.Linear(features, features)} if beside == "shared" else parts


def product(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor, held: str) -> torch.Tensor:
    read = matrices.transpose(1, 2) if held == "transposed" else matrices
    # torch's own takes no double precision, and without memory bf16 alone.
    if rows.dtype == torch.float64 or rows.is_meta:
        import transformers.integrations.moe  # noqa: F401

        return torch.ops.transformers.grouped_mm_fallback(rows, read, ends)
    return F.grouped_mm(rows, read, offs=ends)


def chosen_by(scores: torch.Tensor, each: int, route: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and experts of each row, (rows, each)."""
    if route == "maximum" and each == 1:
        weights, chosen = F.softmax(scores, -1).max(-1, keepdim=True)
        return weights, chosen
    if route == "of chosen":
        found, chosen = scores.topk(each, -1)
        return F.softmax(found, -1), chosen
    weights, chosen = (torch.sigmoid(scores) if route == "sigmoid" else F.softmax(scores, -1)).topk(each, -1)
    return (weights / weights.sum(-1, keepdim=True) if route == "normalised" else weights), chosen


def inner_of(own: Parts, rows: torch.Tensor, ends: torch.Tensor, kind: str, held: str) -> torch.Tensor:
    up = product(rows, own["up"], ends, held)
    if kind == "plain":
        return F.gelu(up)
    if kind == "gated":
        return F.silu(product(rows, own["gate"], ends, held)) * up
    gate, up = up.chunk(2, dim=-1)
    return F.silu(gate) * up


def put_back(made: torch.Tensor, order: torch.Tensor, each: int, back: str) -> torch.Tensor:
    """Rows sorted by expert, as (rows, features): the sum over each row's experts."""
    number = order.size(0) // each
    if back == "index_add":
        return made.new_zeros(number, made.size(-1)).index_add(0, order // each, made)
    if back == "scatter":
        at = order.unsqueeze(-1).expand_as(made)
        return torch.zeros_like(made).scatter(0, at, made).view(number, each, -1).sum(1)
    if back == "assigned":
        found = torch.zeros_like(made)
        found[order] = made
        return found.view(number, each, -1).sum(1)
    return made[order.argsort()].view(number, each, -1).sum(1)


@operation(SEQUENCE, draw=draw_experts, build=build_experts, weight=0.0)
def experts(
    own: Parts, x: torch.Tensor, number: int, each: int, kind: str, held: str, route: str, **how: Any
) -> torch.Tensor:
    given = own["norm"](x)
    rows = given.flatten(0, 1)
    weights, chosen = chosen_by(own["router"](rows), each, route)
    which = chosen.flatten()
    order = which.argsort()
    ends = F.one_hot(which, number).sum(0).cumsum(0).to(torch.int32)
    sent, of_rows = rows[order // each], weights.flatten()[order].unsqueeze(-1)
    inner = inner_of(own, sent * of_rows if how["weighted"] == "rows" else sent, ends, kind, held)
    made = product(inner, own["down"], ends, held)
    made = made if how["weighted"] == "rows" else made * of_rows
    found = put_back(made, order, each, how["back"]).view_as(x)
    if how["beside"] == "shared":
        return x + found + own["shared"](given)
    return x + found if how["beside"] == "residual" else found
