"""Models with layers replaced in torch itself, beside the model that they were made of."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Blocks(nn.Module):
    """A convolution, a norm, a residual branch with several kinds of layers, and a head over tokens."""

    input_shape = (3, 16, 16)

    def __init__(self) -> None:
        super().__init__()
        self.stem: nn.Module = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm: nn.Module = nn.BatchNorm2d(8)
        self.act: nn.Module = nn.ReLU(inplace=True)
        self.branch: nn.Module = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.GELU())
        self.pool: nn.Module = nn.MaxPool2d(2)
        self.tokens: nn.Module = nn.Flatten(2)
        self.mix: nn.Module = nn.Linear(64, 32)
        self.drop: nn.Module = nn.Dropout(0.1)
        self.flat: nn.Module = nn.Flatten()
        self.head: nn.Module = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.stem(x)))
        x = self.pool(x + self.branch(x))
        return self.head(self.flat(self.drop(self.mix(self.tokens(x)))))


def wider_stem_window() -> Blocks:
    """Everything up to the pool has other extents."""
    model = Blocks()
    model.stem = nn.Conv2d(3, 8, 5, stride=2, padding=2)
    model.pool = nn.AvgPool2d(3, 1, 1)
    return model


def norms_of_other_kinds() -> Blocks:
    """Norms with and without buffers change places; a new module comes after one that had parameters."""
    model = Blocks()
    model.norm = nn.GroupNorm(4, 8)
    model.branch = nn.Sequential(nn.Conv2d(8, 8, (1, 3), padding=(0, 1), groups=2, bias=False), nn.BatchNorm2d(8))
    return model


def longer_head() -> Blocks:
    """Rows of a smaller width, and a chain of modules for one; fewer classes."""
    model = Blocks()
    model.mix = nn.Linear(64, 16, bias=False)
    model.drop = nn.Identity()
    model.head = nn.Sequential(nn.Linear(128, 20), nn.LayerNorm(20), nn.SiLU(), nn.Dropout(0.25), nn.Linear(20, 3))
    return model


def convolution_in_place_of_a_pool() -> Blocks:
    """Parameters where there were none, and none where there were."""
    model = Blocks()
    model.norm = nn.Identity()
    model.pool = nn.Sequential(nn.Conv2d(8, 8, 2, stride=2), nn.AdaptiveMaxPool2d((4, 16)))
    return model


def vgg16_of_convolutions() -> nn.Module:
    """Table 3 of OSF's paper: convolutions and a global average in the place of the linear layers."""
    from torchvision.models import vgg16

    model: Any = vgg16()
    model.input_shape = (3, 224, 224)
    model.avgpool = nn.Sequential(nn.Conv2d(512, 512, 1), nn.Conv2d(512, 1000, 1), nn.AdaptiveAvgPool2d(1))
    model.classifier = nn.Identity()
    return model  # type: ignore[no-any-return]
