"""Networks of the emulation suites that no library has: ``emulated_networks:small_vgg``, ``:bert``, ``:gpt2``, ``:t5``,
``:llama``, ``:mixtral``.

BERT, GPT-2 (345M) and T5 are the networks of DistSim's figures 8 to 10 at a sixth of their depth and half of their
width, so that a host of few cores can carry their messages. Llama's and Mixtral's perceptrons have the proportions of
Llama-2-7B and Mixtral-8x7B, and about as many gradients as GPT-2. ``:tiny_bert`` and so on are as small as it takes to
train them on such a host for real. Weights are untied, as pipelines need them. Without dropout, whose layers would only
add calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from paradl_bench.network.models.language_models import build_language_model
from paradl_bench.network.models.torchvision_import import import_torchvision_models


@dataclass(frozen=True, slots=True)
class Size:
    """Of a language model; T5 has half of the blocks in its encoder, and half in its decoder."""

    tokens: int
    width: int
    heads: int
    blocks: int
    vocabulary: int


SMALL = Size(tokens=128, width=512, heads=8, blocks=4, vocabulary=8192)
NARROW = Size(tokens=128, width=256, heads=8, blocks=4, vocabulary=8192)
"""Of a model with eight experts, whose matrices then hold as much as another model's."""
TINY = Size(tokens=64, width=128, heads=4, blocks=2, vocabulary=1024)


def small_vgg() -> nn.Module:
    """vgg11's convolutions and two small fully connected layers: a rank holds 37 MB of gradients, not 530."""
    features = import_torchvision_models().vgg11().features
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 256), nn.Linear(256, 10))
    return nn.Sequential(features, head)


def bert(size: Size = SMALL) -> nn.Module:
    """A masked language model."""
    sizes = {"hidden_size": size.width, "intermediate_size": 4 * size.width, "num_attention_heads": size.heads}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return _untied("bert", size, **sizes, **dropout, num_hidden_layers=size.blocks)


def gpt2(size: Size = SMALL) -> nn.Module:
    """A causal language model."""
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": None, "eos_token_id": None}
    return _untied("gpt2", size, n_embd=size.width, n_layer=size.blocks, n_head=size.heads, **dropout, **ends)


def t5(size: Size = SMALL) -> nn.Module:
    """An encoder and a decoder."""
    sizes = {"d_model": size.width, "d_ff": 4 * size.width, "d_kv": size.width // size.heads, "num_heads": size.heads}
    return _untied("t5", size, **sizes, num_layers=size.blocks // 2, dropout_rate=0.0)


def llama(size: Size = SMALL) -> nn.Module:
    """A causal language model with rotary positions, a gated perceptron, and half as many heads of keys."""
    return _untied("llama", size, **_rotary(size), intermediate_size=size.width * 11008 // 4096)


def mixtral(size: Size = NARROW) -> nn.Module:
    """Likewise, with two of eight experts for each token."""
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": size.width * 14336 // 4096}
    return _untied("mixtral", size, **_rotary(size), **experts)


def _rotary(size: Size) -> dict[str, int]:
    heads = {"num_attention_heads": size.heads, "num_key_value_heads": size.heads // 2}
    return {"hidden_size": size.width, "num_hidden_layers": size.blocks, **heads}


def tiny_bert() -> nn.Module:
    """See :func:`bert`."""
    return bert(TINY)


def tiny_gpt2() -> nn.Module:
    """See :func:`gpt2`."""
    return gpt2(TINY)


def tiny_t5() -> nn.Module:
    """See :func:`t5`."""
    return t5(TINY)


def tiny_llama() -> nn.Module:
    """See :func:`llama`."""
    return llama(TINY)


def tiny_mixtral() -> nn.Module:
    """See :func:`mixtral`."""
    return mixtral(TINY)


def _untied(family: str, size: Size, **settings: Any) -> nn.Module:
    model = build_language_model(family, tied=False, vocab_size=size.vocabulary, **settings)
    model.input_shape = (size.tokens,)  # type: ignore[assignment]
    return model
