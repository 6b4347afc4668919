"""The language models known by name: one configuration each under ``sizes/``, with the source of its numbers.

A file is as :mod:`.configurations` reads it, and says under ``source`` where its numbers are from. Torch-free, and free
of transformers.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from paradl_bench.network.models.configurations import Configuration, read_configuration

UNTIED = "-untied"
"""Ends the name of a model whose output layer has weights of its own, not those of the token embedding."""

_FOLDER = Path(__file__).parent / "sizes"
_TIED_FAMILIES = frozenset({"bert", "gpt2", "t5"})
"""Those that share the token embedding's weights where a configuration does not say."""


@cache
def _sizes() -> dict[str, Path]:
    return {path.stem: path for path in sorted(_FOLDER.glob("*.json"))}


def language_model_names() -> list[str]:
    """All names, those of models with untied weights included."""
    return [name + ending for name in _sizes() for ending in (("", UNTIED) if _is_tied(name) else ("",))]


def size_of(name: str) -> Configuration | None:
    """What a name stands for; None for a name of something else."""
    tied_name = name.removesuffix(UNTIED)
    if tied_name not in _sizes() or (tied_name != name and not _is_tied(tied_name)):
        return None
    return _configuration(tied_name)


@cache
def _configuration(name: str) -> Configuration:
    return read_configuration(_sizes()[name])


def _is_tied(name: str) -> bool:
    family, settings = _configuration(name)
    return bool(settings.get("tie_word_embeddings", family in _TIED_FAMILIES))
