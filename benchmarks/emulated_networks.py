"""Networks of the emulation suites that no library has: ``emulated_networks:small_vgg``, ``:bert``, ``:gpt2``, ``:t5``.

The last three are the networks of DistSim's figures 8 to 10 at a sixth of their depth and half of their width, so that
a host of few cores can carry their messages. Weights are untied, as pipelines need them. Without dropout, whose layers
would only add calls.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from paradl_bench.network.models.language_models import build_language_model
from paradl_bench.network.models.language_sizes import Family
from paradl_bench.network.models.torchvision_import import import_torchvision_models

TOKENS, WIDTH, HEADS, BLOCKS, VOCABULARY = 128, 512, 8, 4, 8192


def small_vgg() -> nn.Module:
    """vgg11's convolutions and two small fully connected layers: a rank holds 37 MB of gradients, not 530."""
    features = import_torchvision_models().vgg11().features
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 256), nn.Linear(256, 10))
    return nn.Sequential(features, head)


def bert() -> nn.Module:
    """BERT of four blocks."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_attention_heads": HEADS}
    return _untied("bert", **sizes, num_hidden_layers=BLOCKS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def gpt2() -> nn.Module:
    """GPT-2 of four blocks."""
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": None, "eos_token_id": None}
    return _untied("gpt2", n_embd=WIDTH, n_layer=BLOCKS, n_head=HEADS, **dropout, **ends)


def t5() -> nn.Module:
    """T5 of two blocks in its encoder and two in its decoder."""
    sizes = {"d_model": WIDTH, "d_ff": 4 * WIDTH, "d_kv": WIDTH // HEADS, "num_heads": HEADS}
    return _untied("t5", **sizes, num_layers=BLOCKS // 2, dropout_rate=0.0)


def _untied(family: Family, **settings: Any) -> nn.Module:
    model = build_language_model(family, tied=False, vocab_size=VOCABULARY, **settings)
    model.input_shape = (TOKENS,)  # type: ignore[assignment]
    return model
