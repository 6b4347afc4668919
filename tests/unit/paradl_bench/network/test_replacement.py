"""Layers of a network replaced: held against traces of models that were changed in torch."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import pytest
from torch import Tensor, nn

from paradl_bench.core.errors import UserError
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.network.graph import Layer, ModelGraph
from paradl_bench.network.models.catalog import load_model
from paradl_bench.network.replacement.modules import MODULES
from paradl_bench.network.replacement.replace import Replaced, replace_layers
from paradl_bench.network.replacement.written import parse_replacement


class Blocks(nn.Module):
    """A convolution, a norm, a residual branch with several kinds of layers, and a head over tokens."""

    input_shape = (3, 16, 16)

    def __init__(self) -> None:
        super().__init__()
        self.stem: nn.Module = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm: nn.Module = nn.BatchNorm2d(8)
        self.act: nn.Module = nn.ReLU(inplace=True)
        self.branch: nn.Module = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.GELU())
        self.pool: nn.Module = nn.MaxPool2d(2)
        self.tokens: nn.Module = nn.Flatten(2)
        self.mix: nn.Module = nn.Linear(64, 32)
        self.drop: nn.Module = nn.Dropout(0.1)
        self.flat: nn.Module = nn.Flatten()
        self.head: nn.Module = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.stem(x)))
        x = self.pool(x + self.branch(x))
        return self.head(self.flat(self.drop(self.mix(self.tokens(x)))))


def wider_stem_window() -> Blocks:
    """Everything up to the pool has other extents."""
    model = Blocks()
    model.stem = nn.Conv2d(3, 8, 5, stride=2, padding=2)
    model.pool = nn.AvgPool2d(3, 1, 1)
    return model


def norms_of_other_kinds() -> Blocks:
    """Norms with and without buffers change places; a new module comes after one that had parameters."""
    model = Blocks()
    model.norm = nn.GroupNorm(4, 8)
    model.branch = nn.Sequential(nn.Conv2d(8, 8, (1, 3), padding=(0, 1), groups=2, bias=False), nn.BatchNorm2d(8))
    return model


def longer_head() -> Blocks:
    """Rows of a smaller width, and a chain of modules for one; fewer classes."""
    model = Blocks()
    model.mix = nn.Linear(64, 16, bias=False)
    model.drop = nn.Identity()
    model.head = nn.Sequential(nn.Linear(128, 20), nn.LayerNorm(20), nn.SiLU(), nn.Dropout(0.25), nn.Linear(20, 3))
    return model


def convolution_in_place_of_a_pool() -> Blocks:
    """Parameters where there were none, and none where there were."""
    model = Blocks()
    model.norm = nn.Identity()
    model.pool = nn.Sequential(nn.Conv2d(8, 8, 2, stride=2), nn.AdaptiveMaxPool2d((4, 16)))
    return model


def vgg16_of_convolutions() -> nn.Module:
    """Table 3 of OSF's paper: convolutions and a global average in the place of the linear layers."""
    from torchvision.models import vgg16

    model: Any = vgg16()
    model.input_shape = (3, 224, 224)
    model.avgpool = nn.Sequential(nn.Conv2d(512, 512, 1), nn.Conv2d(512, 1000, 1), nn.AdaptiveAvgPool2d(1))
    model.classifier = nn.Identity()
    return model  # type: ignore[no-any-return]


CASES = {
    "wider_stem_window": ("stem=conv2d(*,8,5,2,2)", "pool=avg_pool2d(3,1,1)"),
    "norms_of_other_kinds": (
        "norm=group_norm(4,8)",
        "branch.0=conv2d(8,8,1x3,padding=0x1,groups=2,bias=false)",
        "branch.1=batch_norm(*)",
        "branch.2=none",
    ),
    "longer_head": (
        "mix=linear(*,16,false)",
        "drop=none",
        "head=linear(128,20)+layer_norm(*)+silu+dropout(0.25)+linear(20,3)",
    ),
    "convolution_in_place_of_a_pool": ("norm=none", "pool=conv2d(8,8,2,2)+adaptive_max_pool2d(4x16)"),
}
VGG16 = ("avgpool=conv2d(512,512,1)+conv2d(512,1000,1)+adaptive_avg_pool2d(1)", "classifier.*=none")


@functools.cache
def traced(name: str) -> ModelGraph:
    """The network of a factory in this file, or of a model of torchvision."""
    return trace_network(load_model(f"{__name__}:{name}" if name in globals() else name, device="meta"))


def replaced(network: ModelGraph, *texts: str) -> Replaced:
    return replace_layers(network, [parse_replacement(text) for text in texts])


def without_lifetimes(network: ModelGraph) -> list[dict[str, object]]:
    """Layers as built-in values, but for what variables of the model's code hold, and memory that was watched."""
    dropped = ("held_until", "memory", "state")
    layers = [msgspec.to_builtins(layer) for layer in network.layers]
    return [{name: value for name, value in layer.items() if name not in dropped} for layer in layers]


def assert_as_traced(changed: ModelGraph, traced_anew: ModelGraph) -> None:
    assert without_lifetimes(changed) == without_lifetimes(traced_anew)
    for name in ("parameters", "buffers", "gradient_order", "outputs", "fw_flops", "bw_flops", "parameter_bytes"):
        assert getattr(changed, name) == getattr(traced_anew, name), name
    assert msgspec.structs.replace(changed, name="").digest == msgspec.structs.replace(traced_anew, name="").digest


@pytest.mark.parametrize("name", CASES)
def test_replacing_gives_what_tracing_the_changed_model_gives(name: str) -> None:
    found = replaced(traced("Blocks"), *CASES[name])
    assert_as_traced(found.network, traced(name))


def test_vgg16_loses_its_linear_layers_as_the_paper_has_it() -> None:
    found = replaced(traced("vgg16"), *VGG16)
    assert_as_traced(found.network, traced("vgg16_of_convolutions"))
    of_linear = (25088 + 1) * 4096 + (4096 + 1) * 4096 + (4096 + 1) * 1000
    of_convolutions = (512 + 1) * 512 + (512 + 1) * 1000
    before = traced("vgg16").parameter_elements
    assert found.network.parameter_elements == before - of_linear + of_convolutions
    assert found.inserted == ("avgpool.0", "avgpool.1", "avgpool.2")
    assert found.reshaped == ("flatten",)


def test_a_layer_by_itself_is_the_same_network() -> None:
    network = traced("Blocks")
    found = replaced(network, "mix=linear(64,32)", "stem=conv2d(3,8,3,1,1,bias=false)", "pool=max_pool2d(2)")
    assert found.network.digest == network.digest


def test_memory_of_a_loss_follows_its_classes() -> None:
    changed = replaced(traced("Blocks"), *CASES["longer_head"]).network
    assert changed.layers[-1].memory == traced("longer_head").layers[-1].memory


def test_what_held_a_removed_layer_names_one_that_is_there() -> None:
    network = replaced(traced("vgg16"), *VGG16).network
    names = {layer.name for layer in network.layers}
    assert {layer.held_until for layer in network.layers} <= names | {"", "input"}


def test_weights_that_others_read_stay() -> None:
    network = traced("Blocks")
    tied = [
        msgspec.structs.replace(layer, parameters=("mix.weight", "mix.bias")) if layer.name == "head" else layer
        for layer in network.layers
    ]
    found = replaced(msgspec.structs.replace(network, layers=tuple(tied), gradient_order=()), "mix=none", "head=none")
    assert "mix.weight" not in {tensor.name for tensor in found.network.parameters}
    kept = msgspec.structs.replace(network, layers=tuple(tied), gradient_order=())
    remaining = replaced(kept, "drop=none", "head=linear(256,4)").network
    assert {"mix.weight", "head.weight"} <= {tensor.name for tensor in remaining.parameters}


def test_frozen_parameters_go_with_their_layer() -> None:
    network = traced("Blocks")
    stem = next(tensor for tensor in network.parameters if tensor.name == "stem.weight")
    frozen = msgspec.structs.replace(
        network,
        parameters=tuple(tensor for tensor in network.parameters if tensor != stem),
        gradient_order=tuple(name for name in network.gradient_order if name != stem.name),
        frozen=(stem,),
        registered=tuple(tensor.name for tensor in network.parameters),
    )
    found = replaced(frozen, "stem=conv2d(3,8,1,bias=false)").network
    assert found.frozen == ()
    assert found.registered == tuple(tensor.name for tensor in found.parameters)
    assert found.gradient_order[-1] == "stem.weight"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "write PATTERN=none"),
        ("head", "write PATTERN=none"),
        ("=none", "write PATTERN=none"),
        ("head=", "write PATTERN=none"),
        ("head=linear(256,10)+none", "none stands alone"),
        ("head=linear(256,10", "is no module"),
        ("head=linear(256,10))", "is no module"),
        ("head=__import__('os')", "is no module"),
        ("head=linear(256,10)++relu", "'' is no module"),
        ("head=lineal(256,10)", "did you mean linear"),
        ("head=prelu", "unknown module"),
        ("head=linear(256)", r"lacks out; write linear\(in,out\[,bias\]\)"),
        ("head=linear", "lacks in"),
        ("head=linear(256,10,true,1)", "no place for '1'"),
        ("head=linear(256,10,out=3)", "no place for 'out=3'"),
        ("head=linear(in=256,10)", "no place for '10'"),
        ("head=linear(256,10,width=3)", "no place for 'width=3'"),
        ("head=linear(256,0)", "out is '0', and has to be a whole number from 1"),
        ("head=linear(256,*)", "out is '\\*'"),
        ("head=linear(256,1e3)", "out is '1e3'"),
        ("head=linear(256,٣)", "out is '٣'"),
        ("head=linear(256,2000000)", "out is '2000000'"),
        ("head=linear(256,10,maybe)", "true or false"),
        ("head=conv2d(8,8,3x)", "kernel is '3x'"),
        ("head=conv2d(8,8,3,1,-1)", "padding is '-1'"),
        ("head=dropout(1.5)", "between 0 and 1"),
        ("head=linear(,10)", "in is ''"),
    ],
)
def test_what_does_not_parse_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_replacement(text)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_every_module_parses_as_its_usage_says(name: str) -> None:
    usage = MODULES[name].usage.replace("[", "").replace("]", "")
    values = {"flag": "false", "share": "0.5", "width": "*", "count": "2", "extents": "1", "padding": "0"}
    for argument, sort in MODULES[name].arguments.items():
        usage = usage.replace(f"({argument}", f"({values[sort]}").replace(f",{argument}", f",{values[sort]}")
    (written,) = parse_replacement(f"x={usage}").modules
    assert set(written.arguments) >= set(MODULES[name].arguments)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (("nothing=none",), "no layer of .*Blocks is named like 'nothing'"),
        (("head=none", "h*=none"), "layer head is replaced by --replace 'head=none' already"),
        (("loss*=none",), "layer loss.cross_entropy is not replaced, since it is the loss"),
        (("add=none",), "since it reads 2 tensors"),
        (("norm.num*=none",), "layer norm.num_batches_tracked.add reads no other layer"),
        (("norm=none", "act=none", "*tem=none"), "layer branch.0 .conv. gets 3x16x16 of input, it takes 8 channels"),
        (("[ab][cr][ta]*=gelu",), "layer add reads act, which stands inside of what is replaced"),
        (("head=linear(4096,512)",), r"linear\(4096,512\) instead of head gets 256 of flat, it takes 4096"),
        (("mix=linear(*,16)",), "layer head .linear. gets 128 of flat, it takes 256"),
        (("mix=linear(64,32)+linear(64,32)",), r"linear\(64,32\) instead of mix gets 8x32 of mix.0, it takes 64"),
        (("stem=conv2d(3,4,3,1,1)",), "layer norm .batch_norm. gets 4x16x16 of stem, it takes 8 channels in 3 dims"),
        (("branch.0=conv2d(8,4,3,1,1)",), "layer branch.1 .norm. gets 4x16x16 of branch.0, it takes 8 channels"),
        (("branch.2=max_pool2d(2)",), "layer add .elementwise. gets 8x16x16 of act and 8x8x8 of branch.2, it takes"),
        (("tokens=none",), "layer mix .linear. gets 8x8x8 of pool, it takes 64"),
        (("flat=none",), "layer head .linear. gets 8x32 of drop, it takes 256"),
        (("flat=none", "head=linear(32,10)"), "layer loss.cross_entropy .loss. gets 8x10 of head, it takes 10"),
        (("pool=linear(*,4)", "tokens=conv2d(8,8,9)"), "instead of tokens gets 8x16x4 of pool, it takes extents"),
        (("pool=conv2d(8,8,99)",), "gets 8x16x16 of add, it takes extents of at least 99x99"),
        (("pool=conv1d(8,8,3)",), "it takes 2 dims a sample"),
        (("pool=conv2d(8,8,3x3x3)",), "it takes a kernel of 1 or 2 numbers"),
        (("pool=conv2d(8,8,3,1,1x1x1)",), "it takes a padding of 1 or 2 numbers"),
        (("pool=conv2d(8,9,3,groups=2)",), "channels and filters that groups=2 parts evenly"),
        (("pool=avg_pool2d(2,2,2)",), "a padding of at most half its kernel"),
        (("pool=adaptive_avg_pool2d(2x2x2)",), "an output of 1 or 2 numbers"),
        (("pool=group_norm(3,8)",), "channels that groups=3 parts evenly"),
        (("tokens=linear(*,64)",), "layer head .linear. gets 2048 of flat, it takes 256"),
        (("mix=conv1d(8,1000000,1,1,500000)",), "layer head"),
        (("flat=adaptive_max_pool2d(9)",), "it takes 3 dims a sample"),
    ],
)
def test_what_does_not_fit_is_refused_by_layer(texts: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        replaced(traced("Blocks"), *texts)
    assert "\n" not in str(caught.value)


def test_layers_that_cannot_stand_alone_are_not_replaced() -> None:
    network = traced("Blocks")

    def with_drop(**changes: object) -> ModelGraph:
        layers = [_changed(layer, changes) if layer.name == "drop" else layer for layer in network.layers]
        return msgspec.structs.replace(network, layers=tuple(layers))

    for changes, message in (
        ({"repeats": "yes", "repeats_with": "mix"}, "torch.utils.checkpoint"),
        ({"handled": True}, "the model's own code looks into"),
        ({"batchless": True}, "without the batch"),
    ):
        with pytest.raises(UserError, match=message):
            replaced(with_drop(**changes), "drop=none")
    returned = msgspec.structs.replace(network, outputs=("mix", "head"))
    with pytest.raises(UserError, match="the model returns mix, inside of mix to drop"):
        replaced(returned, "[md]*[xp]=none")


def _changed(layer: Layer, changes: dict[str, object]) -> Layer:
    return msgspec.structs.replace(layer, **changes)


def test_token_ids_are_taken_by_no_module() -> None:
    network = msgspec.structs.replace(traced("Blocks"), input_dtype="int64")
    with pytest.raises(UserError, match="reads token ids"):
        replaced(network, "stem=conv2d(3,8,3,1,1)")
