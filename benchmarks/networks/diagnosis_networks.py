"""Networks that suffer from one thing at a time: ``diagnosis_networks:convolutions`` and others."""

from __future__ import annotations

from torch import nn


def _of_convolutions(channels: int, count: int, kernel: int = 3) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1)]
    for _ in range(count):
        layers += [nn.ReLU(), nn.Conv2d(channels, channels, kernel, padding=kernel // 2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def convolutions() -> nn.Sequential:
    """Six of 64 channels: much compute, 0.8 MB of gradients."""
    return _of_convolutions(64, 6)


def many_channels() -> nn.Sequential:
    """Two of 512 channels: much compute for what each layer puts out, 19 MB of gradients."""
    return _of_convolutions(512, 2)


def large_kernels() -> nn.Sequential:
    """Two of 256 channels and windows of 11 x 11: more compute still for what each layer puts out."""
    return _of_convolutions(256, 2, kernel=11)


def large_images() -> nn.Sequential:
    """Two of 256 channels: much compute for 5 MB of gradients, and for the edges of an image."""
    return _of_convolutions(256, 2)


def wide_linear() -> nn.Sequential:
    """Four layers of 2048 x 2048: little compute for 67 MB of gradients, however few samples pass them."""
    layers: list[nn.Module] = [nn.Flatten()]
    for _ in range(4):
        layers += [nn.Linear(2048, 2048), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(2048, 16))


def depthwise() -> nn.Sequential:
    """Four convolutions of a channel each: little compute for what has to be cut, padded and put together."""
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.ReLU()]
    # The last pool needs all positions: little is left to be gathered for it.
    pools = nn.MaxPool2d(16), nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*layers, *pools, nn.Flatten(), nn.Linear(8, 10))
