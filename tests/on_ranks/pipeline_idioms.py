"""Networks that use what pipelines are easily wrong about: work in place, views, several outputs, state, constants."""

import torch
import torch.nn.functional as F
from torch import nn


class Linears(nn.Module):
    "Some fully connected layers, named a, b, c, ..."

    input_shape = (6, 8)

    def __init__(self, count=6, features=8):
        super().__init__()
        for name in "abcdefgh"[:count]:
            setattr(self, name, nn.Linear(features, features))


class Discarded(Linears):
    "What an operation in place returns is thrown away; a residual is added in place."

    def forward(self, x):
        x = self.a(x)
        F.relu(x, inplace=True)
        y = self.d(torch.tanh(self.b(x)))
        y += x
        y.mul_(0.5)
        return (self.f(torch.tanh(self.e(y))) + y).mean(1)


class Views(Linears):
    "Parts of a tensor are changed: by a slice, by assignment, through a view that was made before, and by +=."

    def forward(self, x):
        x = self.a(x)
        x[:, 0].mul_(2.0)
        x[:, 1:3] += 1.0
        late = x.flatten(1)
        x[:, :, 0] = 0.25
        x[:, 5, 1:4] = x[:, 0, 4:7].tanh()
        y = self.c(torch.tanh(self.b(x)))
        z = late.view(-1, 6, 8)[:, :, 1:] * y[:, :, 1:]
        return self.f(F.pad(z, (1, 0)) + self.d(y)).mean(1)


class Filled(Linears):
    "A tensor made from nothing is filled, step by step, beside a mask that is changed in place."

    def forward(self, x):
        x = self.a(x)
        mask = torch.zeros(6, 1, device=x.device, dtype=x.dtype)
        mask[2:] = 1.0
        mask.add_(0.5)
        out = torch.zeros(x.size(0), 6, 8, device=x.device, dtype=x.dtype)
        for step in range(6):
            out[:, step] = torch.tanh(x[:, step] + (out[:, step - 1] if step else 0.0))
        y = self.b(out) * mask
        return self.e(torch.tanh(self.d(torch.tanh(self.c(y)) + out * mask))).mean(1)


class Copied(Linears):
    "copy_, masked_fill_, index_add_, zero_ and fill_ on tensors that are read much later, too."

    def forward(self, x):
        x = self.a(x)
        x.masked_fill_(x > 1.0, 0.5)
        kept = x.clone()
        kept[:, 0].zero_()
        kept.index_add_(1, torch.tensor([1, 3], device=x.device), x[:, :2])
        y = self.b(kept)
        y[:, 2].copy_(x[:, 3])
        y[:, 4].fill_(0.5)
        return self.e(torch.tanh(self.d(torch.tanh(self.c(y)) + kept)) * x).mean(1)


class SeveralTensors(Linears):
    "chunk, split, unbind and a pool's indices, whose parts are read far apart."

    def forward(self, x):
        one, two = self.a(x).chunk(2, dim=-1)
        y = self.b(torch.cat([torch.tanh(two), one], -1))
        first, rest = y.split([2, 4], dim=1)
        y = torch.cat([self.c(rest), first], 1)
        parts = y.unbind(1)
        y = torch.stack([parts[5], *parts[:5]], 1)
        pooled, places = F.max_pool1d(self.d(y), 2, return_indices=True)
        y = F.max_unpool1d(pooled, places, 2)
        return self.f(self.e(y) * parts[2].unsqueeze(1) + two.repeat(1, 1, 2)).mean(1)


class Attending(nn.Module):
    "Multi-head attention and recurrent layers, of whose several outputs one or all are read."

    input_shape = (6, 8)

    def __init__(self):
        super().__init__()
        self.one, self.two = (nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.lstm = nn.LSTM(8, 8, num_layers=2, batch_first=True)
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        x, weights = self.one(x, x, x)
        y, last = self.gru(x)
        z, (hidden, cell) = self.lstm(y)
        x, _ = self.two(z, z, z, need_weights=False)
        x = x + torch.matmul(weights, z)
        return self.fc(x.mean(1) + last[0] + hidden[1] * cell[0])


class RunningSums(nn.Module):
    "Buffers of the network itself that forward changes and reads; one changed through a view."

    input_shape = (6, 8)

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("counts", torch.zeros(3))
        self.register_buffer("scale", torch.full((8,), 0.5))

    def forward(self, x):
        x = self.a(x)
        self.counts[1] += 1.0
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        x = torch.tanh(self.b(x - self.mean))
        return self.d(torch.tanh(self.c(x * self.scale))).mean(1)


class Constants(Linears):
    "Constants made on the CPU without saying so, and moved to where a tensor from elsewhere is."

    def forward(self, x):
        x = self.a(x)
        places = torch.arange(6)
        wave = torch.sin(places.float() / 6).unsqueeze(-1)
        y = torch.tanh(self.b(x)) + wave.to(x.dtype)
        y = self.d(torch.tanh(self.c(y)) * torch.linspace(0.5, 1.5, 8).to(x.device, x.dtype))
        mask = torch.ones(6, 6, dtype=torch.bool).tril()
        scores = (y @ self.e(y).transpose(1, 2)).masked_fill(~mask, -1e9).softmax(-1)
        return self.f(scores @ y).mean(1) * torch.tensor([2.0], dtype=x.dtype)


class Auxiliary(Linears):
    "Outputs that the loss does not read: one of an early layer, one of a layer of its own."

    def forward(self, x):
        early = self.a(x)
        x = torch.tanh(self.b(torch.tanh(early)))
        aux = self.c(x)
        return {"logits": self.e(torch.tanh(self.d(x))).mean(1), "aux": aux, "early": early}


class Query(nn.Module):
    "A query that is a parameter, and parameters that are worked upon before they meet data."

    input_shape = (6, 8)

    def __init__(self):
        super().__init__()
        self.a, self.q, self.k, self.v, self.fc = (nn.Linear(8, 8) for _ in range(5))
        self.query = nn.Parameter(torch.randn(3, 8))
        self.gate = nn.Parameter(torch.randn(8))

    def forward(self, x):
        x = torch.tanh(self.a(x))
        query = self.q(self.query.tanh())
        scores = (query @ self.k(x).transpose(1, 2)).softmax(-1)
        y = scores @ self.v(x)
        return self.fc(y + query).mean(1) * self.gate.sigmoid()


class Transposed(Linears):
    "Attributes that are views, detached tensors, and comparisons."

    def forward(self, x):
        x = self.a(x)
        y = torch.tanh(self.b(x))
        z = self.c(y @ x.mT @ y)
        z = torch.where(x > 0.0, z, z * 0.1) + x.detach().abs()
        return self.e(torch.tanh(self.d(z)) + y).mean(1)


class ChangedInput(Linears):
    "The network's own input is changed in place, and read again much later in the same stage."

    def forward(self, x):
        x.mul_(0.5)
        y = torch.tanh(self.a(x))
        y = self.b(y) + F.leaky_relu(x, 0.1)
        return self.e(torch.tanh(self.d(torch.tanh(self.c(y))))).mean(1)


class Regularised(Linears):
    "The code lists all parameters, and adds up their squares at the end."

    def forward(self, x):
        y = self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))
        y = self.e(torch.tanh(self.d(torch.tanh(y)))).mean(1)
        return y * (1 + 0.01 * sum(p.square().sum() for p in self.parameters()))


class Convolutions(nn.Module):
    "Convolutions that keep positions, named a, b, c, d, before a fully connected layer."

    input_shape = (3, 12, 12)

    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3, padding=1)
        self.b, self.c, self.d = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.fc = nn.Linear(8, 5)

    def end(self, x):
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


class DiscardedImages(Convolutions):
    "What an operation in place returns is thrown away; a residual is added in place."

    def forward(self, x):
        x = self.a(x)
        F.relu(x, inplace=True)
        y = self.c(torch.tanh(self.b(x)))
        y += x
        y.mul_(0.5)
        return self.end(torch.tanh(self.d(y)) + y)


class ChangedChannels(Convolutions):
    "Some channels are changed in place and by assignment, behind a convolution that is cut."

    def forward(self, x):
        x = self.a(x)
        x[:, :4].mul_(2.0)
        x[:, 4:6] += 1.0
        y = self.b(torch.tanh(x))
        y[:, 0] = 0.25
        one, two = y.chunk(2, dim=1)
        z = self.c(torch.cat([torch.tanh(two), one], 1))
        return self.end(self.d(torch.tanh(z)) + x)


class ViewedChannels(Convolutions):
    "Some channels are changed through a view, and the whole is read on both sides of a cut."

    def forward(self, x):
        x = self.a(x)
        x[:, :4].mul_(2.0)
        y = self.c(torch.tanh(self.b(torch.tanh(x))))
        return self.end(self.d(torch.tanh(y)) + x)


class AuxiliaryImages(Convolutions):
    "Outputs that the loss does not read, of layers that are cut."

    def forward(self, x):
        early = self.a(x)
        x = torch.tanh(self.b(torch.tanh(early)))
        aux = self.c(x)
        return {"logits": self.end(torch.tanh(self.d(x))), "aux": aux, "early": early}


class NormedImages(Convolutions):
    "Batch norms, and residuals in place."

    def __init__(self):
        super().__init__()
        self.n, self.m = nn.BatchNorm2d(8), nn.BatchNorm2d(8)

    def forward(self, x):
        x = F.relu_(self.n(self.a(x)))
        y = self.m(self.c(F.relu_(self.b(x))))
        y += x
        F.relu_(y)
        return self.end(self.d(y).add_(y))
