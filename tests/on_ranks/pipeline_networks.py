"""Networks that tests cut into stages."""

import torch
import torch.nn.functional as F
from torch import nn


class Chain(nn.Module):
    "As VGG: convolutions, activations in place and otherwise, pools, fully connected layers."

    input_shape = (3, 12, 12)

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 8, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Tanh(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(nn.Linear(72, 16), nn.ReLU(inplace=True), nn.Linear(16, 10), nn.Linear(10, 5))

    def forward(self, x):
        return self.classifier(torch.flatten(self.features(x), 1))


class Residual(nn.Module):
    "Skips within blocks and one over the whole network; addition in place; a projection."

    input_shape = (3, 8, 8)

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(6, 6, 3, padding=1) for _ in range(6))
        self.project = nn.Conv2d(6, 6, 1)
        self.fc = nn.Linear(6, 4)

    def forward(self, x):
        first = x = torch.tanh(self.stem(x))
        for a, b in zip(self.convs[::2], self.convs[1::2], strict=True):
            y = b(F.relu(a(x)))
            y += x
            x = F.relu(y, inplace=True)
        return self.fc((x + self.project(first)).mean((2, 3)))


class Branching(nn.Module):
    "Branches that are concatenated, and shapes that forward asks for; the output is a dict."

    input_shape = (2, 9, 9)

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = (nn.Conv2d(2, 4, k, padding=k // 2) for k in (1, 3, 5))
        self.merge = nn.Conv2d(12, 8, 3)
        self.left, self.right = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 3, padding=1)
        self.fc1, self.fc2 = nn.Linear(8 * 49, 12), nn.Linear(12, 4)

    def forward(self, x):
        x = F.elu(self.merge(torch.cat([self.one(x), self.two(x), F.relu(self.three(x))], 1)))
        x = torch.cat([self.left(x), self.right(x)], 1)
        x = x.reshape(x.size(0), -1) if x.dim() == 4 else x
        return {"logits": self.fc2(torch.sigmoid(self.fc1(x)))}


class Normed(nn.Module):
    "Batch norm: statistics are those of each micro-batch."

    input_shape = (3, 8, 8)

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            *(
                m
                for i in range(5)
                for m in (
                    nn.Conv2d(3 if i == 0 else 6, 6, 3, padding=1, bias=False),
                    nn.BatchNorm2d(6),
                    nn.ReLU(inplace=True),
                )
            )
        )
        self.fc = nn.Linear(6, 4)

    def forward(self, x):
        return self.fc(self.body(x).mean((2, 3)))


class Rereading(nn.Module):
    "What is read whole, by positions and whole again, wherever it is cut; a pool over uneven positions."

    input_shape = (3, 11, 11)

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.three = nn.Conv2d(8, 6, 5, padding=2)
        self.early, self.late, self.fc = nn.Linear(8, 5), nn.Linear(8, 5), nn.Linear(6, 5)

    def forward(self, x):
        x = F.relu(self.one(x))
        out = self.early(x.mean((2, 3)))
        y = F.max_pool2d(torch.tanh(self.two(x)), 3, 1, 1)
        out = out + self.late(x.flatten(2).sum(2))
        return out + self.fc(torch.flatten(self.three(y + x), 2).sum(2))
