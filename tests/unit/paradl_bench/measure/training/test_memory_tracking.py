"""Peaks that torch's tracker sees of small networks, trained alone, against the prediction, to the byte."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from paradl_bench.measure.execution.optimizers import build_optimizer
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.measure.training.memory_tracking import track_memory
from paradl_bench.network.models.catalog import LoadedModel, load_model
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.strategies.memory.peak import per_phase_memory

BATCH = 6


class Residual(nn.Module):
    """Two branches that meet, in place or not; the skip goes past a convolution, or is one."""

    input_shape = (3, 8, 8)

    def __init__(self, *, in_place: bool = True, project: bool = True) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.act = nn.BatchNorm2d(8), nn.ReLU(inplace=in_place)
        self.skip = nn.Conv2d(8, 8, 1) if project else nn.Identity()
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.one(x))
        y = self.norm(self.two(x))
        x = self.act(y + self.skip(x)) if self.act.inplace else torch.sigmoid(self.skip(x) + y)
        return self.head(x.mean((2, 3)))


class Dense(nn.Module):
    """Every layer reads all before it, as densenet's do."""

    input_shape = (4, 8, 8)

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4 + 6 * i, 6, 3, padding=1) for i in range(4))
        self.head = nn.Linear(28, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [x]
        for conv in self.convs:
            parts.append(torch.relu(conv(torch.cat(parts, 1))))
        return self.head(nn.functional.adaptive_avg_pool2d(torch.cat(parts, 1), (1, 1)).flatten(1))


class Sliced(nn.Module):
    """Gradients that meet are slices of larger ones, which cannot be added to in place."""

    input_shape = (3, 16, 16)

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 1), nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = self.one(x)
        two = self.two(one)
        return self.head(sum(self.pooled(torch.cat(parts, 1)) for parts in ((one, two), (two, one))))

    def pooled(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.adaptive_avg_pool2d(x, (1, 1)).flatten(1)


class Weights(nn.Module):
    """Weights read as views: transposed and of another shape; one whose gradient autograd copies."""

    input_shape = (48,)

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.randn(32, 48)), nn.Parameter(torch.randn(4, 8, 32))
        self.three, self.head = nn.Parameter(torch.randn(8, 8, 32)), nn.Linear(64, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(x @ self.one.t())
        x = torch.relu(x @ self.two.view(32, 32).T)
        return self.head(torch.einsum("bi,hdi->bhd", x, self.three.permute(0, 1, 2)).flatten(1))


class Frequencies(nn.Module):
    """Complex numbers, whose gradients' real parts are halves of larger memory; then double ones."""

    input_shape = (3, 16, 16)

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        spectrum = torch.fft.rfft2(x)[:, :, :8, :8]
        y = nn.functional.interpolate(spectrum.real * spectrum.imag, size=(16, 16)) + self.two(x)
        return self.head(y.double().exp().add(1).log().float().mean((2, 3)))


def sequence(*layers: nn.Module, input_shape: tuple[int, ...]) -> nn.Module:
    module = nn.Sequential(*layers)
    module.input_shape = input_shape
    return module


def convolutions(*between: nn.Module, dims: int = 2) -> nn.Module:
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    after = (conv(8, 8, 3, padding=1), nn.Flatten(), nn.LazyLinear(7))
    module = nn.Sequential(conv(3, 8, 3, padding=1), *between, *after)
    shape = (3, *(8,) * dims)
    module(torch.zeros(2, *shape))
    module.input_shape = shape
    return module


NETWORKS = {
    "linear": lambda: sequence(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10), input_shape=(64,)),
    "wide": lambda: sequence(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 3), input_shape=(512,)),
    "chain": convolutions,
    "relu": lambda: convolutions(nn.ReLU()),
    "relu in place": lambda: convolutions(nn.ReLU(inplace=True)),
    "leaky": lambda: convolutions(nn.LeakyReLU()),
    "leaky in place": lambda: convolutions(nn.LeakyReLU(inplace=True)),
    "relu6 in place": lambda: convolutions(nn.BatchNorm2d(8), nn.ReLU6(inplace=True)),
    "silu in place": lambda: convolutions(nn.SiLU(inplace=True)),
    "gelu": lambda: convolutions(nn.GELU()),
    "norm": lambda: convolutions(nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
    "dropout": lambda: convolutions(nn.ReLU(), nn.Dropout(0.5)),
    "dropout in place": lambda: convolutions(nn.BatchNorm2d(8), nn.Dropout(0.5, inplace=True)),
    "dropout of channels": lambda: convolutions(nn.ReLU(), nn.Dropout2d(0.5)),
    "max pool": lambda: convolutions(nn.ReLU(inplace=True), nn.MaxPool2d(2)),
    "overlapping max pool": lambda: convolutions(nn.MaxPool2d(3, 2, 1)),
    "average pool in 3-D": lambda: convolutions(nn.LeakyReLU(), nn.AvgPool3d(2), dims=3),
    "max pool in 1-D": lambda: convolutions(nn.MaxPool1d(2), dims=1),
    "adaptive pool": lambda: convolutions(nn.AdaptiveAvgPool2d((2, 2))),
    "group norm": lambda: convolutions(nn.GroupNorm(2, 8)),
    "softmax": lambda: convolutions(nn.Softmax(1)),
    "residual in place": Residual,
    "residual, identity": lambda: Residual(project=False),
    "residual, copies": lambda: Residual(in_place=False),
    "dense": Dense,
    "sliced": Sliced,
    "frequencies": Frequencies,
}


CHOSEN: list[str] = []


def chosen() -> nn.Module:
    return NETWORKS[CHOSEN[-1]]()


def load(name: str) -> LoadedModel:
    CHOSEN.append(name)
    return load_model(f"{__name__}:chosen")


def tracked(model: LoadedModel, optimizer_name: str) -> dict[str, int]:
    inputs, targets = model.make_batch(BATCH, 0)
    optimizer = build_optimizer(optimizer_name, model.module.parameters())

    def iterate() -> None:
        model.loss(model.module(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    iterate()
    found = track_memory(iterate, model.module, optimizer, (inputs, targets), rank=0)
    assert found.tracked_bytes == sum(found.parts_bytes.values())
    parts = {**found.parts_bytes, "input": found.parts_bytes["other"]}
    parts["activations"] = parts.get("activations", 0) + parts.pop("temporary", 0)
    if optimizer_name == "adam":
        # What the update makes is the optimizer's to the tracker; it also counts its steps.
        state = sum(2 * p.nbytes for p in model.module.parameters())
        parts["activations"] += parts["optimizer"] - state
        parts["optimizer"] = state
    return {name: size for name, size in parts.items() if name != "other"}


def predicted(model: LoadedModel, optimizer: str) -> dict[str, int]:
    parts = per_phase_memory(
        trace_network(model), BATCH, PlanSettings(batch=1, optimizer=optimizer), exchanged=False
    ).parts_bytes
    return {name: size for name, size in parts.items() if size}


# What nobody counts: losses, their gradients, and counters, a few numbers each.
SCALARS_BYTES = 100


@pytest.mark.parametrize("name", NETWORKS)
def test_the_tracked_peak_is_predicted_in_every_category(name: str) -> None:
    check(name, "sgd")


def test_adam_holds_its_moments_and_temporary_tensors() -> None:
    for name in ("wide", "norm"):
        check(name, "adam")


def test_frozen_parameters_are_tracked_too() -> None:
    module = NETWORKS["linear"]()
    module[0].weight.requires_grad_(False)
    model = LoadedModel(name="frozen", module=module, input_shape=module.input_shape)
    assert tracked(model, "sgd")["parameters"] == 4 * (64 * 32 + 32 + 32 * 10 + 10)


def test_weights_read_as_views_are_held_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NETWORKS, "weights", Weights)
    model = load("weights")
    found, expected = tracked(model, "sgd"), predicted(model, "sgd")
    # What becomes a parameter's gradient later counts as an activation in the one, as a gradient in the other.
    assert abs(sum(found.values()) - sum(expected.values())) <= SCALARS_BYTES, (found, expected)


def check(name: str, optimizer: str) -> None:
    model = load(name)
    found, expected = tracked(model, optimizer), predicted(model, optimizer)
    assert found.keys() == expected.keys()
    for category in found:
        assert abs(found[category] - expected[category]) <= SCALARS_BYTES, (category, found, expected)
