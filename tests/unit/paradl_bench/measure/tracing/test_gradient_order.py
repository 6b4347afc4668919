"""Gradients are planned in the order in which the device hands them on, which the meta device may not know."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

torch = pytest.importorskip("torch")

from paradl_bench.measure.layers.profiling import measure_layers
from paradl_bench.measure.layers.request import LayersRequest
from paradl_bench.measure.tracing.gradient_order import GradientOrder
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.models.catalog import LoadedModel, load_model
from paradl_bench.ranks.groups.process_groups import RankContext

ALONE = RankContext(
    rank=0, ranks=1, local_rank=0, device=torch.device("cpu"), backend="none", launcher="local", core=None
)


class Recurrent(torch.nn.Module):
    """oneDNN runs an LSTM whole, and the meta device its operations one by one."""

    input_shape = (4, 6)

    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(6, 8, num_layers=2, batch_first=True)
        self.head = torch.nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0].mean(1))


def as_seen(model: LoadedModel) -> GradientOrder:
    inputs, targets = model.make_batch(2, seed=0)
    with GradientOrder(model.module) as order:
        model.loss(model.module(inputs), targets).backward()
    return order


def test_a_network_takes_the_order_of_the_device() -> None:
    model = load_model(f"{__name__}:Recurrent")
    network, order = trace_network(model), as_seen(model)
    assert sorted(order.names) == sorted(network.gradient_order)
    assert tuple(order.names) != network.gradient_order, (
        "the devices agree: another layer has to show that they may not"
    )
    assert order.of(network).gradient_order == tuple(order.names)


def test_other_gradients_than_were_traced_change_nothing() -> None:
    model = load_model(f"{__name__}:Recurrent")
    network = trace_network(model)
    fewer = msgspec.structs.replace(network, gradient_order=network.gradient_order[1:])
    assert as_seen(model).of(fewer) is fewer


def test_layers_keep_the_order_of_the_device(tmp_path: Path) -> None:
    name = f"{__name__}:Recurrent"
    asked = LayersRequest(
        models=(name,),
        batches=(2,),
        input_shape=None,
        device="cpu",
        dtype="fp32",
        optimizer="sgd",
        ranks_on_host=(1,),
        blocks=1,
        pairs=1,
        warmup=2,
        isolated="none",
    )
    measure_layers(asked, ALONE, tmp_path / "measured", ("paradl-bench", "layers"))
    (kept,) = (tmp_path / "measured").glob("network*.json")
    assert msgspec.json.decode(kept.read_bytes(), type=ModelGraph).gradient_order == tuple(
        as_seen(load_model(name)).names
    )
