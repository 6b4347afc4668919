"""Build language models; transformers is imported when one is asked for, and only then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paradl_bench.core.errors import UserError
from paradl_bench.network.models.torchvision_import import fit_torchvision

if TYPE_CHECKING:
    import torch


def build_language_model(family: str, *, tied: bool | None = None, **settings: Any) -> torch.nn.Module:
    """A model with random weights, whose ``token_task`` says what it reads.

    Args:
        family: its ``model_type``.
        tied: whether the output layer shares the token embedding's weights; None as the configuration says.
        settings: of transformers' configuration of the family; what is left out is as published.

    Raises:
        UserError: transformers is not installed, or takes the settings for no configuration.
    """
    fit_torchvision()
    try:
        from huggingface_hub.errors import StrictDataclassError

        from paradl_bench.network.models.transformer_families import EXPERTS, WITHOUT_MASKS, family_classes
    except ModuleNotFoundError as error:
        if error.name not in ("transformers", "huggingface_hub"):
            raise
        raise UserError(
            f"{family} is built by transformers, which is not installed: pip install 'paradl[transformers]'"
        ) from None
    configuration, model = family_classes(family)
    # Tokens that begin and end a text say nothing of a network; the family's own may lie beyond another vocabulary.
    fixed: dict[str, object] = dict.fromkeys(("bos_token_id", "eos_token_id"))
    fixed["attn_implementation"] = WITHOUT_MASKS
    if "num_experts_per_tok" in settings:
        fixed["experts_implementation"] = EXPERTS
    try:
        configured = configuration(**fixed | settings)
    except (StrictDataclassError, KeyError, TypeError, ValueError) as error:
        why = " ".join(str(error).split())
        raise UserError(f"transformers takes this for no configuration of {family}: {why}") from None
    if tied is not None:
        # Not among the settings: T5's would leave its decoder's output unscaled, and logits so large that probabilities
        # become denormal numbers, with which a CPU computes many times slower.
        configured.tie_word_embeddings = tied
    built: torch.nn.Module = model(configured)
    return built
