"""Ghost layers: what a real module would return and want gradients of, without its work, and when they sleep for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ghost_clock import Clock
from torch import nn

from paradl_bench.core.errors import WorkError
from paradl_bench.emulation.forms import form_of
from paradl_bench.emulation.layers import _Zeros, _zeros_of, hold_in_common
from paradl_bench.emulation.twin import GhostTwin
from paradl_bench.measure.collectives.ghosts_before import GhostsBefore
from paradl_bench.measure.tracing.gradient_order import GradientOrder
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.measure.training.request import TrainingRequest
from paradl_bench.measure.training.trainer import Trainer
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.models.catalog import LoadedModel, load_model
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.plan.tasks import Compute
from paradl_bench.ranks.groups.process_groups import RankContext
from paradl_bench.records.training.ghost_record import GhostPhase, GhostRole
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.passes.recomputed_module import recompute_segments
from paradl_bench.strategies.running.spans import Spans


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


def traced(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> ModelGraph:
    # Traced by name: a model of this file is built here.
    if model.name == "branching":
        monkeypatch.setattr(
            "paradl_bench.network.models.catalog.load_model",
            lambda name, shape, device: LoadedModel(name, on(device), shape),
        )
    return trace_network(model)


def on(device: str) -> nn.Module:
    with torch.device(device):
        return Branching().train()


def second_each(network: ModelGraph) -> GhostRole:
    """A layer's place in the network makes its seconds: a sum tells which layers were slept for."""
    layers: dict[str, dict[GhostPhase, float]] = {
        layer.name: {"FW": 1e-3 * (index + 1), "BW": 1e-6 * (index + 1)} for index, layer in enumerate(network.layers)
    }
    return GhostRole(layers=layers, between={"FW": 0.0, "BW": 0.0}, update_s=7.0)


@pytest.mark.parametrize("name", MODELS)
def test_ghosts_give_the_modules_outputs_and_its_gradient_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS[name]()
    network = traced(model, monkeypatch)
    inputs, targets = model.make_batch(2, 0)
    real = model.module(inputs)
    before = {name: value.clone() for name, value in model.module.named_parameters()}

    twin = GhostTwin(network, second_each(network), dilate=2.0)
    loss_of, optimizer = twin.loss(model.loss), twin.optimizer_class()(model.module.parameters())
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
    # Calls that return what they are given are planned, and so they sleep as well.
    assert asked["FW"] == pytest.approx(2e-3 * len(network.layers) * (len(network.layers) + 1) / 2)
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


@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [(torch.topk, (2,), {}), (torch.Tensor.max, (), {"dim": -1}), (torch.min, (1,), {}), (torch.topk, (3, 1), {})],
)
def test_places_are_chosen_equally_often(function: Any, args: tuple[int, ...], kwargs: dict[str, int]) -> None:
    values = torch.randn(8, 4)
    form = form_of(function, (values, *args), kwargs, [values])
    assert form.outputs is not None
    chosen, places = (_zeros_of(output, [values], _Zeros()) for output in form.outputs)
    assert places.shape == chosen.shape
    assert places.flatten().bincount().tolist() == [places.numel() // 4] * 4
    assert all(len(set(row)) == len(row) for row in places.view(8, -1).tolist())


def test_control_flow_that_varies_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LoadedModel("varying", Varying().train(), (6,))
    on_meta = LoadedModel("varying", Varying().to("meta").train(), (6,))
    monkeypatch.setattr("paradl_bench.network.models.catalog.load_model", lambda *_, **__: on_meta)
    twin = GhostTwin(trace_network(model), GhostRole(layers={}, between={}, update_s=0.0), 1.0)
    inputs, _ = model.make_batch(2, 0)
    alone = twin.alone(model.module)
    with pytest.raises(WorkError, match="control flow varies"):
        [alone(inputs) for _ in range(2)]


def test_a_twin_settles_before_messages_and_before_gradient_work(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["branching"]()
    network = traced(model, monkeypatch)
    clock = Clock(monkeypatch, late_s=0.0)
    twin, spans = GhostTwin(network, second_each(network), dilate=1e3), Spans()
    twin.follow(spans, model.module.parameters())
    inputs, targets = model.make_batch(2, 0)
    twin.sleeper.begin_turn()
    outputs = twin.alone(model.module)(inputs)
    assert clock.sleeps == 0
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


def test_swept_calls_follow_ghosts_and_are_timed_from_their_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch, late_s=0.0)
    ghosts = GhostsBefore(5e-3)
    for begin in (2.0, 3.0):
        clock.now = begin
        ghosts.run()
        assert ghosts.over == pytest.approx(begin + 5e-3)
        assert clock.now == pytest.approx(ghosts.over, abs=2e-6)


def test_ghosts_sleep_only_in_timed_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
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
