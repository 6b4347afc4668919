"""BERT, GPT-2 and T5 as transformers implements them, from a configuration alone: nothing is downloaded.

Each takes one tensor of token ids and returns logits (batch, tokens, vocabulary), so that tracing, pipelines and probes
see one input and one output. Attention is torch's ``scaled_dot_product_attention``, transformers' own default.
All tokens of a sample are attended to (GPT-2 and T5's decoder: those before): batches are not padded, so no
mask is built, and nothing is searched for packed sequences, which would read values back from the device in each
iteration. Dropout is that of the configuration (0.1): it is a part of pre-training's time.

Output layers share the token embedding's weights unless ``tied`` is False, which changes nothing else: T5's decoder's
output is scaled by the root of its width either way.

Not modelled: BERT's next-sentence task and pooling layer, key and value caches, and sequences of unlike lengths.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import BertConfig, GPT2Config, T5Config
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface
from transformers.models.bert.modeling_bert import BertForMaskedLM
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel
from transformers.models.t5.modeling_t5 import T5ForConditionalGeneration

from paradl_bench.network.models.language_sizes import Family
from paradl_bench.network.models.token_tasks import MaskedTokens, NextToken, TokenTask, TwoSequences

# transformers builds masks for the implementations that it knows by name; this one it calls without.
WITHOUT_MASKS = "sdpa_without_masks"
AttentionInterface.register(WITHOUT_MASKS, sdpa_attention_forward)

_BERT_MASK_TOKEN = 103
_T5_SEQUENCE = 512


class Bert(BertForMaskedLM):  # type: ignore[misc]
    """A masked language model."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of token ids (batch, tokens)."""
        logits: torch.Tensor = super().forward(input_ids=ids).logits
        return logits

    @property
    def token_task(self) -> TokenTask:
        """What it is trained on."""
        positions = self.config.max_position_embeddings
        return MaskedTokens(
            vocabulary=self.config.vocab_size,
            sequence=positions,
            positions=positions,
            mask_token=min(_BERT_MASK_TOKEN, self.config.vocab_size - 1),
        )


class GPT2(GPT2LMHeadModel):  # type: ignore[misc]
    """A causal language model."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of token ids (batch, tokens)."""
        logits: torch.Tensor = super().forward(input_ids=ids, use_cache=False).logits
        return logits

    @property
    def token_task(self) -> TokenTask:
        """What it is trained on."""
        positions = self.config.n_positions
        return NextToken(vocabulary=self.config.vocab_size, sequence=positions, positions=positions)


class T5(T5ForConditionalGeneration):  # type: ignore[misc]
    """A sequence-to-sequence model.

    Both sequences are embedded first, by the one table, so that what follows can be cut into stages.
    """

    def __init__(self, config: T5Config) -> None:
        super().__init__(config)
        # Untied, encoder and decoder would keep tables of their own, which nothing reads.
        self.set_input_embeddings(self.shared)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of the decoder's tokens; ids (batch, 2, tokens), the encoder's first."""
        embedded = [self.shared(ids[:, index]) for index in range(2)]
        outputs = super().forward(inputs_embeds=embedded[0], decoder_inputs_embeds=embedded[1], use_cache=False)
        logits: torch.Tensor = outputs.logits
        return logits

    @property
    def token_task(self) -> TokenTask:
        """What it is trained on."""
        return TwoSequences(
            vocabulary=self.config.vocab_size, sequence=_T5_SEQUENCE, start_token=self.config.pad_token_id
        )


FAMILIES: dict[Family, tuple[Any, Any]] = {"bert": (BertConfig, Bert), "gpt2": (GPT2Config, GPT2), "t5": (T5Config, T5)}
"""Configuration and model of each family."""
