"""Networks of the emulation suite that torchvision does not have: ``emulated_networks:small_vgg``."""

from __future__ import annotations

from torch import nn

from paradl_bench.network.models.torchvision_import import import_torchvision_models


def small_vgg() -> nn.Module:
    """vgg11's convolutions and two small fully connected layers: a rank holds 37 MB of gradients, not 530."""
    features = import_torchvision_models().vgg11().features
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 256), nn.Linear(256, 10))
    return nn.Sequential(features, head)
