"""Small networks that ghosts stand for, with what ghosts are easily wrong about."""

import torch
from torch import nn

from paradl_bench.network.models.token_tasks import NextToken


class Small(nn.Module):
    """Convolutions, batch norm, a skip, and a head with a bias: buckets hold them in the order in which they arrive.

    Uneven extents, and pools whose windows reach beyond them.
    """

    input_shape = (4, 13, 12)

    def __init__(self):
        super().__init__()
        self.one = nn.Conv2d(4, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.two = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.average, self.largest = nn.AvgPool2d(3, 2, 1, count_include_pad=False), nn.MaxPool2d(2, ceil_mode=True)
        self.hidden, self.head = nn.Linear(8, 64), nn.Linear(64, 10)

    def forward(self, x):
        x = torch.relu(self.norm(self.one(x)))
        x = self.largest(self.average(torch.relu_(self.two(x) + x)))
        return self.head(torch.relu(self.hidden(x.mean((2, 3)))))


class Words(nn.Module):
    """Token ids to logits of an odd number of tokens, by one table."""

    def __init__(self):
        super().__init__()
        self.token_task = NextToken(vocabulary=17, sequence=6)
        self.embedding, self.norm, self.last = nn.Embedding(17, 12), nn.LayerNorm(12), nn.LayerNorm(12)
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, ids):
        x = self.embedding(ids)
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return nn.functional.linear(self.last(x), self.embedding.weight)
