"""Steps that any value takes: activations, residuals, what is done in place, views, constants, questions."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from random_modules.operation import SEQUENCE, Parts, Sight, operation, other

ACTIVATIONS = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "elu": F.elu,
    "leaky": F.leaky_relu,
    "softplus": F.softplus,
    "hardswish": F.hardswish,
    "square": torch.square,
    "abs": torch.abs,
}


@operation(draw=lambda rng, sight: {"name": rng.choice(list(ACTIVATIONS))}, weight=6)
def activation(own: Parts, x: torch.Tensor, name: str) -> torch.Tensor:
    return ACTIVATIONS[name](x)


IN_PLACE = {
    "relu": lambda x: F.relu(x, inplace=True),
    "relu_": lambda x: x.relu_(),
    "elu": lambda x: F.elu(x, inplace=True),
    "leaky": lambda x: F.leaky_relu_(x),
    "clamp": lambda x: x.clamp_(-2, 2),
    "multiply": lambda x: x.mul_(1.5),
    "add": lambda x: x.add_(0.1),
    "hardtanh": lambda x: F.hardtanh(x, inplace=True),
    "divide": lambda x: x.div_(1.25),
}


def draw_in_place(rng: Random, sight: Sight) -> dict[str, Any]:
    return {"name": rng.choice(list(IN_PLACE)), "discarded": rng.random() < 0.4}


@operation(draw=draw_in_place, weight=5)
def in_place(own: Parts, x: torch.Tensor, name: str, discarded: bool) -> torch.Tensor:
    if discarded:
        IN_PLACE[name](x)
        return x
    return IN_PLACE[name](x)


@operation(build=lambda: {"": nn.ReLU(inplace=True)}, weight=2)
def relu_module(own: Parts, x: torch.Tensor) -> torch.Tensor:
    return own[""](x)


@operation(draw=other, weight=6)
def residual(own: Parts, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


def draw_residual_in_place(rng: Random, sight: Sight) -> dict[str, Any] | None:
    found = other(rng, sight)
    return found and {**found, "way": rng.choice(["+=", "add_", "-=", "*="])}


@operation(draw=draw_residual_in_place, weight=5)
def residual_in_place(own: Parts, x: torch.Tensor, y: torch.Tensor, way: str) -> torch.Tensor:
    if way == "+=":
        x += y
    elif way == "-=":
        x -= 0.5 * y
    elif way == "*=":
        x *= torch.sigmoid(y)
    else:
        x.add_(y, alpha=0.5)
    return x


@operation(draw=other, weight=2)
def gate(own: Parts, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(y)


@operation(draw=other)
def choose(own: Parts, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, x, 0.1 * y)


@operation(draw=other)
def stack_and_sum(own: Parts, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, y], dim=1).sum(dim=1)


@operation(draw=lambda rng, sight: other(rng, sight) if sight.features <= 12 else None, weight=2)
def join(own: Parts, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, y], dim=2 if x.dim() == 3 and x.shape[2] <= 12 else 1)


def even(rng: Random, sight: Sight) -> dict[str, Any] | None:
    way = rng.choice(["chunk", "split", "slice", "glu"])
    return {"dim": sight.dim, "way": way} if sight.features % 2 == 0 and sight.features > 2 else None


@operation(draw=even, weight=2)
def halves(own: Parts, x: torch.Tensor, dim: int, way: str) -> torch.Tensor:
    half = x.size(dim) // 2
    if way == "glu":
        return F.glu(x, dim)
    if way == "slice":
        first, second = x.narrow(dim, 0, half), x.narrow(dim, half, half)
    else:
        first, second = x.chunk(2, dim) if way == "chunk" else x.split(half, dim)
    return torch.cat([first * torch.sigmoid(second), second], dim)


@operation(draw=lambda rng, sight: {"dim": sight.dim} if 1 < sight.features <= 8 else None)
def unbind_and_stack(own: Parts, x: torch.Tensor, dim: int) -> torch.Tensor:
    first, *rest = x.unbind(dim)
    return torch.stack([*rest, first], dim)


@operation(draw=lambda rng, sight: {"way": rng.choice(["slice", "stride", "index"])} if sight.features > 3 else None)
def take_features(own: Parts, x: torch.Tensor, way: str) -> torch.Tensor:
    if x.dim() == 3:
        x = x.transpose(1, 2)
    found = {"slice": lambda: x[:, 1:], "stride": lambda: x[:, ::2], "index": lambda: x[:, [0, 2, 1, -1]]}[way]()
    return found.transpose(1, 2) if x.dim() == 3 else found


@operation(draw=lambda rng, sight: {"dim": sight.dim, "way": rng.choice(["number", "value"])}, weight=2)
def assign_features(own: Parts, x: torch.Tensor, dim: int, way: str) -> torch.Tensor:
    y = x.clone()
    where = (slice(None),) * dim
    # Behind a norm the mean is 0 but for rounding: what follows would choose by that rounding's sign.
    y[(*where, 0)] = 0.25 if way == "number" else x.mean(dim) + 0.25
    return y


@operation(draw=lambda rng, sight: {"way": rng.choice(["multiply", "add", "view"])}, weight=2)
def change_features(own: Parts, x: torch.Tensor, way: str) -> torch.Tensor:
    y = x + 0.5
    if way == "multiply":
        y[:, :1].mul_(0.5)
    elif way == "add":
        y[:, 0] += 1.0
    else:
        y.view(y.size(0), -1)[:, 0].zero_()
    return y


@operation(draw=lambda rng, sight: {"dim": rng.choice(range(1, len(sight.shape)))})
def softmax(own: Parts, x: torch.Tensor, dim: int) -> torch.Tensor:
    return F.softmax(x, dim=dim) * x.size(dim)


@operation(draw=lambda rng, sight: {"dim": rng.choice(range(1, len(sight.shape)))})
def centre(own: Parts, x: torch.Tensor, dim: int) -> torch.Tensor:
    return (x - x.mean(dim, keepdim=True)) / (1 + x.std(dim, keepdim=True, unbiased=False))


@operation()
def unit_length(own: Parts, x: torch.Tensor) -> torch.Tensor:
    return F.normalize(x + 0.1, dim=1)


@operation(draw=lambda rng, sight: {"way": rng.choice(["detach", "no_grad"])}, weight=2)
def untracked(own: Parts, x: torch.Tensor, way: str) -> torch.Tensor:
    if way == "detach":
        return x - 0.5 * x.detach()
    with torch.no_grad():
        sign = torch.sign(x)
    return x + 0.1 * sign


CONSTANTS = {
    "arange": lambda x: torch.arange(x.size(-1), dtype=x.dtype, device=x.device) / x.size(-1),
    "ones_like": lambda x: torch.ones_like(x) * 0.5,
    "new_full": lambda x: x.new_full((x.shape[-1],), 0.25),
    "zeros": lambda x: torch.zeros(x.size(1), *[1] * (x.dim() - 2), device=x.device) + 0.5,
    "tensor": lambda x: torch.tensor(0.75),
    "cpu": lambda x: torch.ones(1),
    "eye": lambda x: torch.eye(x.size(-1), dtype=x.dtype, device=x.device)[0],
}


@operation(draw=lambda rng, sight: {"name": rng.choice(list(CONSTANTS))}, weight=2)
def constant(own: Parts, x: torch.Tensor, name: str) -> torch.Tensor:
    return x + CONSTANTS[name](x)


@operation(draw=lambda rng, sight: {"dim": sight.dim})
def mask(own: Parts, x: torch.Tensor, dim: int) -> torch.Tensor:
    keep = torch.arange(x.size(-1), device=x.device) % 2 == 0
    return x.masked_fill(keep, 0.0) + x


def draw_condition(rng: Random, sight: Sight) -> dict[str, Any]:
    asked = rng.choice(["training", "attribute", "rank", "last_extent", "grad"])
    return {"asked": asked, "limit": rng.choice([2, 4, 6])}


@operation(draw=draw_condition, weight=2)
def condition(own: Parts, x: torch.Tensor, asked: str, limit: int) -> torch.Tensor:
    answers = {
        "training": lambda: True,
        "attribute": lambda: limit > 3,
        "rank": lambda: x.dim() > 2,
        "last_extent": lambda: x.shape[-1] > limit,
        "grad": torch.is_grad_enabled,
    }
    if answers[asked]():
        return torch.tanh(x)
    return 0.5 * x


@operation(draw=lambda rng, sight: {"way": rng.choice(["permute", "reshape", "contiguous", "to"])})
def there_and_back(own: Parts, x: torch.Tensor, way: str) -> torch.Tensor:
    if way == "permute":
        return x.transpose(1, -1).sigmoid().transpose(1, -1)
    if way == "reshape":
        return x.reshape(x.size(0), -1).tanh().reshape(x.shape)
    return x.to(x.dtype) * 2 if way == "to" else x.contiguous() * 2


def draw_einsum(rng: Random, sight: Sight) -> dict[str, Any] | None:
    equation = "btc,cd->btd" if sight.kind == SEQUENCE else "bc...,cd->bd..."
    return {"features": sight.features, "equation": equation} if sight.features <= 16 else None


def build_einsum(features: int, equation: str) -> Parts:
    return {"": nn.Parameter(torch.eye(features) + 0.1)}


@operation(draw=draw_einsum, build=build_einsum)
def einsum(own: Parts, x: torch.Tensor, features: int, equation: str) -> torch.Tensor:
    return torch.einsum(equation, x, own[""])


def draw_dropout(rng: Random, sight: Sight) -> dict[str, Any]:
    return {"p": rng.choice([0.0, 1.0, 1.0, 0.4]), "way": rng.choice(["module", "function", "eval"])}


def build_dropout(p: float, way: str) -> Parts:
    return {"": nn.Dropout(p)} if way == "module" else {}


@operation(draw=draw_dropout, build=build_dropout)
def dropout(own: Parts, x: torch.Tensor, p: float, way: str) -> torch.Tensor:
    """All or nothing, mostly: what is drawn by chance is held against nothing."""
    if way == "module":
        return x + own[""](x)
    return x + F.dropout(x, p, training=way == "function")
