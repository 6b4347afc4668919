"""Training by autocast: what operations run in, what is refused, and that times of two dtypes are kept apart."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from network_factory import NetworkFactory
from profile_factory import layer_times, make_network, make_profile, model_times
from search_cases import found, profile_of

from calibrate.fitting.layer_fit import rates_reached
from calibrate.profile.profile import write_profile
from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.kinds.autocast import kept_dtype, widths_of
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy, parse_strategy
from paradl_bench.plan.tasks import Collective, Transfer
from paradl_bench.strategies.memory.of_plan import memory_of_plan
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.passes.lower_precision import check_dtype
from predict.cli import group

NETWORKS = """
import torch
from torch import nn
from torch.nn import functional as F

class Images(nn.Module):
    "Normalisations, pooling, a residual connection, concatenation, an odd operation."
    input_shape = (3, 16, 16)
    def __init__(self):
        super().__init__()
        self.one, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8, track_running_stats=False)
        self.two, self.groups = nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.head = nn.Linear(16 * 16, 5)
    def forward(self, x):
        x = F.max_pool2d(torch.relu(self.norm(self.one(x))), 2)
        x = x + self.groups(self.two(x))
        x = torch.cat([x, F.avg_pool2d(x, 3, 1, 1)], 1).exp().sum(1, keepdim=True).pow(0.5)
        x = F.dropout(F.local_response_norm(x, 2), 0.1).expand(-1, 4, -1, -1)
        return self.head(x.flatten(1).sigmoid())

class Volumes(nn.Module):
    "As CosmoFlow: a CPU pools volumes in fp32."
    input_shape = (2, 8, 8, 8)
    def __init__(self):
        super().__init__()
        self.one, self.two, self.head = nn.Conv3d(2, 4, 3, padding=1), nn.Conv3d(4, 4, 3, padding=1), nn.Linear(4, 3)
    def forward(self, x):
        x = F.avg_pool3d(F.leaky_relu(self.one(x)), 2)
        return self.head(F.adaptive_avg_pool3d(F.max_pool3d(self.two(x), 2), 1).flatten(1))

class Attention(nn.Module):
    "Products of activations, softmax, layer normalisation, parameters that are added, scales that are single numbers."
    input_shape = (6, 8)
    def __init__(self):
        super().__init__()
        self.place, self.scale = nn.Parameter(torch.zeros(6, 8)), nn.Parameter(torch.ones(()))
        self.norm, self.qkv, self.head = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 3)
    def forward(self, x):
        q, k, v = self.qkv(self.norm(x + self.place)).chunk(3, -1)
        y = torch.matmul(torch.softmax(q @ k.transpose(-1, -2) / 3.0, -1), v) * self.scale.exp() * self.scale
        y = y + F.scaled_dot_product_attention(q, k, v) + self.place
        return self.head(F.gelu(y.mean(1)))
"""


@pytest.mark.parametrize("name", ["Images", "Volumes", "Attention"])
def test_operations_run_in_what_torch_runs_them_in(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from torch.overrides import TorchFunctionMode

    from paradl_bench.measure.tracing.tracing import trace_network
    from paradl_bench.network.models.catalog import load_model
    from paradl_bench.strategies.running.operations import is_operation

    class Seen(TorchFunctionMode):
        sizes: list[int] = []  # noqa: RUF012

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            if is_operation(function, result):
                first = result if isinstance(result, torch.Tensor) else result[0]
                self.sizes.append(first.element_size())
            return result

    (tmp_path / "nets_of_precision_test.py").write_text(NETWORKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = load_model(f"nets_of_precision_test:{name}")
    network = trace_network(model)
    inputs, targets = model.make_batch(2, 0)
    with torch.autocast("cpu", torch.bfloat16), Seen() as seen:
        model.loss(model.module(inputs), targets)
    expected = dict(zip([layer.name for layer in network.layers], seen.sizes, strict=True))
    seen.sizes.clear()
    widths = widths_of(network, "bf16", "cpu")
    assert {layer.name: width.runs for layer, width in zip(network.layers, widths, strict=True)} == expected
    assert set(expected.values()) == {2, 4}


def test_in_fp32_everything_is_as_wide() -> None:
    assert {width.runs for width in widths_of(make_network(), "fp32", "cpu")} == {4}
    assert not any(width.lowers_parameters for width in widths_of(make_network(), "fp32", "cuda"))


def test_parameters_gradients_and_input_keep_their_bytes_and_activations_halve() -> None:
    network, settings = make_network(), PlanSettings(batch=4096)
    wide, narrow = (memory_of_plan(network, Strategy(), settings, dtype=dtype) for dtype in ("fp32", "bf16"))
    for part in ("parameters", "optimizer", "input"):
        assert narrow.parts_bytes[part] == wide.parts_bytes[part]
    assert kept_dtype("bf16") == "fp32"
    assert 0.4 < narrow.parts_bytes["activations"] / wide.parts_bytes["activations"] < 0.8


@pytest.mark.parametrize("strategy", ["f2", "c2", "s2", "d2f2", "p2f2"])
def test_strategies_that_hand_on_activations_are_refused_by_name(strategy: str) -> None:
    parsed = parse_strategy(strategy)
    check_dtype(parsed, PlanSettings(batch=4), "fp32")
    with pytest.raises(UserError, match=f"--dtype bf16 with {parsed.axes[-1].kind} parallelism"):
        check_dtype(parsed, PlanSettings(batch=4), "bf16")


@pytest.mark.parametrize("strategy", ["t2", "p2", "d2p2", "p2t2", "d2p2t2", "z1d2"])
def test_tensor_and_pipeline_parallelism_are_trained_in_bf16(strategy: str) -> None:
    check_dtype(parse_strategy(strategy), PlanSettings(batch=4), "bf16")


def test_a_framework_holds_its_own_copies_of_experts() -> None:
    settings = PlanSettings(batch=4)
    with pytest.raises(UserError, match="no run has shown fp32 copies of parameters that fewer"):
        check_dtype(parse_strategy("d2e2"), settings, "bf16-weights")
    check_dtype(parse_strategy("d2e2"), msgspec.structs.replace(settings, preset="megatron"), "bf16-weights")


def sent_bytes(dtype: str) -> dict[str, list[int]]:
    """Of two layers behind each other in halves, and in two stages."""
    factory = NetworkFactory(16)
    for number in range(4):
        factory.linear(f"fc{number}", 16)
    factory.loss()
    network, found = factory.network("chain"), {}
    for text in ("p2", "t2"):
        strategy, settings = parse_strategy(text), PlanSettings(batch=4, dtype=dtype)
        plan = planner_for(strategy).plan(network, strategy, settings)
        found[text] = [work.message_bytes for work in plan.works if isinstance(work, Collective)]
        found[text] += [size for work in plan.works if isinstance(work, Transfer) for size in work.message_bytes]
    return found


def test_activations_that_ranks_hand_on_are_half_as_wide() -> None:
    wide, narrow = sent_bytes("fp32"), sent_bytes("bf16")
    assert {text: sorted(2 * size for size in sizes) for text, sizes in narrow.items()} == {
        text: sorted(sizes) for text, sizes in wide.items()
    }
    assert all(narrow.values())


@pytest.mark.parametrize(
    ("settings", "message"), [(PlanSettings(batch=4, batch_norm="sync"), "with --batch-norm sync")]
)
def test_settings_that_convert_by_themselves_are_refused(settings: PlanSettings, message: str) -> None:
    check_dtype(parse_strategy("z3d2"), PlanSettings(batch=4, accumulate=2, recompute=("all",)), "bf16")
    with pytest.raises(UserError, match=message):
        check_dtype(parse_strategy("d2"), settings, "bf16")


def both(network: ModelGraph) -> dict[str, object]:
    """Times in two dtypes, of which bf16 takes a quarter."""
    quarter = [*layer_times(network), *model_times(network)]
    made = [msgspec.convert(scaled(msgspec.to_builtins(time)), type(time)) for time in quarter]
    layers = [time for time in made if hasattr(time, "operation")]
    wholes = [time for time in made if not hasattr(time, "operation")]
    return {
        "layer_times": (*layer_times(network), *layers),
        "model_times": (*model_times(network), *wholes),
    }


def scaled(value: Any) -> Any:
    if isinstance(value, dict):
        changed = {key: item / 4 if key.endswith("_s") else scaled(item) for key, item in value.items()}
        return {**changed, "dtype": "bf16"} if "dtype" in changed else changed
    return value


def test_predictions_are_of_the_dtype_that_is_asked_for(tmp_path: Path) -> None:
    path, network = tmp_path / "p.json", make_network()
    write_profile(path, make_profile(network, **both(network)))

    def seconds(*options: str) -> float:
        words = ["--from-profile", str(path), "--model", "chain", "--strategy", "serial", "--batch", "8", "--json"]
        result = CliRunner().invoke(group, [*words, *options])
        assert result.exit_code == 0, result.output
        return float(json.loads(result.output)[0]["iteration_s"])

    assert seconds() == seconds("--dtype", "fp32")
    assert seconds("--dtype", "bf16") == pytest.approx(seconds() / 4)


def test_a_bf16_search_finds_trainable_strategies_and_counts_the_others(tmp_path: Path) -> None:
    path, network = tmp_path / "p.json", make_network()
    write_profile(path, profile_of(network, **both(network)))
    answer = found(path, "--ranks", "4", "--batch", "32", "--dtype", "bf16")
    kinds = {axis.kind for row in answer["rows"] for axis in parse_strategy(row["prediction"]["strategy"]).axes}
    assert kinds <= {"data", "pipeline", "tensor"}
    assert "data" in kinds
    assert any("--dtype bf16 with filter" in reason for reason in answer["searched"][0]["impossible"])


def test_rooflines_stand_on_fp32_where_it_was_measured() -> None:
    network = make_network()
    times = both(network)["layer_times"]
    assert isinstance(times, tuple)
    assert rates_reached(times, {"chain": network}) == rates_reached(layer_times(network), {"chain": network})
    lower = [time for time in times if time.dtype == "bf16"]
    reached = rates_reached(lower, {"chain": network}).peak_flops
    assert reached == pytest.approx(4 * (rates_reached(times, {"chain": network}).peak_flops or 0.0))


def test_a_conversion_counts_where_a_device_knows_no_autocast() -> None:
    torch = pytest.importorskip("torch")
    autocast = importlib.import_module("paradl_bench.strategies.running.autocast")
    tensor = torch.ones(2)
    assert not autocast.converts_alone(torch.Tensor.float, (tensor.to("meta"),))
    assert not autocast.converts_alone(torch.Tensor.float, (tensor,))
    with torch.autocast("cpu", torch.bfloat16):
        assert autocast.converts_alone(torch.Tensor.float, (tensor,))
