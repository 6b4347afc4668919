"""Peaks that torch's tracker sees of networks over 10 MB, against the prediction: what no formula covers is watched."""

from __future__ import annotations

import itertools
import math
import sys
import types
from collections.abc import Callable
from functools import partial

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.network.graph import NEXT_FORWARD, ModelGraph
from paradl_bench.network.models.catalog import load_model
from paradl_bench.strategies.passes.recomputation import repeated_by_model


class OnTokens(nn.Module):
    """A layer between two linear ones, on sequences."""

    input_shape = (128, 64)

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.before, self.between, self.head = nn.Linear(64, 128), between, nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.between(self.before(x)).mean(1))


class OnImages(nn.Module):
    """A function between two convolutions."""

    input_shape = (4, 48, 48)

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.before, self.between = nn.Conv2d(4, 16, 3), between
        self.after, self.head = nn.LazyConv2d(16, 3), nn.Linear(16, 10)
        with torch.no_grad():
            self(torch.zeros(1, *self.input_shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.after(self.between(self.before(x))).mean((2, 3)))


class Function(nn.Module):
    def __init__(self, function: object, **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def attention(own: Function, x: torch.Tensor) -> torch.Tensor:
    return x + own.attention(x, x, x, need_weights=False)[0]


def attention_with_weights(own: Function, x: torch.Tensor) -> torch.Tensor:
    return x + own.attention(x, x, x)[0]


def cross_attention(own: Function, x: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(x)
    return x + own.attention(x, y, y, need_weights=False)[0]


def in_heads(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Query, key and value of one product; the gradient of all three lies otherwise than the product."""
    samples, length, width = x.shape
    return x.reshape(samples, length, 3, 4, width // 12).permute(2, 0, 3, 1, 4).unbind(0)


def fused_attention(own: Function, x: torch.Tensor) -> torch.Tensor:
    return own.out(F.scaled_dot_product_attention(*in_heads(own.qkv(x))).transpose(1, 2).reshape(x.shape))


def fused_softmax(own: Function, x: torch.Tensor) -> torch.Tensor:
    query, key, value = in_heads(own.qkv(x))
    return own.out((torch.softmax(query @ key.transpose(-2, -1), -1) @ value).transpose(1, 2).reshape(x.shape))


def attention_of_views(own: Function, x: torch.Tensor) -> torch.Tensor:
    parts = (part.view(*x.shape[:2], 4, -1).transpose(1, 2) for part in own.qkv(x).chunk(3, -1))
    return F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).contiguous().view(x.shape)


def stacked(own: Function, x: torch.Tensor) -> torch.Tensor:
    parts = [torch.tanh(x), torch.sigmoid(x) * 2, x + 1, x * 3]
    return torch.stack(parts).sum(0)


def named(own: Function, x: torch.Tensor) -> torch.Tensor:
    """Nothing is saved for backward, and every variable lives to the end."""
    more = x + 1
    twice = more * 2
    less = twice - 1
    return less * 2 + 0.5


def remembered(own: Function, x: torch.Tensor) -> torch.Tensor:
    history = [x]
    for step in range(5):
        history.append(history[-1] + step)
    return sum(history)


def unpooled_without_gradient(own: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Positions of maxima live as long as a variable holds them."""
    wide = x.detach().repeat(1, 4, 1, 1)
    pooled, positions = F.max_pool2d(wide, 2, return_indices=True)
    return x * F.max_unpool2d(torch.tanh(pooled), positions, 2).mean(1, keepdim=True)


def product_in_place(own: Function, x: torch.Tensor) -> torch.Tensor:
    """The gradient of the other factor needs what was there before, which autograd copies."""
    y = x + 1
    y *= torch.tanh(x)
    return y.clamp_(-1, 1)


def mixed_channels(own: Function, x: torch.Tensor) -> torch.Tensor:
    """An einsum returns a view, whose change in place has autograd copy the gradient of the whole."""
    return torch.tanh(F.relu(torch.einsum("bc...,cd->bd...", x, own.mix.weight), inplace=True))


def changed_part(own: Function, x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    y[:, :12].mul_(0.5)
    y[:, 12:] = x[:, :4]
    return y * 2


def sum_of_parts(split: object) -> nn.Module:
    """Nothing is larger than what backward of the parts makes."""
    return Function(lambda own, x: sum(split(x)).repeat(1, 4, 1, 1))


def repeated(reentrant: bool) -> nn.Module:
    """Two calls of a checkpoint, whose operations keep nothing from forward to backward."""
    halves = nn.Sequential(nn.Tanh(), nn.Sigmoid()), nn.Sequential(nn.Softplus(), nn.Tanh(), nn.Sigmoid())

    def run(own: Function, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(own.second, checkpoint(own.first, x, use_reentrant=reentrant), use_reentrant=reentrant)

    return Function(run, first=halves[0], second=halves[1])


def changed_again(own: Function, x: torch.Tensor) -> torch.Tensor:
    """A reentrant checkpoint that ends with a change in place, which keeps nothing."""

    def change(x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x) + x
        y[:, :, :2].mul_(0.5)
        return y

    return checkpoint(change, x, use_reentrant=True)


class BehindCheckpoint(OnImages):
    """A reentrant checkpoint of the input, which gets no gradient: backward does not come to it."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Tanh(), nn.Tanh()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(checkpoint(self.between, torch.tanh(x), use_reentrant=True))


class Keeping(nn.Module):
    """Keeps a feature as an attribute, to be looked at between iterations."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.feature = x + 1
        return self.feature * 2


def heads(dropout: float = 0.0) -> nn.Module:
    return nn.MultiheadAttention(128, 4, batch_first=True, dropout=dropout)


NETWORKS = {
    "attention": lambda: OnTokens(Function(attention, attention=heads())),
    "dropped attention": lambda: OnTokens(Function(attention, attention=heads(0.1))),
    "attention with weights": lambda: OnTokens(Function(attention_with_weights, attention=heads())),
    "cross-attention": lambda: OnTokens(Function(cross_attention, attention=heads())),
    "gru": lambda: OnTokens(Function(lambda own, x: own.gru(x)[0], gru=nn.GRU(128, 128, batch_first=True))),
    "lstm": lambda: OnTokens(Function(lambda own, x: own.lstm(x)[0], lstm=nn.LSTM(128, 128, batch_first=True))),
    "deep lstm": lambda: OnTokens(Function(lambda own, x: own.lstm(x)[0], lstm=nn.LSTM(128, 128, 2, batch_first=True))),
    "broadcast product": lambda: OnImages(Function(lambda own, x: x * x.mean((2, 3), keepdim=True))),
    "reflected edges": lambda: OnImages(Function(lambda own, x: F.pad(x, (2, 2, 2, 2), mode="reflect"))),
    "circular edges": lambda: OnImages(Function(lambda own, x: F.pad(x, (2, 2, 2, 2), mode="circular"))),
    "transposed convolution": lambda: OnImages(nn.Sequential(nn.ReLU(), nn.ConvTranspose2d(16, 16, 3), nn.ReLU())),
    "interpolation": lambda: OnImages(Function(lambda own, x: F.interpolate(x, scale_factor=2, mode="bilinear"))),
    "pixel shuffle": lambda: OnImages(nn.Sequential(nn.Conv2d(16, 64, 1), nn.PixelShuffle(2))),
    "repetition": lambda: OnImages(Function(lambda own, x: x.repeat_interleave(2, dim=2))),
    "glu": lambda: OnImages(nn.Sequential(nn.Conv2d(16, 32, 1), nn.GLU(1))),
    "instance norm": lambda: OnImages(nn.Sequential(nn.InstanceNorm2d(16, affine=True), nn.ReLU())),
    "deviation": lambda: OnImages(Function(lambda own, x: (x - x.mean(1, True)) / (1 + x.std(1, keepdim=True)))),
    "unit length": lambda: OnImages(Function(lambda own, x: F.normalize(x, dim=1))),
}
NETWORKS |= {
    "fused attention": lambda: OnTokens(Function(fused_attention, qkv=nn.Linear(128, 384), out=nn.Linear(128, 128))),
    "fused softmax": lambda: OnTokens(Function(fused_softmax, qkv=nn.Linear(128, 384), out=nn.Linear(128, 128))),
    "shared gradient of parts": lambda: OnTokens(
        Function(lambda own, x: sum(in_heads(own.qkv(x))).transpose(1, 2).flatten(2), qkv=nn.Linear(128, 384))
    ),
    "attention of views": lambda: OnTokens(Function(attention_of_views, qkv=nn.Linear(128, 384))),
    "channels last": lambda: OnImages(
        Function(lambda own, x: own.mix(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), mix=nn.Linear(16, 16))
    ),
    "choice": lambda: OnImages(Function(lambda own, x: torch.where(torch.tanh(x) > 0, x, -x))),
    "absolute values": lambda: OnImages(Function(lambda own, x: torch.where(x.detach().abs() < 1, x * x, x.abs()))),
    "unpooling": lambda: OnImages(Function(lambda own, x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2))),
    "unpooling without gradient": lambda: OnImages(Function(unpooled_without_gradient)),
    "product in place": lambda: OnImages(Function(product_in_place)),
    "taken channels": lambda: OnImages(Function(lambda own, x: torch.tanh(x)[:, list(range(15, -1, -1))].sigmoid())),
    "constant factor": lambda: OnImages(
        Function(lambda own, x: torch.tanh(x) * torch.linspace(0, 1, 46, device=x.device) * x.detach())
    ),
    "prelu": lambda: OnImages(nn.PReLU()),
    "stacked branches": lambda: OnImages(Function(stacked)),
    "variables": lambda: OnImages(Function(named)),
    "list of activations": lambda: OnImages(Function(remembered)),
    "attribute": lambda: OnImages(Keeping()),
    "spread sum": lambda: OnImages(Function(lambda own, x: torch.tanh(x) * x.sum(1, True))),
}
NETWORKS |= {
    "mixed channels": lambda: OnImages(Function(mixed_channels, mix=nn.Linear(16, 16, bias=False))),
    "normalised mixed channels": lambda: OnImages(
        Function(
            lambda own, x: own.norm(mixed_channels(own, x)).flatten(1).tanh().view(x.shape),
            mix=nn.Linear(16, 16, bias=False),
            norm=nn.GroupNorm(4, 16),
        )
    ),
    "dropout of all": lambda: OnImages(nn.Dropout(1.0)),
    "changed part": lambda: OnImages(Function(changed_part)),
    "views of their own": lambda: OnImages(sum_of_parts(lambda x: x.tensor_split(4, 1))),
    "views of one node": lambda: OnImages(sum_of_parts(lambda x: x.split(4, 1))),
    "copies of one node": lambda: OnImages(sum_of_parts(lambda x: x.unsafe_split(4, 1))),
    "horizontal views": lambda: OnImages(Function(lambda own, x: sum(x.hsplit(2)).repeat(1, 2, 1, 1))),
    "checkpoint that never runs again": lambda: BehindCheckpoint(),
    "checkpoints": lambda: OnImages(repeated(False)),
    "reentrant checkpoints": lambda: OnImages(repeated(True)),
    "reentrant checkpoint that changes in place": lambda: OnImages(Function(changed_again)),
}
SAMPLES = 32


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_the_peak_of_what_is_watched_is_predicted(name: str, hold_prediction_to_track: Callable[..., None]) -> None:
    hold_prediction_to_track(NETWORKS[name], SAMPLES)


def language_model(family: str, tokens: int, **sizes: int) -> nn.Module:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[bench,test]'")
    from paradl_bench.network.models.language_models import build_language_model

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = build_language_model(family, tied=False, vocab_size=64, hidden_size=128, **(heads | sizes))
    model.input_shape = (tokens,)  # type: ignore[assignment]
    return model


def test_transposed_experts_keep_their_gradient_without_a_copy(hold_prediction_to_track: Callable[..., None]) -> None:
    sizes = {"intermediate_size": 256, "num_hidden_layers": 2, "num_local_experts": 8, "num_experts_per_tok": 2}
    hold_prediction_to_track(lambda: language_model("mixtral", 16, **sizes), 2)


def test_routers_in_fp32_and_turned_heads_are_predicted(hold_prediction_to_track: Callable[..., None]) -> None:
    ranks = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 24}
    experts = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 2, "n_shared_experts": 1}
    sizes = {"intermediate_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 2, "first_k_dense_replace": 1}
    build = partial(language_model, "deepseek_v3", 64, num_key_value_heads=4, **ranks, **experts, **sizes)
    hold_prediction_to_track(build, 16)


def test_norms_of_a_model_in_bf16_hold_what_they_convert(hold_prediction_to_track: Callable[..., None]) -> None:
    sizes = {"intermediate_size": 64, "num_hidden_layers": 3}
    hold_prediction_to_track(lambda: language_model("llama", 64, **sizes), 48, "bf16-weights")


def traced(between: nn.Module) -> ModelGraph:
    """The network of :class:`OnImages`."""
    holder = types.ModuleType("one_function")
    net = OnImages(between)
    holder.network = lambda: net
    sys.modules["one_function"] = holder
    try:
        return trace_network(load_model("one_function:network"))
    finally:
        del sys.modules["one_function"]


def watched(function: object, *shape: int, **arguments: object) -> tuple[object, int]:
    """The memory of a function that is traced alone, and bytes of a sample that it reads."""
    network = traced(Function(lambda own, x: function(x, **arguments)))
    layer = next(layer for layer in network.layers if layer.memory is not None)
    return layer.memory, 4 * layer.input_elements


def test_what_autograd_keeps_is_watched() -> None:
    memory, _ = watched(F.interpolate, scale_factor=2)
    assert (memory.inputs, memory.output, memory.kept, memory.backward) == ((), False, (0, 0), (0, 0))
    memory, read = watched(F.instance_norm)
    assert memory.inputs == (0,)
    assert memory.kept == (2 * 16 * 4, 0)
    memory, read = watched(lambda x: x * x.mean((2, 3), keepdim=True))
    # The gradient of the smaller factor is as large as the larger one before it is summed.
    assert memory.inputs == (0, 1)
    assert 0.9 * read < memory.backward_if_held[0] < 1.1 * read


def test_gradients_with_gaps_count_as_whole_samples() -> None:
    def turned(x: torch.Tensor) -> torch.Tensor:
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack((even - odd, even + odd), -1).flatten(-2)

    layers = [layer for layer in traced(Function(lambda own, x: turned(x))).layers if layer.memory is not None]
    assert layers
    for layer in layers:
        memory = layer.memory
        # The mean loss has numbers of its own, whatever the batch.
        assert all(abs(fixed) < 100 for _, fixed in (memory.kept, memory.forward, memory.backward)), layer


def test_outputs_that_autograd_does_not_keep_are_watched() -> None:
    memory, read = watched(lambda x: F.max_pool2d(x.detach(), 2, return_indices=True)[0])
    # A quarter as many positions, of 8 bytes each.
    assert (memory.inputs, memory.kept, memory.forward) == ((), (read // 2, 0), (0, 0))
    memory, read = watched(lambda x: F.max_pool2d(x, 2, return_indices=True)[0])
    assert (memory.inputs, memory.kept) == ((0,), (read // 2, 0))


def test_views_with_nodes_of_their_own_are_told_apart() -> None:
    assert watched(lambda x: torch.tensor_split(x, 2, 1)[0])[0].apart
    assert watched(lambda x: torch.dsplit(x, 2)[0])[0].apart
    assert not watched(lambda x: torch.unsafe_split(x, 8, 1)[0])[0].apart


def test_a_view_changed_in_place_copies_the_whole_gradient() -> None:
    memory, read = watched(lambda x: x.view(x.shape).relu_())
    # The gradient of the view, that of the whole, a copy of the part, and what it becomes: one given and one made.
    assert memory.backward == (2 * read, 0)


def test_a_tensor_changed_in_place_has_no_gradient_copied() -> None:
    layers = traced(Function(lambda own, x: (x + 1).relu_())).layers
    assert not any(layer.memory for layer in layers if layer.attributes.get("in_place"))


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_runs_again_is_known_call_by_call(reentrant: bool) -> None:
    network = traced(repeated(reentrant))
    ranges = repeated_by_model(network)
    assert list(map(len, ranges)) == [2, 3]
    again = [network.layers[i] for layers in ranges for i in layers]
    assert {layer.repeats for layer in again} == {"reentrant" if reentrant else "yes"}
    assert not any(layer.without_gradient for layer in again)


def test_the_loss_of_many_classes_holds_two_logit_gradients() -> None:
    network = trace_network(load_model("gpt2"))
    loss = network.layers[-1]
    logits = 4 * math.prod(loss.input_shapes[0])
    assert loss.memory is not None
    assert loss.memory.kept[0] == loss.memory.backward[0] == logits
    assert loss.memory.inputs == (1,)


def test_variables_hold_outputs_beyond_their_last_reader() -> None:
    held = {layer.name: layer.held_until for layer in traced(Function(stacked)).layers if layer.held_until}
    # The argument and the list live until the sum of the stack is returned.
    branches = ("between", "between#3", "between#4", "between#5")
    assert held == dict.fromkeys(("before", *branches), "between#7")
    kept = {layer.name: layer.held_until for layer in traced(Keeping()).layers}
    assert kept["between"] == NEXT_FORWARD
    assert kept["between#2"] == ""


def test_variables_of_a_randomly_branching_model_are_not_followed() -> None:
    turns = itertools.count()

    def other(own: Function, x: torch.Tensor) -> torch.Tensor:
        # Two small batches, then the trace, then the pass for variables.
        less = x + 1
        return torch.tanh(x) + less if next(turns) < 4 else x + 1 - less

    assert not any(layer.held_until for layer in traced(Function(other)).layers if layer.name.startswith("between"))
