"""Ghost layers: what a real module would return and want gradients of, without its work, and what is slept for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from paradl_bench.core.errors import WorkError
from paradl_bench.emulation.layers import hold_in_common
from paradl_bench.emulation.sleeper import Sleeper
from paradl_bench.emulation.twin import GhostTwin
from paradl_bench.measure.collectives.ghosts_before import GhostsBefore
from paradl_bench.measure.tracing.gradient_order import GradientOrder
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.measure.training.request import TrainingRequest
from paradl_bench.measure.training.trainer import Trainer
from paradl_bench.network.graph import Network
from paradl_bench.network.models.catalog import LoadedModel, load_model
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.plan.tasks import Compute
from paradl_bench.ranks.groups.process_groups import RankContext
from paradl_bench.records.training.ghost_record import GhostPhase, GhostRole
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.passes.recomputed_module import recompute_segments
from paradl_bench.strategies.running.group_functions import Spans


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
            "paradl_bench.measure.tracing.tracing.load_model",
            lambda name, shape, device: LoadedModel(name, on(device), shape),
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
    monkeypatch.setattr("paradl_bench.measure.tracing.tracing.load_model", lambda *_, **__: on_meta)
    twin = GhostTwin(trace_network(model), GhostRole(layers={}, between={}, update_s=0.0), 1.0)
    inputs, _ = model.make_batch(2, 0)
    alone = twin.alone(model.module)
    with pytest.raises(WorkError, match="control flow varies"):
        [alone(inputs) for _ in range(2)]


class Clock:
    """A clock that sleeping moves, and a little more, and offering the core to others a microsecond."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, late_s: float) -> None:
        self.now, self.late_s, self.sleeps = 0.0, late_s, 0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self._sleep)
        monkeypatch.setattr("paradl_bench.emulation.sleeper.offer_core", self._offer)

    def _sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.sleeps += 1
        self.now += seconds + self.late_s

    def _offer(self) -> None:
        self.now += 1e-6


def turn(sleeper: Sleeper) -> None:
    """Begin a forward or backward, and its first layer, which takes nothing."""
    sleeper.begin_turn()
    sleeper.ask("FW", 0.0)


def test_nobody_sleeps_until_somebody_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sleeper = Clock(monkeypatch, late_s=0.0), Sleeper(dilate=3.0)
    turn(sleeper)
    for _ in range(100):
        # The host dispatches ahead of what it dispatches.
        clock.now += 1e-4
        sleeper.ask("FW", 1e-3)
    assert (clock.now, clock.sleeps) == (pytest.approx(0.01), 0)
    sleeper.settle()
    assert (clock.now, clock.sleeps) == (pytest.approx(0.3, abs=2e-6), 1)
    assert sleeper.take_asked() == pytest.approx({"FW": 0.3})
    assert sleeper.take_asked() == {}
    sleeper.settle()
    assert clock.sleeps == 1


@pytest.mark.parametrize("each_s", [1e-5, 2e-4, 3e-3])
def test_sleeps_that_end_late_add_up_to_what_was_asked(each_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sleeper = Clock(monkeypatch, late_s=1.5e-4), Sleeper(dilate=3.0)
    turn(sleeper)
    late = []
    for count in range(1, 1001):
        sleeper.ask("FW", each_s)
        sleeper.settle()
        late.append(clock.now - 3 * count * each_s)
    # The kernel is asked for earlier ends once it is known to be late; what one took too long the next are shorter by.
    assert max(late) <= clock.late_s
    assert max(late[-100:]) <= 2e-6
    assert min(late) >= -1e-12


def test_a_kernel_that_is_late_by_milliseconds_is_not_waited_for_on_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sleeper = Clock(monkeypatch, late_s=5e-3), Sleeper()
    turn(sleeper)
    for _ in range(200):
        sleeper.ask("FW", 0.1)
        sleeper.settle()
    clock.late_s, before = 0.0, clock.sleeps
    at, offered = clock.now, []
    monkeypatch.setattr(
        "paradl_bench.emulation.sleeper.offer_core", lambda: (offered.append(clock.now), clock._offer())
    )
    sleeper.ask("FW", 0.2)
    sleeper.settle()
    assert clock.sleeps == before + 1
    assert clock.now > at
    assert len(offered) <= 301


def test_a_rank_that_was_kept_from_its_core_catches_up_until_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sleeper = Clock(monkeypatch, late_s=0.5), Sleeper()
    turn(sleeper)
    sleeper.ask("BW", 1.0)
    sleeper.settle()
    late_s = clock.now - 1.0
    assert late_s == pytest.approx(0.5, abs=1e-3)
    clock.late_s = 0.0
    # A message, for which it would have waited longer had it been in time: it is late by what is left.
    sleeper.span_began("halo")
    clock.now += 0.3
    sleeper.span_ended("halo")
    sleeper.ask("BW", 1.0)
    sleeper.settle()
    assert clock.now == pytest.approx(1.0 + late_s + 0.3 + 1.0 - (late_s - 0.3), abs=1e-5)
    clock.late_s, before = 0.5, clock.now
    sleeper.ask("BW", 1.0)
    sleeper.settle()
    clock.late_s, late_s = 0.0, clock.now - before - 1.0
    sleeper.span_began("halo")
    clock.now += 0.7
    sleeper.span_ended("halo")
    sleeper.ask("BW", 1.0)
    sleeper.settle()
    # Never earlier than with sleeps that end in time.
    assert clock.now == pytest.approx(before + 1.0 + late_s + 0.7 + 1.0, abs=1e-5)


def test_what_is_done_with_gradients_is_real_and_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sleeper = Clock(monkeypatch, late_s=0.0), Sleeper()
    turn(sleeper)
    sleeper.ask("BW", 1.0)
    clock.now += 0.25
    # The layer is over when its gradients arrive; two of them are copied.
    sleeper.work()
    assert clock.now == pytest.approx(1.0, abs=2e-6)
    clock.now += 0.5
    sleeper.work()
    clock.now += 0.25
    sleeper.ask("BW", 2.0)
    clock.now += 0.125
    sleeper.settle()
    assert clock.now == pytest.approx(1.0 + 0.75 + 2.0, abs=4e-6)


@pytest.mark.parametrize("host_s", [0.0, 0.02])
def test_a_turn_that_was_waited_for_takes_as_long_as_any(host_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sleeper = Clock(monkeypatch, late_s=0.0), Sleeper()
    sleeper.host_s = {"FW": host_s}
    sleeper.begin_turn()
    sleeper.ask("WU", 0.1)
    sleeper.begin_turn()
    for _ in range(3):
        # A stage waits for what it is sent, and then has its micro-batch.
        clock.now += 0.5
        sleeper.span_began("FW")
        begin = clock.now
        for _ in range(2):
            clock.now += host_s
            sleeper.ask("FW", 0.1)
        sleeper.span_ended("FW")
        # Of what passes until a turn's first layer, the host's own time is known as far as it was measured.
        assert clock.now - begin == pytest.approx(0.2, abs=4e-6)


def test_a_twin_settles_before_messages_and_before_gradients_are_worked_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["branching"]()
    network = traced(model, monkeypatch)
    clock = Clock(monkeypatch, late_s=0.0)
    twin, spans = GhostTwin(network, second_each(network), dilate=1e3), Spans()
    twin.follow(spans, model.module.parameters())
    inputs, targets = model.make_batch(2, 0)
    twin.sleeper.begin_turn()
    outputs = twin.alone(model.module)(inputs)
    assert clock.now == 0
    asked = sum(twin.sleeper.asked_s.values())
    with spans.span("halo"):
        assert clock.now == pytest.approx(asked, abs=1e-5)
        clock.now += 1.0
    loss = twin.then(lambda: twin.loss(model.loss)(outputs, targets))()
    arrivals: list[tuple[float, float]] = []
    for parameter in model.module.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: arrivals.append((clock.now, 1.0 + sum(twin.sleeper.asked_s.values())))
        )
    loss.backward()
    assert len(arrivals) == len(network.gradient_order)
    assert len({round(now, 4) for now, _ in arrivals}) > 4
    for now, due in arrivals:
        assert now == pytest.approx(due, abs=1e-4)
    assert spans.rows == []


def test_calls_that_are_swept_lie_behind_ghosts_and_count_from_when_these_are_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch, late_s=0.0)
    ghosts = GhostsBefore(5e-3)
    for begin in (2.0, 3.0):
        clock.now = begin
        ghosts.run()
        assert ghosts.over == pytest.approx(begin + 5e-3)
        assert clock.now == pytest.approx(ghosts.over, abs=2e-6)


def test_who_is_awake_asks_and_does_not_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sleeper = Clock(monkeypatch, late_s=0.0), Sleeper()
    with sleeper.awake():
        sleeper.ask("WU", 1.0)
        sleeper.work()
        sleeper.settle()
    assert (clock.sleeps, sleeper.take_asked()) == (0, {"WU": 1.0})
    # Nor is what was done with gradients meanwhile anything to come behind.
    clock.now += 0.25
    sleeper.settle()
    assert sleeper.due == 0
    turn(sleeper)
    sleeper.ask("WU", 1.0)
    sleeper.settle()
    assert clock.now == pytest.approx(1.25, abs=2e-6)
    assert sleeper.calls == {"FW": 1, "WU": 1}


def test_what_passes_between_sleeps_is_kept_by_phase_while_it_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sleeper = Clock(monkeypatch, late_s=0.0), Sleeper()
    sleeper.ask("FW", 1.0)
    with sleeper.watched() as gaps:
        for phase, host_s in (("FW", 0.25), ("FW", 0.5), ("BW", 2.0)):
            clock.now += host_s
            sleeper.ask(phase, 1.0)
            if phase == "FW":
                sleeper.settle()
    clock.now += 8.0
    sleeper.ask("BW", 1.0)
    assert gaps == {"FW": pytest.approx([0.25, 0.5]), "BW": pytest.approx([2.0])}


def test_of_who_is_awake_what_passes_between_calls_is_kept_too(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sleeper = Clock(monkeypatch, late_s=0.0), Sleeper()
    with sleeper.awake(), sleeper.watched() as gaps:
        for phase, host_s in (("FW", 0.25), ("FW", 0.5), ("BW", 2.0)):
            clock.now += host_s
            sleeper.ask(phase, 1.0)
            sleeper.settle()
    assert gaps == {"FW": pytest.approx([0.25, 0.5]), "BW": pytest.approx([2.0])}
    assert clock.sleeps == 0


def test_ghosts_sleep_in_iterations_that_are_timed_and_in_none_before(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model("resnet18", (3, 32, 32))
    network = trace_network(model)
    clock = Clock(monkeypatch, late_s=0.0)
    twin = GhostTwin(network, second_each(network), dilate=1.0)
    iteration_s = sum(sum(seconds.values()) for seconds in second_each(network).layers.values()) + 7.0
    request = TrainingRequest(model="resnet18", strategy=Strategy(), batch=2, device="cpu", input_shape=(3, 32, 32))
    context = RankContext(
        rank=0, ranks=1, local_rank=0, device=torch.device("cpu"), backend="none", launcher="local", core=None
    )
    trainer = Trainer(model, request, context, twin)
    trainer.try_alone(network)
    trainer.prepare(network)
    assert (clock.sleeps, clock.now) == (0, 0.0)
    trainer.run_chunk(0, 2)
    # One that is not timed stands before them; a layer or two have nothing to do in backward.
    assert clock.now == pytest.approx(3 * iteration_s, rel=1e-3)


@pytest.mark.parametrize("dilate", [0.0, -1.0, float("inf"), float("nan")])
def test_a_dilation_is_positive(dilate: float) -> None:
    with pytest.raises(ValueError, match="dilate"):
        Sleeper(dilate)
