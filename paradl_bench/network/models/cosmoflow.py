"""CosmoFlow: a 3-D network that predicts cosmological parameters from a volume of matter density.

Mathuriya et al., "CosmoFlow: Using Deep Learning to Learn the Universe at Scale" (SC18), as ParaDL uses it: volumes of
4x128^3 to 4x512^3, seven convolutions with average pooling, three dense layers, about two million parameters. Neither
paper gives every width. Those here (docs/measuring/models.md) are ours: 16, 32, 64 and four times 128 filters of
3^3, dense layers of 256, 64 and 4. A volume too small for seven poolings is pooled as often as it can be.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import nn

FILTERS = (16, 32, 64, 128, 128, 128, 128)
DENSE = (256, 64)
OUTPUTS = 4


class CosmoFlow(nn.Module):
    """The network for one size of volume.

    Args:
        input_shape: (channels, depth, height, width) of a sample.

    Raises:
        ValueError: not three spatial dims.
    """

    def __init__(self, input_shape: Sequence[int]) -> None:
        super().__init__()
        if len(input_shape) != 4:
            raise ValueError(f"cosmoflow takes volumes, as 4x128x128x128, not {'x'.join(map(str, input_shape))}")
        channels, *extents = input_shape
        layers: list[nn.Module] = []
        for filters in FILTERS:
            layers += [nn.Conv3d(channels, filters, 3, padding=1), nn.LeakyReLU()]
            channels = filters
            if min(extents) >= 2:
                layers.append(nn.AvgPool3d(2))
                extents = [extent // 2 for extent in extents]
        self.features = nn.Sequential(*layers)
        widths = (channels * math.prod(extents), *DENSE)
        dense: list[nn.Module] = []
        for wide, narrow in itertools.pairwise(widths):
            dense += [nn.Linear(wide, narrow), nn.LeakyReLU()]
        self.classifier = nn.Sequential(*dense, nn.Linear(widths[-1], OUTPUTS))

    def forward(self, volumes: torch.Tensor) -> torch.Tensor:
        """Parameters (batch, 4) of volumes (batch, channels, depth, height, width)."""
        output: torch.Tensor = self.classifier(self.features(volumes).flatten(1))
        return output
