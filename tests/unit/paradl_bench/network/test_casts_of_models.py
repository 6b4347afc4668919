"""Models that convert to fp32 by themselves: each layer's dtype is the one that it has in a run under autocast."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[bench,test]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[bench,test]'")

from small_language_models import write_configuration
from torch.overrides import TorchFunctionMode

from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.network.graph import RETURNS_INPUT, ModelGraph
from paradl_bench.network.kinds.autocast import KEEPS_FP32, READS_LOWER, WEIGHTS_DTYPE, as_held, widths_of
from paradl_bench.network.models.catalog import load_model
from paradl_bench.strategies.running.operations import function_name, is_operation, output_of

FAMILIES = ("llama", "qwen2", "qwen3", "mixtral", "deepseek_v2", "deepseek_v3", "gpt2", "bert", "t5")


class _Dtypes(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, Any]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if is_operation(function, result):
            output = output_of(function, args, result)
            self.made.append((function_name(function)[0], output if torch.is_tensor(output) else output[0]))
        return result


def in_fp32_too(made: list[tuple[str, Any]], network: ModelGraph) -> Iterator[tuple[str, Any]]:
    """Operations but those that convert to bf16 where a run in fp32 converts nothing."""
    expected = iter(str(layer.attributes.get("function", "")) for layer in network.layers)
    function = next(expected)
    for name, output in made:
        if name == "to" != function and output.dtype == torch.bfloat16:
            continue
        yield name, output
        function = next(expected, "")


@pytest.mark.parametrize("family", FAMILIES)
def test_widths_with_bf16_weights_are_those_of_a_run(family: str, tmp_path: Any) -> None:
    name = write_configuration(tmp_path, family)
    network, model = trace_network(load_model(name)), load_model(name)
    ids, _ = model.make_batch(2, 0)
    module = model.module.to(torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), _Dtypes() as run:
        module(ids)
    widths = widths_of(as_held(network, WEIGHTS_DTYPE), WEIGHTS_DTYPE, "cpu")
    compared = 0
    for layer, width, (function, output) in zip(network.layers, widths, in_fp32_too(run.made, network), strict=False):
        # A constant may follow the weights' dtype, and is planned in fp32.
        told = layer.kind != "constant" and not layer.attributes.get(RETURNS_INPUT)
        if told and output.is_floating_point():
            assert (layer.name, function, width.runs) == (layer.name, function, output.element_size())
            compared += 1
    assert compared > len(network.layers) // 2


def test_norms_that_convert_keep_fp32(tmp_path: Any) -> None:
    network = trace_network(load_model(write_configuration(tmp_path, "llama")))
    keeping = {layer.name for layer in network.layers if layer.attributes.get(KEEPS_FP32)}
    # Of seven operations of a norm, squares to products; not what is converted back.
    assert {f"model.layers.0.input_layernorm#{number}" for number in range(2, 7)} <= keeping
    assert not keeping & {"model.layers.0.input_layernorm#8", "model.layers.0.self_attn.q_proj"}


def test_a_norm_that_reads_bf16_beside_fp32_keeps_the_former(tmp_path: Any) -> None:
    network = trace_network(load_model(write_configuration(tmp_path, "t5")))
    keeping = {layer.name: layer.attributes for layer in network.layers if KEEPS_FP32 in layer.attributes}
    norm = "encoder.block.0.layer.0.layer_norm"
    # Squares are of what was converted; their root multiplies what was not.
    assert READS_LOWER not in keeping[f"{norm}#2"]
    assert READS_LOWER in keeping[f"{norm}#6"]
    assert f"{norm}#7" not in keeping
