"""Modules as a user writes them, which no test names: what :mod:`strategies` trains beside networks of the catalog.

    paradl-bench describe own_networks:branches    # in this folder

Each has much of something that predictions may be wrong about: small layers, concatenations, group norm, gates, tokens,
wide linear layers, one dim or three.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from paradl_bench.network.models.token_tasks import NextToken

CLASSES = 10


def _normed(channels: int, filters: int, extent: int = 3, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(channels, filters, extent, stride=stride, padding=extent // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(filters), nn.ReLU())


class _Branches(nn.Module):
    """Four small convolutions side by side, concatenated."""

    def __init__(self, channels: int, filters: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            [
                _normed(channels, filters, 1),
                nn.Sequential(_normed(channels, filters, 1), _normed(filters, filters)),
                nn.Sequential(_normed(channels, filters, 1), _normed(filters, filters), _normed(filters, filters)),
                nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), _normed(channels, filters, 1)),
            ]
        )

    def forward(self, features: Tensor) -> Tensor:
        """(batch, channels, height, width) to (batch, 4 filters, height, width)."""
        return torch.cat([branch(features) for branch in self.branches], dim=1)


def branches() -> nn.Module:
    """Many small convolutions, concatenated."""
    blocks = nn.Sequential(
        _normed(3, 32),
        _Branches(32, 16),
        _Branches(64, 16),
        nn.MaxPool2d(2),
        _Branches(64, 32),
        _Branches(128, 32),
        nn.MaxPool2d(2),
        _Branches(128, 48),
        _Branches(192, 48),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(192, CLASSES),
    )
    blocks.input_shape = (3, 32, 32)
    return blocks


class _Dense(nn.Module):
    """Convolutions that each read all before them."""

    def __init__(self, channels: int, growth: int, layers: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv2d(channels + growth * index, growth, 3, padding=1) for index in range(layers)
        )

    def forward(self, features: Tensor) -> Tensor:
        """(batch, channels, height, width) to (batch, channels + layers growth, height, width)."""
        for convolution in self.convolutions:
            features = torch.cat([features, functional.relu(convolution(features))], dim=1)
        return features


def dense() -> nn.Module:
    """Concatenations that grow, without normalisation."""
    blocks = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        _Dense(16, 8, 6),
        nn.Conv2d(64, 32, 1),
        nn.AvgPool2d(2),
        _Dense(32, 16, 6),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, CLASSES),
    )
    blocks.input_shape = (3, 32, 32)
    return blocks


class _Grouped(nn.Module):
    """Two convolutions with group norm, and what they are added to."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.first_norm = nn.GroupNorm(8, channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.second_norm = nn.GroupNorm(8, channels)

    def forward(self, features: Tensor) -> Tensor:
        """(batch, channels, height, width) to the same."""
        inner = self.second(functional.silu(self.first_norm(self.first(features))))
        return functional.silu(features + self.second_norm(inner))


def grouped() -> nn.Module:
    """Residual blocks with group norm."""
    blocks = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        *(_Grouped(32) for _ in range(2)),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        *(_Grouped(64) for _ in range(3)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, CLASSES),
    )
    blocks.input_shape = (3, 32, 32)
    return blocks


class _Gated(nn.Module):
    """A depthwise convolution between two of extent 1, its channels gated by their means."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = 4 * channels
        self.widen = _normed(channels, wide, 1)
        self.depthwise = nn.Conv2d(wide, wide, 3, padding=1, groups=wide)
        self.gate = nn.Sequential(nn.Conv2d(wide, channels, 1), nn.ReLU(), nn.Conv2d(channels, wide, 1), nn.Sigmoid())
        self.narrow = nn.Conv2d(wide, channels, 1)

    def forward(self, features: Tensor) -> Tensor:
        """(batch, channels, height, width) to the same."""
        inner = functional.silu(self.depthwise(self.widen(features)))
        return features + self.narrow(inner * self.gate(inner.mean((2, 3), keepdim=True)))


def gated() -> nn.Module:
    """Depthwise convolutions and gates."""
    blocks = nn.Sequential(
        _normed(3, 32, stride=2),
        *(_Gated(32) for _ in range(2)),
        _normed(32, 64, stride=2),
        *(_Gated(64) for _ in range(3)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, CLASSES),
    )
    blocks.input_shape = (3, 32, 32)
    return blocks


def perceptron() -> nn.Module:
    """Linear layers alone."""
    blocks = nn.Sequential(
        nn.Linear(512, 2048),
        nn.GELU(),
        nn.Linear(2048, 1024),
        nn.LayerNorm(1024),
        nn.Linear(1024, 2048),
        nn.GELU(),
        nn.Linear(2048, 512),
        nn.ReLU(),
        nn.Linear(512, CLASSES),
    )
    blocks.input_shape = (512,)
    return blocks


class _Attention(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.inner_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, tokens, width) to the same."""
        normed = self.norm(tokens)
        query, key, value = (
            layer(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        tokens = tokens + self.out(attended.transpose(1, 2).flatten(2))
        return tokens + self.inner(self.inner_norm(tokens))


class _Language(nn.Module):
    """Predicts the next token."""

    token_task = NextToken(vocabulary=1000, sequence=64)

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 128)
        self.blocks = nn.Sequential(*(_Attention(128, 4) for _ in range(3)))
        self.head = nn.Linear(128, 1000)

    def forward(self, ids: Tensor) -> Tensor:
        """(batch, tokens) to logits (batch, tokens, vocabulary)."""
        return self.head(self.blocks(self.embedding(ids)))


def language() -> nn.Module:
    """Attention over tokens."""
    return _Language()


class _Patches(nn.Module):
    """Attention over patches of an image."""

    input_shape = (3, 32, 32)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 128, 4, stride=4)
        self.blocks = nn.Sequential(*(_Attention(128, 4) for _ in range(3)))
        self.head = nn.Linear(128, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) to logits (batch, classes)."""
        return self.head(self.blocks(self.embed(images).flatten(2).transpose(1, 2)).mean(1))


def patches() -> nn.Module:
    """Attention over patches."""
    return _Patches()


def sound() -> nn.Module:
    """Convolutions along one dim."""
    blocks = nn.Sequential(
        nn.Conv1d(1, 32, 9, stride=2, padding=4),
        nn.ReLU(),
        nn.Conv1d(32, 64, 9, stride=2, padding=4),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Conv1d(64, 128, 9, padding=4),
        nn.ReLU(),
        nn.MaxPool1d(4),
        nn.Conv1d(128, 128, 9, padding=4),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(128, CLASSES),
    )
    blocks.input_shape = (1, 2048)
    return blocks
