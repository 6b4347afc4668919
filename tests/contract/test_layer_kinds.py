"""What holds for every layer kind, without naming one: met in real networks, run alone, and counted as torch counts."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from paradl_bench.measure.kernels.design import sweepable_kinds
from paradl_bench.measure.layers.isolated import shapes_of_inputs
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.network.graph import DTYPE_BYTES, Layer, ModelGraph
from paradl_bench.network.kernel import KernelShape, KernelStage
from paradl_bench.network.kinds.kernel_shape import kernel_shape, layer_of_sizes
from paradl_bench.network.kinds.kind import kind_of_function, layer_kinds
from paradl_bench.network.models.catalog import LoadedModel, load_model
from paradl_bench.network.models.language_models import build_language_model


class Sentence(torch.nn.Module):
    """What torchvision's models lack: words, assignment, and a network without images. Input: (batch, 6) numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(11, 8)
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = torch.nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = self.words((x.abs() * 3).clamp(max=10).long())
        mixed, _ = self.attention(words, words, words, need_weights=False)
        mixed = mixed + words
        mixed[:, 0] = 0.5
        scores = torch.nn.functional.log_softmax(self.head(mixed), dim=-1)
        return scores.mean(1)


class Experts(torch.nn.Module):
    """Two experts that share the samples out among themselves. Input: (batch, 16) numbers."""

    ends: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.Parameter(torch.rand(2, 16, 32, dtype=torch.bfloat16))
        self.register_buffer("ends", torch.zeros(2, dtype=torch.int32))
        self.head = torch.nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = torch.where(x > 0, x, -x)
        mixed = torch.nn.functional.grouped_mm(chosen.bfloat16(), self.weights, offs=self.ends)
        return self.head(mixed.float())


def sentence() -> torch.nn.Module:
    return Sentence()


def experts() -> torch.nn.Module:
    return Experts()


def language_model(family: Any, **sizes: Any) -> torch.nn.Module:
    return build_language_model(family, vocab_size=61, **sizes)


def bert() -> torch.nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    return language_model("bert", **sizes)


def gpt2() -> torch.nn.Module:
    return language_model("gpt2", n_embd=32, n_layer=1, n_head=2, bos_token_id=None, eos_token_id=None)


def t5() -> torch.nn.Module:
    return language_model("t5", d_model=32, d_ff=48, d_kv=16, num_layers=1, num_heads=2)


def mixtral() -> torch.nn.Module:
    """Tokens that go to experts; several heads of queries to one of keys and values."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "max_position_embeddings": 64}
    return language_model("mixtral", **heads, **sizes, num_local_experts=4, num_experts_per_tok=2)


SENTENCE = f"{__name__}:sentence"
LANGUAGE = ("bert", "gpt2", "mixtral", "t5")
# A kind that none of these uses needs a network here that does.
TORCHVISION = {"googlenet": (3, 64, 64), "swin_t": (3, 32, 32), "mobilenet_v3_small": (3, 32, 32)}


@pytest.fixture(scope="module")
def networks() -> list[ModelGraph]:
    own = LoadedModel(name=SENTENCE, module=sentence(), input_shape=(6,))
    return [
        trace_network(own),
        trace_network(LoadedModel(name=f"{__name__}:experts", module=experts(), input_shape=(16,))),
        *(trace_network(load_model(name, shape)) for name, shape in TORCHVISION.items()),
        *(trace_network(load_model(f"{__name__}:{name}", (14,))) for name in LANGUAGE),
    ]


def met(networks: list[ModelGraph]) -> Iterator[tuple[ModelGraph, Layer]]:
    """One layer a distinct operation that reads an activation (the others count batches and the like)."""
    seen = set()
    for network in networks:
        for layer in network.layers:
            if layer.input_shapes and layer.operation not in seen:
                seen.add(layer.operation)
                yield network, layer


def parameters_of(network: ModelGraph, layer: Layer) -> list[torch.Tensor]:
    shapes = {tensor.name: tensor.shape for tensor in network.parameters}
    return [torch.rand(shapes[name], requires_grad=True) for name in layer.parameters]


def test_each_kind_has_its_own_functions_and_some_network(networks: list[ModelGraph]) -> None:
    assert set(kind_of_function().values()) == set(layer_kinds().values())
    found = {layer.kind for _, layer in met(networks)}
    assert set(layer_kinds()) - found == set(), "add a network that uses it to this test"


def test_a_file_and_its_kind_have_one_name() -> None:
    for name, kind in layer_kinds().items():
        assert kind.facts.__module__ == f"paradl_bench.network.kinds.{name}"


def test_an_operation_is_the_same_after_a_file(networks: list[ModelGraph]) -> None:
    for _, layer in met(networks):
        assert msgspec.json.decode(msgspec.json.encode(layer), type=Layer).operation == layer.operation


def test_what_moves_no_data_computes_nothing(networks: list[ModelGraph]) -> None:
    views = {name for name, kind in layer_kinds().items() if kind.view}
    for _, layer in met(networks):
        if layer.kind in views:
            assert layer.fw_flops == layer.bw_input_flops == layer.bw_weight_flops == layer.fw_bytes == 0
        else:
            assert layer.fw_bytes > 0, layer.name


@pytest.mark.parametrize("batch", [1, 3])
def test_a_layer_built_alone_gives_its_traced_shape(networks: list[ModelGraph], batch: int) -> None:
    built = set()
    for network, layer in met(networks):
        build = layer_kinds()[layer.kind].build if layer.kind in layer_kinds() else None
        if build is None:
            continue
        if batch == 1 and layer.kind == "batch_norm" and math.prod(layer.output_shape[1:]) == 1:
            continue  # one value a channel has no variance, and torch refuses it
        if layer.kind == "elementwise" and layer.state:
            continue  # a buffer is none of the activations that it is built for, and may be the wider of the two
        inputs = [torch.rand(shape) for shape in shapes_of_inputs(layer, batch)]
        output = build(layer.attributes)(inputs, parameters_of(network, layer))
        assert output.shape == (layer.output_shape if layer.batchless else (batch, *layer.output_shape)), (
            layer.operation
        )
        built.add(layer.kind)
    assert built == {name for name, kind in layer_kinds().items() if kind.build is not None}


def saved_storages(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, dict[int, int]]:
    """What an operation returns, and bytes of every storage that autograd keeps of it, by address."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = run()
    return output, kept


def addresses(tensors: list[torch.Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def test_what_autograd_keeps_is_what_a_kind_says(networks: list[ModelGraph]) -> None:
    batch = 3
    for network, layer in met(networks):
        kind = layer_kinds().get(layer.kind)
        if kind is None or kind.build is None or layer.batchless:
            continue
        # Not leaves, so that what works in place may.
        inputs = [torch.rand(shape, requires_grad=True) * 1 for shape in shapes_of_inputs(layer, batch)]
        parameters = parameters_of(network, layer)
        run = functools.partial(kind.build(layer.attributes), inputs, parameters)
        output, kept = saved_storages(run)
        keeps, counted = kind.saves(layer), addresses(parameters)
        if keeps.inputs:
            assert kept.keys() & addresses(inputs), layer.operation
            counted |= addresses(inputs)
        if keeps.output:
            assert kept.keys() & addresses([output]), layer.operation
            counted |= addresses([output])
        beside = sum(size for address, size in kept.items() if address not in counted)
        a_sample = keeps.elements + keeps.mask + keeps.sums
        expected = 4 * (keeps.statistics + batch * a_sample) + 8 * batch * keeps.indices
        # Running statistics, which the network holds as buffers, are kept as well.
        slack = 2 * 4 * layer.output_shape[0] if layer.kind == "batch_norm" else 0
        assert expected <= beside <= expected + slack, layer.operation


def test_two_gradients_apart_are_both_there_and_counted(networks: list[ModelGraph]) -> None:
    for network, layer in met(networks):
        kind = layer_kinds().get(layer.kind)
        if kind is None or kind.build is None or not kind.splits_backward:
            continue
        inputs = [torch.rand(shape, requires_grad=True) for shape in shapes_of_inputs(layer, 2)]
        parameters = parameters_of(network, layer)
        output = kind.build(layer.attributes)(inputs, parameters)
        for wanted, flops in ((inputs, layer.bw_input_flops), (parameters, layer.bw_weight_flops)):
            gradients = torch.autograd.grad(output, wanted, torch.ones_like(output), retain_graph=True)
            assert all(gradient.shape == tensor.shape for gradient, tensor in zip(gradients, wanted, strict=True))
            assert flops > 0


def test_forward_flops_are_at_least_the_products_that_torch_counts(networks: list[ModelGraph]) -> None:
    """torch's counter knows products alone: a kind may count more (bias, sums), never less, and not much more."""
    counted = 0
    for network, layer in met(networks):
        kind = layer_kinds().get(layer.kind)
        if kind is None or kind.build is None:
            continue
        inputs = [torch.rand(shape) for shape in shapes_of_inputs(layer, 2)]
        with FlopCounterMode(display=False) as counter:
            kind.build(layer.attributes)(inputs, parameters_of(network, layer))
        products = counter.get_total_flops()
        counted += products > 0
        if products:
            assert products <= 2 * layer.fw_flops <= products + 2 * layer.output_elements, layer.operation
    assert counted


STAGES: tuple[KernelStage, ...] = ("FW", "BW", "BW_input", "BW_weight")
BATCH = 3


def shapes(networks: list[ModelGraph], dtype: str = "fp32") -> Iterator[tuple[Layer, KernelShape]]:
    """Kernels of all layers that sizes describe."""
    for _, layer in met(networks):
        for stage in STAGES:
            shape = kernel_shape(layer, stage, BATCH, dtype)
            if shape is not None:
                yield layer, shape


def test_what_has_sizes_is_made_from_them(networks: list[ModelGraph]) -> None:
    sized = {layer.kind for layer, _ in shapes(networks)}
    assert sized == {name for name, kind in layer_kinds().items() if kind.call is not None}
    assert {"conv", "linear"} <= sized


def test_kernels_of_one_kind_and_stage_name_the_same_sizes(networks: list[ModelGraph]) -> None:
    names: dict[tuple[str, str], set[str]] = {}
    for layer, shape in shapes(networks):
        assert shape.kind == layer.kind
        assert names.setdefault((shape.kind, shape.stage), set(shape.sizes)) == set(shape.sizes), layer.operation
        assert "function" in shape.settings
        assert shape.sizes["batch"] > 0


def test_flops_equal_the_layers_and_bytes_cover_reads_and_writes(networks: list[ModelGraph]) -> None:
    for layer, shape in shapes(networks):
        batch = 1 if layer.batchless else BATCH
        if shape.stage == "FW":
            assert shape.flops == layer.fw_flops * batch
            moved = layer.input_elements_of(batch) + layer.output_elements_of(batch)
            assert shape.bytes >= moved * DTYPE_BYTES["fp32"] > 0, layer.operation
        elif shape.bytes == 0:
            assert layer_kinds()[layer.kind].passes_gradient(layer), layer.operation
        else:
            assert shape.bytes >= layer.output_elements_of(batch) * DTYPE_BYTES["fp32"], layer.operation


def test_the_two_halves_of_backward_have_its_flops(networks: list[ModelGraph]) -> None:
    for _, layer in met(networks):
        halves = [kernel_shape(layer, stage, BATCH, "fp32") for stage in ("BW_input", "BW_weight")]
        backward = kernel_shape(layer, "BW", BATCH, "fp32")
        found = [half.flops for half in halves if half is not None]
        if found:
            assert backward is not None
            assert sum(found) == backward.flops
        if "input" in layer.inputs and layer_kinds()[layer.kind].splits_backward:
            assert backward == halves[1], "the network's own input needs no gradient"


def test_half_as_wide_numbers_take_half_the_bytes(networks: list[ModelGraph]) -> None:
    for (_, whole), (layer, half) in zip(shapes(networks), shapes(networks, "bf16"), strict=True):
        indices = 8 * BATCH * layer_kinds()[layer.kind].saves(layer).indices if whole.stage == "BW" else 0
        assert half.bytes - indices == (whole.bytes - indices) / 2, layer.operation


def test_a_layer_made_from_sizes_has_them_and_runs(networks: list[ModelGraph]) -> None:
    seen = set()
    for layer, shape in shapes(networks):
        made, batch, parameter_shapes = layer_of_sizes(shape.kind, shape.sizes, shape.settings)
        if "input" not in layer.inputs:
            again = kernel_shape(made, shape.stage, batch, "fp32")
            assert again == shape, layer.operation
        key = (shape.kind, str(shape.sizes))
        if key in seen:
            continue
        seen.add(key)
        build = layer_kinds()[shape.kind].build
        if build is None:
            assert shape.kind not in sweepable_kinds()
            continue
        inputs = [torch.rand(extents) for extents in shapes_of_inputs(made, batch)]
        output = build(made.attributes)(inputs, [torch.rand(extents) for extents in parameter_shapes])
        assert output.numel() == layer.output_elements_of(BATCH), layer.operation
        assert tuple(output.shape) == (batch, *made.output_shape), layer.operation
