"""Models that compute in other dtypes than fp32 by themselves: each message has the bytes of what is sent."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[bench,test]'")

from paradl_bench.core.errors import UserError
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.network.graph import DTYPE_BYTES, ModelGraph
from paradl_bench.network.kinds.autocast import widths_of
from paradl_bench.network.models.catalog import load_model
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy, parse_strategy
from paradl_bench.plan.tasks import Collective, HaloExchange, Plan, Transfer
from paradl_bench.strategies.memory.of_plan import memory_of_plan
from paradl_bench.strategies.nesting.catalog import planner_for

MODELS = """
import torch
from torch import nn

class Own(nn.Module):
    "All in one dtype, but for what it is given and what it returns."
    input_shape = (4, 8, 8)
    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype
        self.one, self.two = (nn.Conv2d(4, 4, 3, padding=1, dtype=dtype) for _ in range(2))
        self.up, self.down = nn.Linear(256, 32, dtype=dtype), nn.Linear(32, 8, dtype=dtype)
    def forward(self, x):
        x = torch.relu(self.two(torch.relu(self.one(x.to(self.dtype))))).flatten(1)
        return self.down(torch.relu(self.up(x))).to(torch.float32)

class Mixed(nn.Module):
    "A layer in bf16, a conversion, a layer in fp32."
    input_shape = (8,)
    def __init__(self):
        super().__init__()
        self.low, self.high = nn.Linear(8, 16, dtype=torch.bfloat16), nn.Linear(16, 4)
    def forward(self, x):
        return self.high(torch.relu(self.low(x.to(torch.bfloat16))).float())

class Block(nn.Module):
    "A unit of ZeRO with parameters of both."
    def __init__(self):
        super().__init__()
        self.low, self.high = nn.Linear(8, 8, dtype=torch.bfloat16), nn.Linear(8, 8)
    def forward(self, x):
        return x + self.high(torch.relu(self.low(x.to(torch.bfloat16))).float())

class Blocks(nn.Module):
    input_shape = (8,)
    def __init__(self):
        super().__init__()
        self.h, self.head = nn.Sequential(Block(), Block(), Block()), nn.Linear(8, 4)
    def forward(self, x):
        return self.head(self.h(x))

def fp32(): return Own(torch.float32)
def fp64(): return Own(torch.float64)
def bf16(): return Own(torch.bfloat16)
def fp16(): return Own(torch.float16)
"""


@pytest.fixture
def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, ModelGraph]:
    (tmp_path / "own_dtypes.py").write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    names = ("fp32", "fp64", "bf16", "fp16", "Mixed", "Blocks")
    return {name: trace_network(load_model(f"own_dtypes:{name}", None, device="meta")) for name in names}


def _sizes(plan: Plan) -> list[int]:
    found: list[int] = []
    for work in plan.works:
        if isinstance(work, Collective):
            found.append(work.message_bytes)
        elif isinstance(work, HaloExchange):
            found += work.sends_bytes
        elif isinstance(work, Transfer):
            found += work.message_bytes
    return found


def _planned(network: ModelGraph, text: str, dtype: str = "fp32") -> list[int]:
    strategy = parse_strategy(text)
    return _sizes(planner_for(strategy).plan(network, strategy, PlanSettings(batch=8, dtype=dtype)))


@pytest.mark.parametrize("text", ["d2", "z1d2", "z3d2", "f2", "c2", "t2", "p2", "d2f2"])
def test_messages_of_every_axis_follow_the_models_dtype(traced: dict[str, ModelGraph], text: str) -> None:
    own = _planned(traced["fp32"], text)
    assert own
    for dtype in ("fp64", "bf16", "fp16"):
        assert _planned(traced[dtype], text) == [size * DTYPE_BYTES[dtype] // 4 for size in own], dtype


def test_blocks_of_positions_follow_the_dtype_of_layers(traced: dict[str, ModelGraph]) -> None:
    # A conversion reads all positions, so no user's model of another dtype gets that far by itself.
    network = traced["fp32"]
    lower = msgspec.structs.replace(
        network,
        layers=tuple(msgspec.structs.replace(layer, other_dtype="bf16") for layer in network.layers),
        parameters=tuple(msgspec.structs.replace(tensor, dtype="bf16") for tensor in network.parameters),
    )
    assert _planned(lower, "s2") == [size // 2 for size in _planned(network, "s2")]


def test_each_layer_of_a_mixed_model_has_its_width(traced: dict[str, ModelGraph]) -> None:
    widths = {
        layer.name: width.runs
        for layer, width in zip(traced["Mixed"].layers, widths_of(traced["Mixed"], "fp32", "cpu"), strict=True)
    }
    assert (widths["low"], widths["relu"], widths["high"]) == (2, 2, 4)
    # Gathers of eight samples: 8 of 16 features in bf16, 2 of 4 in fp32; then the gradient of 16 features.
    assert _planned(traced["Mixed"], "f2") == [8 * 8 * 2, 8 * 2 * 4, 8 * 16 * 4]


class TestParametersOfSeveralDtypes:
    @pytest.mark.parametrize(
        ("text", "where"), [("z1d2", "the model"), ("z2d2", r"h\.0"), ("z3d2", r"h\.0"), ("d2z3d2", r"h\.0")]
    )
    def test_torchs_zero_is_refused_before_ranks_start(
        self, traced: dict[str, ModelGraph], text: str, where: str
    ) -> None:
        instead = "d4" if text == "d2z3d2" else "d2"
        told = rf"{where} has h\.0\.low\.weight in bf16 and h\.0\.high\.weight in fp32.*one buffer.*or take {instead}$"
        with pytest.raises(UserError, match=told):
            _planned(traced["Blocks"], text)

    def test_units_of_one_dtype_each_are_sharded(self, traced: dict[str, ModelGraph]) -> None:
        assert _planned(traced["Mixed"], "z3d2")


class TestParametersInBf16:
    """What is sent, with fp32 copies of parameters in the optimizer."""

    def test_gradients_and_broadcasts_are_half_as_long(self, traced: dict[str, ModelGraph]) -> None:
        for text in ("d2", "z1d2"):
            own, lower = (_planned(traced["fp32"], text, dtype) for dtype in ("fp32", "bf16-weights"))
            assert own
            assert lower == [size // 2 for size in own]

    def test_an_update_of_them_keeps_and_makes_fp32_tensors(self, traced: dict[str, ModelGraph]) -> None:
        network = traced["fp32"]
        elements = network.parameter_elements
        use = memory_of_plan(network, Strategy(), PlanSettings(batch=2, optimizer="adamw-fused"), dtype="bf16-weights")
        assert use.parts_bytes["parameters"] == 2 * elements
        assert use.parts_bytes["gradients"] == 2 * elements
        # A copy, two moments; and the gradients in fp32 while it updates.
        assert use.parts_bytes["optimizer"] == 3 * 4 * elements
        assert use.parts_bytes["activations"] == 4 * elements

    @pytest.mark.parametrize("text", ["z2d2", "z3d2"])
    def test_fp32_shards_are_gathered_and_reduced_in_bf16(self, traced: dict[str, ModelGraph], text: str) -> None:
        network, strategy = traced["fp32"], parse_strategy(text)
        own, lower = (_planned(network, text, dtype) for dtype in ("fp32", "bf16-weights"))
        assert own
        assert lower == [size // 2 for size in own]
        settings = PlanSettings(batch=8, optimizer="adam")
        held = [memory_of_plan(network, strategy, settings, dtype=dtype) for dtype in ("fp32", "bf16-weights")]
        assert held[0].parts_bytes["optimizer"] == held[1].parts_bytes["optimizer"] == 4 * network.parameter_elements
        assert held[0].parts_bytes["parameters"] == held[1].parts_bytes["parameters"]
