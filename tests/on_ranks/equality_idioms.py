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


class Assigning(Convolved):
    """Changes parts of tensors in place: by assignment, on views, on what an earlier view looks at."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        x[:, :, 0] = 0.25
        x[:, 1:3, 2:5, ::2].mul_(2)
        x.select(2, 1).zero_()
        x.transpose(2, 3).add_(0.5)
        y = x * 0.5
        looking_on = y.flatten(2)
        y.mul_(3)
        return y + looking_on.mean(2)[..., None, None]


class Gated(Convolved):
    """Reads a block whole before it is changed in place, position by position and by what was read."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        gate = torch.sigmoid(x.mean((2, 3), keepdim=True))
        x.mul_(2)
        y = torch.tanh(x)
        x *= gate
        return x + y


class Mapped(Convolved):
    """Constants by position: a buffer, as many rows as there are blocks, and a tensor that no module knows of."""

    input_shape = (4, 2, 9)

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.tensor([[1.0], [2.0]]).view(1, 1, 2, 1))
        self.plain = torch.linspace(0, 1, 108).view(6, 2, 9)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.rows
        return self.conv2(x) + self.plain.to(x.dtype)


class Handled(Convolved):
    """Reads values of a tensor, and changes a gradient on its way."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv2(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient.clamp(max=1e-4))
        y = torch.tanh(x)
        return y * y.abs().max().item() * max(y.flatten().tolist())


class Frames(nn.Module):
    """Convolutions of frames that lie beside samples in the batch."""

    input_shape = (3, 4, 8, 6)

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(4, 6, 3, padding=1, groups=2), nn.Conv2d(6, 8, 3)
        self.fc = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv2(torch.relu(self.conv1(x.flatten(0, 1))))
        return self.fc(x.unflatten(0, (-1, 3)).mean((1, 3, 4)))


class Attended(nn.Module):
    """Linear layers whose parts are asked for their extents, hooked on, and changed through views."""

    input_shape = (5, 8)

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.fc1(x))
        x = x * (x.numel() / len(x) + x.stride(0) + x.nbytes / x.element_size() / len(x)) * 0.01
        return self.fc3(self.fc2(x)).mean(1)


class Hooked(Attended):
    """The gradient of what would be a part is changed on its way, by all of its elements."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.fc1(x))
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient / (1 + gradient.norm()))
        return self.fc3(torch.relu(self.fc2(x))).mean(1)
