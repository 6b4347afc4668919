"""Ghost layers: what a real module would return and want gradients of, without its work, and what is slept for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from paradl_bench.emulate.layers import hold_in_common
from paradl_bench.emulate.sleeper import SHORTEST_S, Sleeper
from paradl_bench.emulate.twin import GhostTwin
from paradl_bench.measure.gradient_order import GradientOrder
from paradl_bench.measure.tracing import trace_network
from paradl_bench.models.catalog import LoadedModel, load_model
from paradl_bench.spec.errors import WorkError
from paradl_bench.spec.ghost_record import GhostPhase, GhostRole
from paradl_bench.spec.network import Network
from paradl_bench.spec.plan import Compute, PlanSettings
from paradl_bench.spec.strategy import Strategy
from paradl_bench.strategies.catalog import planner_for
from paradl_bench.strategies.recomputed_module import recompute_segments


class Branching(nn.Module):
    "Skips, works in place, normalises, reads positions, indexes, and has four parameters in one function."

    input_shape = (3, 8, 8)

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.block = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.places, self.attention = nn.Embedding(64, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Any) -> Any:
        x = nn.functional.relu(self.norm(self.stem(x)), inplace=True)
        x = x + self.block(x)
        x += 1
        x.mul_(2)
        x = x.flatten(2).transpose(1, 2) + self.places(torch.arange(64, device=x.device))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        values, _ = x.max(1)
        return self.head(values)


class Varying(nn.Module):
    "Calls one operation more in every other forward."

    input_shape = (6,)

    def __init__(self) -> None:
        super().__init__()
        self.head, self.calls = nn.Linear(6, 10), 0

    def forward(self, x: Any) -> Any:
        self.calls += x.device.type != "meta"
        return torch.relu(self.head(x)) if self.calls % 2 else self.head(x)


MODELS: dict[str, Callable[[], LoadedModel]] = {
    "branching": lambda: LoadedModel("branching", Branching().train(), Branching.input_shape),
    "resnet18": lambda: load_model("resnet18", (3, 32, 32)),
    "shufflenet_v2_x0_5": lambda: load_model("shufflenet_v2_x0_5", (3, 64, 64)),
    "vit_b_16": lambda: load_model("vit_b_16"),
}


def traced(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> Network:
    # Traced by name: a model of this file is built here.
    if model.name == "branching":
        monkeypatch.setattr(
            "paradl_bench.measure.tracing.load_model", lambda name, shape, device: LoadedModel(name, on(device), shape)
        )
    return trace_network(model)


def on(device: str) -> nn.Module:
    with torch.device(device):
        return Branching().train()


def second_each(network: Network) -> GhostRole:
    """A layer's place in the network makes its seconds: a sum tells which layers were slept for."""
    layers: dict[str, dict[GhostPhase, float]] = {
        layer.name: {"FW": 1e-3 * (index + 1), "BW": 1e-6 * (index + 1)} for index, layer in enumerate(network.layers)
    }
    return GhostRole(layers=layers, between={"FW": 0.0, "BW": 0.0}, update_s=7.0)


@pytest.mark.parametrize("name", MODELS)
def test_a_ghost_gives_what_the_module_would_and_gradients_in_its_order(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MODELS[name]()
    network = traced(model, monkeypatch)
    inputs, targets = model.make_batch(2, 0)
    real = model.module(inputs)
    before = {name: value.clone() for name, value in model.module.named_parameters()}

    twin = GhostTwin(network, second_each(network), dilate=2.0)
    loss_of, optimizer = twin.loss(model.loss), twin.optimizer(model.module.parameters())
    with twin.sleeper.awake():
        outputs = twin.alone(model.module)(inputs)
        assert (outputs.shape, outputs.dtype, outputs.stride()) == (real.shape, real.dtype, real.stride())
        loss = loss_of(outputs, targets)
        with GradientOrder(model.module) as order:
            loss.backward()
        optimizer.step()
    assert loss.item() == 0
    assert tuple(order.names) == network.gradient_order
    for parameter_name, parameter in model.module.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.shape == parameter.shape
        assert not parameter.grad.any(), parameter_name
        assert torch.equal(parameter, before[parameter_name])
    asked = twin.sleeper.take_asked()
    every = len(network.layers) * (len(network.layers) + 1) / 2
    # A call that returned what it was given is no layer's work.
    untouched = sum(i + 1 for i, layer in enumerate(network.layers) if layer.attributes.get("returns_input"))
    assert asked["FW"] == pytest.approx(2e-3 * (every - untouched))
    assert asked["WU"] == 14.0
    optimizer.zero_grad(set_to_none=True)
    assert all(parameter.grad is None for parameter in model.module.parameters())


def test_backward_sleeps_for_the_layers_that_a_plan_runs_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["branching"]()
    network = traced(model, monkeypatch)
    for recompute in ((), ("attention",)):
        settings = PlanSettings(batch=2, recompute=recompute)
        plan = planner_for(Strategy()).plan(network, Strategy(), settings)
        seconds = second_each(network)
        wanted = {"FW": 0.0, "BW": 0.0}
        for index in plan.roles[0].work.tolist():
            work = plan.works[index]
            if isinstance(work, Compute):
                wanted[work.way] += seconds.layers[work.layer][work.phase]
        recompute_segments(model.module, network, settings)
        twin = GhostTwin(network, seconds, dilate=1.0)
        inputs, targets = model.make_batch(2, 0)
        with twin.sleeper.awake():
            twin.loss(model.loss)(twin.alone(model.module)(inputs), targets).backward()
        assert twin.sleeper.take_asked() == pytest.approx(wanted), recompute


def test_outputs_gradients_and_parameters_each_share_their_memory() -> None:
    model = load_model("resnet18", (3, 32, 32))
    network = trace_network(model)
    hold_in_common(model.module)
    held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.module.parameters()}
    assert list(held.values()) == [4 * max(p.numel() for p in model.module.parameters())]
    outputs: dict[int, int] = {}
    for part in model.module.modules():
        if isinstance(part, nn.Conv2d):
            part.register_forward_hook(
                lambda _, __, made: outputs.update({made.untyped_storage().data_ptr(): made.untyped_storage().nbytes()})
            )
    twin = GhostTwin(network, GhostRole(layers={}, between={}, update_s=0.0), 1.0)
    inputs, targets = model.make_batch(2, 0)
    twin.loss(model.loss)(twin.alone(model.module)(inputs), targets).backward()
    blocks = {p.grad.untyped_storage().data_ptr() for p in model.module.parameters() if p.grad is not None}
    sizes = {p.grad.untyped_storage().nbytes() for p in model.module.parameters() if p.grad is not None}
    # A block is made anew when a larger parameter comes; here they grow towards the input's side a few times.
    assert len(blocks) < 12
    assert max(sizes) == 4 * max(p.numel() for p in model.module.parameters())
    # The first convolution's output is the largest: 64 channels of 16 x 16, of two samples.
    assert list(outputs.values()) == [4 * 2 * 64 * 16 * 16]


def test_control_flow_that_varies_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LoadedModel("varying", Varying().train(), (6,))
    on_meta = LoadedModel("varying", Varying().to("meta").train(), (6,))
    monkeypatch.setattr("paradl_bench.measure.tracing.load_model", lambda *_, **__: on_meta)
    twin = GhostTwin(trace_network(model), GhostRole(layers={}, between={}, update_s=0.0), 1.0)
    inputs, _ = model.make_batch(2, 0)
    alone = twin.alone(model.module)
    with pytest.raises(WorkError, match="control flow varies"):
        [alone(inputs) for _ in range(2)]


class Clock:
    """A clock that sleeping moves, and a little more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, late_s: float) -> None:
        self.now, self.late_s, self.sleeps = 0.0, late_s, 0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self._sleep)

    def _sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.sleeps += 1
        self.now += seconds + self.late_s


@pytest.mark.parametrize("each_s", [1e-5, 2e-4, 3e-3])
def test_sleeps_that_end_late_add_up_to_what_was_asked(each_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sleeper = Clock(monkeypatch, late_s=1.5e-4), Sleeper(dilate=3.0)
    for _ in range(1000):
        sleeper.sleep("FW", each_s)
    assert abs(clock.now - 3000 * each_s) <= max(SHORTEST_S, clock.late_s) + 1e-9
    assert sleeper.take_asked() == pytest.approx({"FW": 3000 * each_s})
    assert sleeper.take_asked() == {}


def test_a_rank_that_was_kept_from_its_core_catches_up_until_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sleeper = Clock(monkeypatch, late_s=0.5), Sleeper()
    sleeper.sleep("BW", 1.0)
    clock.late_s = 0.0
    sleeper.sleep("BW", 1.0)
    assert clock.now == pytest.approx(2.0)
    clock.late_s = 0.5
    sleeper.sleep("BW", 1.0)
    clock.late_s = 0.0
    # A message, for which it would have waited longer had it been in time: it is late by what is left.
    clock.now += 0.3
    sleeper.sleep("BW", 1.0)
    assert clock.now == pytest.approx(2.0 + 1.5 + 0.3 + 0.8)
    clock.late_s = 0.5
    sleeper.sleep("BW", 1.0)
    clock.late_s, before = 0.0, clock.now
    clock.now += 0.7
    sleeper.sleep("BW", 1.0)
    assert clock.now == pytest.approx(before + 0.7 + 1.0)


def test_who_is_awake_asks_and_does_not_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sleeper = Clock(monkeypatch, late_s=0.0), Sleeper()
    with sleeper.awake():
        sleeper.sleep("WU", 1.0)
    assert (clock.sleeps, sleeper.take_asked()) == (0, {"WU": 1.0})
    sleeper.sleep("WU", 1.0)
    assert clock.now == 1.0


def test_what_the_host_takes_for_a_layer_stands_in_for_a_part_of_its_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sleeper = Clock(monkeypatch, late_s=0.0), Sleeper(dilate=2.0)
    sleeper.host_s = {"FW": 4e-4}
    for _ in range(100):
        # The host is busy, and then asks; every second layer sleeps less than it takes the host.
        for seconds in (1e-3, 1e-4):
            clock.now += 4e-4
            sleeper.sleep("FW", seconds)
    assert clock.now == pytest.approx(100 * 2 * 1.1e-3, abs=4e-4)
    assert sleeper.take_asked() == pytest.approx({"FW": 100 * 2 * 1.1e-3})
    # It takes off no more than what has passed.
    sleeper.sleep("FW", 1.0)
    sleeper.take_asked()
    before = clock.now
    sleeper.sleep("FW", 1e-3)
    assert clock.now == pytest.approx(before + 2e-3, abs=SHORTEST_S)
    assert sleeper.calls == {"FW": 1}


def test_what_passes_between_sleeps_is_kept_by_phase_while_it_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sleeper = Clock(monkeypatch, late_s=0.0), Sleeper()
    sleeper.sleep("FW", 1.0)
    with sleeper.watched() as gaps:
        for phase, host_s in (("FW", 0.25), ("FW", 0.5), ("BW", 2.0)):
            clock.now += host_s
            sleeper.sleep(phase, 1.0)
    clock.now += 8.0
    sleeper.sleep("BW", 1.0)
    assert gaps == {"FW": [0.25, 0.5], "BW": [2.0]}


@pytest.mark.parametrize("dilate", [0.0, -1.0, float("inf"), float("nan")])
def test_a_dilation_is_positive(dilate: float) -> None:
    with pytest.raises(ValueError, match="dilate"):
        Sleeper(dilate)
