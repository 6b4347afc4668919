"""Build BERT, GPT-2 and T5; transformers is imported when one is asked for, and only then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paradl_bench.core.errors import UserError
from paradl_bench.network.models.language_sizes import Family
from paradl_bench.network.models.torchvision_import import fit_torchvision

if TYPE_CHECKING:
    import torch


def build_language_model(family: Family, *, tied: bool = True, **settings: Any) -> torch.nn.Module:
    """A model with random weights, whose ``token_task`` says what it reads.

    Args:
        tied: whether the output layer shares the token embedding's weights.
        settings: of transformers' configuration of the family; what is left out is as published.

    Raises:
        UserError: transformers is not installed.
    """
    fit_torchvision()
    try:
        from paradl_bench.network.models.transformer_families import FAMILIES, WITHOUT_MASKS
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise UserError(
            f"{family} is built by transformers, which is not installed: pip install 'paradl[transformers]'"
        ) from None
    configuration, model = FAMILIES[family]
    configured = configuration(attn_implementation=WITHOUT_MASKS, **settings)
    # Not among the settings: T5's would leave its decoder's output unscaled, and logits so large that probabilities
    # become denormal numbers, with which a CPU computes many times slower.
    configured.tie_word_embeddings = tied
    built: torch.nn.Module = model(configured)
    return built
