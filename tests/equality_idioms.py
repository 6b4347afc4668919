"""Networks in idioms of users whose sharded training is held against the serial one."""

from __future__ import annotations

import torch
from torch import nn


class Convolved(nn.Module):
    """Two convolutions of 6 channels with something between, and a head; subclasses say what."""

    input_shape = (4, 10, 9)

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(4, 6, 3, padding=1)
        self.conv2 = nn.Conv2d(6, 6, 3, padding=1)
        self.fc1, self.fc2 = nn.Linear(6, 8), nn.Linear(8, 4)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.conv2(self.between(self.conv1(x))))
        return self.fc2(torch.tanh(self.fc1(x.mean((2, 3)))))


class Measuring(Convolved):
    """Asks tensors, blocks and parameters among them, for their extents in every way that torch knows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.numel() / x.shape[0] + x.stride(1) + x.nbytes / x.element_size() / len(x)
        return super().forward(x / scale)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        count = len(x)
        x = x * (x.numel() + x.nelement() + torch.numel(x)) / count / 100 + x.stride(1) + x.stride()[2]
        x = x * 0.01 * (x.size(2) + x.size(dim=-1) + x.shape[2] + len(x[0, 0]) + x.ndim + x.is_contiguous())
        weight, bias = self.conv2.weight, self.fc1.bias
        return x / (weight.numel() + weight.shape[0] + weight.size(1) + len(bias) + self.fc2.weight.stride(0))


class Unwatched(Convolved):
    """Reads all of a tensor without a gradient first, and with one later."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            mean = x.mean((2, 3), keepdim=True)
        return torch.tanh(x - mean) + x.softmax(3)


class Turned(Convolved):
    """Attributes that are views: of what has as many columns as rows, and of a weight."""

    input_shape = (4, 9, 9)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(x.mT) + x.data
        return x * self.conv2.weight.data.norm()
