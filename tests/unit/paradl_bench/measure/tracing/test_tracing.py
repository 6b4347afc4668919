"""Tracing: every operation counts, the graph keeps its branches, and FLOPs agree with torch's own counter."""

from __future__ import annotations

import msgspec
import pytest

torch = pytest.importorskip("torch")

from pipeline_idioms import Regularised
from torch.utils.flop_counter import FlopCounterMode

from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.models.catalog import LoadedModel, load_model
from paradl_bench.strategies.running.operations import function_name


class Branches(torch.nn.Module):
    """Functional operations, a skip, a concatenation, one module used twice, a buffer and a tied weight."""

    input_shape = (4, 8, 8)

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(4, 4, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(4)
        self.act = torch.nn.ReLU(inplace=True)
        self.head = torch.nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left = self.act(self.norm(self.conv(x)))
        right = self.act(self.conv(left))
        left = left + right
        both = torch.cat([left, right], 1)
        return self.head(torch.nn.functional.adaptive_avg_pool2d(both, 1).flatten(1))


def branches() -> torch.nn.Module:
    return Branches()


@pytest.fixture(scope="module")
def network() -> ModelGraph:
    return trace_network(LoadedModel(name=f"{__name__}:branches", module=branches(), input_shape=(4, 8, 8)))


def test_every_operation_is_a_layer_with_its_dependencies(network: ModelGraph) -> None:
    layers = {layer.name: layer for layer in network.layers}
    assert [layer.kind for layer in network.layers] == [
        "conv", "elementwise", "batch_norm", "activation", "conv", "activation", "elementwise", "cat",
        "adaptive_pool", "view", "linear", "loss",
    ]  # fmt: skip
    assert layers["conv#2"].inputs == ("act",)
    assert set(layers["add"].inputs) == {"act", "act#2"}
    assert set(layers["cat"].inputs) == {"add", "act#2"}
    assert layers["norm.num_batches_tracked.add"].inputs == ()
    assert layers["conv"].parameters == ("conv.weight", "conv.bias") == layers["conv#2"].parameters
    assert layers["cat"].output_shape == (8, 8, 8)
    assert layers["conv"].operation == layers["conv#2"].operation


def test_parameters_buffers_and_gradient_order(network: ModelGraph) -> None:
    assert network.parameter_elements == sum(p.numel() for p in branches().parameters())
    assert [(buffer.name, buffer.dtype) for buffer in network.buffers] == [
        ("norm.running_mean", "fp32"), ("norm.running_var", "fp32"), ("norm.num_batches_tracked", "int64"),
    ]  # fmt: skip
    # The shared convolution is finished only when backward has passed its first use, behind the batch norm.
    assert set(network.gradient_order[:2]) == {"head.weight", "head.bias"}
    assert set(network.gradient_order[-2:]) == {"conv.weight", "conv.bias"}


@pytest.mark.parametrize(
    ("name", "shape"), [("resnet18", (3, 64, 64)), ("vgg11", (3, 32, 32)), ("mobilenet_v2", (3, 64, 64))]
)
def test_multiply_adds_agree_with_torchs_counter(name: str, shape: tuple[int, ...]) -> None:
    model = load_model(name, shape, device="meta")
    network = trace_network(model)
    inputs, targets = (tensor.to("meta") for tensor in model.make_batch(2, 0))
    with FlopCounterMode(display=False) as counter:
        loss = model.loss(model.module(inputs), targets)
        forward = counter.get_total_flops()
        loss.backward()
    products = [layer for layer in network.layers if layer.kind in ("conv", "linear")]
    bias = sum(layer.output_elements for layer in products if layer.attributes["bias"])
    assert 2 * (sum(layer.fw_flops for layer in products) - bias) == forward
    first = products[0]
    backward = sum(layer.bw_input_flops + layer.bw_weight_flops for layer in products) - bias
    if name == "mobilenet_v2":
        return  # torch's counter leaves the groups out of a convolution's backward
    # The first layer's input needs no gradient, which torch leaves out.
    assert 2 * (backward - first.bw_input_flops) == counter.get_total_flops() - forward


@pytest.mark.parametrize("name", ["swin_t", "vit_b_16", "shufflenet_v2_x1_0", "inception_v3", "regnet_y_400mf"])
def test_torchvisions_odder_models_trace(name: str) -> None:
    """Those of the paper, of which some have branches too, are traced where their sizes are looked at."""
    network = trace_network(load_model(name, device="meta"))
    assert network.layers[-1].kind == "loss"
    assert sorted(network.gradient_order) == sorted(parameter.name for parameter in network.parameters)
    assert "input" in {name for layer in network.layers for name in layer.inputs}


def test_gradients_of_vgg11_do_not_arrive_in_reverse_registration() -> None:
    network = trace_network(load_model("vgg11", device="meta"))
    assert network.gradient_order != tuple(parameter.name for parameter in reversed(network.parameters))


def test_function_names_are_normalised() -> None:
    assert function_name(torch.Tensor.__iadd__) == ("add", True)
    assert function_name(torch.Tensor.add_) == ("add", True)
    assert function_name(torch.add) == ("add", False)
    assert function_name(torch.nn.functional.relu) == ("relu", False)
    assert function_name(torch.Tensor.__setitem__) == ("setitem", True)


class Assigning(torch.nn.Module):
    input_shape = (4, 6)

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(6, 8), torch.nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        x[:, 1:3, 0] = 0.25
        x[..., [0, 2]] = x[..., 4:6]
        return self.two(x).mean(1)


def assigning() -> torch.nn.Module:
    return Assigning()


def test_assignment_to_a_part_is_an_operation() -> None:
    network = trace_network(LoadedModel(name=f"{__name__}:assigning", module=assigning(), input_shape=(4, 6)))
    layers = {layer.name: layer for layer in network.layers}
    assert [layer.kind for layer in network.layers[:5]] == ["linear", "assign", "view", "assign", "linear"]
    by_number, by_tensor = layers["setitem"], layers["setitem#2"]
    assert (by_number.inputs, by_number.output_shape) == (("one",), (4, 8))
    assert (by_tensor.inputs, layers["two"].inputs) == (("setitem", "getitem"), ("setitem#2",))
    # Written: two positions of one feature; read and written: four positions of two.
    assert (by_number.fw_bytes, by_tensor.fw_bytes) == (4 * 2, 4 * 2 * 8)


class InPlace(torch.nn.Module):
    input_shape = (4, 6)

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (torch.nn.Linear(6, 6) for _ in range(3))
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        torch.nn.functional.relu(x, inplace=True)
        whole = self.two(x)
        whole[:, 0].mul_(2.0)
        self.seen[1].add_(1.0)
        left, right = whole.chunk(2, dim=-1)
        y = self.norm(self.three(torch.cat([right, left], -1))) + whole.mT.mT
        return (y + (y > 0.0) * whole.detach()).mean(1)


def in_place() -> torch.nn.Module:
    return InPlace()


def test_what_works_in_place_makes_what_is_read_later() -> None:
    network = trace_network(LoadedModel(name=f"{__name__}:in_place", module=in_place(), input_shape=(4, 6)))
    layers = {layer.name: layer for layer in network.layers}
    # What it returns is thrown away.
    assert layers["two"].inputs == ("relu",)
    assert layers["relu"].values_written == (("one", 0),)
    # It changes a part; the whole is read, by its own name, and by one of its attributes.
    assert layers["mul"].values_written == (("two", 0), ("getitem", 0))
    assert (layers["chunk"].inputs, layers["chunk"].reads) == (("mul",), (("two", 0),))
    assert layers["mT"].reads == (("two", 0),)
    assert layers["chunk"].further_outputs == ((4, 3),)
    assert layers["cat"].reads == (("chunk", 1), ("chunk", 0))
    assert (layers["add"].state, layers["norm"].state) == (
        ("seen",),
        ("norm.running_mean", "norm.running_var"),
    )
    assert (layers["gt"].without_gradient, layers["detach"].without_gradient, layers["cat"].without_gradient) == (
        (0,),
        (0,),
        (),
    )


def test_data_flow_survives_json_and_leaves_the_digest_unchanged() -> None:
    network = trace_network(LoadedModel(name=f"{__name__}:in_place", module=in_place(), input_shape=(4, 6)))
    again = msgspec.json.decode(msgspec.json.encode(network), type=ModelGraph)
    assert again == network
    bare = [
        msgspec.structs.replace(layer, reads=(), writes=None, further_outputs=(), without_gradient=(), state=())
        for layer in network.layers
    ]
    assert msgspec.structs.replace(network, layers=tuple(bare)).digest == network.digest


def regularised() -> torch.nn.Module:
    return Regularised()


def test_a_scalar_of_parameters_alone_holds_no_batch() -> None:
    network = trace_network(LoadedModel(name=f"{__name__}:regularised", module=regularised(), input_shape=(6, 8)))
    layers = {layer.name: layer for layer in network.layers}
    assert all(layers[name].batchless for name in ("square", "sum", "add", "sum#2", "mul"))
    # A scalar of samples is of them: the loss, and what a mean over all of a sample leaves.
    assert not any(layers[name].batchless for name in ("a", "mul#2", "loss.cross_entropy"))
    assert layers["sum"].output_elements_of(7) == 1
