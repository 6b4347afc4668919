"""The language models known by name, and the sizes that make them: settings of transformers' configurations.

Devlin et al. 2019 (BERT), Radford et al. 2019 (GPT-2), Raffel et al. 2020 (T5). What is not said here (vocabulary,
dropout, initialisation) is as in the configuration of the family. Torch-free, and free of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Family = Literal["bert", "gpt2", "t5"]
UNTIED = "-untied"
"""Ends the name of a model whose output layer has weights of its own, not those of the token embedding."""


@dataclass(frozen=True, slots=True)
class LanguageSize:
    """A family, and what sets this size of it apart."""

    family: Family
    settings: Mapping[str, int]


def _bert(hidden: int, layers: int, heads: int) -> LanguageSize:
    settings = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return LanguageSize("bert", settings | {"intermediate_size": 4 * hidden})


def _gpt2(hidden: int, layers: int, heads: int) -> LanguageSize:
    return LanguageSize("gpt2", {"n_embd": hidden, "n_layer": layers, "n_head": heads})


def _t5(hidden: int, layers: int, heads: int) -> LanguageSize:
    settings = {"d_model": hidden, "d_ff": 4 * hidden, "num_layers": layers, "num_heads": heads}
    return LanguageSize("t5", settings | {"d_kv": 64, "num_decoder_layers": layers})


_SIZES = {
    "bert-base": _bert(768, 12, 12),
    "bert-large": _bert(1024, 24, 16),
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-345m": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "t5-small": _t5(512, 6, 8),
    "t5-base": _t5(768, 12, 12),
    "t5-large": _t5(1024, 24, 16),
}


def language_model_names() -> list[str]:
    """All names, those of models with untied weights included."""
    return [name + ending for name in _SIZES for ending in ("", UNTIED)]


def size_of(name: str) -> LanguageSize | None:
    """What a name stands for; None for a name of something else."""
    return _SIZES.get(name.removesuffix(UNTIED))
