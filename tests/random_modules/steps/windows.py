"""Steps on positions: pools, padding, resizing, slices and assignments to them."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from random_modules.operation import IMAGE, VECTOR, Parts, Sight, operation

MAX_POOLS = (F.max_pool1d, F.max_pool2d, F.max_pool3d)
UNPOOLS = (F.max_unpool1d, F.max_unpool2d, F.max_unpool3d)
AVERAGE_POOLS = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
ADAPTIVE_POOLS = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)


def draw_pool(rng: Random, sight: Sight) -> dict[str, Any] | None:
    if min(sight.positions) < 4:
        return None
    return {
        "dims": len(sight.positions),
        "kind": rng.choice(["max", "average"]),
        "kernel_size": rng.choice([2, 3]),
        "stride": rng.choice([1, 2, 2]),
        "padding": rng.choice([0, 0, 1]),
        "ceil_mode": rng.random() < 0.2,
    }


@operation(IMAGE, draw=draw_pool, weight=4)
def pool(own: Parts, x: torch.Tensor, dims: int, kind: str, **arguments: Any) -> torch.Tensor:
    return (MAX_POOLS if kind == "max" else AVERAGE_POOLS)[dims - 1](x, **arguments)


def draw_unpool(rng: Random, sight: Sight) -> dict[str, Any] | None:
    if len(sight.positions) != 2 or min(sight.positions) < 4 or any(size % 2 for size in sight.positions):
        return None
    return {"back": rng.random() < 0.5}


@operation(IMAGE, draw=draw_unpool)
def pool_with_indices(own: Parts, x: torch.Tensor, back: bool) -> torch.Tensor:
    found, indices = F.max_pool2d(x, 2, return_indices=True)
    return x + F.max_unpool2d(torch.tanh(found), indices, 2) if back else found


def draw_adaptive(rng: Random, sight: Sight) -> dict[str, Any] | None:
    size = rng.choice([1, 2, 3])
    return {"dims": len(sight.positions), "size": size} if min(sight.positions) >= size else None


def build_adaptive(dims: int, size: int) -> Parts:
    return {"": ADAPTIVE_POOLS[dims - 1](size)}


@operation(IMAGE, draw=draw_adaptive, build=build_adaptive)
def adaptive_pool(own: Parts, x: torch.Tensor, **_: Any) -> torch.Tensor:
    return own[""](x)


def draw_pad(rng: Random, sight: Sight) -> dict[str, Any] | None:
    if min(sight.positions) < 3:
        return None
    sides = [rng.choice([0, 1, 2]) for _ in range(2 * len(sight.positions))]
    mode = rng.choice(["constant", "reflect", "replicate", "circular"])
    return {"sides": sides, "mode": mode}


@operation(IMAGE, draw=draw_pad)
def pad(own: Parts, x: torch.Tensor, sides: list[int], mode: str) -> torch.Tensor:
    return F.pad(x, tuple(sides), mode=mode)


def draw_interpolate(rng: Random, sight: Sight) -> dict[str, Any] | None:
    if max(sight.positions) > 10:
        return None
    linear = ("linear", "bilinear", "trilinear")[len(sight.positions) - 1]
    return {"mode": rng.choice(["nearest", linear]), "by": rng.choice(["scale", "size"])}


@operation(IMAGE, draw=draw_interpolate)
def interpolate(own: Parts, x: torch.Tensor, mode: str, by: str) -> torch.Tensor:
    if by == "scale":
        return F.interpolate(x, scale_factor=2, mode=mode)
    return F.interpolate(x, size=tuple(size + 2 for size in x.shape[2:]), mode=mode)


def draw_shuffle(rng: Random, sight: Sight) -> dict[str, Any] | None:
    if len(sight.positions) != 2:
        return None
    up = sight.features % 4 == 0 and sight.features > 4 and max(sight.positions) <= 10
    down = not any(size % 2 for size in sight.positions)
    return {"way": rng.choice(["up"] * up + ["down"] * down)} if up or down else None


@operation(IMAGE, draw=draw_shuffle)
def pixel_shuffle(own: Parts, x: torch.Tensor, way: str) -> torch.Tensor:
    return F.pixel_shuffle(x, 2) if way == "up" else F.pixel_unshuffle(x, 2)


@operation(IMAGE, draw=lambda rng, sight: {"dim": 2} if max(sight.positions) <= 10 else None, weight=0.5)
def repeat_interleave(own: Parts, x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.repeat_interleave(2, dim=dim)


@operation(IMAGE, draw=lambda rng, sight: {"channels": sight.features} if sight.features % 2 == 0 else None)
def shuffle_channels(own: Parts, x: torch.Tensor, channels: int) -> torch.Tensor:
    """As ShuffleNet does."""
    apart = x.view(x.size(0), 2, channels // 2, *x.shape[2:]).transpose(1, 2)
    return apart.contiguous().view(x.size(0), channels, *x.shape[2:])


@operation(IMAGE, draw=lambda rng, sight: {"dim": -1} if sight.positions[-1] > 4 else None)
def crop(own: Parts, x: torch.Tensor, dim: int) -> torch.Tensor:
    return x[..., 1:-1]


@operation(IMAGE, draw=lambda rng, sight: {"way": rng.choice(["flip", "roll"])}, weight=0.7)
def turn(own: Parts, x: torch.Tensor, way: str) -> torch.Tensor:
    return x.flip(-1) if way == "flip" else x.roll(1, 2)


@operation(IMAGE, draw=lambda rng, sight: {"dim": rng.choice([2, -1])}, weight=0.7)
def sum_along_positions(own: Parts, x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.cumsum(dim) / x.size(dim)


@operation(IMAGE, draw=lambda rng, sight: {"value": 0.25, "first": rng.choice([True, False])})
def assign_positions(own: Parts, x: torch.Tensor, value: float, first: bool) -> torch.Tensor:
    y = x * 1.5
    if first:
        y[:, :, 0] = value
    else:
        y[..., -1] = x[..., 0]
    return y


@operation(IMAGE, draw=lambda rng, sight: {"way": rng.choice(["multiply", "add", "zero"])})
def change_positions(own: Parts, x: torch.Tensor, way: str) -> torch.Tensor:
    y = torch.tanh(x)
    y = y + x
    if way == "multiply":
        y[:, :, :2].mul_(0.5)
    elif way == "add":
        y[:, :, 1:] += 0.5
    else:
        y.narrow(2, 0, 1).zero_()
    return y


@operation(IMAGE, draw=lambda rng, sight: {"question": rng.choice(["numel", "stride", "shape", "sample", "nelement"])})
def ask_positions(own: Parts, x: torch.Tensor, question: str) -> torch.Tensor:
    """By a number that the value's extents give, one sample's."""
    answers = {
        "numel": lambda: x.numel() // x.size(0),
        "nelement": lambda: torch.numel(x) // len(x),
        "stride": lambda: x.stride(0),
        "shape": lambda: x.shape[1] * x.shape[-1],
        "sample": lambda: x[0].numel(),
    }
    return x * (100 / (100 + answers[question]()))


@operation(IMAGE, draw=lambda rng, sight: {"way": rng.choice(["flat", "view", "amax"])})
def normalise_by_untracked(own: Parts, x: torch.Tensor, way: str) -> torch.Tensor:
    """By what is computed without gradients, over all positions."""
    with torch.no_grad():
        if way == "flat":
            size = x.flatten(1).abs().mean(1)
        elif way == "view":
            size = x.view(x.size(0), -1).pow(2).mean(-1).sqrt()
        else:
            size = x.abs().amax(dim=tuple(range(1, x.dim())))
    return x / (1 + size.view(-1, *[1] * (x.dim() - 1)))


@operation(IMAGE, draw=lambda rng, sight: {"dims": len(sight.positions)})
def broadcast_product(own: Parts, x: torch.Tensor, dims: int) -> torch.Tensor:
    return x * x.mean(dim=tuple(range(2, 2 + dims)), keepdim=True)


@operation(IMAGE, draw=lambda rng, sight: {"dims": len(sight.positions)})
def coordinates(own: Parts, x: torch.Tensor, dims: int) -> torch.Tensor:
    """One more channel, which forward makes of the positions."""
    line = torch.linspace(-1, 1, x.size(-1), dtype=x.dtype, device=x.device)
    return torch.cat([x, line.expand(x.size(0), 1, *x.shape[2:])], 1)


@operation(IMAGE, draw=lambda rng, sight: {} if sight.positions[0] > 1 else None)
def split_positions(own: Parts, x: torch.Tensor) -> torch.Tensor:
    first, second = x.tensor_split(2, dim=2)
    return torch.cat([second, torch.tanh(first)], dim=2)


@operation(IMAGE, to=VECTOR, draw=lambda rng, sight: {"way": rng.choice(["mean", "flatten", "amax", "adaptive"])})
def pool_positions(own: Parts, x: torch.Tensor, way: str) -> torch.Tensor:
    if way == "flatten":
        return x.flatten(1)
    dims = tuple(range(2, x.dim()))
    if way == "adaptive":
        return (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[x.dim() - 3](x, 1).flatten(1)
    return x.mean(dims) if way == "mean" else x.amax(dims)
