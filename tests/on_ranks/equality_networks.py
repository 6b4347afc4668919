"""Networks whose sharded training is held against the serial one."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Plain(nn.Module):
    """Strides, an uneven extent, an overlapping pool, bias or none, functional operations, a skip, a concatenation."""

    input_shape = (4, 23, 19)

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(4, 6, 7, stride=2, padding=3, bias=False)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.conv2 = nn.Conv2d(6, 6, 3, padding=1)
        self.conv3 = nn.Conv2d(6, 7, 1)
        self.fc1 = nn.Linear(13, 9)
        self.fc2 = nn.Linear(9, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = x + self.conv2(x)
        x = torch.cat([x, F.relu_(self.conv3(x))], 1)
        return self.fc2(F.relu(self.fc1(F.adaptive_avg_pool2d(x, 1).flatten(1))))


class Grouped(nn.Module):
    """Groups, depthwise, dilation, ceil mode, averages with and without padding counted."""

    input_shape = (4, 22, 21)

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(4, 8, 3, padding=2, dilation=2, groups=2)
        self.conv2 = nn.Conv2d(8, 8, 5, padding=2, groups=8, bias=False)
        self.pool1 = nn.MaxPool2d(3, 2, ceil_mode=True)
        self.pool2 = nn.AvgPool2d(3, 2, 1, ceil_mode=True)
        self.pool3 = nn.AvgPool2d(2, 1, 1, count_include_pad=False)
        self.conv3 = nn.Conv2d(8, 12, 3, padding="same", groups=4)
        self.fc = nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool1(F.silu(self.conv2(F.relu(self.conv1(x)))))
        x = self.conv3(self.pool3(self.pool2(x)))
        return self.fc(x.mean((2, 3)))


class Normed(nn.Module):
    """Batch norms, over uneven blocks too, one of them without parameters of its own."""

    input_shape = (4, 13, 12)

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(4, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 6, 3, stride=2, padding=1)
        self.bn2 = nn.BatchNorm2d(6, affine=False, momentum=0.3)
        self.fc = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return self.fc(F.relu(self.bn2(self.conv2(x))).mean((2, 3)))


class Line(nn.Module):
    """One spatial dim."""

    input_shape = (4, 37)

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(4, 6, 5, stride=2, padding=2), nn.ReLU(), nn.AvgPool1d(3, 2, 1), nn.Conv1d(6, 8, 3), nn.Tanh()
        )
        self.fc = nn.Linear(8 * 8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.body(x).flatten(1))


class Volume(nn.Module):
    """Three spatial dims."""

    input_shape = (4, 9, 10, 11)

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv3d(4, 6, 3, padding=1), nn.LeakyReLU(), nn.AvgPool3d(2), nn.Conv3d(6, 8, 3, padding=1)
        )
        self.fc1 = nn.Linear(8 * 4 * 5 * 5, 10)
        self.fc2 = nn.Linear(10, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.relu(self.fc1(self.body(x).flatten(1))))


class Asking(nn.Module):
    """Asks tensors for their shapes, reads twice what is gathered once, and changes in place what was read whole."""

    input_shape = (4, 11, 10)

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3, padding=1)
        self.fc = nn.Linear(6 + 6 + 6 * 110, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        before = x.mean((2, 3))
        x = F.relu_(x)
        pooled = F.avg_pool2d(x, x.shape[2:]).view(x.size(0), -1)
        flat = x.reshape(len(x), x.size(1) * x.size(dim=2) * x.size()[3])
        return self.fc(torch.cat([before, pooled, flat], 1))


class Dropped(nn.Module):
    """Dropout of whole channels of blocks, and of single features behind them."""

    input_shape = (4, 13, 9)

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(4, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 6, 3, stride=2)
        self.fc1 = nn.Linear(6 * 6 * 4, 12)
        self.fc2 = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv2(F.dropout2d(self.conv1(x), 0.4)))
        return self.fc2(F.dropout(self.fc1(F.dropout(x.flatten(1), 0.3)), 0.5))


class Block(nn.Module):
    """A residual block, a unit of sharding by its number unless it starts in place."""

    def __init__(self, features: int, *, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.one, self.two = nn.Linear(features, features + 3), nn.Linear(features + 3, features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.leaky_relu(x, inplace=self.in_place)
        return x + self.two(torch.tanh(self.one(x)))


class ConvBlock(nn.Module):
    """A residual block whose activations work in place, and whose output is changed by nobody else."""

    def __init__(self, channels: int, drop: float) -> None:
        super().__init__()
        self.one = nn.Conv2d(channels, channels + 2, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels + 2)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(drop) if drop else nn.Sigmoid()
        self.two = nn.Conv2d(channels + 2, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.two(self.drop(self.act(self.norm(self.one(x))))) + x)


class Blocked(nn.Module):
    """Blocks in a sequence, behind a stem and in front of a head, which are sequences of single operations."""

    input_shape = (4, 13, 12)
    drop = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.MaxPool2d(3, 2, 1))
        self.blocks = nn.Sequential(ConvBlock(6, self.drop), ConvBlock(6, self.drop))
        self.head = nn.Sequential(nn.Linear(6, 9), nn.ReLU(inplace=True), nn.Linear(9, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class BlockedDropout(Blocked):
    """The same with dropout inside of blocks."""

    drop = 0.4


class Woven(nn.Module):
    """Blocks in a sequence, a layer used twice, a weight read elsewhere, one read twice, a head that no loss reads."""

    input_shape = (5,)

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))
        self.first = nn.Linear(5, 5)
        self.blocks = nn.ModuleList(Block(5, in_place=i == 1) for i in range(3))
        self.read_elsewhere = nn.Linear(5, 7)
        self.tied = nn.Linear(7, 5, bias=False)
        self.aside = nn.Linear(5, 3)
        self.head = nn.Linear(5, 1)
        self.last = nn.Linear(1, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(F.relu_(self.first(x))) * self.scale
        for block in self.blocks:
            x = block(x)
        x = F.linear(self.tied(F.linear(x, self.read_elsewhere.weight)), self.tied.weight.t())[:, :5]
        self.aside(x)
        return self.last(self.head(x))


class DroppedInside(Dropped):
    """Dropout of single positions of blocks, whose extents are unlike, and of features behind them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv2(F.dropout(self.conv1(x), 0.4)))
        return self.fc2(F.dropout(self.fc1(x.flatten(1)), 0.5))


class Undropped(Dropped):
    """Dropout of nothing, which returns what it is given: inside of blocks, and where they are gathered."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv2(F.dropout(self.conv1(x), 0.0)))
        return self.fc2(F.dropout(self.fc1(F.dropout(x, 0.0).contiguous().flatten(1)), 0.0))


class Joined(nn.Module):
    """Branches that join, one of them of groups, and a skip connection; no batch norm."""

    input_shape = (4, 9, 8)

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(4, 6, 3, padding=1)
        self.left, self.right = nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 6, 1, groups=2)
        self.conv2 = nn.Conv2d(6, 5, 3, stride=2)
        self.fc = nn.Linear(5 * 4 * 4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2, 1, 1)
        x = F.relu_(self.left(x) + self.right(x) * 0.5) + x
        return self.fc(F.silu(self.conv2(x)).flatten(1))


class Recalling(nn.Module):
    """Reads its own input again, alone and beside what was made of it, where positions are no longer cut."""

    input_shape = (4, 11, 10)

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(4, 6, 3, stride=2)
        self.fc1, self.fc2, self.fc3 = nn.Linear(6, 5), nn.Linear(4, 5), nn.Linear(110, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.conv1(x))
        scores = torch.einsum("bchw,bdhw->bcd", y, x).sum(2)
        again = F.relu(self.conv2(x)).mean((2, 3))
        return self.fc1(scores + again) + self.fc2(x.mean((2, 3))) + self.fc3(torch.tanh(x.flatten(2)).sum(1))


class Tokens(nn.Module):
    """Features last, behind other dims; a flatten that moves them."""

    input_shape = (5, 6)

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(6, 8), nn.Linear(8, 7), nn.Linear(7, 6, bias=False)
        self.fc4 = nn.Linear(30, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fc2(F.dropout(F.gelu(self.fc1(x)), 0.3))
        x = self.fc3(torch.softmax(x, -1))
        return self.fc4(torch.tanh(x).flatten(1))


_FUNCTIONS: dict[str, Any] = {"relu": nn.ReLU, "tanh": nn.Tanh, "relu_in_place": lambda: nn.ReLU(inplace=True)}


class Drawn(nn.Module):
    """A sequence of layers from a description.

    Args:
        input_shape: of one sample.
        layers: each its name ("conv", "max", "avg", "norm" or that of a function) and arguments.
        features: of what the last layer writes, flat.
    """

    def __init__(self, input_shape: list[int], layers: list[list[Any]], features: int) -> None:
        super().__init__()
        self.input_shape = tuple(input_shape)
        dims = len(input_shape) - 1
        kinds = {
            "conv": f"Conv{dims}d",
            "max": f"MaxPool{dims}d",
            "avg": f"AvgPool{dims}d",
            "norm": f"BatchNorm{dims}d",
        }
        self.body = nn.Sequential(
            *(
                _FUNCTIONS[name]() if name in _FUNCTIONS else getattr(nn, kinds[name])(**arguments)
                for name, arguments in layers
            )
        )
        self.fc1, self.fc2 = nn.Linear(features, 7), nn.Linear(7, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.tanh(self.fc1(self.body(x).flatten(1))))
