"""What a stage of a pipeline would refuse is refused before ranks are started, and cuts are where stages are sound."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import pipeline_idioms

from paradl_bench.core.errors import UserError
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.models.catalog import LoadedModel, load_model
from paradl_bench.plan.settings import PlanSettings, plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.strategies.pipeline.crossings import refusals
from paradl_bench.strategies.pipeline.rehearsal import rehearse
from paradl_bench.strategies.pipeline.stages import cut_into_stages, given_cuts


def traced(factory: str) -> tuple[LoadedModel, ModelGraph]:
    model = load_model(factory if ":" in factory else f"pipeline_idioms:{factory}", device="meta")
    return model, trace_network(model)


def rehearsed(factory: str, ranks: int = 2, **settings: object) -> None:
    model, network = traced(factory)
    asked = plan_settings(batch=4 * ranks, **settings)  # type: ignore[arg-type]
    rehearse(model.module, network, parse_strategy(f"p{ranks}"), asked)


class Averaging(torch.nn.Sequential):
    input_shape = (4, 6)

    def __init__(self) -> None:
        norm = torch.nn.BatchNorm1d(4, momentum=None)
        super().__init__(torch.nn.Linear(6, 6), norm, torch.nn.Linear(6, 6), torch.nn.Flatten(), torch.nn.Linear(24, 5))


class Asking(pipeline_idioms.Linears):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        return self.c(torch.tanh(self.b(x)) * float(x.abs().max())).mean(1)


class Frozen(pipeline_idioms.Linears):
    def __init__(self) -> None:
        super().__init__()
        self.e.requires_grad_(False)
        self.f.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.f(torch.tanh(self.e(torch.tanh(self.b(torch.tanh(self.a(x))))))).mean(1)


def test_cumulative_batch_norm_is_refused_with_the_correct_setting() -> None:
    with pytest.raises(UserError, match=r"cannot run in stages: its code asks for values.*; give 1 a momentum"):
        rehearsed(f"{__name__}:Averaging")


def test_code_that_reads_values_is_refused_by_the_preceding_operation() -> None:
    with pytest.raises(UserError, match=r"cannot run in stages: its code asks for values behind max, which a stage"):
        rehearsed(f"{__name__}:Asking")


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved"])
@pytest.mark.parametrize("name", ["Discarded", "Views", "Copied", "SeveralTensors", "Constants", "Transposed"])
def test_what_can_be_followed_is_rehearsed(name: str, schedule: str) -> None:
    rehearsed(name, schedule=schedule)


def test_a_stage_of_frozen_parameters_trains_nothing() -> None:
    _, network = traced(f"{__name__}:Frozen")
    with pytest.raises(UserError, match=r"the stage that starts at e has no parameter to train"):
        given_cuts(network, ("e",), 2)
    stages = cut_into_stages(network, 2, PlanSettings(batch=8))
    assert [stage.network.parameters[0].name for stage in stages] == ["a.weight", "b.weight"]


def test_cuts_crossed_by_in_place_work_are_refused_by_name() -> None:
    _, network = traced("Views")
    refused = refusals(network)
    places = {layer.name: i for i, layer in enumerate(network.layers)}
    # x and a view of it are changed behind these; behind the last of them both cross as they are then.
    assert refused[places["mul"]].endswith("works in place on what crosses")
    assert refused[places["setitem#2"]] == "setitem#2 works in place on what crosses"
    assert places["c"] not in refused


def test_every_tensor_of_several_crosses_by_itself() -> None:
    _, network = traced("SeveralTensors")
    stages = cut_into_stages(network, 2, plan_settings(batch=8, stages=("tanh",)))
    names = [(network.layers[value.layer].name, value.output) for value in stages[1].receives]
    assert names == [("chunk", 0), ("chunk", 1)]
    assert stages[1].receives == stages[0].sends
