"""Networks: graphs of operations that validate themselves, and the key under which an operation is measured once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paradl_bench.network.graph import (
    Attribute,
    Layer,
    LayerMemory,
    ModelGraph,
    Tensor,
    operation_key,
    read_network,
)
from paradl_bench.network.kinds.kind import layer_kinds
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.strategies.memory.peak import planned_memory

DATA = Path(__file__).parents[3] / "data"

CONV = Layer(
    name="conv1",
    kind="conv",
    attributes={"kernel": (3, 3), "stride": (1, 1), "bias": False},
    inputs=("input",),
    input_shapes=((3, 8, 8),),
    output_shape=(4, 8, 8),
    parameters=("conv1.weight",),
    fw_flops=100,
    bw_input_flops=60,
    bw_weight_flops=40,
    fw_bytes=16,
)
RELU = Layer(name="relu", kind="relu", inputs=("conv1",), input_shapes=((4, 8, 8),), output_shape=(4, 8, 8), fw_flops=8)
ADD = Layer(
    name="add",
    kind="add",
    inputs=("conv1", "relu"),
    input_shapes=((4, 8, 8), (4, 8, 8)),
    output_shape=(4, 8, 8),
    bw_input_flops=5,
)
WEIGHT = Tensor(name="conv1.weight", shape=(4, 3, 3, 3))
BIAS = Tensor(name="head.bias", shape=(4,), dtype="bf16")


def network(**change: Any) -> ModelGraph:
    settings: dict[str, Any] = {
        "name": "tiny",
        "input_shape": (3, 8, 8),
        "layers": (CONV, RELU, ADD),
        "parameters": (WEIGHT, BIAS),
        "buffers": (Tensor(name="count", shape=(), dtype="int64"),),
        "gradient_order": ("head.bias", "conv1.weight"),
    }
    return ModelGraph(**(settings | change))


def test_a_network_adds_up() -> None:
    tiny = network()
    assert tiny.parameter_elements == 4 * 3 * 3 * 3 + 4
    assert tiny.parameter_bytes == 4 * 3 * 3 * 3 * 4 + 4 * 2
    assert tiny.fw_flops == 108
    assert tiny.bw_flops == 105
    assert (ADD.input_elements, ADD.output_elements) == (512, 256)
    assert tiny.buffers[0].bytes == 8


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"layers": (CONV, CONV)}, "layer name 'conv1' occurs twice in 'tiny'"),
        ({"layers": (RELU, CONV)}, "layer 'relu' reads 'conv1', which no earlier layer writes"),
        ({"parameters": (WEIGHT, WEIGHT), "gradient_order": ()}, "parameter 'conv1.weight' occurs twice"),
        ({"gradient_order": ("conv2.weight",)}, "names a parameter that the network lacks"),
        ({"gradient_order": ("head.bias", "head.bias")}, "names a parameter twice"),
    ],
)
def test_a_network_that_is_no_graph_is_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        network(**change)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"name": ""}, "reserved or empty"),
        ({"name": "input"}, "reserved or empty"),
        ({"output_shape": (1 << 40, 1 << 40)}, "more than"),
        ({"input_shapes": ((3,), (1 << 30, 1 << 30))}, "more than"),
    ],
)
def test_a_layer_validates_itself(change: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        msgspec.structs.replace(CONV, **change)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"fw_flops": -1}, "fw_flops"),
        ({"fw_bytes": -1}, "fw_bytes"),
        ({"output_shape": (4, -8)}, "output_shape[1]"),
        ({"input_shapes": ((3,), (1 << 63,))}, "input_shapes[1][0]"),
    ],
)
def test_a_layer_that_is_read_is_held_to_bounds(change: dict[str, Any], where: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=re.escape(f"at `$.{where}`")):
        msgspec.convert(msgspec.to_builtins(CONV) | change, Layer)


def test_inputs_are_their_producers_outputs_in_what_was_traced() -> None:
    loss = Layer(name="loss", kind="loss", inputs=("relu",), input_shapes=((7,), ()))
    relu = msgspec.structs.replace(RELU, inputs=("conv1",), input_shapes=(CONV.output_shape,), output_shape=(7,))
    assert network(layers=(CONV, relu, loss), gradient_order=())
    wrong = msgspec.structs.replace(relu, input_shapes=((5, 5),))
    with pytest.raises(
        ValueError, match=r"layers\[1\]\.input_shapes: 'relu' has no input as large as what 'conv1' makes"
    ):
        network(layers=(CONV, wrong, loss), gradient_order=())
    with pytest.raises(ValueError, match=r"no layer of 'tiny' reads parameter 'head\.bias', which got a gradient"):
        network(layers=(CONV, relu, loss))


def test_a_tensor_validates_itself() -> None:
    with pytest.raises(ValueError, match=r"dtype 'float32' is not one of fp64, fp32"):
        Tensor(name="w", shape=(1,), dtype="float32")
    with pytest.raises(ValueError, match="holds more than"):
        Tensor(name="w", shape=(1 << 40, 1 << 40))


def test_a_network_survives_json_with_its_digest() -> None:
    again = msgspec.json.decode(msgspec.json.encode(network()), type=ModelGraph)
    assert again == network()
    assert again.digest == network().digest
    assert [layer.operation for layer in again.layers] == [layer.operation for layer in network().layers]


@pytest.mark.parametrize(
    "change",
    [
        {"layers": (CONV, RELU)},
        {"input_shape": (3, 16, 16)},
        {"parameters": (WEIGHT,), "gradient_order": ("conv1.weight",)},
        {"gradient_order": ("conv1.weight", "head.bias")},
    ],
)
def test_other_work_has_another_digest(change: dict[str, Any]) -> None:
    assert network(**change).digest != network().digest


def test_a_network_of_before_memory_was_watched_loads() -> None:
    for path in (DATA / "layers-v1").glob("network-*.json"):
        assert b'"memory"' not in path.read_bytes()
        older = read_network(path)
        assert [layer.memory for layer in older.layers] == [None] * len(older.layers)
        assert planned_memory(older, parse_strategy("serial"), PlanSettings(batch=8)).peak_bytes > 0


def test_watched_memory_survives_json_and_is_no_other_work() -> None:
    memory = LayerMemory(inputs=(0,), kept=(12, 0), backward=(-4, 8), passes_gradient=True, aliases=True)
    first, *others = network().layers
    watched = network(layers=(msgspec.structs.replace(first, memory=memory), *others))
    again = msgspec.json.decode(msgspec.json.encode(watched), type=ModelGraph)
    assert again.layers[0].memory == memory
    assert again.digest == network().digest


@pytest.mark.parametrize("change", [{"inputs": (7,)}, {"width": 0}, {"kept": (1 << 62, 0)}])
def test_memory_that_no_layer_has_is_refused(change: dict[str, Any]) -> None:
    raw = msgspec.to_builtins(network())
    raw["layers"][0]["memory"] = change
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(raw, ModelGraph)


def test_a_field_of_another_version_is_named() -> None:
    raw = msgspec.to_builtins(network())
    raw["layers"][1]["flops"] = 3
    with pytest.raises(msgspec.ValidationError, match=r"unknown field `flops` - at `\$\.layers\[1\]`"):
        msgspec.convert(raw, ModelGraph)


def test_the_key_reads_well() -> None:
    assert CONV.operation == "conv(3x8x8; bias=false kernel=3x3 stride=1x1 parameters=1)"
    assert ADD.operation == "add(4x8x8 4x8x8; )"
    assert operation_key("sum", {"mode": "mean"}, ((),)) == "sum(scalar; mode=mean)"


words = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=6)
attribute_values: st.SearchStrategy[Attribute] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-9, 9),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=6),
    st.sampled_from(["true", "null", "3", "3x3", "a b=1", "a; parameters=1", "reflect"]),
    st.lists(st.integers(0, 9), min_size=2, max_size=3).map(tuple),
)
attributes = st.dictionaries(words, attribute_values, max_size=3)
shapes = st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), max_size=2).map(tuple)
operations = st.tuples(st.sampled_from(["conv", "add"]), attributes, shapes, st.integers(0, 2))


def _exact(operation: tuple[str, dict[str, Attribute], Any, int]) -> tuple[Any, ...]:
    # Python takes True, 1 and 1.0 for equal; kernels do not.
    kind, given_attributes, input_shapes, parameters = operation
    typed = {name: (type(value), repr(value)) for name, value in given_attributes.items()}
    return kind, typed, input_shapes, parameters


@given(operations, operations)
def test_keys_are_equal_where_operations_are_and_nowhere_else(first: Any, second: Any) -> None:
    assert (operation_key(*first) == operation_key(*second)) == (_exact(first) == _exact(second))


@given(operations)
def test_attribute_order_is_irrelevant_and_json_keeps_the_operation_key(operation: Any) -> None:
    kind, given_attributes, input_shapes, parameters = operation
    reordered = dict(reversed(given_attributes.items()))
    layer = Layer(
        name="x",
        kind=kind,
        attributes=reordered,
        input_shapes=input_shapes,
        parameters=tuple(f"p{index}" for index in range(parameters)),
    )
    again = msgspec.json.decode(msgspec.json.encode(layer), type=Layer)
    assert again.operation == layer.operation == operation_key(*operation)


@given(attribute_values, attribute_values)
@example("true", True)
@example("3", 3)
@example("3x3", (3, 3))
@example(1, 1.0)
@example("", ())
def test_values_that_differ_are_other_operations(first: Attribute, second: Attribute) -> None:
    keys = {operation_key("pad", {"mode": value}, ()) for value in (first, second)}
    assert (len(keys) == 1) == ((type(first), repr(first)) == (type(second), repr(second)))


def test_digests_of_older_networks_stay_what_they_were() -> None:
    """Runs name the digest of their network: fields that came later must not change it where nobody gave them."""
    layer = Layer(name="conv", kind="conv", inputs=("input",), input_shapes=((3, 4, 4),), output_shape=(2, 4, 4))
    network = ModelGraph(name="one", input_shape=(3, 4, 4), layers=(layer,), parameters=())
    assert network.digest == "58d30fa67e4c"
    without_batch = msgspec.structs.replace(layer, batchless=True)
    assert msgspec.structs.replace(network, layers=(without_batch,)).digest != network.digest
    assert msgspec.structs.replace(network, input_dtype="int64").digest != network.digest


@pytest.mark.parametrize(("p", "drawn"), [(0.0, 0), (0.5, 12), (1.0, 0)])
def test_dropout_of_none_or_all_keeps_no_mask(p: float, drawn: int) -> None:
    attributes: dict[str, Attribute] = {"function": "dropout", "training": True, "in_place": False, "p": p}
    layer = Layer(name="drop", kind="dropout", attributes=attributes, input_shapes=((3, 4),), output_shape=(3, 4))
    assert layer_kinds()["dropout"].saves(layer).mask == drawn
