"""Steps that hold layers: what users write as modules of torch."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from random_modules.operation import IMAGE, SEQUENCE, VECTOR, Parts, Sight, operation, other, width

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def draw_conv(rng: Random, sight: Sight) -> dict[str, Any] | None:
    channels, smallest = sight.features, min(sight.positions)
    kernel = rng.choice([1, 3, 3, 3, 5])
    if smallest < kernel:
        kernel = 1
    groups = rng.choice([1, 1, 1, 1, 2, channels])
    filters = width(rng, sight)
    if channels % groups or filters % groups:
        groups = 1
    padding = rng.choice([kernel // 2, kernel // 2, kernel // 2, 0])
    return {
        "dims": len(sight.positions),
        "in_channels": channels,
        "out_channels": filters,
        "kernel_size": kernel,
        "padding": padding,
        "stride": rng.choice([1, 1, 1, 2]) if smallest > 5 else 1,
        "groups": groups,
        "bias": rng.random() < 0.7,
        "padding_mode": rng.choice(["zeros"] * 6 + ["reflect", "circular", "replicate"]) if padding else "zeros",
    }


def build_conv(dims: int, **arguments: Any) -> Parts:
    return {"": CONVOLUTIONS[dims - 1](**arguments)}


@operation(IMAGE, draw=draw_conv, build=build_conv, weight=14)
def conv(own: Parts, x: torch.Tensor, **_: Any) -> torch.Tensor:
    return own[""](x)


def draw_conv_transpose(rng: Random, sight: Sight) -> dict[str, Any] | None:
    if max(sight.positions) > 10:
        return None
    stride = rng.choice([1, 2, 2])
    return {
        "dims": len(sight.positions),
        "in_channels": sight.features,
        "out_channels": width(rng, sight),
        "kernel_size": rng.choice([stride, 3]),
        "stride": stride,
        "bias": rng.random() < 0.7,
    }


def build_conv_transpose(dims: int, **arguments: Any) -> Parts:
    return {"": TRANSPOSED[dims - 1](**arguments)}


@operation(IMAGE, draw=draw_conv_transpose, build=build_conv_transpose)
def conv_transpose(own: Parts, x: torch.Tensor, **_: Any) -> torch.Tensor:
    return own[""](x)


def draw_batch_norm(rng: Random, sight: Sight) -> dict[str, Any] | None:
    if sight.kind == SEQUENCE:
        return None
    return {
        "dims": max(1, len(sight.positions)),
        "num_features": sight.features,
        "affine": rng.random() < 0.8,
        "momentum": rng.choice([0.1, 0.1, 0.1, None]),
        "track_running_stats": rng.random() < 0.8,
    }


def build_batch_norm(dims: int, **arguments: Any) -> Parts:
    return {"": BATCH_NORMS[dims - 1](**arguments)}


@operation(IMAGE, VECTOR, draw=draw_batch_norm, build=build_batch_norm, weight=3)
def batch_norm(own: Parts, x: torch.Tensor, **_: Any) -> torch.Tensor:
    return own[""](x)


def draw_group_norm(rng: Random, sight: Sight) -> dict[str, Any]:
    channels = sight.features
    return {"groups": rng.choice([g for g in (1, 2, 3, 4) if channels % g == 0]), "channels": channels}


def build_group_norm(groups: int, channels: int) -> Parts:
    return {"": nn.GroupNorm(groups, channels)}


@operation(IMAGE, draw=draw_group_norm, build=build_group_norm)
def group_norm(own: Parts, x: torch.Tensor, **_: Any) -> torch.Tensor:
    return own[""](x)


def draw_instance_norm(rng: Random, sight: Sight) -> dict[str, Any] | None:
    positions = sight.positions
    if min(positions) < 2:
        return None
    return {"dims": len(positions), "num_features": sight.features, "affine": rng.random() < 0.5}


def build_instance_norm(dims: int, **arguments: Any) -> Parts:
    return {"": INSTANCE_NORMS[dims - 1](**arguments)}


@operation(IMAGE, draw=draw_instance_norm, build=build_instance_norm)
def instance_norm(own: Parts, x: torch.Tensor, **_: Any) -> torch.Tensor:
    return own[""](x)


def draw_layer_norm(rng: Random, sight: Sight) -> dict[str, Any]:
    # Of an image, over channels and positions, as normalising whole samples is written.
    return {"shape": list(sight.shape[1:] if sight.kind == IMAGE else sight.shape[-1:])}


def build_layer_norm(shape: list[int]) -> Parts:
    return {"": nn.LayerNorm(shape)}


@operation(draw=draw_layer_norm, build=build_layer_norm, weight=2)
def layer_norm(own: Parts, x: torch.Tensor, **_: Any) -> torch.Tensor:
    return own[""](x)


def draw_linear(rng: Random, sight: Sight) -> dict[str, Any]:
    return {"in_features": sight.features, "out_features": width(rng, sight), "bias": rng.random() < 0.8}


def build_linear(**arguments: Any) -> Parts:
    return {"": nn.Linear(**arguments)}


@operation(VECTOR, SEQUENCE, draw=draw_linear, build=build_linear, weight=7)
def linear(own: Parts, x: torch.Tensor, **_: Any) -> torch.Tensor:
    return own[""](x)


def draw_mlp(rng: Random, sight: Sight) -> dict[str, Any]:
    return {"features": sight.features, "hidden": rng.choice([8, 12]), "gated": rng.random() < 0.3}


def build_mlp(features: int, hidden: int, gated: bool) -> Parts:
    parts: Parts = {"up": nn.Linear(features, hidden), "down": nn.Linear(hidden, features)}
    return parts | {"gate": nn.Linear(features, hidden)} if gated else parts


@operation(VECTOR, SEQUENCE, draw=draw_mlp, build=build_mlp, weight=4)
def mlp(own: Parts, x: torch.Tensor, gated: bool, **_: Any) -> torch.Tensor:
    hidden = F.silu(own["gate"](x)) * own["up"](x) if gated else F.gelu(own["up"](x))
    return x + own["down"](hidden)


_MOST_BILINEAR = 128


def draw_bilinear(rng: Random, sight: Sight) -> dict[str, Any] | None:
    # It has as many parameters as the cube of that.
    found = other(rng, sight) if sight.features <= _MOST_BILINEAR else None
    return found and {**found, "features": sight.features}


def build_bilinear(features: int) -> Parts:
    return {"": nn.Bilinear(features, features, features)}


@operation(VECTOR, draw=draw_bilinear, build=build_bilinear)
def bilinear(own: Parts, x: torch.Tensor, y: torch.Tensor, **_: Any) -> torch.Tensor:
    return own[""](x, y)


def draw_functional(rng: Random, sight: Sight) -> dict[str, Any]:
    return {"features": sight.features, "out_features": width(rng, sight)}


def build_functional(features: int, out_features: int) -> Parts:
    weight = torch.empty(out_features, features)
    return {
        "weight": nn.Parameter(nn.init.kaiming_uniform_(weight, a=5**0.5)),
        "bias": nn.Parameter(torch.zeros(out_features)),
    }


@operation(VECTOR, SEQUENCE, draw=draw_functional, build=build_functional)
def functional_linear(own: Parts, x: torch.Tensor, **_: Any) -> torch.Tensor:
    return F.linear(x, own["weight"], own["bias"])


@operation(VECTOR, SEQUENCE, draw=draw_functional, build=build_functional)
def parameter_product(own: Parts, x: torch.Tensor, **_: Any) -> torch.Tensor:
    return x @ own["weight"].t() + own["bias"]


def draw_functional_conv(rng: Random, sight: Sight) -> dict[str, Any] | None:
    if len(sight.positions) != 2:
        return None
    return draw_functional(rng, sight)


def build_functional_conv(features: int, out_features: int) -> Parts:
    return {"weight": nn.Parameter(torch.randn(out_features, features, 3, 3) / (3 * features**0.5))}


@operation(IMAGE, draw=draw_functional_conv, build=build_functional_conv)
def functional_conv(own: Parts, x: torch.Tensor, **_: Any) -> torch.Tensor:
    return F.conv2d(x, own["weight"], padding=1)


def draw_scale(rng: Random, sight: Sight) -> dict[str, Any]:
    shape = [sight.features] + [1] * len(sight.positions)
    return {"shape": shape, "held": rng.choice(["parameter", "parameter", "buffer"]), "in_place": rng.random() < 0.2}


def build_scale(shape: list[int], held: str, in_place: bool) -> Parts:
    values = torch.linspace(0.5, 1.5, shape[0]).view(shape)
    return {"": nn.Parameter(values) if held == "parameter" else values}


@operation(draw=draw_scale, build=build_scale, weight=3)
def scale(own: Parts, x: torch.Tensor, in_place: bool, **_: Any) -> torch.Tensor:
    """By a parameter or a buffer of the module's own."""
    if in_place:
        x *= own[""]
        return x
    return x * own[""]


@operation(draw=draw_scale, build=build_scale)
def offset(own: Parts, x: torch.Tensor, in_place: bool, **_: Any) -> torch.Tensor:
    return x.add_(own[""]) if in_place else own[""] + x


def draw_prelu(rng: Random, sight: Sight) -> dict[str, Any] | None:
    return {"count": rng.choice([1, sight.features])} if sight.kind == IMAGE else {"count": 1}


def build_prelu(count: int) -> Parts:
    return {"": nn.PReLU(count)}


@operation(draw=draw_prelu, build=build_prelu)
def prelu(own: Parts, x: torch.Tensor, **_: Any) -> torch.Tensor:
    return own[""](x)


def draw_excite(rng: Random, sight: Sight) -> dict[str, Any]:
    return {"channels": sight.features, "hidden": 4, "dims": len(sight.positions)}


def build_excite(channels: int, hidden: int, dims: int) -> Parts:
    return {"down": CONVOLUTIONS[dims - 1](channels, hidden, 1), "up": CONVOLUTIONS[dims - 1](hidden, channels, 1)}


@operation(IMAGE, draw=draw_excite, build=build_excite, weight=2)
def excite(own: Parts, x: torch.Tensor, dims: int, **_: Any) -> torch.Tensor:
    """Squeeze and excitation."""
    mean = x.mean(tuple(range(2, 2 + dims)), keepdim=True)
    return x * torch.sigmoid(own["up"](torch.relu(own["down"](mean))))


def build_patches(features: int, out_features: int) -> Parts:
    return {"": nn.Linear(features, out_features)}


@operation(IMAGE, draw=draw_functional, build=build_patches, to=SEQUENCE, weight=1.5)
def patches(own: Parts, x: torch.Tensor, **_: Any) -> torch.Tensor:
    """Positions become the tokens of a sequence."""
    return own[""](x.flatten(2).transpose(1, 2))


@operation(SEQUENCE, to=IMAGE, weight=1)
def as_line(own: Parts, x: torch.Tensor) -> torch.Tensor:
    """Tokens become positions."""
    return x.transpose(1, 2)
