"""Networks as users write them, whose peak of memory is over 50 MB: ``benchmarks/accuracy/memory.py`` trains them."""
# ruff: noqa: D102

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paradl_bench.network.models.token_tasks import NextToken


class GNBlock(nn.Module):
    """Group norm, SiLU and convolution, twice, with a skip."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.n1, self.c1 = nn.GroupNorm(8, a), nn.Conv2d(a, b, 3, padding=1)
        self.n2, self.c2 = nn.GroupNorm(8, b), nn.Conv2d(b, b, 3, padding=1)
        self.act = nn.SiLU()
        self.skip = nn.Conv2d(a, b, 1) if a != b else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.c1(self.act(self.n1(x)))
        h = self.c2(self.act(self.n2(h)))
        return h + self.skip(x)


class DiffusionUNet(nn.Module):
    """A U-Net of residual blocks, up by transposed convolutions, as diffusion models have."""

    input_shape = (3, 32, 32)

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.b1, self.d1 = GNBlock(32, 32), nn.Conv2d(32, 64, 3, stride=2, padding=1)
        self.b2, self.d2 = GNBlock(64, 64), nn.Conv2d(64, 128, 3, stride=2, padding=1)
        self.mid = GNBlock(128, 128)
        self.u2 = nn.ConvTranspose2d(128, 64, 4, stride=2, padding=1)
        self.b3 = GNBlock(128, 64)
        self.u1 = nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1)
        self.b4 = GNBlock(64, 32)
        self.out = nn.Sequential(nn.GroupNorm(8, 32), nn.SiLU(), nn.Conv2d(32, 10, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        a = self.b1(self.stem(x))
        b = self.b2(self.d1(a))
        m = self.mid(self.d2(b))
        y = self.b3(torch.cat([self.u2(m), b], 1))
        y = self.b4(torch.cat([self.u1(y), a], 1))
        return self.out(y).mean((2, 3))


class Autoencoder(nn.Module):
    """Strided convolutions down and transposed ones up, with SiLU in place."""

    input_shape = (3, 64, 64)

    def __init__(self) -> None:
        super().__init__()

        def up(a, b):
            return [nn.ConvTranspose2d(a, b, 2, stride=2), nn.GroupNorm(4, b), nn.SiLU(inplace=True)]

        def down(a, b):
            return [nn.Conv2d(a, b, 3, stride=2, padding=1), nn.GroupNorm(4, b), nn.SiLU(inplace=True)]

        self.body = nn.Sequential(
            *down(3, 32), *down(32, 64), *down(64, 128), *up(128, 64), *up(64, 32), *up(32, 16), nn.Conv2d(16, 10, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).flatten(2).mean(2)


def windows(x: Tensor, w: int) -> Tensor:
    """Parts of w x w positions, each a sample."""
    b, h, ww, c = x.shape
    x = x.view(b, h // w, w, ww // w, w, c)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, w, w, c)


def unwindows(x: Tensor, w: int, h: int, ww: int) -> Tensor:
    """What :func:`windows` has taken apart."""
    b = x.shape[0] // (h * ww // w // w)
    x = x.view(b, h // w, ww // w, w, w, -1)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(b, h, ww, -1)


class WindowAttention(nn.Module):
    """Attention inside of windows, with a learned bias by relative position."""

    def __init__(self, dim: int, heads: int, w: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.bias = nn.Parameter(torch.zeros((2 * w - 1) ** 2, heads))
        c = torch.stack(torch.meshgrid(torch.arange(w), torch.arange(w), indexing="ij")).flatten(1)
        r = (c[:, :, None] - c[:, None, :]).permute(1, 2, 0) + w - 1
        self.register_buffer("index", r[..., 0] * (2 * w - 1) + r[..., 1])

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        a = (q * self.scale) @ k.transpose(-2, -1)
        bias = self.bias[self.index.view(-1)].view(n, n, -1).permute(2, 0, 1).contiguous()
        a = (a + bias.unsqueeze(0)).softmax(-1)
        return self.proj((a @ v).transpose(1, 2).reshape(b, n, c))


class SwinBlock(nn.Module):
    """Attention in windows, shifted by a roll or not, and an MLP."""

    def __init__(self, dim: int, heads: int, w: int, shift: int) -> None:
        super().__init__()
        self.w, self.shift = w, shift
        self.n1, self.att = nn.LayerNorm(dim), WindowAttention(dim, heads, w)
        self.n2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        _, h, w, c = x.shape
        short = x
        x = self.n1(x)
        if self.shift:
            x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        x = self.att(windows(x, self.w).view(-1, self.w * self.w, c))
        x = unwindows(x.view(-1, self.w, self.w, c), self.w, h, w)
        if self.shift:
            x = torch.roll(x, (self.shift, self.shift), (1, 2))
        x = short + x
        return x + self.mlp(self.n2(x))


class Merge(nn.Module):
    """Four neighbours become one position."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.red = nn.LayerNorm(4 * dim), nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1)
        return self.red(self.norm(x))


class Swin(nn.Module):
    """Shifted windows (Liu et al. 2021), of two stages."""

    input_shape = (3, 64, 64)

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Conv2d(3, 48, 4, 4), nn.LayerNorm(48)
        self.s1 = nn.Sequential(SwinBlock(48, 3, 4, 0), SwinBlock(48, 3, 4, 2))
        self.merge = Merge(48)
        self.s2 = nn.Sequential(SwinBlock(96, 6, 4, 0), SwinBlock(96, 6, 4, 2))
        self.out, self.head = nn.LayerNorm(96), nn.Linear(96, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.embed(x).permute(0, 2, 3, 1))
        x = self.s2(self.merge(self.s1(x)))
        return self.head(self.out(x).mean((1, 2)))


class Unet3d(nn.Module):
    """A U-Net over volumes, with ELU."""

    input_shape = (1, 16, 16, 16)

    def __init__(self) -> None:
        super().__init__()

        def c(a, b):
            return nn.Sequential(nn.Conv3d(a, b, 3, padding=1), nn.GroupNorm(4, b), nn.ELU())

        self.a, self.b, self.d = c(1, 16), c(16, 32), c(32, 16)
        self.u = nn.ConvTranspose3d(32, 16, 2, stride=2)
        self.out = nn.Conv3d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(F.max_pool3d(a, 2))
        return self.out(self.d(torch.cat([self.u(b), a], 1))).mean((2, 3, 4))


class ESPCN(nn.Module):
    """Pixels shuffled to a finer grid."""

    input_shape = (3, 32, 32)

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 64, 5, padding=2),
            nn.Tanh(),
            nn.Conv2d(64, 32, 3, padding=1),
            nn.Tanh(),
            nn.Conv2d(32, 3 * 4 * 4, 3, padding=1),
            nn.PixelShuffle(4),
            nn.Conv2d(3, 10, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).mean((2, 3))


class WaveNet(nn.Module):
    """Dilated causal convolutions with gates, whose skips are summed."""

    input_shape = (1, 1024)

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Conv1d(1, 32, 1)
        self.f = nn.ModuleList(nn.Conv1d(32, 32, 2, dilation=2**i) for i in range(6))
        self.g = nn.ModuleList(nn.Conv1d(32, 32, 2, dilation=2**i) for i in range(6))
        self.r = nn.ModuleList(nn.Conv1d(32, 32, 1) for i in range(6))
        self.k = nn.ModuleList(nn.Conv1d(32, 64, 1) for i in range(6))
        self.e = nn.Conv1d(64, 10, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, skip = self.start(x), 0
        for i in range(6):
            p = F.pad(x, (2**i, 0))
            z = torch.tanh(self.f[i](p)) * torch.sigmoid(self.g[i](p))
            skip = skip + self.k[i](z)
            x = x + self.r[i](z)
        return self.e(F.relu(skip)).mean(2)


class RMS(nn.Module):
    """Root mean square norm, written out."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.w


class Llama(nn.Module):
    """Rotary positions, shared keys and values, and gated MLPs."""

    token_task = NextToken(vocabulary=500, sequence=64)

    def __init__(self) -> None:
        super().__init__()
        d = 128
        self.emb = nn.Embedding(500, d)
        widths = {"q": (d, d), "k": (d, 64), "v": (d, 64), "o": (d, d), "a": (d, 320), "g": (d, 320), "b": (320, d)}
        self.blocks = nn.ModuleList()
        for _ in range(3):
            products = {name: nn.Linear(*of, bias=False) for name, of in widths.items()}
            self.blocks.append(nn.ModuleDict({"n1": RMS(d), "n2": RMS(d), **products}))
        self.n, self.head = RMS(d), nn.Linear(d, 500, bias=False)
        f = torch.outer(torch.arange(64), 1 / 10000 ** (torch.arange(0, 32, 2) / 32))
        self.register_buffer("cos", torch.cat([f, f], -1).cos())
        self.register_buffer("sin", torch.cat([f, f], -1).sin())

    def rope(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * self.cos + torch.cat([-b, a], -1) * self.sin

    def forward(self, ids: Tensor) -> Tensor:
        b, t = ids.shape
        x = self.emb(ids)
        for m in self.blocks:
            h = m["n1"](x)
            q = self.rope(m["q"](h).view(b, t, 4, 32).transpose(1, 2))
            k = self.rope(m["k"](h).view(b, t, 2, 32).transpose(1, 2)).repeat_interleave(2, 1)
            v = m["v"](h).view(b, t, 2, 32).transpose(1, 2).repeat_interleave(2, 1)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + m["o"](y.transpose(1, 2).reshape(b, t, 128))
            h = m["n2"](x)
            x = x + m["b"](F.silu(m["g"](h)) * m["a"](h))
        return self.head(self.n(x))


class Shuffle(nn.Module):
    """Half of the channels go through convolutions; then all are shuffled."""

    input_shape = (3, 32, 32)

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 3, padding=1)
        self.c = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(32, 32, 1, bias=False),
                nn.BatchNorm2d(32),
                nn.ReLU(),
                nn.Conv2d(32, 32, 3, padding=1, groups=32, bias=False),
                nn.BatchNorm2d(32),
                nn.Conv2d(32, 32, 1, bias=False),
                nn.BatchNorm2d(32),
                nn.ReLU(),
            )
            for _ in range(4)
        )
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for c in self.c:
            a, b = x.chunk(2, 1)
            x = torch.cat([a, c(b)], 1)
            n, ch, h, w = x.shape
            x = x.view(n, 2, ch // 2, h, w).transpose(1, 2).reshape(n, ch, h, w)
        return self.head(x.mean((2, 3)))


class FNO(nn.Module):
    """A product in the frequency domain, of complex numbers."""

    input_shape = (3, 32, 32)

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 32, 1)
        self.w = nn.Conv2d(32, 32, 1)
        self.wr = nn.Parameter(torch.randn(32, 32, 8, 8) / 32)
        self.wi = nn.Parameter(torch.randn(32, 32, 8, 8) / 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        f = torch.fft.rfft2(x)[:, :, :8, :8]
        re = torch.einsum("bixy,ioxy->boxy", f.real, self.wr) - torch.einsum("bixy,ioxy->boxy", f.imag, self.wi)
        y = F.interpolate(re, size=(32, 32))
        return self.head(F.gelu(y + self.w(x)).mean((2, 3)))


class VQ(nn.Module):
    """Codes chosen from a book by distance, with gradients passed straight through."""

    input_shape = (3, 32, 32)

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Sequential(nn.Conv2d(3, 32, 4, 2, 1), nn.SiLU(), nn.Conv2d(32, 32, 3, padding=1))
        self.book = nn.Embedding(128, 32)
        self.d = nn.Sequential(nn.ConvTranspose2d(32, 32, 4, 2, 1), nn.SiLU(), nn.Conv2d(32, 10, 1))

    def forward(self, x: Tensor) -> Tensor:
        z = self.e(x).permute(0, 2, 3, 1)
        dist = (z.unsqueeze(-2) - self.book.weight).pow(2).sum(-1)
        q = self.book(dist.argmin(-1))
        q = z + (q - z).detach() + 0 * q
        return self.d(q.permute(0, 3, 1, 2)).mean((2, 3))


class UNetUp(nn.Module):
    """A U-Net up by bilinear resizing, with instance norms."""

    input_shape = (3, 48, 48)

    def __init__(self) -> None:
        super().__init__()

        def c(a, b):
            return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.InstanceNorm2d(b, affine=True), nn.LeakyReLU(0.1))

        self.a, self.b, self.c, self.d, self.e = c(3, 24), c(24, 48), c(48, 96), c(144, 48), c(72, 24)
        self.out = nn.Conv2d(24, 10, 1)

    def up(self, x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(F.max_pool2d(a, 2))
        c = self.c(F.max_pool2d(b, 2))
        d = self.d(torch.cat([self.up(c), b], 1))
        e = self.e(torch.cat([self.up(d), a], 1))
        return self.out(e).amax((2, 3))


class ParamView(nn.Module):
    """Weights read transposed, and as views of another shape."""

    input_shape = (512,)

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(1024, 512) / 30)
        self.v = nn.Parameter(torch.randn(8, 128, 1024) / 30)
        self.h = nn.Linear(1024, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(x @ self.w.t())
        z = y @ self.v.view(1024, 1024).T
        return self.h(torch.relu(z))
